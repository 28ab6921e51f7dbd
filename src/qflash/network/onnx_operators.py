"""The modules of an integer network as nodes of :class:`.onnx_graph.Graph`.

What is static is worked out here, by the functions that define it (:mod:`qflash.specification.fixed_point`,
:mod:`qflash.specification.layers`), and becomes constants: multipliers and shifts, and functions of few bits as tables (GELU's
tail, the exponential). What depends on the images becomes nodes. int8 tensors are uint8 with a zero point of 128; the residual
stream is int32 clipped to int16, because onnxruntime adds no int16.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..specification import fixed_point as fp
from ..specification import layers as op
from ..specification.recipe import Recipe
from ..specification.texts import PADDING
from . import activations
from .float_parts import FloatNode
from .graph import IMAGES, IntegerNetwork
from .modules import (
    Attention,
    First,
    IntegerModule,
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
from .onnx_float_parts import float_node
from .onnx_graph import ZERO_POINT, Graph, Value
from .onnx_narrow import NarrowGraph
from .onnx_rescale import after_of, rescale, saturated

Shape = tuple[int, ...]
"""Of a value of the network, for one image."""


def _array(x: torch.Tensor) -> np.ndarray:
    return x.detach().cpu().numpy()


def _wide_product(graph: Graph, x: Value, weight: Value, numbers: np.ndarray) -> Value:
    """Return the product of int32 of int16's range and weights of :meth:`Graph.weight`, by upper and lower eight bits."""
    positive = graph.add(graph.known(x, *op.INT16), 1 << 15)
    high = graph.shift_positive(positive, 8)
    low = graph.known(graph.subtract(positive, graph.multiply(high, 256)), 0, 255)
    high, low = graph.cast(high, np.uint8), graph.cast(low, np.uint8)
    sums = [
        graph.matmul(part, weight, x_zero=zero, inner=len(numbers), weight=numbers)
        for part, zero in ((high, ZERO_POINT), (low, 0))
    ]
    return graph.add(graph.multiply(sums[0], 256), sums[1])


def linear(graph: Graph, module: Linear, x: Value, residual: Value | None = None) -> Value:
    """Write a :class:`.modules.Linear`, or a kind of it; arguments as its ``forward`` has them."""
    weight, numbers = graph.weight(module.weight.mT, "weight"), _array(module.weight.mT)
    if isinstance(module, WideLinear):
        sums = _wide_product(graph, x, weight, numbers)
    else:
        sums = graph.matmul(x, weight, inner=len(numbers), weight=numbers)
    bound = _array(module.weight.to(torch.int64).abs().sum(dim=1) * module.largest_input)
    change = bound, module.left, module.bias, module.multiplier
    if isinstance(module, LinearActivation):
        limits = -op.TAIL_END, op.ACTIVATION_LIMIT
        return _activated(graph, module.activated, rescale(graph, sums, *change, limits=limits))
    if residual is None:
        return saturated(graph, rescale(graph, sums, *change, after_of(module.dtype), _limits(module.dtype)), module.dtype)
    # beyond twice int16's range a sum saturates whatever the residual
    out = rescale(graph, sums, *change, limits=(2 * op.INT16[0], 2 * op.INT16[1] + 1))
    return saturated(graph, graph.add(out, graph.known(residual, *op.INT16), np.int32), module.dtype)


def _limits(dtype: torch.dtype) -> tuple[int, int] | None:
    return None if dtype == torch.int32 else op.LIMITS[dtype]


def _activated(graph: Graph, by: op.Activation, u: Value) -> Value:
    """Write :func:`.layers.activate`."""
    value = activations.onnx(graph, by.name, graph.cast(u, np.int32))
    multiplier, offset = _array(by.multiplier), _array(by.offset)
    bound = int((multiplier.astype(np.int64) * (op.ACTIVATION_LIMIT + 1) + np.abs(offset.astype(np.int64))).max())
    wide = graph.multiply(value, graph.constant(multiplier, np.int32, "activation_multiplier"))
    out = graph.shift_right(wide, by.shift, min(bound, (1 << 31) - 1), offset, ZERO_POINT)
    return saturated(graph, out, torch.int8)


