"""Normalisation without a mean, and normalisation in front of a sum: ``torch.ops.qflash.integer_norm``.

The integers are :func:`qflash.specification.layers.layer_norm`. :class:`..modules.LayerNorm` runs this operator where it adds
to a residual stream; without a residual it runs ``integer_layer_norm``.
"""

from __future__ import annotations

from typing import Any

import torch

from ...backends import find_backend
from ...specification import layers as op
from ..execution import _check_layer_norm, _check_residual, _check_tokens
from ..modules import LayerNorm

_LIBRARY = torch.library.Library("qflash", "FRAGMENT")
_LIBRARY.define(
    "integer_norm(Tensor h, int epsilon, Tensor gain, Tensor offset, int shift, Tensor? gather, Tensor? residual, "
    "bool centred, ScalarType out_dtype, str backend) -> Tensor"
)


class RmsNorm(LayerNorm):
    """Normalisation of int16 rows by their root mean square; see :class:`..modules.LayerNorm`.

    Normalisation by the Euclidean norm is the same, with ``1 / sqrt(channels)`` in the gain.
    """

    centred = False


def _check(
    h: torch.Tensor, epsilon: int, gain: torch.Tensor, offset: torch.Tensor, shift: int, gather: torch.Tensor | None,
    residual: torch.Tensor | None, centred: bool, out_dtype: torch.dtype, backend: str,
) -> tuple[int, ...]:  # fmt: skip
    """Return the output's shape."""
    _check_layer_norm(h, epsilon, gain, offset, shift, gather, out_dtype, backend)
    if not centred and epsilon == op.MAX_EPSILON:
        raise ValueError(f"epsilon must be below {op.MAX_EPSILON} where the mean stays, got {epsilon}")
    shape = tuple(h.shape) if gather is None else (h.shape[0], gather.shape[0], len(gain))
    _check_residual(residual, shape, out_dtype, h)
    return shape


def integer_norm(
    h: torch.Tensor,
    epsilon: int,
    gain: torch.Tensor,
    offset: torch.Tensor,
    shift: int,
    gather: torch.Tensor | None,
    residual: torch.Tensor | None,
    centred: bool,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    """Normalise int16 rows, with or without taking their mean out, and add a residual.

    Args:
        h, gain, offset, shift, gather, out_dtype, backend: see :func:`..execution.integer_layer_norm`.
        epsilon: 0 to 2**46; below 2**46 unless ``centred``.
        residual: int16 of the output's shape, for int16 outputs, or None.
        centred: whether the mean is taken out.

    Returns:
        (..., channels), or (batch, new tokens, pieces * channels).

    Raises:
        TypeError: a tensor or the output has another dtype.
        ValueError: a shape, a device or a number does not fit, or the back end cannot run there.
    """
    _check(h, epsilon, gain, offset, shift, gather, residual, centred, out_dtype, backend)
    if gather is not None:
        _check_tokens("gather", gather, h.shape[1], once=False)
    return find_backend(backend, h.device).layer_norm(
        h, epsilon, gain, offset, shift, out_dtype, gather, centred=centred, residual=residual
    )


def _fake(h: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return h.new_empty(_check(h, *arguments), dtype=arguments[7])


_LIBRARY.impl("integer_norm", integer_norm, "CompositeExplicitAutograd")
torch.library.register_fake("qflash::integer_norm", _fake, lib=_LIBRARY)
