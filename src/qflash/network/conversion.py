"""From a float network and calibration images to integers: scales, zero points, and what is folded into the weights.

Everything here is float arithmetic that happens once. What a channel's range needs is folded away exactly: a linear layer's
input is ``step * q + middle`` for each channel, the steps go into its weights and what produces its input, the middles into
its bias. Layer scale goes into the weights before it; a key's middle is dropped, since softmax does not see it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from ..specification import layers as op
from ..specification.gated import GATE_BITS, PRODUCT_SHIFT
from ..specification.rotary import MOST_OFFSET, ONE
from .activations import NAMES
from .modules import Attention, LayerNorm, Linear, LinearActivation, Mean, WideLinear
from .operators.gated import Gated
from .operators.narrow import Narrow
from .operators.rotary import Rotary

_WIDE_BIAS = 1 << 28
"""A bias beyond this many units of a row's sums makes the row's unit coarser."""
_LEAST_MULTIPLIER = 8
"""R is a whole number: a smaller one would be too coarse a step. Outputs whose R would be smaller hardly change."""


Covariance = tuple[torch.Tensor, ...]
"""Float32 (channels, channels) of some channels each, one part behind the other; nothing where it was not looked at."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """Where int8 activations lie: ``x ~ step * q + middle`` for each channel.

    Attributes:
        step, middle: float64 (channels,).
        covariance: of the activations, as :class:`Range` has it.
    """

    step: torch.Tensor
    middle: torch.Tensor
    covariance: Covariance = ()


@dataclasses.dataclass(frozen=True)
class Range:
    """What calibration saw of a tensor's channels: float64 (channels,), and their covariance."""

    low: torch.Tensor
    high: torch.Tensor
    mean: torch.Tensor
    covariance: Covariance = ()

    @property
    def half(self) -> torch.Tensor:
        """Half the width, positive."""
        return ((self.high - self.low) / 2).clamp(min=1e-12)

    @property
    def middle(self) -> torch.Tensor:
        """The middle."""
        return (self.high + self.low) / 2

    def widened(self, factor: float) -> Range:
        """Return a range of the same middle, as many times as wide."""
        return Range(self.middle - self.half * factor, self.middle + self.half * factor, self.mean, self.covariance)

    def with_constants(self, factor: torch.Tensor | None, term: torch.Tensor | None) -> Range:
        """Return the range of what is multiplied and added to, by float64 (channels,) each, or None; without a covariance."""
        if factor is None and term is None:
            return self
        ends = torch.stack((self.low, self.high, self.mean))
        ends = (ends if factor is None else ends * factor) + (0 if term is None else term)
        return Range(ends[:2].amin(dim=0), ends[:2].amax(dim=0), ends[2])

    def on(self, grid: Grid) -> Grid:
        """Return a grid with this range's covariance."""
        return dataclasses.replace(grid, covariance=self.covariance)


