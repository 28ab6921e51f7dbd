"""From a float network and calibration images to integers: scales, zero points, and what is folded into the weights.

Everything here is float arithmetic that happens once. What a channel's range needs is folded away exactly: a linear layer's
input is ``step * q + middle`` for each channel, the steps go into its weights and what produces its input, the middles into
its bias. Layer scale goes into the weights before it; a key's middle is dropped, since softmax does not see it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import operators as op
from .float_network import FloatBlock, FloatLinear, FloatNetwork
from .modules import Block, LayerNorm, Linear, LinearGelu, Mean

_WIDE_BIAS = 1 << 28
"""A bias beyond this many units of a row's sums makes the row's unit coarser."""
_FRACTION = 8
"""Fraction bits below an output's unit that shifted sums have at least, where there is room."""
_LEAST_MULTIPLIER = 8
"""Below it half an output's unit leaves no room for sums. Outputs whose R would be smaller hardly change."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """Where int8 activations lie: ``x ~ step * q + middle`` for each channel.

    Attributes:
        step, middle: float64 (channels,).
    """

    step: torch.Tensor
    middle: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Range:
    """What calibration saw of a tensor's channels: float64 (channels,)."""

    low: torch.Tensor
    high: torch.Tensor
    mean: torch.Tensor

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
        return Range(self.middle - self.half * factor, self.middle + self.half * factor, self.mean)


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


def quantize_linear(
    module: Linear,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    grid: Grid,
    mean: torch.Tensor,
    step: torch.Tensor | float,
    middle: torch.Tensor | float = 0.0,
) -> None:
    """Fill a linear layer in: its inputs lie on a grid, its outputs are ``step * q + middle``.

    The scale of an output's weights is the least that a whole R can give, so nothing is lost by rounding R.

    Args:
        module: to fill in.
        weight: float64 (outputs, inputs).
        bias: float64 (outputs,) or None.
        grid: of the inputs.
        mean: of the inputs: what rounding the weights does to it is taken out of the bias.
        step, middle: of the outputs, a number or (outputs,).

    Raises:
        ValueError: no R brings the sums to the outputs' unit; the network's scales are degenerate.
    """
    scaled, whole = _on_grid(weight, bias, grid)
    whole = whole - middle
    ratio = torch.maximum(scaled.abs().amax(dim=1) / 127, whole.abs() / _WIDE_BIAS).clamp(min=1e-30) / step
    centred = (mean - grid.middle) / grid.step
    for left in range(_left_of(ratio), -1, -1):
        multiplier = (ratio * 2.0 ** (32 - left)).ceil().clamp(min=_LEAST_MULTIPLIER)
        unit = multiplier * 2.0 ** (left - 32) * step
        values = (scaled / unit[:, None]).round().clamp(-127, 127)
        offset = _offset_of((whole + (scaled - values * unit[:, None]) @ centred) / unit, left, multiplier)
        bound = 128 * 2.0**left * values.abs().sum(dim=1) + offset.abs()
        if float(bound.max()) < 1 << 31:
            break
    # so that a NaN is refused
    if not (float(bound.max()) < 1 << 31 and float(multiplier.max()) < 1 << 31):
        raise ValueError(
            f"sums up to {float(bound.max()) * 2.0**-left:.3g} cannot be brought to a unit {float(ratio.max()):.3g} times as "
            "fine; the network's scales are degenerate"
        )
    module.left = left
    module.weight.copy_(values.to(torch.int8))
    module.bias.copy_(offset.to(torch.int32))
    module.multiplier.copy_(multiplier.to(torch.int32))


def _left_of(ratio: torch.Tensor) -> int:
    """Return the shift with which an output's unit has :data:`_FRACTION` bits below it, where there is room for them."""
    return min(max(0, _FRACTION + math.frexp(float(ratio.max()))[1]), 30)


