"""The modules of an integer network as nodes of :class:`.onnx_graph.Graph`.

What is static is worked out here, by the functions that define it (:mod:`qflash.fixed_point`,
:mod:`.operators`), and becomes constants: multipliers and shifts, and functions of few bits as tables (GELU's tail, the
exponential). What depends on the images becomes nodes. int8 tensors are uint8 with a zero point of 128; the residual stream is
int32 clipped to int16, because onnxruntime adds no int16.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from .. import fixed_point as fp
from ..recipe import Recipe
from . import operators as op
from .models import IntegerNetwork, SwinTransformer, VisionTransformer
from .modules import Attention, Block, LayerNorm, Linear, LinearGelu, Mean, Merge, WindowBlock
from .onnx_graph import ZERO_POINT, Graph, Value


def check_recipe(recipe: Recipe) -> None:
    """Require a recipe whose attention has a form in ONNX.

    Raises:
        ValueError: it has none; the message names the field.
    """
    for field, allowed in (
        ("normalization", ("two_pass",)),
        ("output", ("accumulator",)),
        ("probability_bits", (7, 8)),
    ):
        if getattr(recipe, field) not in allowed:
            raise ValueError(
                f"the network's recipe must have {field} {' or '.join(map(repr, allowed))} to be written as ONNX, "
                f"got {getattr(recipe, field)!r}"
            )


def _array(x: torch.Tensor) -> np.ndarray:
    return x.detach().cpu().numpy()


def _saturated(graph: Graph, x: Value, dtype: torch.dtype) -> Value:
    """Return :func:`.operators.saturate` of x, to which :func:`_after` has been added."""
    if dtype == torch.int8:
        return graph.cast(graph.clip(x, 0, 255), np.uint8)
    return graph.cast(x if dtype == torch.int32 else graph.clip(x, *op.LIMITS[dtype]), np.int32)


def _after(dtype: torch.dtype) -> int:
    return ZERO_POINT if dtype == torch.int8 else 0


def _rescale(
    graph: Graph, sums: Value, bound: np.ndarray, left: int, bias: torch.Tensor, multiplier: torch.Tensor, after: int = 0
) -> Value:
    """Return :func:`.operators.rescale` of int32 sums, plus ``after``.

    Shift and bias go into the product: ``((acc << left) + b) R`` is ``acc (R << left) + b R``.

    Args:
        graph: to add to.
        sums: int32 (..., channels).
        bound: of their magnitude, (channels,).
        left, bias, multiplier: see :func:`.operators.rescale`.
        after: added to the result.
    """
    factor = _array(multiplier).astype(np.int64)
    wide, offset = factor << left, factor * _array(bias).astype(np.int64)
    # Python's integers: bounds of untrained networks may be beyond 64 bits
    most = max(int(a) * int(b) + abs(int(c)) for a, b, c in zip(bound, wide, offset, strict=True))
    return graph.shift_right(graph.multiply(sums, wide, np.int64), 32, most, offset, after)


def linear(graph: Graph, module: Linear, x: Value, residual: Value | None = None) -> Value:
    """Write a :class:`.modules.Linear` or :class:`.modules.LinearGelu`; arguments as its ``forward`` has them."""
    sums = graph.matmul(x, graph.weight(module.weight.mT, "weight"))
    bound = _array(module.weight.to(torch.int64).abs().sum(dim=1) * 128)
    change = bound, module.left, module.bias, module.multiplier
    if isinstance(module, LinearGelu):
        return _gelu(graph, module, _rescale(graph, sums, *change))
    out = _rescale(graph, sums, *change, _after(module.dtype))
    return _saturated(graph, out if residual is None else graph.add(out, residual, np.int32), module.dtype)


def _gelu(graph: Graph, module: LinearGelu, u: Value) -> Value:
    """Write :func:`.operators.gelu_int8`, the tail of GELU as a table."""
    u = graph.cast(u, np.int32)
    table = -op.gelu(-torch.arange(op.GELU_END + 1, dtype=torch.int64, device="cpu"))
    tail = graph.gather(graph.constant(table, np.int32, "gelu_tail"), graph.minimum(graph.node("Abs", u), op.GELU_END))
    value = graph.subtract(graph.clip(u, 0, op.GELU_LIMIT), tail)
    multiplier, offset = _array(module.gelu_multiplier), _array(module.gelu_offset)
    bound = int((multiplier.astype(np.int64) * (op.GELU_LIMIT + 1) + np.abs(offset.astype(np.int64))).max())
    wide = graph.multiply(value, multiplier)
    out = graph.shift_right(wide, module.gelu_shift, min(bound, (1 << 31) - 1), offset, ZERO_POINT)
    return _saturated(graph, out, torch.int8)


_VARIANCE_BITS = 55
_NORM_BOUND = 1 << 61
"""Of the product that :func:`.operators.normalise` shifts: 2**31 by 2**30."""


def _inverse_root(graph: Graph, v: Value) -> Value:
    """Write :func:`.operators.inverse_root`; shifts to the left go into those to the right."""
    x = graph.subtract(graph.constant(op.ROOT_START, np.int64), graph.multiply_high(v, op.ROOT_SLOPE << 2))
    for _ in range(3):
        square = graph.multiply_high(x, x, 30)
        error = graph.subtract(graph.constant(1 << 28, np.int64), graph.multiply_high(square, v, 30))
        x = graph.add(x, graph.multiply_high(x, error, 29))
    return x


def _normalise(graph: Graph, h: Value, channels: int, epsilon: int) -> Value:
    """Write :func:`.operators.normalise`; what follows from the variance's bit length is looked up."""
    total = graph.reduce("ReduceSum", h, -1)
    wide, wide_total = graph.cast(h, np.int64), graph.cast(total, np.int64)
    squares = graph.reduce("ReduceSum", graph.multiply(wide, wide), -1)
    variance = graph.subtract(graph.multiply(squares, channels), graph.multiply(wide_total, wide_total))
    variance = graph.add(variance, epsilon)
    bits = graph.bit_length(variance, _VARIANCE_BITS)

    half = (np.arange(_VARIANCE_BITS + 1, dtype=np.int64) - 29) >> 1
    up, down = np.maximum(-2 * half, 0), np.maximum(2 * half, 0)
    left, right = np.maximum(8 - half, 0), np.maximum(half - 8, 0)

    def of_bits(table: np.ndarray, dtype: Any) -> Value:
        return graph.gather(graph.constant(table, dtype, "of_bit_length"), bits)

    v = graph.shift_unsigned(graph.cast(variance, np.uint64), of_bits(up, np.uint64), "LEFT")
    v = graph.maximum(graph.cast(graph.shift_unsigned(v, of_bits(down, np.uint64)), np.int64), 1 << 28)
    factor = graph.multiply(_inverse_root(graph, v), of_bits(1 << left, np.int64))
    difference = graph.subtract(graph.multiply(h, channels), total)
    product = graph.add(graph.multiply(difference, factor, np.int64), _NORM_BOUND)
    shifted = graph.shift_unsigned(graph.cast(product, np.uint64), of_bits(32 + right, np.uint64))
    return graph.subtract(graph.cast(shifted, np.int32), of_bits(_NORM_BOUND >> (32 + right), np.int32))


