"""Measuring: latency, energy, accuracy, whole models, ablations."""
