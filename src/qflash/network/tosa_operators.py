"""The modules of an integer network as operators of :class:`.tosa_graph.Graph`.

What is static is worked out here, by the functions that define it (:mod:`qflash.specification.fixed_point`,
:mod:`qflash.specification.layers`), and becomes constants. Values have four axes: (batch, tokens, channels) is (batch, 1,
tokens, channels), (batch, channels) is (batch, 1, 1, channels), so that a linear layer is a convolution of one pixel. The
residual stream is int32 saturated to int16, because the integer profile adds nothing narrower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..specification import fixed_point as fp
from ..specification import layers as op
from ..specification.recipe import Recipe
from . import activations
from .graph import IMAGES, IntegerNetwork
from .modules import (
    Attention,
    First,
    Join,
    LayerNorm,
    Linear,
    LinearActivation,
    Mean,
    OwnForms,
    PatchEmbedding,
    WideLinear,
    Widen,
)
from .tosa_graph import Graph, Value

Shape = tuple[int, ...]
"""Of a value of the network, for one image."""
_UNIT = 30
"""``RESCALE`` by ``2**30`` and a shift of 30 is 1, of numbers below ``2**29``."""


def _array(x: torch.Tensor) -> np.ndarray:
    return x.detach().cpu().numpy()


def _wide(x: torch.Tensor) -> np.ndarray:
    return _array(x).astype(np.int64)


_NUMPY = {torch.int8: np.int8, torch.int16: np.int16, torch.int32: np.int32}


def _saturated(graph: Graph, x: Value, dtype: torch.dtype, bound: int, shift: int | np.ndarray = 0) -> Value:
    """Return int32 shifted right, rounded half up and saturated: int8, or int32 of the type's range.

    Args:
        graph: to add to.
        x: int32, at most ``bound`` in magnitude.
        dtype: of the specification.
        bound: see there.
        shift: 0 to 30; an array has one for each of the last axis.
    """
    if dtype == torch.int32:
        return graph.shift_right(x, shift, rounded=True)
    up = np.minimum(_UNIT, 32 - np.asarray(shift))
    if dtype == torch.int8 and bound < 1 << (int(np.min(up + shift)) - 1):
        return graph.rescale(x, 1 << up, up + shift, np.int8)
    x = graph.shift_right(x, shift, rounded=True)
    low, high = op.LIMITS[dtype]
    x = graph.maximum(graph.minimum(x, high), low)
    return graph.cast(x, np.int8) if dtype == torch.int8 else x


def _shifted_sums(graph: Graph, sums: Value, left: int, bias: np.ndarray) -> Value:
    return graph.add(graph.shift_left(sums, left), bias)


def _wide_product(graph: Graph, x: Value, weight: np.ndarray, bias: np.ndarray) -> Value:
    """Return sums of int32 of int16's range times int8 weights, plus a bias, by upper and lower eight bits of x."""
    high = graph.shift_right(x, 8)
    low = graph.cast(graph.subtract(x, graph.add(graph.shift_left(high, 8), 128)), np.int8)
    # 128 is taken from the lower bits, which are 0 to 255
    sums = graph.convolve(graph.cast(high, np.int8), weight, np.zeros_like(bias))
    return graph.add(
        graph.shift_left(sums, 8), graph.convolve(low, weight, bias + 128 * weight.sum(axis=(1, 2, 3), dtype=np.int64))
    )


def _products(graph: Graph, module: Linear, x: Value) -> tuple[Value, int]:
    """Return the sums that :func:`.layers.rescale` multiplies but for a shift to the left, and that shift.

    The bias goes into the convolution where it is whole in the unit of the sums.
    """
    weight, bias = _array(module.weight), _wide(module.bias)
    if isinstance(module, PatchEmbedding):
        high, wide = module.patch_size
        weight = weight.reshape(len(weight), -1, high, wide).transpose(0, 2, 3, 1)
    else:
        weight = weight[:, None, None, :]
    if isinstance(module, WideLinear):
        sums = _wide_product(graph, x, weight, np.zeros_like(bias))
        return _shifted_sums(graph, sums, module.left, bias), 0
    if not (bias & ((1 << module.left) - 1)).any():
        return graph.convolve(x, weight, bias >> module.left), module.left
    return _shifted_sums(graph, graph.convolve(x, weight, np.zeros_like(bias)), module.left, bias), 0