_VARIANCE_BITS = 47


def _inverse_root(graph: Graph, v: Value) -> Value:
    """Write :func:`.layers.inverse_root`."""
    # x is within 8.6 %, so it and the error are within these ends
    ends = (1 << 29) - (1 << 26), (1 << 30) + 64
    x = graph.subtract(graph.constant(op.ROOT_START, graph.wide), graph.multiply_round(v, op.ROOT_SLOPE, 30))
    for _ in range(3):
        square = graph.multiply_round(graph.known(x, *ends), x, 30)
        error = graph.subtract(graph.constant(1 << 28, graph.wide), graph.multiply_round(square, v, 30))
        x = graph.add(x, graph.multiply_round(x, graph.known(error, -(1 << 26), 1 << 26), 29))
    return graph.known(x, *ends)


def _normalise(graph: Graph, h: Value, channels: int, epsilon: int, centred: bool) -> Value:
    """Write :func:`.layers.normalise`; what follows from the variance's bit length is looked up."""
    by = op.row_constants(channels)
    difference = graph.multiply(h, 4)
    if centred:
        total = graph.reduce("ReduceSum", h, -1)
        middle = graph.shift_right(graph.multiply(total, by.inverse, np.int64), by.bits, 1 << 58, 1 << (by.bits - 1))
        difference = graph.subtract(difference, middle)
    difference = graph.cast(difference, np.int64)
    squares = graph.reduce("ReduceSum", graph.multiply(difference, difference), -1)
    variance = graph.add(squares, graph.constant(epsilon, np.int64, "epsilon"))
    bits = graph.bit_length(variance, _VARIANCE_BITS)

    half = (np.arange(_VARIANCE_BITS + 1, dtype=np.int64) - 29) >> 1
    up, down = np.maximum(-2 * half, 0), np.maximum(2 * half, 0)
    # of lengths that a variance has
    left = np.clip(8 - half - by.shift, -5, 25)

    def of_bits(table: np.ndarray, dtype: Any) -> Value:
        return graph.gather(graph.table(table, dtype, "of_bit_length"), bits)

    v = graph.shift_unsigned(graph.cast(variance, np.uint64), of_bits(up, np.uint64), "LEFT")
    v = graph.maximum(graph.cast(graph.shift_unsigned(v, of_bits(down, np.uint64)), np.int64), 1 << 28)
    factor = graph.multiply_round(_inverse_root(graph, v), by.root, 30)
    difference = graph.multiply(h, channels)
    if centred:
        difference = graph.subtract(difference, total)
    raised = graph.multiply(difference, of_bits(np.int64(1) << (left + 5), np.int64), np.int64)
    return graph.multiply_round(graph.shift_right(raised, 5, (1 << 36) - 32, 16), factor)