def _offset_of(sums: torch.Tensor, left: int, multiplier: torch.Tensor) -> torch.Tensor:
    """Return b of :func:`.operators.rescale` that adds to sums and rounds what comes out."""
    return (sums * 2.0**left + 2.0**31 / multiplier).round()


def gelu_steps(module: LinearGelu, output: Range, weight: torch.Tensor) -> Grid:
    """Choose the steps of GELU's outputs, and fill them in.

    The steps are those that whole multipliers can give, so nothing is lost by rounding the multipliers.

    Args:
        module: the layer before GELU.
        output: of GELU.
        weight: (outputs, inputs) of the layer behind.

    Raises:
        ValueError: an activation is beyond what GELU takes here, or its zero point is.
    """
    most = op.GELU_LIMIT * op.GELU_UNIT
    if not float(output.high.max()) <= most:
        raise ValueError(f"an activation of GELU is {float(output.high.max()):.4g}; integer networks take up to {most:.0f}")
    steps = SPREADS["fc2"].steps(output.half, weight)
    shift = 30
    while shift > 0 and float((2.0**shift * op.GELU_UNIT / steps).max()) > op.MAX_GELU_MULTIPLIER:
        shift -= 1
    unit = 2.0**shift * op.GELU_UNIT
    multiplier = (unit / steps).round().clamp(1, op.MAX_GELU_MULTIPLIER)
    steps = unit / multiplier
    # GELU has a lowest value, which calibration has seen nearly; what it has not seen lies above
    middle = output.low + 128 * steps
    offset = ((0.5 - middle / steps) * 2.0**shift).round()
    if not float(offset.abs().max()) < 1 << 30:
        raise ValueError("GELU's zero point is too large for its unit; the network's scales are degenerate")
    module.gelu_shift = shift
    module.gelu_multiplier.copy_(multiplier.to(torch.int32))
    module.gelu_offset.copy_(offset.to(torch.int32))
    return Grid(steps, (0.5 - offset / 2.0**shift) * steps)


def finish_norm(
    module: LayerNorm, norm: Any, unit: float, step: torch.Tensor | float, middle: torch.Tensor | float = 0.0
) -> None:
    """Fill a layer normalisation in, with outputs ``step * q + middle``.

    Args:
        module: to fill in.
        norm: the float one.
        unit: of the residual stream.
        step, middle: of the outputs.
    """
    gain = double(norm.weight) / step
    offset = (double(norm.bias) - middle) / step
    shift = 29
    while shift > 1 and (
        float(gain.abs().max()) * 2.0 ** (8 + shift) >= 2**31 - 1 or float(offset.abs().max()) * 2.0**shift >= 2**30 - 1
    ):
        shift -= 1
    for name, x, most in (("gain", gain * 2.0 ** (8 + shift), 2**31 - 1), ("offset", offset * 2.0**shift, 2**30 - 1)):
        if not float(x.abs().max()) < most:
            raise ValueError(f"a normalisation's {name} is too large for its unit; the network's scales are degenerate")
    module.shift = shift
    module.epsilon = min(round(gain.numel() ** 2 * norm.eps / unit**2), 1 << 53)
    module.gain.copy_((gain * 2.0 ** (8 + shift)).round().to(torch.int32))
    module.offset.copy_((offset * 2.0**shift).round().to(torch.int32))


def finish_mean(module: Mean, unit: torch.Tensor, step: torch.Tensor, middle: torch.Tensor | float = 0.0) -> None:
    """Fill a mean over tokens in: inputs ``unit * q``, outputs ``step * q + middle``."""
    tokens = module.tokens
    ratio = unit / tokens / step
    # as little as leaves R below 2**31
    left = max(0, math.frexp(float(ratio.max()))[1] + 1)
    multiplier = (ratio * 2.0 ** (32 - left)).round().clamp(min=_LEAST_MULTIPLIER)
    offset = _offset_of(-middle * tokens / unit * torch.ones_like(step), left, multiplier)
    if not tokens * 32768 * 2.0**left + float(offset.abs().max()) < 1 << 31:
        raise ValueError(f"the mean of {tokens} tokens has no room in 32 bits; the network's scales are degenerate")
    module.left = left
    module.multiplier.copy_(multiplier.to(torch.int32))
    module.offset.copy_(offset.to(torch.int32))