def linear(graph: Graph, module: Linear, x: Value, residual: Value | np.ndarray | None = None) -> Value:
    """Write a :class:`.modules.Linear` or :class:`.modules.LinearActivation`; arguments as its ``forward`` has them."""
    sums, left = _products(graph, module, x)
    multiplier = _array(module.multiplier)
    if isinstance(module, LinearActivation):
        by = module.activated
        u = graph.rescale(sums, multiplier, 32 - left, np.int32)
        tables = graph.int16 and activations.has_tables(by.name)
        return _activated(graph, by, u, graph.rescale(sums, multiplier, 32 - left, np.int16) if tables else None)
    if module.dtype == torch.int8:
        return graph.rescale(sums, multiplier, 32 - left, np.int8)
    out = graph.rescale(sums, multiplier, 32 - left, np.int32)
    return _saturated(graph, out if residual is None else graph.add(out, residual), module.dtype, 1 << 31)


def _activated(graph: Graph, by: op.Activation, u: Value, narrow: Value | None) -> Value:
    """Write :func:`.layers.activate`; ``narrow`` as :func:`.activations.tosa` has it."""
    multiplier, offset = _wide(by.multiplier), _wide(by.offset)
    # the specification's shift rounds down
    offset = offset - (1 << by.shift >> 1)
    bound = int((multiplier * (op.ACTIVATION_LIMIT + 1) + np.abs(offset)).max())
    value = graph.multiply(activations.tosa(graph, by.name, u, narrow), multiplier)
    return _saturated(graph, graph.add(value, offset), torch.int8, bound, by.shift)


def _inverse_root(graph: Graph, v: Value) -> Value:
    """Write :func:`.layers.inverse_root`."""
    x = graph.subtract(op.ROOT_START, graph.multiply(v, op.ROOT_SLOPE, 30))
    for _ in range(3):
        error = graph.subtract(1 << 28, graph.multiply(graph.multiply(x, x, 30), v, 30))
        x = graph.add(x, graph.multiply(x, error, 29))
    return x


_LOW = 18
"""Bits of the lower limb of a variance; even, since a root halves it."""


