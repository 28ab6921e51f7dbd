"""Attention for Hopper: wgmma, the copy engine, asynchronous copies."""