def layer_norm(graph: Graph, module: LayerNorm, h: Value) -> Value:
    """Write a :class:`.modules.LayerNorm`; h is int32 of int16's range."""
    gain, offset = _array(module.gain).astype(np.int64), _array(module.offset).astype(np.int64)
    n = _normalise(graph, h, gain.size, module.epsilon)
    product = graph.multiply(n, gain << 4, np.int64)
    bound = (int(np.abs(gain).max()) << 30) + (int(np.abs(offset).max()) << 32)
    out = graph.round_shift(product, 32 + module.shift, bound, offset << 32, _after(module.dtype))
    return _saturated(graph, out, module.dtype)


def mean(graph: Graph, module: Mean, x: Value) -> Value:
    """Write a :class:`.modules.Mean` of int32 (batch, tokens, channels): (batch, channels)."""
    sums = graph.node("ReduceSum", x, graph.constant([1], np.int64), keepdims=0)
    bound = np.full(module.offset.numel(), module.tokens * 32768)
    out = _rescale(graph, sums, bound, module.left, module.offset, module.multiplier, _after(module.dtype))
    return _saturated(graph, out, module.dtype)


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


def _scores(graph: Graph, module: Attention, query: Value, key: Value) -> tuple[Value, np.ndarray]:
    """Return the exponents t, int32 (..., heads, queries, keys), and their fraction bits (heads, 1, 1)."""
    biased = module.bias is not None
    query_scale, key_scale = (fp.split_scale(x.view(torch.float32)) for x in (module.query_scale, module.key_scale))
    constant = fp.split_float(module.softmax_scale * math.log2(math.e))
    mantissa, exponent = fp.combine_scales(query_scale, key_scale, constant)
    multiplier, fraction_bits = fp.narrow_multiplier(mantissa, exponent, module.head_dim, biased)
    offset, _, _ = fp.probability_constants(module.recipe.exponential, module.recipe.probability_bits)
    products = graph.multiply(graph.matmul(query, key), multiplier[0])
    if module.bias is not None:
        drop = (fraction_bits - fp.BIAS_FRACTION_BITS).clamp(min=0)
        fraction_bits = fraction_bits - drop
        bias = module.bias.to(torch.int64)
        if bool((bias.abs() > fp.BIAS_LIMIT).any()):
            raise ValueError("the bias of attention must be finite to be written as ONNX, got one that masks keys")
        products = graph.shift_right(products, _array(drop[0]), (1 << 30) - 1)
        products = graph.add(products, _window_bias(graph, bias >> (fp.BIAS_FRACTION_BITS - fraction_bits)))
    start = fp.exponent_offset(offset, fraction_bits)[0]
    most = graph.add(graph.row_maximum(products), start)
    return graph.subtract(most, products), _array(fraction_bits[0])


