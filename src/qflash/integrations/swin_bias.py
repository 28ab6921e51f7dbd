"""What a Swin layer adds to its scores: relative position bias, and the mask of shifted windows."""

from __future__ import annotations

import torch
from torch.overrides import handle_torch_function, has_torch_function

from .. import plan_cache
from ..backends import triton_unavailable
from ..specification.memory_format import empty_bias, padded_row
from ..validation import FLOAT_DTYPES

_OPTIONS = ("window bias",)
_MOST_BLOCKS = 65535


def window_bias(table: torch.Tensor, index: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Look a bias up and add the mask of each window to it: ``table.t()[:, index] + mask[:, None]``, rounded like that.

    On a GPU that is one launch. Rows of the result are aligned (:func:`qflash.align_bias`), unless a gradient is to go through
    here.

    Args:
        table: (distances, heads), float.
        index: int64, (tokens, tokens): the row of ``table`` for each query and key.
        mask: float, (windows, tokens, tokens), or None.

    Returns:
        (windows or 1, heads, tokens, tokens), of the table's dtype or what table and mask promote to.

    Raises:
        IndexError: a number in ``index`` that the table has not, on a CPU; on a GPU NaN stands there.
    """
    if has_torch_function((table, index, mask)):
        return handle_torch_function(window_bias, (table, index, mask), table, index, mask)
    gradient = torch.is_grad_enabled() and (table.requires_grad or (mask is not None and mask.requires_grad))
    # a parameter as a plain tensor
    tensors = table.detach(), index, mask
    place = None if gradient else plan_cache.place_of(tensors)
    if place is None:
        # a compiler, a trace or a transform takes operators of PyTorch that write to no given output
        bias = table.t().index_select(1, index.flatten()).unflatten(1, index.shape).unsqueeze(0)
        if mask is not None:
            bias = bias + mask.unsqueeze(1)
        # which a compiler does in passing
        return bias if gradient else _pad(bias)
    if place != plan_cache.CPU:
        run = plan_cache.find(tensors, _OPTIONS)
        if run is not None:
            return run(*tensors)[..., : index.shape[1]]
        if _has_kernel(*tensors):
            from ..kernels.launch_recorder import record
            from ..kernels.triton.swin_bias import launch_window_bias

            out, prepare = record(launch_window_bias, tensors)
            plan_cache.remember(tensors, _OPTIONS, tensors, out.shape, prepare)
            return out[..., : index.shape[1]]
    bias = empty_bias(table, (table.shape[1], *index.shape), table.dtype)
    bias = torch.ops.aten.index.Tensor_out(table.t(), [None, index], out=bias).unsqueeze(0)
    if mask is None:
        return bias
    shape = (len(mask), *bias.shape[1:])
    return torch.add(bias, mask.unsqueeze(1), out=empty_bias(bias, shape, torch.result_type(bias, mask)))


def _pad(bias: torch.Tensor) -> torch.Tensor:
    tokens = bias.shape[-1]
    return torch.nn.functional.pad(bias, (0, padded_row(tokens) - tokens))[..., :tokens]


def _has_kernel(table: torch.Tensor, index: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Tell whether these tensors of a GPU are what the kernel takes, and it runs there."""
    return (
        triton_unavailable(table.device) is None
        and table.dtype in FLOAT_DTYPES
        and index.dtype == torch.int64
        and max(table.shape[1], 0 if mask is None else len(mask)) <= _MOST_BLOCKS
        and (mask is None or (mask.dtype in FLOAT_DTYPES and mask.numel() > 0))
        and 0 not in (*table.shape, *index.shape)
    )