def _narrow_normalise(graph: NarrowGraph, h: Value, channels: int, epsilon: int, centred: bool) -> Value:
    """Write :func:`.layers.normalise` without 64 bits: squares are sums of products of 10 bits, the variance has two parts."""
    by = op.row_constants(channels)
    difference = graph.multiply(graph.known(h, *op.INT16), 4)
    if centred:
        total = graph.total(h, -1, channels)
        middle = graph.multiply_round(total, by.inverse, by.bits)
        difference = graph.subtract(difference, graph.known(middle, -(1 << 17), 1 << 17))
    upper, lower = graph.halves(difference, 9)
    squares, mixed, rest = (
        graph.total(graph.multiply(*pair), -1, channels) for pair in ((upper, upper), (upper, lower), (lower, lower))
    )
    # V = squares 2**18 + mixed 2**10 + rest + epsilon = high 2**18 + low
    over, under = graph.halves(mixed, 8, centred=False)
    low = graph.add(graph.add(graph.multiply(under, 1 << 10), rest), epsilon & ((1 << 18) - 1))
    carry, low = graph.halves(graph.known(low, 0, (1 << 31) - 1), 18, centred=False)
    high = graph.add(graph.add(graph.add(squares, over), epsilon >> 18), carry)
    graph.known(high, 0, (1 << 29) - 1)
    # the bit length of V is that of its high part and 18, or that of its low part
    large = graph.bit_length(high, 29)
    large = graph.add(large, graph.multiply(graph.minimum(large, 1), 18))
    bits = graph.maximum(large, graph.bit_length(low, 18))

    half = (np.arange(_VARIANCE_BITS + 1, dtype=np.int64) - 29) >> 1
    # of a length of 18 and less the high part is 0, and with it its factor
    lift = np.where(18 - 2 * half < 31, np.int64(1) << np.minimum(18 - 2 * half, 30), 0)

    def of_bits(table: np.ndarray) -> Value:
        return graph.gather(graph.table(table, np.int32, "of_bit_length"), bits)

    # shifted to 29 or 30 bits
    part = graph.multiply_known(high, of_bits(lift), 0, (1 << 30) - 1)
    last = graph.divide(low, of_bits(np.int64(1) << np.maximum(2 * half, 0)))
    last = graph.multiply_known(last, of_bits(np.int64(1) << np.minimum(np.maximum(-2 * half, 0), 30)), 0, (1 << 30) - 1)
    v = graph.known(graph.wrap("Add", part, last), 0, (1 << 30) - 1)
    factor = graph.multiply_round(_inverse_root(graph, graph.maximum(v, 1 << 28)), by.root, 30)
    graph.known(factor, (1 << 28) - 64, 1 << 30)
    difference = graph.multiply(h, channels)
    if centred:
        difference = graph.known(graph.subtract(difference, total), -(1 << 28), 1 << 28)
    # lengths that a variance has
    left = np.clip(8 - half - by.shift, -5, 25)
    # |d| <= channels sqrt(V) / 4, and V < 2**(30 + 2 half)
    most = (channels << (21 - by.shift)) + 1
    scaled = graph.multiply_known(difference, of_bits(np.int64(1) << np.maximum(left, 0)), -most, most)
    # the largest variance: rows of both ends, and the mean's rounding
    longest = min((channels * ((1 << 34) + 4) + epsilon).bit_length(), _VARIANCE_BITS)
    if left[longest] < 0:
        right = np.maximum(-left, 0)
        upper, lower = graph.halves(scaled, 8, centred=False)
        upper = graph.wrap("Mul", upper, of_bits(np.int64(1) << (8 - right)))
        lower = graph.divide(graph.add(lower, of_bits((np.int64(1) << right) >> 1)), of_bits(np.int64(1) << right))
        scaled = graph.known(graph.wrap("Add", upper, lower), -most, most)
    n = graph.multiply_round(scaled, factor)
    # at most sqrt(channels) in 1 / 2**20, and its rounding
    most = min(op.most_normalised(centred), math.isqrt(channels << 40) + 4096)
    return graph.known(n, -most, most)


def layer_norm(graph: Graph, module: LayerNorm, h: Value, residual: Value | None = None) -> Value:
    """Write a :class:`.modules.LayerNorm`; h and the residual are int32 of int16's range."""
    gain, offset = _array(module.gain).astype(np.int64), _array(module.offset).astype(np.int64)
    normalise: Any = _narrow_normalise if isinstance(graph, NarrowGraph) else _normalise
    n = normalise(graph, h, gain.size, module.epsilon, module.centred)
    # both roundings down, of the product and of what follows, are one of their sum
    bound = int(np.abs(gain).max()) * op.most_normalised(module.centred) + ((int(np.abs(offset).max()) + 1) << 28)
    plus = (offset << 28) + (1 << 27), 28 + module.shift, after_of(module.dtype)
    out = graph.affine_rounded(n, bound, gain, *plus, name="gain")
    if residual is None:
        return saturated(graph, out, module.dtype)
    return saturated(graph, graph.add(out, graph.known(residual, *op.INT16), graph.wide), module.dtype)