def _window_bias(graph: Graph, bias: torch.Tensor) -> Value:
    """Return the bias of all windows, int32; windows with the same are stored once."""
    if bias.shape[0] == 1:
        return graph.constant(bias[0], np.int32, "bias")
    different, which = bias.unique(dim=0, return_inverse=True)
    return graph.gather(graph.constant(different, np.int32, "bias"), graph.constant(which, np.int64))


def _twice_mean(graph: Graph, value: Value, keys: int) -> Value:
    """Write :func:`qflash.fixed_point.twice_mean` over the keys, int32 (..., heads, 1, channels)."""
    sums = graph.matmul(graph.constant(np.ones((1, keys)), np.uint8), value, x_zero=0)
    wide = graph.multiply(sums, fp.inverse_count(keys) << 3, np.int64)
    return graph.cast(graph.round_shift(wide, 33, (128 * keys * fp.inverse_count(keys)) << 3), np.int32)


def _row_inverse(graph: Graph, denominator: Value) -> tuple[Value, Value]:
    """Write :func:`qflash.fixed_point.row_inverse` of an int32 that is positive: bits, int32, and x, int64."""
    bits = graph.bit_length(denominator, 31)
    powers = graph.constant(1 << (31 - np.arange(32, dtype=np.int64)), np.int64, "of_bit_length")
    divisor = graph.multiply(denominator, graph.gather(powers, bits), np.int64)
    x = graph.subtract(graph.constant(fp.RECIPROCAL_START, np.int64), graph.multiply_high(divisor, fp.RECIPROCAL_SLOPE))
    for _ in range(3):
        error = graph.subtract(graph.constant(1 << 28, np.int64), graph.multiply_high(divisor, x))
        x = graph.add(x, graph.multiply_high(x, error, 28))
    return bits, x


