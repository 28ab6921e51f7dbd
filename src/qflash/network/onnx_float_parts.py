"""Nodes that are kept in floating point, as nodes of :class:`.onnx_graph.Graph`. Runtimes round them in their own ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..specification import layers as op
from . import activations
from .float_parts import FloatNode
from .modules import LayerNorm, Linear, LinearActivation, Mean, PatchEmbedding
from .onnx_graph import ZERO_POINT, Graph, Value
from .operators.gated import Gated
from .operators.narrow import Narrow
from .operators.rotary import Rotary, by_token

Shape = tuple[int, ...]


def _constant(graph: Graph, x: torch.Tensor | float, name: str) -> Value:
    return graph.constant(x if isinstance(x, torch.Tensor) else np.float32(x), np.float32, name)


def _linear(graph: Graph, node: FloatNode, inputs: Sequence[Value]) -> Value:
    x = graph.node("MatMul", inputs[0], _constant(graph, node.weight.mT.contiguous(), "weight"))
    if node.bias is not None:
        x = graph.node("Add", x, _constant(graph, node.bias, "bias"))
    if isinstance(node.inner, LinearActivation):
        return activations.floating_onnx(graph, node.inner.activation, node.slope, x)
    if node.scatter is not None:
        x = graph.take(x, node.scatter.argsort())
    return graph.node("Add", x, inputs[1]) if len(inputs) > 1 else x


def _norm(graph: Graph, node: FloatNode, x: Value, shape: Shape, *residual: Value) -> Value:
    inner: Any = node.inner
    channels = node.weight.numel()
    if inner.part is not None:
        first, heads = inner.part
        x = graph.reshape(graph.cut(x, first, first + heads * channels, 2), 0, shape[1], heads, channels)
    if node.gather is not None:
        x = graph.reshape(graph.take(x, node.gather), 0, node.gather.shape[0], channels)
    weight, bias = _constant(graph, node.weight, "weight"), _constant(graph, node.bias, "bias")
    if inner.centred:
        x = graph.node("LayerNormalization", x, weight, bias, axis=-1, epsilon=node.epsilon)
    else:
        mean = graph.node("ReduceMean", graph.node("Mul", x, x), graph.constant([-1], np.int64), keepdims=1)
        root = graph.node("Sqrt", graph.node("Add", mean, _constant(graph, node.epsilon, "epsilon")))
        x = graph.node("Add", graph.node("Mul", graph.node("Div", x, root), weight), bias)
    x = graph.reshape(x, 0, channels) if inner.single else x
    return graph.node("Add", x, *residual) if residual else x


def _attention(graph: Graph, node: FloatNode, parts: Sequence[Value], shapes: Sequence[Shape]) -> Value:
    inner: Any = node.inner
    if inner.padded or inner.causal:
        raise ValueError("attention with masked keys that is kept in floating point has no form in ONNX here")
    heads, width = inner.heads, inner.head_dim
    windows = shapes[0][1] // inner.tokens if inner.tokens else 0
    each, lead = graph.split_heads(parts, shapes, heads, width, inner.tokens)
    axes = tuple(range(lead))
    token, head, channel = (lead + i for i in range(3))
    value = graph.transpose(each[-1], *axes, head, token, channel)
    if node.query is None:
        query, queries = graph.transpose(each[0], *axes, head, token, channel), inner.tokens or shapes[0][1]
    else:
        query, queries = _constant(graph, node.query, "query"), node.query.shape[2]
    if inner.first:
        query, queries = graph.cut(query, 0, inner.first, head), inner.first
    scores = graph.node("MatMul", query, graph.transpose(each[-2], *axes, head, channel, token))
    scale = inner.softmax_scale if node.head_scale is None else inner.softmax_scale * node.head_scale[:, None, None]
    scores = graph.node("Mul", scores, _constant(graph, scale, "scale"))
    if node.mask is not None:
        mask = node.mask if windows else node.mask[0]
        # a finite number in place of minus infinity, which few runtimes are tried with
        scores = graph.node("Add", scores, _constant(graph, mask.clamp(min=-1e30), "mask"))
    out = graph.node("MatMul", graph.node("Softmax", scores, axis=-1), value)
    return graph.reshape(graph.transpose(out, *axes, head, token, channel), 0, max(windows, 1) * queries, heads * width)


def _embed(graph: Graph, node: FloatNode, x: Value, shape: Shape) -> Value:
    high, wide = node.inner.patch_size
    channels, rows, columns = shape[1], shape[2] // high, shape[3] // wide
    x = graph.reshape(graph.cut_patches(x, shape[1:], high, wide), 0, channels, rows, high, columns, wide)
    x = graph.reshape(graph.transpose(x, 0, 2, 4, 1, 3, 5), 0, rows * columns, channels * high * wide)
    x = graph.node("MatMul", x, _constant(graph, node.weight.mT.contiguous(), "weight"))
    if node.bias is not None:
        x = graph.node("Add", x, _constant(graph, node.bias, "bias"))
    if node.position is not None:
        x = graph.node("Add", x, _constant(graph, node.position, "position"))
    if node.prefix is None:
        return x
    batch = graph.node("Shape", x, dtype=np.int64, start=0, end=1)
    size = graph.node("Concat", batch, graph.constant(node.prefix.shape[1:], np.int64), axis=0)
    return graph.node("Concat", graph.node("Expand", _constant(graph, node.prefix, "prefix"), size), x, axis=1)


def _mean(graph: Graph, node: FloatNode, x: Value, shape: Shape) -> Value:
    inner: Any = node.inner
    x = graph.cut(x, inner.first, inner.first + inner.tokens, 1)
    return graph.reshape(graph.node("ReduceMean", x, graph.constant([1], np.int64), keepdims=1), 0, shape[-1])


def float_node(graph: Graph, node: FloatNode, inputs: Sequence[Value], shapes: Sequence[Shape]) -> Value:
    """Write a node in floating point, between floats and the grids of integers; see :func:`.onnx_operators.node`."""
    floats = []
    for number, x in enumerate(inputs):
        if (grid := node.grid(number)) is not None:
            zero = ZERO_POINT if x.dtype == np.uint8 and not isinstance(node.inner, PatchEmbedding) else 0
            x = graph.cast(x, np.float32)
            if zero:
                x = graph.node("Sub", x, _constant(graph, float(zero), "zero"))
            x = graph.node("Mul", x, _constant(graph, grid[0], "step"))
            x = graph.node("Add", x, _constant(graph, grid[1], "middle"))
        floats.append(x)
    if isinstance(node.inner, PatchEmbedding):
        out = _embed(graph, node, floats[0], shapes[0])
    elif isinstance(node.inner, Narrow):
        out = floats[0]
        if node.gather is not None:
            out = graph.take(out, node.gather)
            out = graph.reshape(out, 0, node.gather.shape[0], node.gather.shape[1] * shapes[0][-1])
    elif isinstance(node.inner, Mean):
        out = _mean(graph, node, floats[0], shapes[0])
    elif isinstance(node.inner, Linear):
        out = _linear(graph, node, floats)
    elif isinstance(node.inner, LayerNorm):
        out = _norm(graph, node, floats[0], shapes[0], *floats[1:])
    elif isinstance(node.inner, Gated):
        gate, value = graph.split(floats[0], 2)
        gate = activations.floating_onnx(graph, node.inner.activation, node.slope, gate)
        out = graph.node("Mul", gate, value)
    elif isinstance(node.inner, Rotary):
        tables = [_constant(graph, by_token(x), "turns") for x in (node.cos, node.sin) if x is not None]
        out = node.inner.turned_onnx(graph, floats[0], *tables)
    else:
        out = _attention(graph, node, floats, shapes)
    if (grid := node.grid(len(inputs))) is None:
        return out
    step, middle = grid
    out = graph.node("Sub", out, _constant(graph, middle, "middle"))
    out = graph.node("Round", graph.node("Div", out, _constant(graph, step, "step")))
    least, most = op.LIMITS[node.dtype]
    if node.dtype == torch.int32:
        # float32's last number below 2**31
        most -= 127
    out = graph.node("Clip", out, _constant(graph, float(least), "least"), _constant(graph, float(most), "most"))
    if node.dtype == torch.int8:
        return graph.cast(graph.node("Add", out, _constant(graph, float(ZERO_POINT), "zero")), np.uint8)
    return graph.cast(out, np.int32)