def mean(graph: Graph, module: Mean, x: Value) -> Value:
    """Write a :class:`.modules.Mean` of int32 (batch, tokens, channels): (batch, channels)."""
    sums = graph.total(graph.known(x, *op.INT16), 1, module.tokens, keep=False)
    bound = np.full(module.offset.numel(), module.tokens * 32768)
    change = module.left, module.offset, module.multiplier, after_of(module.dtype), _limits(module.dtype)
    return saturated(graph, rescale(graph, sums, bound, *change), module.dtype)


def _probability_table(recipe: Recipe, exact: bool) -> np.ndarray:
    """Return the probability, if ``exact`` before rounding, by the exponent in 1/256 octaves.

    The last entry, 0, stands for everything behind it.
    """
    offset, _, _ = fp.probability_constants(recipe.exponential, recipe.probability_bits)
    # no exponent is below the offset, which is in 1/512 octaves
    t = torch.arange(32 << 8, dtype=torch.int64, device="cpu").clamp(min=offset >> 1)
    bits = torch.tensor(8, dtype=torch.int64, device="cpu")
    if exact:
        p = fp.fine_probability(t, bits, recipe.exponential, recipe.probability_bits)
    else:
        p = fp.probability(t, bits, recipe.exponential, recipe.probability_bits, recipe.probability_rounding == "nearest")
    return _array(p)[: int(p.nonzero().max()) + 2]


_ALL_BITS = (1 << 31) - 1
"""An exponent whose weight is 0."""


def _visible(graph: Graph, module: Attention, ids: Value | None, queries: int, tokens: int) -> Value | None:
    """Return which scores take part, bool (batch or 1, 1, queries or 1, keys), or None where all do; 0 or 1 without 64 bits.

    Args:
        graph: to add to.
        module: attention.
        ids: of tokens, (batch, keys), or None.
        queries, tokens: how many; the second of the keys.
    """
    visible = None
    if ids is not None:
        if isinstance(graph, NarrowGraph):
            visible = graph.minimum(graph.subtract(ids, PADDING), 1)
        else:
            visible = graph.node("GreaterOrEqual", ids, graph.constant(0, ids.dtype), dtype=np.bool_)
        visible = graph.reshape(visible, 0, 1, 1, tokens)
    if module.causal:
        dtype = np.int32 if isinstance(graph, NarrowGraph) else np.bool_
        here = graph.constant(np.tri(queries, tokens, dtype=dtype)[None, None], dtype, "causal")
        both = graph.minimum if isinstance(graph, NarrowGraph) else functools.partial(graph.node, "And")
        visible = here if visible is None else both(visible, here)
    return visible


def _scores(
    graph: Graph, module: Attention, recipe: Recipe, query: Value, key: Value, visible: Value | None
) -> tuple[Value, np.ndarray]:
    """Return the exponents t, int32 (..., heads, queries, keys), and their fraction bits (heads, 1, 1)."""
    multiplier, fraction_bits = module.score_multiplier()
    offset, _, _ = fp.probability_constants(recipe.exponential, recipe.probability_bits)
    products = graph.matmul(query, key, inner=module.head_dim)
    products = graph.multiply(products, graph.constant(multiplier[0], np.int32, "score_multiplier"))
    if module.bias is not None:
        drop = (fraction_bits - fp.BIAS_FRACTION_BITS).clamp(min=0)
        fraction_bits = fraction_bits - drop
        bias = module.bias.to(torch.int64)
        if bool((bias.abs() > fp.BIAS_LIMIT).any()):
            raise ValueError("the bias of attention must be finite to be written as ONNX, got one that masks keys")
        products = graph.shift_right(products, _array(drop[0]), (1 << 30) - 1)
        products = graph.add(products, _window_bias(graph, bias >> (fp.BIAS_FRACTION_BITS - fraction_bits)))
        graph.known(products, -3 << 28, 3 << 28)
    start = fp.exponent_offset(offset, fraction_bits)[0]
    honest = products
    if visible is not None and isinstance(graph, NarrowGraph):
        # every score is between the ends of this
        ends = graph.multiply(graph.subtract(graph.multiply(visible, 2), 1), 1 << 30)
        honest = graph.minimum(products, ends)
    elif visible is not None:
        # below every score; a difference from it may wrap, and is not used
        honest = graph.node("Where", visible, products, graph.constant(fp.BIAS_MASKED, np.int32), dtype=np.int32)
    most = graph.add(graph.row_maximum(honest), graph.constant(start, np.int32, "start"))
    t = graph.subtract(most, products)
    if visible is not None and isinstance(graph, NarrowGraph):
        # what is visible is at least the start, which is not negative
        t = graph.maximum(t, graph.multiply(graph.subtract(graph.constant(1, np.int32), visible), _ALL_BITS))
    elif visible is not None:
        t = graph.node("Where", visible, t, graph.constant(_ALL_BITS, np.int32), dtype=np.int32)
    return t, _array(fraction_bits[0])


