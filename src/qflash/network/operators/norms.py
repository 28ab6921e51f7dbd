"""Normalisation without a mean, and normalisation in front of a sum: ``torch.ops.qflash.integer_norm``.

The integers are :func:`qflash.specification.layers.layer_norm`. :class:`..modules.LayerNorm` runs this operator where it adds
to a residual stream; without a residual it runs ``integer_layer_norm``.
"""

from __future__ import annotations

import torch

from ...backends import find_backend
from ...specification import layers as op
from ..modules import LayerNorm
from ..operator_arguments import check_layer_norm, check_residual, check_tokens, operator


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
    shape = check_layer_norm(h, epsilon, gain, offset, shift, gather, out_dtype, backend)
    if not centred and epsilon == op.MAX_EPSILON:
        raise ValueError(f"epsilon must be below {op.MAX_EPSILON} where the mean stays, got {epsilon}")
    check_residual(residual, shape, out_dtype, h)
    return shape


@operator(
    "integer_norm(Tensor h, int epsilon, Tensor gain, Tensor offset, int shift, Tensor? gather, Tensor? residual, "
    "bool centred, ScalarType out_dtype, str backend)",
    _check,
)
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
    if gather is not None:
        check_tokens("gather", gather, h.shape[1], once=False)
    return find_backend(backend, h.device).layer_norm(
        h, epsilon, gain, offset, shift, out_dtype, gather, centred=centred, residual=residual
    )