def scale_bits(scale: torch.Tensor) -> torch.Tensor:
    """Return the bits of scales as float32, as int32."""
    return scale.to(torch.float32).contiguous().view(torch.int32)


Ranges = Mapping[str, Range]
"""Ranges of a network's activations, by the name of a submodule and the side of it: ``"name:in"``, ``"name:out"``."""


def double(x: torch.Tensor) -> torch.Tensor:
    """Return a parameter as float64 on the CPU."""
    return x.detach().to("cpu", torch.float64)


def parameters_of(layer: FloatLinear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weight and bias of a layer, float64."""
    return double(layer.weight), None if layer.bias is None else double(layer.bias)


def scaled_parameters(layer: FloatLinear, factor: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a layer's weight and bias with its outputs scaled, if there is a factor."""
    weight, bias = parameters_of(layer)
    if factor is None:
        return weight, bias
    factor = double(factor)
    return weight * factor[:, None], None if bias is None else bias * factor


def convert_norm_linear(
    norm: LayerNorm, float_norm: Any, unit: float, weight: torch.Tensor, inputs: Range, spread: Spread
) -> Grid:
    """Fill in a normalisation whose int8 outputs go into a linear layer; return where these lie."""
    grid = Grid(spread.steps(inputs.half, weight), inputs.middle)
    finish_norm(norm, float_norm, unit, grid.step, grid.middle)
    return grid


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


def _each(numbers: Sequence[float], times: int) -> torch.Tensor:
    """Return numbers as float64, each so many times."""
    return torch.tensor(numbers, dtype=torch.float64, device="cpu").repeat_interleave(times)


def convert_block(ours: Block, block: FloatBlock, ranges: Ranges, unit: float) -> None:
    """Fill in a transformer block.

    Args:
        ours: to fill in.
        block: the float one.
        ranges: of what :func:`observed` names.
        unit: of the residual stream.
    """
    _convert_attention(ours, block, ranges, unit)
    _convert_mlp(ours, block, ranges, unit)


def _convert_attention(ours: Block, block: FloatBlock, ranges: Ranges, unit: float) -> None:
    """Fill in a block's attention and the normalisation before it; arguments as in :func:`convert_block`."""
    module, norm = ours.attn, ours.norm1
    weight, bias = parameters_of(block.qkv)
    inputs = ranges[f"{block.qkv.name}:in"]
    grid = convert_norm_linear(norm, block.norm1, unit, weight, inputs, SPREADS["qkv"])

    heads, width = module.heads, module.head_dim
    made = ranges[f"{block.qkv.name}:out"]
    low, high = (x.view(3, heads, width) for x in (made.low, made.high))
    value_step, value_middle = ((high[2] - low[2]) / 2).clamp(min=1e-12) / 127, (high[2] + low[2]) / 2
    if module.qkv is not None:
        query_scale, key_scale, query_step, key_step, key_middle = _query_key_grids(low[:2], high[:2])
        steps = torch.stack((query_step, key_step, value_step))
        # the value's middle goes behind the projection, since weights sum to one
        middles = torch.stack((torch.zeros_like(low[0]), key_middle, value_middle))
        quantize_linear(module.qkv, weight, bias, grid, inputs.mean, steps.flatten(), middles.flatten())
    else:
        assert module.qk is not None and module.v is not None and module.q_norm is not None and module.k_norm is not None
        assert block.q_norm is not None and block.k_norm is not None
        norms = block.q_norm, block.k_norm
        # the norms have the same weights in all heads, whose rows they take in one unit
        units = [unit_of(ranges[f"{each.name}:in"]) for each in norms]
        first = 2 * heads * width
        biases = (None, None) if bias is None else (bias[:first], bias[first:])
        quantize_linear(module.qk, weight[:first], biases[0], grid, inputs.mean, _each(units, heads * width))
        ends = value_step.flatten(), value_middle.flatten()
        quantize_linear(module.v, weight[first:], biases[1], grid, inputs.mean, *ends)
        made_by = [ranges[f"{each.name}:out"] for each in norms]
        low, high = torch.stack([x.low for x in made_by])[:, None], torch.stack([x.high for x in made_by])[:, None]
        query_scale, key_scale, query_step, key_step, key_middle = _query_key_grids(low, high)
        finish_norm(module.q_norm, block.q_norm, units[0], query_step[0])
        finish_norm(module.k_norm, block.k_norm, units[1], key_step[0], key_middle[0])

    weight, bias = scaled_parameters(block.proj, block.factor1)
    out = ranges[f"{block.proj.name}:in"]
    middle = value_middle.flatten()
    half = torch.maximum(out.high - middle, middle - out.low).clamp(min=1e-12)
    grid = Grid(SPREADS["proj"].steps(half, weight), middle)
    quantize_linear(module.proj, weight, bias, grid, out.mean, unit)

    module.query_scale.copy_(scale_bits(query_scale)[None, :, None])
    module.key_scale.copy_(scale_bits(key_scale)[None, :, None])
    module.value_scale.copy_(scale_bits(value_step)[None, :, None])
    module.output_scale.copy_(scale_bits(grid.step.view(heads, width))[None, :, None])


def _convert_mlp(ours: Block, block: FloatBlock, ranges: Ranges, unit: float) -> None:
    """Fill in a block's MLP and the normalisation before it; arguments as in :func:`convert_block`."""
    fc1, fc2, norm = ours.fc1, ours.fc2, ours.norm2
    weight, bias = parameters_of(block.fc1)
    inputs = ranges[f"{block.fc1.name}:in"]
    grid = convert_norm_linear(norm, block.norm2, unit, weight, inputs, SPREADS["fc1"])
    quantize_linear(fc1, weight, bias, grid, inputs.mean, op.GELU_UNIT)
    weight, bias = scaled_parameters(block.fc2, block.factor2)
    outputs = ranges[f"{block.fc2.name}:in"]
    quantize_linear(fc2, weight, bias, gelu_steps(fc1, outputs, weight), outputs.mean, unit)


def convert_pixels(module: Linear, plan: FloatNetwork, mean: Sequence[float], deviation: Sequence[float], unit: float) -> None:
    """Fill in a patch embedding that takes pixels less 128, with the images' mean and deviation folded in."""
    weight, bias = parameters_of(plan.patch)
    pixels = weight.shape[1] // plan.image_channels
    centre, spread = _each(mean, pixels), _each(deviation, pixels)
    grid = Grid(1 / (255 * spread), (128 / 255 - centre) / spread)
    quantize_linear(module, weight, bias, grid, grid.middle, unit)


def observed(plan: FloatNetwork) -> tuple[list[str], list[str]]:
    """Name the submodules of a model whose inputs, and whose outputs, calibration looks at."""
    inputs, outputs = [plan.norm.name], [plan.norm.name]
    if plan.first_norm is not None:
        inputs.append(plan.first_norm.name)
    if plan.head is not None:
        inputs.append(plan.head.name)
    for stage in plan.stages:
        if stage.merge is not None:
            inputs.append(stage.merge.reduction.name)
        for block in stage.blocks:
            inputs += [each.name for each in (block.norm1, block.norm2, block.qkv, block.proj, block.fc1, block.fc2)]
            norms = [each.name for each in (block.q_norm, block.k_norm) if each is not None]
            inputs, outputs = inputs + norms, [*outputs, *norms, block.qkv.name, block.name]
    return inputs, outputs


HEADROOM = 2.0
"""How far a residual stream may go beyond what calibration saw: images differ most in a few massive activations."""


HEAD_ROOM = 1.25
"""The same for the head's inputs, of which there is one an image."""


def unit_of(*ranges: Range) -> float:
    """Return an int16 unit that holds tensors, with room to spare."""
    most = max(float(torch.maximum(-x.low, x.high).max()) for x in ranges)
    return max(most, 1e-12) * HEADROOM / 32767


def stream_unit(ranges: Ranges, blocks: Sequence[FloatBlock]) -> float:
    """Return the unit of the residual stream through these blocks."""
    sides = ((f"{block.norm1.name}:in", f"{block.norm2.name}:in", f"{block.name}:out") for block in blocks)
    return unit_of(*(ranges[side] for each in sides for side in each))


def to_int16(x: torch.Tensor, unit: float) -> torch.Tensor:
    """Return constants in an int16 unit, saturated."""
    return (x / unit).round().clamp(*op.INT16).to(torch.int16)


def _convert_head(network: Any, layer: Any, grid: Grid, mean: torch.Tensor) -> None:
    """Fill the last layer in: logits share a unit, the coarsest sum's or down to a 256th of it, as far as 32 bits go."""
    weight, bias = parameters_of(layer)
    scaled, whole = _on_grid(weight, bias, grid)
    unit = (scaled.abs().amax(dim=1) / 127).clamp(min=1e-30)
    room = 31 - math.frexp(float(((128 * scaled.abs().sum(dim=1) + whole.abs()) / unit).max()))[1]
    network.output_scale = float(unit.max()) / 2.0 ** max(0, min(8, room - 3))
    quantize_linear(network.head, weight, bias, grid, mean, network.output_scale)


def _feature_unit(made: Range) -> float:
    return float(torch.maximum(-made.low, made.high).max().clamp(min=1e-12)) / (1 << 18)


def convert_norm_head(network: Any, plan: FloatNetwork, ranges: Ranges, unit: float) -> None:
    """Fill in the last normalisation, and the head behind it or the unit of features.

    Args:
        network: with ``norm`` and ``head``.
        plan: of the float network.
        ranges: of what :func:`observed` names.
        unit: of the residual stream.
    """
    if plan.head is None:
        network.output_scale = _feature_unit(ranges[f"{plan.norm.name}:out"])
        finish_norm(network.norm, plan.norm, unit, network.output_scale)
        return
    inputs = ranges[f"{plan.head.name}:in"]
    weight, _ = parameters_of(plan.head)
    grid = convert_norm_linear(network.norm, plan.norm, unit, weight, inputs.widened(HEAD_ROOM), SPREADS["head"])
    _convert_head(network, plan.head, grid, inputs.mean)


def convert_norm_mean_head(network: Any, plan: FloatNetwork, ranges: Ranges, unit: float) -> None:
    """Fill in the last normalisation, a mean over tokens behind it, and the head; arguments as in :func:`convert_norm_head`."""
    made = ranges[f"{plan.norm.name}:out"]
    fine = torch.maximum(-made.low, made.high).clamp(min=1e-12) / 32000
    fine = fine.clamp(min=float(fine.max()) / 1024)
    finish_norm(network.norm, plan.norm, unit, fine)
    if plan.head is None:
        network.output_scale = _feature_unit(made)
        finish_mean(network.mean, fine, torch.full_like(fine, network.output_scale))
        return
    inputs = ranges[f"{plan.head.name}:in"]
    weight, _ = parameters_of(plan.head)
    grid = Grid(SPREADS["head"].steps(inputs.half * HEAD_ROOM, weight), inputs.middle)
    finish_mean(network.mean, fine, grid.step, grid.middle)
    _convert_head(network, plan.head, grid, inputs.mean)
