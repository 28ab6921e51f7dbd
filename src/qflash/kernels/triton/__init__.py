"""Portable kernels in Triton: every NVIDIA GPU from sm_80 on, and Triton's interpreter."""