def _window_bias(graph: Graph, bias: torch.Tensor) -> Value:
    """Return the bias of all windows, int32; windows with the same are stored once."""
    if bias.shape[0] == 1:
        return graph.constant(bias[0], np.int32, "bias")
    different, which = bias.unique(dim=0, return_inverse=True)
    return graph.gather(graph.constant(different, np.int32, "bias"), graph.constant(which, np.int64))


def _twice_mean(graph: Graph, value: Value, keys: int) -> Value:
    """Write :func:`qflash.specification.fixed_point.twice_mean` over the keys, int32 (..., heads, 1, channels)."""
    sums = graph.matmul(graph.table(np.ones((1, keys)), np.uint8, "ones"), value, x_zero=0, inner=keys)
    factor = fp.inverse_count(keys) << 3
    return graph.cast(graph.affine_rounded(sums, 128 * keys * factor, factor, 0, 33), np.int32)


def _row_inverse(graph: Graph, denominator: Value) -> tuple[Value, Value]:
    """Write :func:`qflash.specification.fixed_point.row_inverse` of an int32 that is positive: bits, int32, and x."""
    bits = graph.bit_length(denominator, 31)
    powers = graph.table(1 << np.minimum(31 - np.arange(32, dtype=np.int64), 30), graph.wide, "of_bit_length")
    divisor = graph.multiply_known(denominator, graph.gather(powers, bits), 1 << 30, (1 << 31) - 1)
    # x is within 1/17, so it and the error are within these ends
    ends = (1 << 29) - (1 << 26), (1 << 30) + (1 << 26)
    x = graph.subtract(graph.constant(fp.RECIPROCAL_START, graph.wide), graph.multiply_round(divisor, fp.RECIPROCAL_SLOPE))
    for _ in range(3):
        error = graph.subtract(graph.constant(1 << 28, graph.wide), graph.multiply_round(divisor, graph.known(x, *ends)))
        x = graph.add(x, graph.multiply_round(x, graph.known(error, -(1 << 24), 1 << 24), 28))
    return bits, graph.known(x, 1 << 29, (1 << 30) + 1)


