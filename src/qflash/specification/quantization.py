"""Quantisation of float tensors to int8: Equations 1 and 2, at four granularities.

Every step is order-independent (maxima) or elementwise in IEEE float32, so that CPU and GPU, PyTorch and
Triton, give the same bits.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from ..torch_internals import in_transform
from . import fixed_point as fp
from .fixed_point import times_power_of_two

GRANULARITIES = ("tensor", "head", "token", "channel")
_REDUCED = {"head": (-2, -1), "token": (-1,), "channel": (-2,)}

SMALLEST_SCALE = 2.0**-126
"""Scales are kept normal floats, so that a reciprocal never overflows and the bits hold a full mantissa."""
LARGEST_SCALE = 129 * 2.0**114
"""127 of it, and some roundings up, are still a float32; what is larger by itself rounds to 127 as well."""


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """An int8 tensor and the scale that gives it meaning, ``x ~ values * scale + offset`` (Equation 2).

    ``a == b`` and ``a != b`` compare dequantised values element by element, as for tensors; the hash is the object's own.
    ``torch.load`` takes one by its safe default once qflash is imported.

    Attributes:
        values: int8, shape (..., tokens, channels).
        scale: float32, broadcastable to ``values``: one element for per-tensor, (..., 1, 1) per head,
            (..., tokens, 1) per token, (..., 1, channels) per channel.
        offset: float32, broadcastable to ``values``, the same for all tokens; None for none. Where the values are centred it
            is minus the zero point times the scale, in the unit of x.

    Raises:
        TypeError: ``values`` is not an int8 tensor, ``scale`` or ``offset`` not a float32 tensor.
        ValueError: the devices differ, ``scale`` or ``offset`` does not broadcast to ``values``, an offset differs between
            tokens, or (looked at only on the CPU: a look at the GPU would stall it) a scale is not positive and finite.
    """

    values: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.values, torch.Tensor) or self.values.dtype != torch.int8:
            raise TypeError(f"values must be an int8 tensor, got {_describe(self.values)}")
        if not isinstance(self.scale, torch.Tensor) or self.scale.dtype != torch.float32:
            raise TypeError(f"scale must be a float32 tensor, got {_describe(self.scale)}")
        if self.values.device != self.scale.device:
            raise ValueError(f"scale is on {self.scale.device}, values are on {self.values.device}; they must agree")
        try:
            broadcast = torch.broadcast_shapes(self.scale.shape, self.values.shape)
        except RuntimeError:
            broadcast = None
        if broadcast != self.values.shape:
            raise ValueError(
                f"scale of shape {tuple(self.scale.shape)} does not broadcast to values of shape {tuple(self.values.shape)}"
            )
        check_scale_values(self.scale, "scale")
        if self.offset is not None:
            self._check_offset(self.offset)

    def _check_offset(self, offset: torch.Tensor) -> None:
        if not isinstance(offset, torch.Tensor) or offset.dtype != torch.float32:
            raise TypeError(f"offset must be a float32 tensor or None, got {_describe(offset)}")
        if offset.device != self.values.device:
            raise ValueError(f"offset is on {offset.device}, values are on {self.values.device}; they must agree")
        shape = self.values.shape
        fits = offset.dim() <= len(shape) and all(
            have in (1, want) for have, want in zip(reversed(offset.shape), reversed(shape), strict=False)
        )
        if not fits:
            raise ValueError(f"offset of shape {tuple(offset.shape)} does not broadcast to values of shape {tuple(shape)}")
        if offset.dim() > 1 and offset.shape[-2] != 1:
            raise ValueError(f"offset must be the same for all tokens, got shape {tuple(offset.shape)}")

    @classmethod
    def from_kernel(
        cls, values: torch.Tensor, scale: torch.Tensor | float, offset: torch.Tensor | None = None
    ) -> QuantizedTensor:
        """Wrap what quantisation computed, unchecked: the scale of data with a NaN or an infinity *is* NaN.

        Of a number a tensor is made when somebody asks for it, which saves a kernel launch where nobody does.
        """
        made = object.__new__(cls)
        # not by attributes, which are frozen
        own = made.__dict__
        own["values"] = values
        own["scale" if isinstance(scale, torch.Tensor) else "_scale"] = scale
        own["offset"] = offset
        return made

    def __getattr__(self, name: str) -> Any:
        # only what is not there gets here
        if name != "scale" or "_scale" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # of the values' mode, not of the one in which it is asked for
        with torch.inference_mode(self.values.is_inference()):
            scale = torch.full((), self.__dict__["_scale"], dtype=torch.float32, device=self.values.device)
        object.__setattr__(self, "scale", scale)
        return scale

    @property
    def shape(self) -> torch.Size:
        """The shape of ``values``."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """The device of ``values`` and ``scale``."""
        return self.values.device

    @property
    def granularity(self) -> str:
        """``"tensor"``, ``"head"``, ``"token"`` or ``"channel"``, read off the shape of ``scale``."""
        if self.scale.numel() == 1:
            return "tensor"
        tokens = self.scale.shape[-2] if self.scale.dim() > 1 else 1
        channels = self.scale.shape[-1]
        if tokens > 1 and channels > 1:
            return "element"
        return "token" if tokens > 1 else "channel" if channels > 1 else "head"

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False, copy: bool = False) -> QuantizedTensor:
        """Return it on another device; itself if it is there and ``copy`` is False, as ``torch.Tensor.to`` does.

        Raises:
            TypeError: asked for a dtype: values are int8 and scales float32.
        """
        if isinstance(device, (torch.dtype, torch.Tensor)):
            raise TypeError(
                f"to() takes a device, got {_describe(device)}: values stay int8 and scales float32, and "
                "dequantize().to(dtype) gives a float tensor"
            )
        own = self.__dict__
        moved = {
            name: x.to(device, non_blocking=non_blocking, copy=copy) if isinstance(x, torch.Tensor) else x
            for name, x in own.items()
        }
        if all(x is own[name] for name, x in moved.items()):
            return self
        made = object.__new__(type(self))
        made.__dict__.update(moved)
        return made

    def __eq__(self, other: object) -> Any:
        return self._compared(other, torch.eq)

    def __ne__(self, other: object) -> Any:
        return self._compared(other, torch.ne)

    __hash__ = object.__hash__

    def _compared(self, other: object, compare: Callable[[torch.Tensor, Any], torch.Tensor]) -> Any:
        if isinstance(other, QuantizedTensor):
            other = other.dequantize()
        if not isinstance(other, (torch.Tensor, int, float)):
            return NotImplemented
        return compare(self.dequantize(), other)

    def dequantize(self) -> torch.Tensor:
        """Return ``values * scale + offset`` in float32."""
        x = self.values.to(torch.float32) * self.scale
        return x if self.offset is None else x + self.offset


QuantizedTensor.__module__ = "qflash.quantization"  # what pickles of every release name
torch.serialization.add_safe_globals([QuantizedTensor])


def _describe(x: object) -> str:
    return f"{x.dtype} tensor" if isinstance(x, torch.Tensor) else type(x).__name__


def check_scale_values(scale: torch.Tensor, name: str) -> None:
    """Refuse scales that are not positive and finite; CPU tensors only (on a GPU the look would synchronise).

    Raises:
        ValueError: naming ``name`` and the first bad scale.
    """
    if scale.device.type != "cpu" or torch.compiler.is_compiling() or type(scale) is not torch.Tensor or in_transform():
        return
    bad = ~((scale > 0) & scale.isfinite())
    if bad.any():
        raise ValueError(f"{name} must be positive and finite, got {scale[bad].flatten()[0].item()}")


def amplitude(x: torch.Tensor, granularity: str) -> torch.Tensor:
    """Return max |x| over what shares one scale (float32, kept dimensions); NaN and infinity stay visible."""
    if x.numel() == 0:
        shape = scale_shape(x.shape, granularity)
        return x.new_zeros(shape, dtype=torch.float32)
    dims = tuple(range(x.dim())) if granularity == "tensor" else _REDUCED[granularity]
    return x.abs().amax(dim=dims, keepdim=True).to(torch.float32)


def scale_shape(shape: torch.Size | tuple[int, ...], granularity: str) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor of ``shape``: reduced dimensions are kept as 1."""
    result = list(shape)
    for dim in range(len(shape)) if granularity == "tensor" else _REDUCED[granularity]:
        result[dim] = 1
    return tuple(result)