def attention(graph: Graph, module: Attention, x: Value, tokens: int, windows: int | None = None) -> Value:
    """Write :meth:`.modules.Attention.attend`: uint8 (batch, [windows,] tokens, channels)."""
    recipe, heads, width = module.recipe, module.heads, module.head_dim
    lead = (0,) if windows is None else (0, windows)
    axes = tuple(range(len(lead)))
    token, head, channel = (len(lead) + i for i in range(3))
    shape = *lead, tokens, heads, width
    if module.qkv is not None:
        with graph.scope("qkv"):
            query, key, value = (graph.reshape(part, *shape) for part in graph.split(linear(graph, module.qkv, x), 3))
    else:
        assert module.qk is not None and module.v is not None and module.q_norm is not None and module.k_norm is not None
        with graph.scope("qk"):
            query, key = (graph.reshape(part, *shape) for part in graph.split(linear(graph, module.qk, x), 2))
        with graph.scope("q_norm"):
            query = layer_norm(graph, module.q_norm, query)
        with graph.scope("k_norm"):
            key = layer_norm(graph, module.k_norm, key)
        with graph.scope("v"):
            value = graph.reshape(linear(graph, module.v, x), *shape)
    query, value = (graph.transpose(part, *axes, head, token, channel) for part in (query, value))
    t, fraction_bits = _scores(graph, module, query, graph.transpose(key, *axes, head, channel, token))

    exact = recipe.takes_exact_sum(tokens)
    table = _probability_table(recipe, exact)
    # octaves and the top 8 fraction bits; what lies behind the table is 0
    last = table.size - 1
    t = graph.minimum(t, ((last + 255) >> 8) << fraction_bits)
    up, down = np.maximum(8 - fraction_bits, 0), np.maximum(fraction_bits - 8, 0)
    t = graph.multiply(t, 1 << up) if up.any() else t
    index = graph.cast(graph.shift_unsigned(graph.cast(t, np.uint32), down), np.int32)
    w = graph.gather(graph.constant(table, np.int32 if exact else np.uint8, "probability"), graph.minimum(index, last))
    p = w
    if exact:
        wide = graph.cast(graph.add(w, 1 << (fp.FINE_BITS - 1)), np.uint32)
        p = graph.cast(graph.shift_unsigned(wide, fp.FINE_BITS), np.uint8)
    numerator = graph.matmul(p, value, x_zero=0)
    denominator = graph.matmul(p, graph.constant(np.ones((tokens, 1)), np.uint8), x_zero=0, y_zero=0)
    if exact:
        rounded = graph.multiply(denominator, 1 << fp.FINE_BITS)
        total = graph.maximum(graph.reduce("ReduceSum", w, -1), rounded)
        lost = graph.cast(graph.subtract(total, rounded), np.uint32)
        missing = graph.cast(graph.shift_unsigned(lost, fp.FINE_BITS + 1), np.int32)
        numerator = graph.add(numerator, graph.multiply(missing, _twice_mean(graph, value, tokens)))
        denominator = total
    out = _finish(graph, module, numerator, denominator, fp.FINE_BITS if exact else 0)
    return graph.reshape(graph.transpose(out, *axes, head, token, channel), *lead, tokens, heads * width)


def _finish(graph: Graph, module: Attention, numerator: Value, denominator: Value, fine_bits: int) -> Value:
    """Write :func:`qflash.reference._finish` to int8: uint8 (..., heads, queries, channels)."""
    multiplier, shift = fp.output_multiplier(*(x.view(torch.float32)[0] for x in (module.value_scale, module.output_scale)))
    bits, inverse = _row_inverse(graph, denominator)
    fall = graph.gather(graph.constant(np.maximum(np.arange(32) - fine_bits, 0), np.uint64, "of_bit_length"), bits)
    raised = graph.cast(graph.multiply(numerator, 1 << 24, np.int64), np.uint64)
    scaled = graph.cast(graph.shift_unsigned(raised, fall), np.int32)
    row = graph.multiply_high(inverse, multiplier)
    # round_shift by the channel's shift, which may be 0, in one with the high half
    shifts = _array(shift)
    half = np.where(shifts > 0, np.left_shift(np.int64(1), 31 + shifts), 0)
    product = graph.multiply(row, scaled)
    out = graph.shift_right(product, 32 + shifts, (1 << 60) + int(half.max()), half, ZERO_POINT)
    return _saturated(graph, out, torch.int8)


def _order(graph: Graph, x: Value, order: torch.Tensor) -> Value:
    """Permute the tokens, axis 1."""
    return graph.gather(x, graph.constant(order.flatten(), np.int64, "order"), axis=1)


def block(graph: Graph, module: Block, h: Value, tokens: int) -> Value:
    """Write a :class:`.modules.Block` or :class:`.modules.WindowBlock`."""
    with graph.scope("norm1"):
        x = layer_norm(graph, module.norm1, h)
    with graph.scope("attn"):
        if isinstance(module, WindowBlock):
            each = module.window[0] * module.window[1]
            windows, channels = tokens // each, module.norm1.gain.numel()
            x = graph.reshape(_order(graph, x, module.order), 0, windows, each, channels)
            x = attention(graph, module.attn, x, each, windows)
            x = graph.reshape(x, 0, tokens, module.attn.heads * module.attn.head_dim)
            x = _order(graph, x, module.order.flatten().argsort())
        else:
            x = attention(graph, module.attn, x, tokens)
        with graph.scope("proj"):
            h = linear(graph, module.attn.proj, x, h)
    with graph.scope("norm2"):
        x = layer_norm(graph, module.norm2, h)
    with graph.scope("fc1"):
        x = linear(graph, module.fc1, x)
    with graph.scope("fc2"):
        return linear(graph, module.fc2, x, h)