def attention(graph: Graph, module: Attention, parts: Sequence[Value], shapes: Sequence[Shape]) -> Value:
    """Write a :class:`.modules.Attention`: uint8 (batch, tokens, channels).

    Args:
        graph: to add to.
        module: to write.
        parts: what it takes, uint8; ids of tokens behind them, int64, if the module is padded.
        shapes: theirs, for one image.
    """
    ids = None
    if module.padded:
        *parts, ids = parts
        shapes = shapes[:-1]
    recipe, heads, width = Recipe.from_key(module.recipe), module.heads, module.head_dim
    windows = shapes[0][1] // module.tokens if module.tokens else 0
    each, lead = graph.split_heads(parts, shapes, heads, width, module.tokens)
    axes = tuple(range(lead))
    token, head, channel = (lead + i for i in range(3))
    tokens = module.tokens or shapes[-1][1]
    if module.query is None:
        query = graph.transpose(each[0], *axes, head, token, channel)
        queries = module.tokens or shapes[0][1]
    else:
        query = graph.constant(module.query.to(torch.int16) + ZERO_POINT, np.uint8, "query")
        queries = module.query.shape[2]
    if module.first:
        query, queries = graph.cut(query, 0, module.first, head), module.first
    key, value = each[-2], graph.transpose(each[-1], *axes, head, token, channel)
    visible = _visible(graph, module, ids, queries, tokens)
    t, fraction_bits = _scores(graph, module, recipe, query, graph.transpose(key, *axes, head, channel, token), visible)

    exact = recipe.takes_exact_sum(tokens)
    table = _probability_table(recipe, exact)
    # octaves and the top 8 fraction bits; what lies behind the table is 0
    last = table.size - 1
    t = graph.minimum(t, graph.constant(((last + 255) >> 8) << fraction_bits, np.int32, "last"))
    up, down = np.maximum(8 - fraction_bits, 0), np.maximum(fraction_bits - 8, 0)
    octaves = (last + 255) >> 8
    if up.any():
        scale = graph.constant(1 << up, np.int32, "scale")
        t = graph.multiply_known(t, scale, 0, octaves << int(np.max(fraction_bits + up)))
    index = graph.known(graph.shift_positive(t, down), 0, octaves << 8)
    w = graph.gather(graph.table(table, np.int32 if exact else np.uint8, "probability"), graph.minimum(index, last))
    p = w
    if exact:
        p = graph.shift_positive(graph.add(w, 1 << (fp.FINE_BITS - 1)), fp.FINE_BITS, np.uint8)
    numerator = graph.matmul(p, value, x_zero=0, inner=tokens)
    ones = graph.table(np.ones((tokens, 1)), np.uint8, "ones")
    denominator = graph.matmul(p, ones, x_zero=0, y_zero=0, inner=tokens)
    if exact:
        rounded = graph.multiply(denominator, 1 << fp.FINE_BITS)
        total = graph.maximum(graph.total(w, -1, tokens), rounded)
        lost = graph.known(graph.subtract(total, rounded), 0, tokens << (fp.FINE_BITS - 1))
        missing = graph.shift_positive(lost, fp.FINE_BITS + 1)
        numerator = graph.add(numerator, graph.multiply(missing, _twice_mean(graph, value, tokens)))
        denominator = total
    out = _finish(graph, module, numerator, denominator, fp.FINE_BITS if exact else 0)
    return graph.reshape(graph.transpose(out, *axes, head, token, channel), 0, max(windows, 1) * queries, heads * width)


def _finish(graph: Graph, module: Attention, numerator: Value, denominator: Value, fine_bits: int) -> Value:
    """Write :func:`qflash.specification.reference._finish` to int8: uint8 (..., heads, queries, channels)."""
    multiplier, shift = fp.output_multiplier(*(x.view(torch.float32)[0] for x in (module.value_scale, module.output_scale)))
    bits, inverse = _row_inverse(graph, denominator)
    scaled = graph.times_power(numerator, 24 - np.maximum(np.arange(32) - fine_bits, 0), bits)
    # a quotient of int8: at most 127 of the denominator
    graph.known(scaled, -(1 << 31), 127 << 24)
    row = graph.multiply_round(inverse, _array(multiplier), name="output_ratio")
    out = graph.multiply_shift(row, scaled, _array(shift), ZERO_POINT)
    return saturated(graph, out, torch.int8)


def _embed(graph: Graph, module: PatchEmbedding, images: Value, image: Sequence[int]) -> Value:
    """Write a :class:`.modules.PatchEmbedding`; as uint8 with a zero point of 128 pixels stay as they are."""
    high, wide = module.patch_size
    channels, rows, columns = image[0], image[1] // high, image[2] // wide
    x = graph.reshape(graph.cut_patches(images, image, high, wide), 0, channels, rows, high, columns, wide)
    x = graph.reshape(graph.transpose(x, 0, 2, 4, 1, 3, 5), 0, rows * columns, channels * high * wide)
    position = None
    if module.position is not None:
        position = graph.cast(graph.constant(module.position, np.int16, "position"), np.int32)
    h = linear(graph, module, x, position)
    if module.prefix is None:
        return h
    prefix = graph.cast(graph.constant(module.prefix, np.int16, "prefix"), np.int32)
    batch = graph.node("Shape", images, dtype=np.int64, start=0, end=1)
    size = graph.node("Concat", batch, graph.constant(module.prefix.shape[1:], np.int64), axis=0)
    return graph.node("Concat", graph.node("Expand", prefix, size), h, axis=1)