def _variance(graph: Graph, e: Value, epsilon: int) -> tuple[Value, Value]:
    """Return the sum of the squares of numbers of 19 bits plus epsilon, below 2**48, in two limbs: high, and low of 18 bits."""
    last = len(e.shape) - 1
    high = graph.reduce_sum(graph.multiply(e, e, _LOW), last)
    # what the rounded squares lack is the low bits of the squares, which those of e (e - q) + q (2 e - q) have
    q = graph.bit_and(e, (1 << _LOW // 2) - 1)
    part = graph.multiply(q, graph.subtract(graph.add(e, e), q))
    part = graph.shift_right(graph.shift_left(part, 32 - _LOW), 32 - _LOW)
    low = graph.add(graph.reduce_sum(part, last), epsilon & ((1 << _LOW) - 1))
    high = graph.add(graph.add(high, epsilon >> _LOW), graph.shift_right(low, _LOW))
    return high, graph.bit_and(low, (1 << _LOW) - 1)


def _normalise(graph: Graph, h: Value, epsilon: int, centred: bool) -> Value:
    """Write :func:`.layers.normalise`."""
    channels = h.shape[-1]
    by = op.row_constants(channels)
    four = graph.shift_left(h, 2)
    if centred:
        total = graph.reduce_sum(h, len(h.shape) - 1)
        four = graph.subtract(four, graph.multiply(total, by.inverse, by.bits))
    high, low = _variance(graph, four, epsilon)

    # below 2**30 both limbs fit one; the leading zeros of what is left say the shift
    large = graph.greater(high, (1 << 12) - 1)
    leading = graph.select(large, high, graph.bit_or(graph.shift_left(high, _LOW), low))
    half = graph.shift_right(graph.leading_zeros(leading), 1)
    twice = graph.shift_left(half, 1)
    v = graph.shift_left(leading, graph.add(twice, -2))
    rest = graph.select(large, graph.shift_left(low, 31 - _LOW), 0)
    v = graph.bit_or(v, graph.shift_right(rest, graph.subtract(33, twice)))
    if not epsilon:
        v = graph.maximum(v, 1 << 28)
    factor = graph.multiply(_inverse_root(graph, v), by.root, 30)

    difference = graph.multiply(h, channels)
    if centred:
        difference = graph.subtract(difference, total)
    left = graph.add(half, graph.select(large, 3 - by.shift, 12 - by.shift))
    one = graph.constant(np.ones((1,) * len(h.shape)), np.int32)
    scaled = graph.multiply(difference, graph.shift_left(one, left), 5)
    return graph.multiply(scaled, factor, 32)


def layer_norm(graph: Graph, module: LayerNorm, h: Value, residual: Value | None = None) -> Value:
    """Write a :class:`.modules.LayerNorm`; h and the residual are int32 of int16's range."""
    gain, offset = _wide(module.gain), _wide(module.offset)
    wide = graph.add(graph.multiply(_normalise(graph, h, module.epsilon, module.centred), gain, 28), offset)
    # |N| <= sqrt(channels) in 1 / 2**20, and its rounding
    most = (math.isqrt(gain.size << 40) + 4096) * int(np.abs(gain).max()) >> 28
    most += 1 + int(np.abs(offset).max())
    if residual is None:
        return _saturated(graph, wide, module.dtype, most, module.shift)
    wide = graph.add(graph.shift_right(wide, module.shift, rounded=True), residual)
    return _saturated(graph, wide, module.dtype, (most >> module.shift) + (1 << 16))


def mean(graph: Graph, module: Mean, x: Value) -> Value:
    """Write a :class:`.modules.Mean` of int32 (batch, 1, tokens, channels): (batch, 1, 1, channels)."""
    sums = _shifted_sums(graph, graph.reduce_sum(x, 2), module.left, _wide(module.offset))
    multiplier = _array(module.multiplier)
    if module.dtype == torch.int8:
        return graph.rescale(sums, multiplier, 32, np.int8)
    return _saturated(graph, graph.rescale(sums, multiplier, 32, np.int32), module.dtype, 1 << 31)


def _exponents(
    graph: Graph, module: Attention, recipe: Recipe, query: Value, key: Value, more: int
) -> tuple[Value, np.ndarray]:
    """Return the exponents t plus ``more`` octaves, int32 (heads, queries, keys), and their fraction bits (heads, 1, 1).

    Heads are those of all images and windows.
    """
    multiplier, bits = module.score_multiplier()
    offset, _, _ = fp.probability_constants(recipe.exponential, recipe.probability_bits)
    times = query.shape[0] // module.heads

    def per_head(x: torch.Tensor | np.ndarray) -> np.ndarray:
        return np.tile(np.asarray(x), (times, 1, 1))

    products = graph.multiply(graph.matmul(query, key), per_head(multiplier[0]))
    if module.bias is not None:
        drop = (bits - fp.BIAS_FRACTION_BITS).clamp(min=0)
        bits = bits - drop
        bias = module.bias.to(torch.int64)
        if bool((bias.abs() > fp.BIAS_LIMIT).any()):
            raise ValueError("the bias of attention must be finite to be written as TOSA, got one that masks keys")
        bias = bias >> (fp.BIAS_FRACTION_BITS - bits)
        products = graph.shift_right(products, per_head(drop[0]))
        windows = bias.flatten(0, 1)
        products = graph.add(products, np.tile(_array(windows), (query.shape[0] // len(windows), 1, 1)))
    start = fp.exponent_offset(offset, bits) + (more << bits)
    most = graph.add(graph.reduce_max(products, 2), per_head(start[0]))
    return graph.subtract(most, products), per_head(bits[0])


def _weights(graph: Graph, module: Attention, recipe: Recipe, query: Value, key: Value, exact: bool) -> Value:
    """Write :func:`qflash.specification.fixed_point.probability`, if ``exact`` ``fine_probability``: int32."""
    _, up, down = fp.probability_constants(recipe.exponential, recipe.probability_bits)
    # the shift of the mantissa is that of its octave and another one, which the exponents hold
    t, bits = _exponents(graph, module, recipe, query, key, down - up - (fp.FINE_BITS if exact else 0))
    # a mantissa has less than 31 bits
    t = graph.minimum(t, (32 << bits) - 1)
    t = graph.shift_right(graph.shift_left(t, np.maximum(8 - bits, 0)), np.maximum(bits - 8, 0))
    fraction = graph.bit_and(t, 255)
    if recipe.exponential == "linear":
        mantissa = graph.multiply(graph.subtract(512, fraction), (1 << recipe.probability_bits) - 1)
    else:
        root = graph.subtract(511, fraction)
        mantissa = graph.add(graph.multiply(root, root), 1 << 17)
    nearest = recipe.probability_rounding == "nearest" and not exact
    return graph.shift_right(mantissa, graph.shift_right(t, 8), rounded=nearest)


def _row_inverse(graph: Graph, denominator: Value) -> tuple[Value, Value]:
    """Write :func:`qflash.specification.fixed_point.row_inverse` of an int32 that is positive: 31 - bits, and x."""
    left = graph.add(graph.leading_zeros(denominator), -1)
    divisor = graph.shift_left(denominator, left)
    x = graph.subtract(fp.RECIPROCAL_START, graph.multiply(divisor, fp.RECIPROCAL_SLOPE, 32))
    for _ in range(3):
        error = graph.subtract(1 << 28, graph.multiply(divisor, x, 32))
        x = graph.add(x, graph.multiply(x, error, 28))
    return left, x


def attention(graph: Graph, module: Attention, parts: Sequence[Value], batch: int) -> Value:
    """Write a :class:`.modules.Attention`: int8 (batch, 1, tokens, channels).

    Args:
        graph: to add to.
        module: to write.
        parts: what it takes, int8.
        batch: images.
    """
    if module.padded or module.causal:
        raise ValueError("attention with masked keys, of padding or causal, has no form in TOSA here")
    recipe, heads, width = Recipe.from_key(module.recipe), module.heads, module.head_dim
    query, key, value = _heads(graph, module, parts, batch)
    groups, tokens = value.shape[0], value.shape[1]
    exact = recipe.takes_exact_sum(tokens)
    w = _weights(graph, module, recipe, query, graph.transpose(key, 0, 2, 1), exact)
    zero = -128 if recipe.probability_bits == 8 else 0
    fall = fp.FINE_BITS if exact else 0
    p = graph.rescale(w, 1 << (_UNIT - fall), _UNIT, np.int8, zero)
    numerator = graph.matmul(p, value, zero)
    denominator = graph.matmul(p, graph.constant(np.ones((groups, tokens, 1)), np.int8), zero)
    if exact:
        rounded = graph.shift_left(denominator, fall)
        denominator = graph.maximum(graph.reduce_sum(w, 2), rounded)
        missing = graph.shift_right(graph.subtract(denominator, rounded), fall + 1)
        sums = graph.matmul(graph.constant(np.ones((groups, 1, tokens)), np.int8), value)
        # eight times the sum and the two shifts of the specification are one
        average = graph.multiply(sums, fp.inverse_count(tokens), 30)
        numerator = graph.add(numerator, graph.multiply(missing, average))
    left, inverse = _row_inverse(graph, denominator)
    scaled = graph.shift_left(numerator, graph.add(left, fall - fp.FINE_BITS))
    scales = (x.view(torch.float32)[0] for x in (module.value_scale, module.output_scale))
    multiplier, shift = fp.output_multiplier(*scales)
    times = groups // heads
    factor = graph.multiply(inverse, np.tile(_array(multiplier), (times, 1, 1)), 32)
    out = _requantize(graph, scaled, factor, np.tile(_array(shift), (times, 1, 1)))
    queries = out.shape[1]
    return graph.arrange(out, (times, heads, queries, width), (0, 2, 1, 3), batch, 1, times * queries // batch, heads * width)


def _requantize(graph: Graph, scaled: Value, factor: Value, shift: np.ndarray) -> Value:
    """Write :func:`qflash.specification.fixed_point.requantize`; ``MUL`` has one shift, so there is one for every shift."""
    if not shift.all():
        # the product would be rounded where the specification rounds down
        raise ValueError(
            "the values of attention must have scales below 2**19 times those of its outputs to be written as TOSA"
        )
    first, *others = np.unique(shift)
    out = graph.multiply(scaled, factor, 32 + int(first))
    for other in others:
        found = graph.multiply(scaled, factor, 32 + int(other))
        out = graph.select(graph.constant(shift == other, np.bool_), found, out)
    return _saturated(graph, out, torch.int8, 1 << 28)


def _heads(graph: Graph, module: Attention, parts: Sequence[Value], batch: int) -> list[Value]:
    """Return query, key and value, each int8 (batch or windows times heads, tokens, channels)."""
    heads, width = module.heads, module.head_dim
    views: list[Value] = []
    if module.query is not None:
        views.append(graph.constant(np.tile(_array(module.query)[0], (batch, 1, 1)), np.int8, "query"))
    for part in parts:
        # (batch, 1, tokens, channels), or (batch, tokens, heads, channels) of a normalisation of heads
        size = part.shape[1] * part.shape[2] * part.shape[3] // (heads * width)
        whole = part.shape[3] != width or part.shape[2] != heads
        tokens = part.shape[2] if whole else part.shape[1]
        count = size // tokens
        tokens = module.tokens or tokens
        groups = batch * size // (count * tokens)
        sizes = groups, tokens, count, heads, width
        x = graph.arrange(part, sizes, (2, 0, 3, 1, 4), count * groups * heads, tokens, width)
        views += [graph.cut(x, i * groups * heads, (i + 1) * groups * heads, 0) for i in range(count)]
    if module.first:
        views[0] = graph.cut(views[0], 0, module.first, 1)
    return views


def _embed(graph: Graph, module: PatchEmbedding, images: Value) -> Value:
    """Write a :class:`.modules.PatchEmbedding`."""
    batch = images.shape[0]
    pixels = graph.rescale(images, 1 << _UNIT, _UNIT, np.int8, unsigned=True)
    pixels = graph.transpose(pixels, 0, 2, 3, 1)
    rows, columns = pixels.shape[1] // module.patch_size[0], pixels.shape[2] // module.patch_size[1]
    # pixels behind the last whole patch are left out
    pixels = graph.cut(pixels, 0, rows * module.patch_size[0], 1)
    pixels = graph.cut(pixels, 0, columns * module.patch_size[1], 2)
    channels = module.bias.numel()
    position = None if module.position is None else _array(module.position).reshape(1, rows, columns, channels)
    h = graph.reshape(linear(graph, module, pixels, position), batch, 1, rows * columns, channels)
    if module.prefix is None:
        return h
    prefix = graph.constant(np.tile(_array(module.prefix)[:, None], (batch, 1, 1, 1)), np.int32, "prefix")
    return graph.concat([prefix, h], 2)


def _norm(graph: Graph, module: LayerNorm, h: Value, *residual: Value) -> Value:
    """Write a :class:`.modules.LayerNorm` with the tokens that it takes."""
    batch, channels = h.shape[0], module.gain.numel()
    if module.part is not None:
        first, heads = module.part
        h = graph.reshape(graph.cut(h, first, first + heads * channels, 3), batch, h.shape[2], heads, channels)
    if module.gather is not None:
        order = _array(module.gather)
        rows = 1 if module.single else len(order)
        h = graph.reshape(graph.take(h, order), batch, 1, rows, channels)
    return layer_norm(graph, module, h, *residual)


def node(graph: Graph, module: Any, inputs: Sequence[Value], batch: int) -> Value:
    """Write one node of a network.

    Args:
        graph: to add to.
        module: of the node.
        inputs: what it takes.
        batch: images.
    """
    x = inputs[0]
    if isinstance(module, OwnForms):
        return module.write_tosa(graph, inputs, batch)
    if isinstance(module, PatchEmbedding):
        return _embed(graph, module, x)
    if isinstance(module, LayerNorm):
        return _norm(graph, module, x, *inputs[1:])
    if isinstance(module, Linear):
        if module.scatter is not None:
            x = graph.take(x, _array(module.scatter.argsort()))
        return linear(graph, module, x, *inputs[1:])
    if isinstance(module, Attention):
        return attention(graph, module, inputs, batch)
    if isinstance(module, Mean):
        return mean(graph, module, graph.cut(x, module.first, module.first + module.tokens, 2))
    if isinstance(module, First):
        return graph.cut(x, 0, module.count, 2)
    if isinstance(module, Join):
        return graph.concat(inputs, 3)
    assert isinstance(module, Widen)
    return x if module.token is None else graph.cut(x, module.token, module.token + 1, 2)


def whole_network(graph: Graph, network: IntegerNetwork, images: Value) -> dict[str, Value]:
    """Write a network; return its int32 outputs by name."""
    values = {IMAGES: images}
    for each in network.nodes:
        with graph.scope(each.name):
            inputs = [values[name] for name in each.inputs]
            values[each.name] = node(graph, network.part(each.name), inputs, images.shape[0])
    return {name: values[made] for name, made in network.outputs.items()}
