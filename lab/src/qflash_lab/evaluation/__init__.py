"""Top-1 of whole models by every method, with its statistics."""