@dataclasses.dataclass(frozen=True)
class Spread:
    """How the steps of a linear layer's int8 inputs are chosen.

    Attributes:
        exponent: a channel's step is in proportion to ``half**exponent / (max |w|)**(1 - exponent)``, with half the width of
            its range: what would make its input coarse goes partly into the weights (SmoothQuant, Equation 4). 0 leaves the
            inputs' ranges as they are, 1 evens them out.
        floor: no channel's range counts as narrower than that of this share of the channels. A few images do not show how far
            a quiet channel can go.
    """

    exponent: float
    floor: float

    def steps(self, half: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the steps, float64 (inputs,).

        Args:
            half: (inputs,) half the range of each.
            weight: (outputs, inputs).
        """
        most = weight.abs().amax(dim=0)
        most = most.clamp(min=float(most.max()) * 1e-5 + 1e-30)
        half = half.clamp(min=max(float(half.quantile(self.floor)), float(half.max()) * 1e-5 + 1e-30))
        factor = half**self.exponent / most ** (1 - self.exponent)
        return factor * ((half / factor).max() / 127)

    def grid(self, inputs: Range, weight: torch.Tensor) -> Grid:
        """Return where inputs of these ranges lie."""
        return Grid(self.steps(inputs.half, weight), inputs.middle)


def side_by_side(grids: Sequence[Grid]) -> Grid:
    """Return where the channels of several tensors lie, one behind the other."""
    known = all(grid.covariance for grid in grids)
    covariance = sum((grid.covariance for grid in grids), ()) if known else ()
    return Grid(torch.cat([grid.step for grid in grids]), torch.cat([grid.middle for grid in grids]), covariance)


SPREADS = {
    "qkv": Spread(0.7, 0.75),
    "proj": Spread(0.5, 0.0),
    "fc1": Spread(0.5, 0.0),
    "fc2": Spread(1.0, 0.98),
    "head": Spread(0.5, 0.9),
}
"""By the layer; measured on DINOv2-S (docs/integer_network.md). The head sees one token an image: a range of few samples."""


def _on_grid(weight: torch.Tensor, bias: torch.Tensor | None, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a linear layer's weights of inputs on a grid, and what is added to their product: ``scaled q + whole``."""
    return weight * grid.step, weight @ grid.middle + (0 if bias is None else bias)


@dataclasses.dataclass(frozen=True)
class QuantizedLinear:
    """Integers of a linear layer, as :class:`.modules.Linear` has them."""

    left: int
    weight: torch.Tensor
    bias: torch.Tensor
    multiplier: torch.Tensor

    def fill(self, module: Linear, outputs: slice = slice(None)) -> None:
        """Fill a module in with some of the outputs."""
        module.left = self.left
        module.weight.copy_(self.weight[outputs])
        module.bias.copy_(self.bias[outputs])
        module.multiplier.copy_(self.multiplier[outputs])


def quantized_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    grid: Grid,
    mean: torch.Tensor,
    step: torch.Tensor | float,
    middle: torch.Tensor | float = 0.0,
    levels: int = 127,
    largest_input: int = Linear.largest_input,
) -> QuantizedLinear:
    """Return the integers of a linear layer whose inputs lie on a grid, its outputs are ``step * q + middle``.

    The scale of an output's weights is the least that a whole R can give, so nothing is lost by rounding R.

    Args:
        weight: float64 (outputs, inputs).
        bias: float64 (outputs,) or None.
        grid: of the inputs.
        mean: of the inputs: what rounding the weights does to it is taken out of the bias.
        step, middle: of the outputs, a number or (outputs,).
        levels: the largest weight of an output becomes this number, if its bias leaves room.
        largest_input: of the integers, in magnitude.

    Raises:
        ValueError: no R brings the sums to the outputs' unit; the network's scales are degenerate.
    """
    scaled, whole = _on_grid(weight, bias, grid)
    whole = whole - middle
    ratio = torch.maximum(scaled.abs().amax(dim=1) / levels, whole.abs() / _WIDE_BIAS).clamp(min=1e-30) / step
    left = _left_of(ratio)
    if left > 3:
        # sums are shifted with their bias, which has less room: an output without weights, say, is its bias alone
        ratio = torch.maximum(ratio, whole.abs() * (2.0 ** (left - 2) / _WIDE_BIAS) / step)
        left = _left_of(ratio)
    multiplier = (ratio * 2.0 ** (32 - left)).ceil().clamp(min=_LEAST_MULTIPLIER)
    unit = multiplier * 2.0 ** (left - 32) * step
    values = _rounded(scaled / unit[:, None], grid)
    centred = (mean - grid.middle) / grid.step
    # whole units of the sums: what rounding takes is far below the noise of a sum
    offset = ((whole + (scaled - values * unit[:, None]) @ centred) / unit).round() * 2.0**left
    bound = largest_input * 2.0**left * values.abs().sum(dim=1) + offset.abs()
    if not (float(bound.max()) < 1 << 31 and float(multiplier.max()) < 1 << 31):
        raise ValueError(
            f"sums up to {float(bound.max()) * 2.0**-left:.3g} cannot be brought to a unit {float(ratio.max()):.3g} times as "
            "fine; the network's scales are degenerate"
        )
    return QuantizedLinear(left, values.to(torch.int8), offset.to(torch.int32), multiplier.to(torch.int32))


