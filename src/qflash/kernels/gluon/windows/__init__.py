"""Attention for windows of up to 64 tokens, from sm_80 on: a warp or two for a window."""