def _norm(graph: Graph, module: LayerNorm, h: Value, shape: Shape, *residual: Value) -> Value:
    """Write a :class:`.modules.LayerNorm` with the tokens that it takes."""
    channels = module.gain.numel()
    if module.part is not None:
        first, heads = module.part
        h = graph.reshape(graph.cut(h, first, first + heads * channels, 2), 0, shape[1], heads, channels)
    if module.gather is not None:
        h = graph.take(h, module.gather)
        rows = module.gather.shape[0]
        h = graph.reshape(h, 0, channels) if module.single else graph.reshape(h, 0, rows, channels)
    elif module.single:
        h = graph.reshape(h, 0, channels)
    return layer_norm(graph, module, h, *residual)


def node(graph: Graph, module: Any, inputs: Sequence[Value], shapes: Sequence[Shape], image: Sequence[int]) -> Value:
    """Write one node of a network.

    Args:
        graph: to add to.
        module: of the node.
        inputs: what it takes.
        shapes: theirs, for one image.
        image: (channels, height, width).
    """
    x, shape = inputs[0], shapes[0]
    if isinstance(module, FloatNode):
        return float_node(graph, module, inputs, shapes)
    if isinstance(module, OwnForms):
        return module.write_onnx(graph, inputs, shapes)
    if isinstance(module, PatchEmbedding):
        return _embed(graph, module, x, image)
    if isinstance(module, LayerNorm):
        return _norm(graph, module, x, shape, *inputs[1:])
    if isinstance(module, Linear):
        if module.scatter is not None:
            x = graph.take(x, module.scatter.argsort())
        return linear(graph, module, x, *inputs[1:])
    if isinstance(module, Attention):
        return attention(graph, module, inputs, shapes)
    if isinstance(module, Mean):
        if len(shape) == 3 and shape[1] != module.tokens:
            x = graph.cut(x, module.first, module.first + module.tokens, 1)
        return mean(graph, module, x)
    if isinstance(module, First):
        return graph.cut(x, 0, module.count, 1)
    if isinstance(module, Join):
        return graph.node("Concat", *inputs, axis=-1)
    assert isinstance(module, Widen)
    return x if module.token is None else graph.gather(x, graph.constant(module.token, np.int64), axis=1)


def _kind(part: IntegerModule, inputs: int) -> str:
    """Return what a function for an operator is called."""
    name = type(part).__name__
    if isinstance(part, FloatNode):
        return f"Float{type(part.inner).__name__}"
    if inputs > 1 and (type(part) is Linear or isinstance(part, LayerNorm)):
        return f"{name}Residual"
    return "Embed" if name == "PatchEmbedding" else name


def _about(part: IntegerModule) -> str:
    """Return the documentation of a function for an operator."""
    summary = (type(part).__doc__ or "").strip().splitlines()[0]
    return (
        f"{summary} Activations of int8 are uint8 with a zero point of 128, the residual stream of int16 is int32. "
        "Equations and units: docs/integer_network.md of QFlash."
    )


def whole_network(graph: Graph, network: IntegerNetwork, images: Value) -> dict[str, Value]:
    """Write a network; return its int32 outputs by name."""
    shapes = network.shapes()
    values = {IMAGES: images}
    for each in network.nodes:
        part, inputs = network.part(each.name), [values[name] for name in each.inputs]
        # a product takes weights of any size; other operators have numbers inside that follow from their sizes
        choices = "" if isinstance(part, Linear) else repr(part.sizes)
        with graph.scope(each.name, _kind(part, len(inputs)), _about(part), choices, part.input_names(len(inputs))):
            values[each.name] = node(graph, part, inputs, [shapes[name] for name in each.inputs], network.image)
    return {name: values[made] for name, made in network.outputs.items()}