_DAMPING = 0.1
"""Of the mean variance, added to each: a few images do not show all directions."""
_COLUMNS = 128
"""Whose errors go on together."""


def _rounded(values: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Round weights (outputs, inputs) to int8's numbers: each to the nearest, or with error feedback.

    With a covariance of the inputs, the error that rounding the weights of an input makes in the outputs goes into the weights
    of the inputs behind it, as far as these can take it (Frantar et al., *GPTQ*, ICLR 2023).
    """
    if not grid.covariance:
        return _nearest(values)
    known = _known.get()
    key = ""
    if known is not None:
        key = hashlib.sha256(
            b"".join(x.contiguous().numpy().tobytes() for x in (values, grid.step, *grid.covariance))
        ).hexdigest()
        if key in known:
            return known[key].to(values.dtype)
    sizes = [len(part) for part in grid.covariance]
    parts = zip(values.split(sizes, dim=1), grid.covariance, grid.step.split(sizes), strict=True)
    found = torch.cat([_with_feedback(*part) for part in parts], dim=1)
    if known is not None:
        known[key] = found.to(torch.int8)
    return found


_known: ContextVar[dict[str, torch.Tensor] | None] = ContextVar("_known", default=None)


@contextlib.contextmanager
def rounded_once() -> Iterator[None]:
    """Round equal weights of equal inputs once in a block: several image sizes have the same layers, and it takes long."""
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


def _nearest(values: torch.Tensor) -> torch.Tensor:
    return values.round().clamp(-127, 127)


def _with_feedback(values: torch.Tensor, covariance: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    inverse_step = (1 / step).float()
    spread = covariance * inverse_step[:, None] * inverse_step
    spread.diagonal().add_(_DAMPING * float(spread.diagonal().mean()) + 1e-12)
    # the upper triangle R with R'R = the inverse, by the factor of the channels in their reverse order
    factor, failed = torch.linalg.cholesky_ex(spread.flip(0, 1))
    if failed:
        # channels so different that float32 does not hold them
        return _nearest(values)
    one = torch.eye(len(spread), dtype=torch.float32, device="cpu")
    upper = torch.linalg.solve_triangular(factor.flip(0, 1), one, upper=True)
    out, left = torch.empty_like(values), values.float()
    for first in range(0, values.shape[1], _COLUMNS):
        block = left[:, first : first + _COLUMNS].t().contiguous()
        triangle = upper[first : first + len(block), first : first + len(block)]
        errors = torch.empty_like(block)
        for column in range(len(block)):
            rounded = block[column].round().clamp(-127, 127)
            out[:, first + column] = rounded
            errors[column] = (block[column] - rounded) / triangle[column, column]
            block[column + 1 :].addr_(triangle[column, column + 1 :], errors[column], alpha=-1)
        behind = first + len(block)
        left[:, behind:].addmm_(errors.t(), upper[first:behind, behind:], alpha=-1)
    return out


def fill_linear(module: Linear, *arguments: Any) -> None:
    """Fill a linear layer in; arguments as of :func:`quantized_linear`."""
    quantized_linear(*arguments).fill(module)


def _left_of(ratio: torch.Tensor) -> int:
    """Return the least shift with which multipliers of these ratios of units stay below 2**31."""
    return min(max(0, math.frexp(float(ratio.max()) * (1 + 2.0**-20))[1] + 1), 30)


def activation_unit(name: str, slope: float, output: Range) -> float:
    """Return the unit in which an activation's inputs lie.

    Args:
        name: of :data:`.layers.ACTIVATIONS`.
        slope: of f, which is ``f(slope x) / slope``.
        output: of the activation.

    Raises:
        ValueError: an activation is beyond what its operator takes.
    """
    high = float(output.high.max())
    unit = op.ACTIVATIONS[name][1]
    unit = max(high, 1e-12) * HEADROOM / op.ACTIVATION_LIMIT if unit is None else unit / slope
    # comparisons are written so that a NaN is refused
    if not high <= (most := op.ACTIVATION_LIMIT * unit):
        raise ValueError(f"an activation of {NAMES[name]} is {high:.4g}; integer networks take up to {most:.0f}")
    return unit


def activation_steps(module: LinearActivation, unit: float, output: Range, weight: torch.Tensor) -> Grid:
    """Choose the steps of an activation's outputs, and fill them in.

    The steps are those that whole multipliers can give, so nothing is lost by rounding the multipliers.

    Args:
        module: the layer before the activation.
        unit: of the activation's inputs.
        output: of the activation.
        weight: (outputs, inputs) of the layer behind.

    Raises:
        ValueError: a zero point is too large.
    """
    steps = SPREADS["fc2"].steps(output.half, weight)
    shift = 30
    while shift > 0 and float((2.0**shift * unit / steps).max()) > op.MAX_ACTIVATION_MULTIPLIER:
        shift -= 1
    whole = 2.0**shift * unit
    multiplier = (whole / steps).round().clamp(1, op.MAX_ACTIVATION_MULTIPLIER)
    steps = whole / multiplier
    # an activation has a lowest value, which calibration has seen nearly; what it has not seen lies above
    middle = output.low + 128 * steps
    offset = ((0.5 - middle / steps) * 2.0**shift).round()
    if not float(offset.abs().max()) < 1 << 30:
        raise ValueError(
            f"the zero point of {NAMES[module.activation]} is too large for its unit; the network's scales are degenerate"
        )
    for name, x in (("multiplier", multiplier), ("offset", offset)):
        getattr(module, f"{module.activation}_{name}").copy_(x.to(torch.int32))
    setattr(module, f"{module.activation}_shift", shift)
    return Grid(steps, (0.5 - offset / 2.0**shift) * steps)


@dataclasses.dataclass(frozen=True)
class GatedUnits:
    """Where a gated product's inputs lie.

    Attributes:
        activation: of what the activation takes.
        gate: of the gates.
        value: float64 (channels,), of the values.
    """

    activation: float
    gate: float
    value: torch.Tensor


def gated_units(name: str, slope: float, activated: Range, value: Range) -> GatedUnits:
    """Choose where a gated product's int16 inputs lie.

    Args:
        name, slope: see :func:`activation_unit`.
        activated: the activations.
        value: the values.

    Raises:
        ValueError: an activation is beyond what its operator takes.
    """
    unit = activation_unit(name, slope, activated)
    # what lies further below 0 than the tail reaches may saturate
    gate = max(float(activated.high.max()), op.TAIL_END * unit) * HEADROOM / 32767
    most = torch.maximum(-value.low, value.high).clamp(min=1e-12)
    return GatedUnits(unit, gate, most.clamp(min=float(most.max()) / 1024) * (HEADROOM / 32767))


def finish_gated(module: Gated, units: GatedUnits, step: torch.Tensor | float, middle: torch.Tensor | float = 0.0) -> Grid:
    """Fill a gated product in; return where its outputs lie, which is near ``step * q + middle``.

    Args:
        module: to fill in.
        units: of its inputs.
        step, middle: of the outputs.

    Raises:
        ValueError: a product has no room in 32 bits; the network's scales are degenerate.
    """
    unit = units.activation * units.value * 2.0**PRODUCT_SHIFT
    multiplier = (unit / step * 2.0**32).round().clamp(min=_LEAST_MULTIPLIER)
    offset = (-middle / unit).round()
    gate = round(units.gate / units.activation * 2.0**GATE_BITS)
    if not (float(multiplier.max()) < 1 << 31 and float(offset.abs().max()) < 1 << 30 and gate < 1 << 31):
        raise ValueError(
            f"products up to {float(unit.max()) * 2.0**30:.3g} cannot be brought to outputs that lie much lower; the network's "
            "scales are degenerate"
        )
    module.gate_multiplier = gate
    module.multiplier.copy_(multiplier.to(torch.int32))
    module.offset.copy_(offset.to(torch.int32))
    return Grid(unit * 2.0**32 / multiplier, -offset * unit)


def finish_norm(
    module: LayerNorm, norm: Any, unit: float, step: torch.Tensor | float, middle: torch.Tensor | float = 0.0
) -> None:
    """Fill a layer normalisation in, with outputs ``step * q + middle``.

    Args:
        module: to fill in.
        norm: weight, bias and epsilon of the float one.
        unit: of the residual stream.
        step, middle: of the outputs.
    """
    gain = norm.weight / step
    offset = (norm.bias - middle) / step
    shift = 29
    while shift > 1 and (
        float(gain.abs().max()) * 2.0 ** (8 + shift) >= 2**31 - 1 or float(offset.abs().max()) * 2.0**shift >= 2**30 - 1
    ):
        shift -= 1
    for name, x, most in (("gain", gain * 2.0 ** (8 + shift), 2**31 - 1), ("offset", offset * 2.0**shift, 2**30 - 1)):
        if not float(x.abs().max()) < most:
            raise ValueError(f"a normalisation's {name} is too large for its unit; the network's scales are degenerate")
    module.shift = shift
    module.epsilon = min(round(16 * gain.numel() * norm.epsilon / unit**2), op.MAX_EPSILON - (not module.centred))
    module.gain.copy_((gain * 2.0 ** (8 + shift)).round().to(torch.int32))
    module.offset.copy_((offset * 2.0**shift).round().to(torch.int32))


def finish_mean(module: Mean | Narrow, unit: torch.Tensor, step: torch.Tensor, middle: torch.Tensor | float = 0.0) -> None:
    """Fill a mean over tokens in, or what narrows each: inputs ``unit * q``, outputs ``step * q + middle``."""
    tokens = module.tokens
    ratio = unit / tokens / step
    left = _left_of(ratio)
    multiplier = (ratio * 2.0 ** (32 - left)).round().clamp(min=_LEAST_MULTIPLIER)
    offset = (-middle * tokens / unit * torch.ones_like(step)).round() * 2.0**left
    if not tokens * 32768 * 2.0**left + float(offset.abs().max()) < 1 << 31:
        raise ValueError(f"the mean of {tokens} tokens has no room in 32 bits; the network's scales are degenerate")
    module.left = left
    module.multiplier.copy_(multiplier.to(torch.int32))
    module.offset.copy_(offset.to(torch.int32))


def scale_bits(scale: torch.Tensor) -> torch.Tensor:
    """Return the bits of scales as float32, as int32."""
    return scale.to(torch.float32).contiguous().view(torch.int32)


Ends = tuple[torch.Tensor, torch.Tensor]
"""Lower and upper ends of ranges."""


def _query_key_grids(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return scales (heads, 1) of query and key, steps (heads, channels) of both, and the key's middles.

    Args:
        low, high: ends of the ranges of (query, key), (2, heads, channels).
    """
    query, key = torch.maximum(low[0].abs(), high[0].abs()).clamp(min=1e-12), ((high[1] - low[1]) / 2).clamp(min=1e-12)
    # a channel's loud queries meet quiet keys: one factor evens both out, and no score changes
    even = (query / key).sqrt().clamp(1 / 64, 64)
    query_scale = (query / even).amax(dim=1, keepdim=True) / 127
    key_scale = (key * even).amax(dim=1, keepdim=True) / 127
    # softmax does not see a key's middle
    return query_scale, key_scale, query_scale * even, key_scale / even, (high[1] + low[1]) / 2


def each(numbers: Sequence[float], times: int) -> torch.Tensor:
    """Return numbers as float64, each so many times."""
    return torch.tensor(numbers, dtype=torch.float64, device="cpu").repeat_interleave(times)


@dataclasses.dataclass(frozen=True)
class AttentionGrids:
    """Where query, key and value of attention lie: query ``step * q``, key and value ``step * q + middle``.

    Attributes:
        query_scale, key_scale: float64 (heads, 1), of the int8 tensors that attention takes.
        query_step, key_step, key_middle, value_step, value_middle: float64 (heads or 1, channels).
    """

    query_scale: torch.Tensor
    key_scale: torch.Tensor
    query_step: torch.Tensor
    key_step: torch.Tensor
    key_middle: torch.Tensor
    value_step: torch.Tensor
    value_middle: torch.Tensor

    def fill(self, core: Attention, head_scale: torch.Tensor | None = None) -> None:
        """Fill the scales of attention in; those of the query hold a factor of the scores of each head, (heads,) or None."""
        query_scale = self.query_scale if head_scale is None else self.query_scale * head_scale[:, None]
        for name, scale in (("query", query_scale), ("key", self.key_scale), ("value", self.value_step)):
            getattr(core, f"{name}_scale").copy_(scale_bits(scale)[None, :, None])


def attention_grids(query: Ends, key: Ends, value: Ends) -> AttentionGrids:
    """Choose where query, key and value of attention lie.

    Args:
        query, key, value: (low, high) ends of their ranges, each (heads or 1, channels).
    """
    low, high = (torch.stack(ends) for ends in zip(query, key, strict=True))
    query_scale, key_scale, query_step, key_step, key_middle = _query_key_grids(low, high)
    # the value's middle goes behind the projection, since weights sum to one
    value_step, value_middle = ((value[1] - value[0]) / 2).clamp(min=1e-12) / 127, (value[1] + value[0]) / 2
    return AttentionGrids(query_scale, key_scale, query_step, key_step, key_middle, value_step, value_middle)


def pair_steps(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return int16 steps (heads or 1, channels), one for each pair of channels i and i + half, with room to spare.

    Args:
        low, high: ends of the ranges.
    """
    most = torch.maximum(-low, high)
    both = torch.maximum(*most.chunk(2, dim=-1))
    both = both.clamp(min=float(both.max()) / 1024 + 1e-12)
    return both.repeat(1, 2) * HEADROOM / 32767


def finish_rotary(module: Rotary, unit: torch.Tensor, step: torch.Tensor, middle: torch.Tensor) -> None:
    """Fill multipliers and offsets of rotary positions in: inputs ``unit * q``, outputs ``step * q + middle``, (channels,)."""
    # a sum of two products is in this unit
    fine = unit / ONE
    multiplier, offset = (fine / step * 2.0**32).round(), (-middle / fine).round()
    if not (float(multiplier.max()) < 1 << 31 and float(offset.abs().max()) <= MOST_OFFSET):
        raise ValueError("rotary positions have steps too far apart from their inputs'; the network's scales are degenerate")
    module.multiplier.copy_(multiplier.to(torch.int32))
    module.offset.copy_(offset.to(torch.int32))


def fill_output(core: Attention, output: Range, middle: torch.Tensor, weight: torch.Tensor | None) -> Grid:
    """Choose where attention's outputs lie, and fill their scales in.

    Args:
        core: to fill in.
        output: of attention.
        middle: of the outputs, (heads * channels,): the values' middles.
        weight: of the projection; None before a normalisation, for which each channel is as fine as it can be.
    """
    half = torch.maximum(output.high - middle, middle - output.low).clamp(min=1e-12)
    grid = Grid(half / 127 if weight is None else SPREADS["proj"].steps(half, weight), middle)
    core.output_scale.copy_(scale_bits(grid.step.view(core.heads, -1))[None, :, None])
    return grid


def convert_pixels(
    module: Linear, weight: Any, bias: torch.Tensor | None, mean: Sequence[float], deviation: Sequence[float], unit: float,
    covariance: Covariance,
) -> None:  # fmt: skip
    """Fill in a patch embedding that takes pixels less 128, with the images' mean and deviation folded in.

    Args:
        module: to fill in.
        weight, bias: float64 (outputs, channels * pixels).
        mean, deviation: of the image channels, of pixels in [0, 1].
        unit: of the outputs.
        covariance: of the inputs as the float layer takes them.
    """
    pixels = weight.shape[1] // len(mean)
    centre, spread = (each(numbers, pixels) for numbers in (mean, deviation))
    grid = Grid(1 / (255 * spread), (128 / 255 - centre) / spread, covariance)
    fill_linear(module, weight, bias, grid, grid.middle, unit)


def pixel_layer(
    weight: Any, bias: torch.Tensor | None, mean: Sequence[float], deviation: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and bias of a patch embedding that takes pixels from 0 to 255; arguments as :func:`convert_pixels`."""
    centre, spread = (each(numbers, weight.shape[1] // len(mean)) for numbers in (mean, deviation))
    return weight / (255 * spread), (0 if bias is None else bias) - weight @ (centre / spread)


HEADROOM = 2.0
"""How far a residual stream may go beyond what calibration saw: images differ most in a few massive activations."""


HEAD_ROOM = 1.25
"""The same for the head's inputs, of which there is one an image."""


def unit_of(*ranges: Range) -> float:
    """Return an int16 unit that holds tensors, with room to spare."""
    most = max(float(torch.maximum(-x.low, x.high).max()) for x in ranges)
    return max(most, 1e-12) * HEADROOM / 32767


def to_int16(x: torch.Tensor, unit: float) -> torch.Tensor:
    """Return constants in an int16 unit, saturated."""
    return (x / unit).round().clamp(*op.INT16).to(torch.int16)


def convert_head(module: Linear, weight: torch.Tensor, bias: torch.Tensor | None, grid: Grid, mean: torch.Tensor) -> float:
    """Fill the last layer in; return the unit of its logits: the coarsest sum's or down to a 256th of it, as 32 bits allow."""
    scaled, whole = _on_grid(weight, bias, grid)
    unit = (scaled.abs().amax(dim=1) / 127).clamp(min=1e-30)
    room = 31 - math.frexp(float(((128 * scaled.abs().sum(dim=1) + whole.abs()) / unit).max()))[1]
    scale = float(unit.max()) / 2.0 ** max(0, min(8, room - 3))
    fill_linear(module, weight, bias, grid, mean, scale)
    return scale


def feature_unit(made: Range) -> float:
    """Return the unit of int32 features."""
    return float(torch.maximum(-made.low, made.high).max().clamp(min=1e-12)) / (1 << 18)


def convert_back(
    module: WideLinear, weight: torch.Tensor, bias: torch.Tensor | None, grid: Grid, mean: torch.Tensor, step: float
) -> None:
    """Fill in what takes an output out of a rotated stream: the weights of an output are 0 or plus or minus one number."""
    quantized_linear(weight, bias, grid, mean, step, levels=1, largest_input=module.largest_input).fill(module)


def fill_norm_mean(
    norm: LayerNorm, module: Mean, float_norm: Any, made: Range, inputs: Range | None, unit: float, weight: torch.Tensor | None
) -> tuple[Grid | None, float, Grid]:
    """Fill in the last normalisation and the mean over tokens behind it.

    Args:
        norm, module: to fill in.
        float_norm: the float normalisation.
        made: what it returns.
        inputs, weight: of the head behind the mean; no weight where there is none, and no inputs where the mean is an output.
        unit: of the residual stream.

    Returns:
        Where the mean's int8 outputs lie, or None and the unit of others; and where the normalisation's lie.
    """
    fine = torch.maximum(-made.low, made.high).clamp(min=1e-12) / 32000
    fine = fine.clamp(min=float(fine.max()) / 1024)
    finish_norm(norm, float_norm, unit, fine)
    if weight is None:
        scale = feature_unit(made) if inputs is None else unit_of(inputs)
        finish_mean(module, fine, torch.full_like(fine, scale))
        return None, scale, Grid(fine, torch.zeros_like(fine))
    assert inputs is not None
    grid = Grid(SPREADS["head"].steps(inputs.half * HEAD_ROOM, weight), inputs.middle)
    finish_mean(module, fine, grid.step, grid.middle)
    return grid, 1.0, Grid(fine, torch.zeros_like(fine))
