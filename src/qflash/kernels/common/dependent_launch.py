"""Programmatic dependent launch (Triton device function): a kernel starts before the one ahead of it in the stream has ended.

What it needs of the other kernel's results it may read or overwrite only behind :func:`wait_for_kernels`.
"""

import triton
import triton.language as tl


@triton.jit
def wait_for_kernels(DEPENDENT: tl.constexpr):
    """Wait until all kernels ahead have ended and what they wrote is there. See :func:`..heuristics.dependent_launch`."""
    if DEPENDENT != "":
        tl.extra.cuda.gdc_wait()
    if DEPENDENT == "early":
        tl.extra.cuda.gdc_launch_dependents()
