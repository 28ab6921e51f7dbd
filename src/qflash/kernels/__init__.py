"""Kernels: :mod:`qflash.specification.reference` on NVIDIA GPUs, in Triton's interpreter and on CPUs; the same bits."""