def merge(graph: Graph, module: Merge, h: Value) -> Value:
    """Write a :class:`.modules.Merge`."""
    x = graph.reshape(_order(graph, h, module.order), 0, module.order.shape[0], module.norm.gain.numel())
    with graph.scope("norm"):
        x = layer_norm(graph, module.norm, x)
    with graph.scope("reduction"):
        return linear(graph, module.reduction, x)


def _patches(graph: Graph, images: Value, shape: Any) -> Value:
    """Cut images into patches (batch, patches, values); as uint8 with a zero point of 128 pixels stay as they are."""
    high, wide = shape.patch_size
    rows, columns = shape.image_size[0] // high, shape.image_size[1] // wide
    x = graph.reshape(images, 0, shape.image_channels, rows, high, columns, wide)
    x = graph.transpose(x, 0, 2, 4, 1, 3, 5)
    return graph.reshape(x, 0, rows * columns, shape.image_channels * high * wide)


def _vision_transformer(graph: Graph, network: VisionTransformer, images: Value) -> Value:
    shape = network.shape
    patches = shape.grid[0] * shape.grid[1]
    tokens = patches + shape.prefix_tokens
    with graph.scope("embed"):
        position = graph.cast(graph.constant(network.position, np.int16, "position"), np.int32)
        h = linear(graph, network.embed, _patches(graph, images, shape), position)
        if shape.prefix_tokens:
            prefix = graph.cast(graph.constant(network.prefix, np.int16, "prefix"), np.int32)
            batch = graph.node("Shape", images, dtype=np.int64, start=0, end=1)
            size = graph.node("Concat", batch, graph.constant([shape.prefix_tokens, shape.channels], np.int64), axis=0)
            h = graph.node("Concat", graph.node("Expand", prefix, size), h, axis=1)
    if network.norm_pre is not None:
        with graph.scope("norm_pre"):
            h = layer_norm(graph, network.norm_pre, h)
    for index, each in enumerate(network.blocks):
        with graph.scope(f"blocks.{index}"):
            h = block(graph, each, h, tokens)
    if network.mean is None:
        x = graph.gather(h, graph.constant(0, np.int64), axis=1)
        with graph.scope("norm"):
            return layer_norm(graph, network.norm, x)
    if shape.prefix_tokens:
        h = graph.node("Slice", h, *(graph.constant([end], np.int64) for end in (shape.prefix_tokens, tokens, 1)))
    for name in ("mean", "norm") if shape.pool == "mean_then_norm" else ("norm", "mean"):
        with graph.scope(name):
            h = mean(graph, network.mean, h) if name == "mean" else layer_norm(graph, network.norm, h)
    return h


def _swin_transformer(graph: Graph, network: SwinTransformer, images: Value) -> Value:
    with graph.scope("embed"):
        h = linear(graph, network.embed, _patches(graph, images, network.shape))
    with graph.scope("embed_norm"):
        h = layer_norm(graph, network.embed_norm, h)
    tokens = 0
    for index, (stage, sizes) in enumerate(zip(network.stages, network.shape.stages, strict=True)):
        if index:
            with graph.scope(f"merges.{index - 1}"):
                h = merge(graph, network.merges[index - 1], h)
        tokens = sizes.grid[0] * sizes.grid[1]
        for number, each in enumerate(stage):
            with graph.scope(f"stages.{index}.{number}"):
                h = block(graph, each, h, tokens)
    with graph.scope("norm"):
        h = layer_norm(graph, network.norm, h)
    with graph.scope("mean"):
        return mean(graph, network.mean, h)


def whole_network(graph: Graph, network: IntegerNetwork, images: Value) -> tuple[Value, int]:
    """Write a network; return its int32 logits or features (batch, outputs) and how many outputs there are.

    Raises:
        TypeError: it is of a kind that has no form in ONNX.
    """
    if isinstance(network, VisionTransformer):
        x = _vision_transformer(graph, network, images)
    elif isinstance(network, SwinTransformer):
        x = _swin_transformer(graph, network, images)
    else:
        raise TypeError(f"network must be a VisionTransformer or SwinTransformer, got {type(network).__name__}")
    if network.head is None:
        return x, network.norm.gain.numel()
    with graph.scope("head"):
        return linear(graph, network.head, x), network.head.bias.numel()