def scale_from_amplitude(amplitude: torch.Tensor) -> torch.Tensor:
    """Return Equation 2's scale ``max |x| / 127``; 1 for an all-zero tensor, NaN where x is not finite."""
    # times the float32 1 / 127: a kernel has a scale to find for every row, and a division is many instructions
    scale = (amplitude * torch.full_like(amplitude, 1.0 / 127.0)).clamp(SMALLEST_SCALE, LARGEST_SCALE)
    scale = torch.where(amplitude == 0, 1.0, scale)
    return torch.where(amplitude.isfinite(), scale, math.nan)


def quantize_values(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``round(x / scale)`` saturated to [-128, 127] (Equations 1-2), ties to even.

    The quotient is the exact product of ``x`` and the float32 ``1 / scale``, rounded once: one fused multiply-add where
    there is one, and float64 holds it here. Where the scale or the element is NaN the value is 0 (the NaN travels in
    the scale).
    """
    scaled = x.to(torch.float64) * (1.0 / scale).to(torch.float64)
    return scaled.clamp(-128.0, 127.0).nan_to_num(0.0).round().to(torch.int8, memory_format=torch.contiguous_format)


def center_channels(x: torch.Tensor) -> torch.Tensor:
    """Subtract every channel's midrange over the tokens, in float32.

    For a key this adds one constant to each row of scores, which softmax does not see. The midrange, unlike
    the mean, minimises the largest magnitude left and has no order of summation to depend on.
    """
    x = x.to(torch.float32)
    if x.numel() == 0:
        return x
    low, high = torch.aminmax(x, dim=-2, keepdim=True)
    # halved first: the sum of two float32 need not be one
    return x - (low * 0.5 + high * 0.5)


CENTERED_AMPLITUDE = 126.5
"""Steps from a centred channel's midrange to its ends: half a step less than 127, which rounding the zero point can take."""
MOST_ZERO_POINT = 2.0**21
"""Steps of a zero point, at most: sums with it stay exact in float32."""


def least_scale(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return channels' midranges, and the least scales that fit their ranges and zero points, float32.

    Args:
        low, high: the ends of the ranges, float32; NaN or infinity make the least scale so.
    """
    # halved first: the sum of two float32 need not be one
    middle, half = low * 0.5 + high * 0.5, high * 0.5 - low * 0.5
    least = half * torch.full_like(half, 1.0 / CENTERED_AMPLITUDE)
    return middle, torch.maximum(least, middle.abs() * (1.0 / MOST_ZERO_POINT))


def scale_from_least(least: torch.Tensor) -> torch.Tensor:
    """Return the scale where :func:`least_scale` says what is needed: 1 for 0, NaN for what is not finite."""
    scale = torch.where(least == 0, 1.0, least.clamp(SMALLEST_SCALE, LARGEST_SCALE))
    return torch.where(least.isfinite(), scale, math.nan)


def quantize_centered(x: torch.Tensor, granularity: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise with a zero point per channel, in the middle of the channel's range over the tokens.

    ``x ~ values * scale + offset`` with ``offset = zero * scale``, ``zero`` an integer: ``values = round(x / scale - zero)``,
    the quotient as in :func:`quantize_values`.

    Args:
        x: float, (..., tokens, channels).
        granularity: of the scale: ``"tensor"``, ``"head"`` or ``"channel"``.

    Returns:
        int8 values, float32 scale, float32 offset (..., 1, channels). Where the scale is NaN the values are 0.
    """
    x = x.to(torch.float32)
    if x.numel() == 0:
        offset = x.new_zeros(scale_shape(x.shape, "channel"))
        return x.to(torch.int8), x.new_ones(scale_shape(x.shape, granularity)), offset
    middle, least = least_scale(*torch.aminmax(x, dim=-2, keepdim=True))
    if granularity != "channel":
        least = least.amax(dim=tuple(range(x.dim())) if granularity == "tensor" else (-2, -1), keepdim=True)
    scale = scale_from_least(least)
    zero = zero_point(middle, scale)
    return centered_values(x, scale, zero), scale, zero.to(torch.float32) * scale


def zero_point(middle: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return midranges in whole steps of their scales, float64."""
    return (middle.to(torch.float64) * (1.0 / scale).to(torch.float64)).round() + 0.0  # no negative zero


def centered_values(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Return ``round(x / scale - zero)`` as int8, the quotient as in :func:`quantize_values`."""
    # exact in float64, so rounded once, ties to even
    values = (x.to(torch.float64) * (1.0 / scale).to(torch.float64) - zero).round()
    return values.nan_to_num(0.0).to(torch.int8, memory_format=torch.contiguous_format)


def balance_exponents(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return what :func:`balance_channels` takes from the query's amplitudes and gives to the key's, as powers of two, int32.

    Args:
        query, key: amplitudes of the channels, float, of the same shape.
    """
    usable = (query > 0) & (key > 0) & query.isfinite() & key.isfinite()
    exponent = torch.div(torch.frexp(query).exponent - torch.frexp(key).exponent, 2, rounding_mode="trunc")
    return torch.where(usable, exponent, 0)


def balance_channels(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Even out query and key amplitudes channel by channel: ``query / 2**e``, ``key * 2**e``.

    Both arguments are ``(batch, heads, tokens, channels)``; the key may have fewer heads, and all query heads
    of a group then share its exponents. Powers of two are exact, so the scores do not change. ``e`` is half
    the difference of the binary exponents of the two amplitudes, truncated towards zero so that amplitudes which merely
    straddle a power of two stay; so do channels that are zero or not finite.
    """
    query, key = query.to(torch.float32), key.to(torch.float32)
    if query.numel() == 0 or key.numel() == 0:
        return query, key
    batch, heads, _, channels = query.shape
    key_heads = key.shape[1]
    above = query.abs().amax(dim=-2).reshape(batch, key_heads, heads // key_heads, channels).amax(dim=2)
    below = key.abs().amax(dim=-2)
    exponent = balance_exponents(above, below)[:, :, None, :]
    key = times_power_of_two(key, exponent)
    return times_power_of_two(query, -exponent.repeat_interleave(heads // key_heads, dim=1)), key


def hadamard_transform(x: torch.Tensor) -> torch.Tensor:
    """Multiply the last dimension by the Hadamard matrix over its size, padding it to a power of two first.

    A butterfly in a fixed order in float32, hence the same bits everywhere. Divided first, no number grows: the norm
    falls by ``sqrt(size)``, and the caller multiplies the softmax scale by ``size``.
    """
    size = rotated_head_dim(x.shape[-1])
    x = x.to(torch.float32) * (1.0 / size)
    x = torch.nn.functional.pad(x, (0, size - x.shape[-1]))
    shape = x.shape
    step = 1
    while step < size:
        pairs = x.reshape(*shape[:-1], size // (2 * step), 2, step)
        even, odd = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((even + odd, even - odd), dim=-2)
        step *= 2
    return x.reshape(shape)


def rotated_head_dim(head_dim: int) -> int:
    """Return the head dimension after rotation: the next power of two."""
    # a trace has a tensor where a size is
    return 1 << max(operator.index(head_dim) - 1, 0).bit_length()


def bias_to_fixed(bias: torch.Tensor) -> torch.Tensor:
    """Turn an additive float mask of any rank into fixed point, contiguous; see :func:`qflash.quantize_bias`."""
    wide = bias.to(torch.float32).contiguous()
    if wide.numel() == 0:
        return wide.to(torch.int32)
    row_max = wide.amax(dim=-1, keepdim=True)
    far = (row_max.abs() > fp.MOST_BIAS_MAXIMUM) & row_max.isfinite()
    base = torch.where(far, row_max, 0.0)
    scaled = ((wide - base) * (math.log2(math.e) * 2**fp.BIAS_FRACTION_BITS)).clamp(-fp.BIAS_LIMIT, fp.BIAS_LIMIT)
    fixed = scaled.nan_to_num_(0.0).round_().to(torch.int32)
    even = base.abs() >= fp.LEAST_EVEN_MAXIMUM
    fixed = torch.where(even & (wide == base), fp.BIAS_EVEN, fixed)
    fixed = torch.where((even & (wide < base)) | (wide == -math.inf), fp.BIAS_MASKED, fixed)
    return torch.where(wide < math.inf, fixed, fp.BIAS_POISON)
