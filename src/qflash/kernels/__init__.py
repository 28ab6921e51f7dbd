"""Triton kernels: the implementation of :mod:`qflash.reference` on NVIDIA GPUs and in Triton's interpreter."""
