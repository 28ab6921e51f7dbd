"""Write golden vectors: inputs and the exact integers that the specification makes of them.

``python scripts/make_golden.py`` writes the committed set again (``golden/*.safetensors``, deterministic; the integers of whole
networks are taken from the file that is there); with ``--convert`` the networks are quantised anew;
``python scripts/make_golden.py --random 500 --output FOLDER`` writes that many random cases more, of larger shapes.
docs/golden_vectors.md describes the files. :func:`run` computes one case on any back end, for the tests.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, safe_open, save_file

import qflash
from qflash.network import (
    execution,  # noqa: F401 - registers the operators
    storage,
)
from qflash.network.modules import Attention, LayerNorm, Linear, Mean
from qflash.network.operators.select_token import SelectToken
from qflash.network.operators.token_embedding import TokenEmbedding
from qflash.specification import fixed_point as fp
from qflash.specification import layers as op
from qflash.specification import rotary
from qflash.specification.quantization import QuantizedTensor
from qflash.specification.recipe import PRESETS
from qflash.specification.reference import ARITHMETIC_VERSION

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "golden"
FORMAT = "qflash golden vectors"
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16, torch.float32,
)}  # fmt: skip

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """One case of a file.

    Attributes:
        operation: a key of :data:`OPERATIONS`.
        parameters: what is no tensor, as JSON holds it.
        inputs: tensors by role.
        outputs: the same.
    """

    operation: str
    parameters: dict[str, Any]
    inputs: Tensors
    outputs: Tensors = dataclasses.field(default_factory=dict)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# What computes a case. Each function takes parameters, inputs and a back end.


def _quantize(parameters: dict[str, Any], inputs: Tensors, backend: str) -> Tensors:
    made = qflash.quantize(inputs["x"], parameters["granularity"], center=parameters["center"], backend=backend)
    outputs = {"values": made.values, "scale": made.scale}
    return outputs if made.offset is None else {**outputs, "offset": made.offset}


def _quantize_with_scale(_parameters: dict[str, Any], inputs: Tensors, backend: str) -> Tensors:
    return {"values": torch.ops.qflash.quantize_with_scale(inputs["x"], inputs["scale"], backend)}


def _quantize_bias(_parameters: dict[str, Any], inputs: Tensors, backend: str) -> Tensors:
    from qflash.execution import quantize_bias

    return {"bias": quantize_bias(inputs["bias"], backend)}


def _score_multiplier(parameters: dict[str, Any], inputs: Tensors, _backend: str) -> Tensors:
    constant, dim = fp.split_float(parameters["scale"] * math.log2(math.e)), parameters["head_dim"]
    R, E = fp.combine_scales(fp.split_scale(inputs["query_scale"]), fp.split_scale(inputs["key_scale"]), constant)
    M, F = fp.narrow_multiplier(R, E, dim)
    biased = fp.narrow_multiplier(R, E, dim, True)
    return _int32({"R": R, "E": E, "M": M, "F": F, "M_biased": biased[0], "F_biased": biased[1]})


def _column_multiplier(parameters: dict[str, Any], inputs: Tensors, _backend: str) -> Tensors:
    constant, dim = fp.split_float(parameters["scale"] * math.log2(math.e)), parameters["head_dim"]
    A, reference = fp.column_multiplier(inputs["key_scale"], dim)
    R, F = fp.wide_multiplier(*fp.combine_scales(fp.split_scale(inputs["query_scale"]), reference, constant), dim, 24)
    return _int32({"A": A.mT, "R": R, "F": F})


def _exponential(parameters: dict[str, Any], inputs: Tensors, _backend: str) -> Tensors:
    exponential, bits = parameters["exponential"], parameters["bits"]
    t, F = inputs["t"].to(torch.int64), inputs["F"].to(torch.int64)
    shifted = t + fp.exponent_offset(fp.probability_constants(exponential, bits)[0], F)
    outputs = {
        "nearest": fp.probability(shifted, F, exponential, bits, True),
        "floor": fp.probability(shifted, F, exponential, bits, False),
    }
    if bits == 8:
        outputs["w"] = fp.fine_probability(shifted, F, exponential, bits)
    if exponential == "linear":
        outputs["release"] = fp.release_factor(t, F)
    return _int32(outputs)


def _reciprocal(_parameters: dict[str, Any], inputs: Tensors, _backend: str) -> Tensors:
    return _int32({"x": fp.reciprocal(inputs["D"].to(torch.int64))})


def _output_ratio(_parameters: dict[str, Any], inputs: Tensors, _backend: str) -> Tensors:
    R, shift = fp.output_multiplier(inputs["value_scale"], inputs["output_scale"])
    return _int32({"R": R, "shift": shift})


def _multiply_add(_parameters: dict[str, Any], inputs: Tensors, _backend: str) -> Tensors:
    return {"sum": fp.fused_multiply_add(inputs["a"], inputs["b"], inputs["c"])}


def _inverse_root(_parameters: dict[str, Any], inputs: Tensors, _backend: str) -> Tensors:
    return _int32({"x": op.inverse_root(inputs["v"].to(torch.int64))})


def _row_constants(_parameters: dict[str, Any], inputs: Tensors, _backend: str) -> Tensors:
    found = torch.tensor([op.row_constants(channels) for channels in inputs["C"].tolist()])
    return _int32(dict(zip(("I", "i", "K", "j"), found.unbind(1), strict=True)))


def _normalise(parameters: dict[str, Any], inputs: Tensors, _backend: str) -> Tensors:
    return _int32({"N": op.normalise(inputs["h"], parameters["epsilon"])})


def _int32(outputs: Tensors) -> Tensors:
    """Return integers that int64 holds in the 32 bits that they fit."""
    return {role: x.to(torch.int32) for role, x in outputs.items()}


def _int8_attention(parameters: dict[str, Any], inputs: Tensors, backend: str) -> Tensors:
    query, key, value = (
        QuantizedTensor.from_kernel(inputs[role], inputs[f"{role}_scale"], inputs.get(f"{role}_offset"))
        for role in ("query", "key", "value")
    )
    dtype = DTYPES[parameters["output"]]
    out = qflash.int8_attention(
        query, key, value, inputs.get("mask"), is_causal=parameters["causal"], scale=parameters["scale"],
        enable_gqa=query.shape[1] != key.shape[1], output_scale=inputs.get("output_scale"),
        out_dtype=None if dtype == torch.int8 else dtype, recipe=qflash.Recipe(**parameters["recipe"]), backend=backend,
    )  # fmt: skip
    return {"output": out.values if isinstance(out, QuantizedTensor) else out}


def _attention(parameters: dict[str, Any], inputs: Tensors, backend: str) -> Tensors:
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    out = qflash.attention(
        query, key, value, inputs.get("mask"), is_causal=parameters["causal"], scale=parameters["scale"],
        enable_gqa=query.shape[1] != key.shape[1], recipe=qflash.Recipe(**parameters["recipe"]), backend=backend,
    )  # fmt: skip
    return {"output": out}


def _linear(parameters: dict[str, Any], inputs: Tensors, backend: str) -> Tensors:
    out = torch.ops.qflash.int8_linear(
        inputs["x"], inputs["weight"], inputs["bias"], inputs["multiplier"], parameters["left"],
        inputs.get("residual"), None, DTYPES[parameters["output"]], backend,
    )  # fmt: skip
    return {"output": out}


def _with_activation(name: str) -> Callable[[dict[str, Any], Tensors, str], Tensors]:
    def linear(parameters: dict[str, Any], inputs: Tensors, backend: str) -> Tensors:
        run = getattr(torch.ops.qflash, f"int8_linear_{name}")
        layer = (inputs[role] for role in ("x", "weight", "bias", "multiplier"))
        made = inputs[f"{name}_multiplier"], inputs[f"{name}_offset"], parameters[f"{name}_shift"]
        return {"output": run(*layer, parameters["left"], *made, backend)}

    return linear


def _gated(parameters: dict[str, Any], inputs: Tensors, backend: str) -> Tensors:
    out = torch.ops.qflash.gated(
        inputs["x"], parameters["gate_multiplier"], inputs["multiplier"], inputs["offset"], parameters["activation"],
        DTYPES[parameters["output"]], backend,
    )  # fmt: skip
    return {"output": out}


def _layer_norm(parameters: dict[str, Any], inputs: Tensors, backend: str) -> Tensors:
    out = torch.ops.qflash.integer_layer_norm(
        inputs["h"], parameters["epsilon"], inputs["gain"], inputs["offset"], parameters["shift"], None,
        DTYPES[parameters["output"]], backend,
    )  # fmt: skip
    return {"output": out}


def _norm(parameters: dict[str, Any], inputs: Tensors, backend: str) -> Tensors:
    out = torch.ops.qflash.integer_norm(
        inputs["h"], parameters["epsilon"], inputs["gain"], inputs["offset"], parameters["shift"], None,
        inputs.get("residual"), parameters["centred"], DTYPES[parameters["output"]], backend,
    )  # fmt: skip
    return {"output": out}


def _narrow(parameters: dict[str, Any], inputs: Tensors, backend: str) -> Tensors:
    out = torch.ops.qflash.integer_narrow(
        inputs["h"], inputs["multiplier"], parameters["left"], inputs["offset"], None, DTYPES[parameters["output"]], backend
    )
    return {"output": out}


def fill(module: torch.nn.Module, inputs: Tensors, *names: str) -> None:
    """Copy inputs into a module's buffers of the same names."""
    for name in names:
        module.get_buffer(name).copy_(inputs[name])


def _mean(parameters: dict[str, Any], inputs: Tensors, _backend: str) -> Tensors:
    _, tokens, channels = inputs["h"].shape
    module = Mean(tokens, channels, parameters["output"])
    fill(module, inputs, "multiplier", "offset")
    module.left = parameters["left"]
    return {"output": module(inputs["h"])}


def _head_norm(parameters: dict[str, Any], inputs: Tensors, backend: str) -> Tensors:
    """Normalisation of some heads' channels: of queries or keys."""
    first, heads = parameters["part"]
    module = LayerNorm(inputs["gain"].numel(), parameters["output"], part=(first, heads))
    fill(module, inputs, "gain", "offset")
    module.epsilon, module.shift = parameters["epsilon"], parameters["shift"]
    return {"output": module.to(inputs["h"].device)(inputs["h"], backend=backend)}


def _rotary(_parameters: dict[str, Any], inputs: Tensors, backend: str) -> Tensors:
    x, turns, offset, multiplier = (inputs[role] for role in ("x", "turns", "offset", "multiplier"))
    return {"output": torch.ops.qflash.rotary(x, turns, offset, multiplier, torch.int8, backend)}


def _token_embedding(parameters: dict[str, Any], inputs: Tensors, backend: str) -> Tensors:
    table, position = inputs["table"], inputs.get("position")
    (rows, channels), places = table.shape, 0 if position is None else len(position)
    module = TokenEmbedding(rows, channels, places, parameters["padded"]).to(table.device)
    module.table.copy_(table)
    if module.position is not None:
        module.position.copy_(inputs["position"])
    return {"output": module(inputs["ids"], backend)}


def _select_token(parameters: dict[str, Any], inputs: Tensors, backend: str) -> Tensors:
    return {"output": SelectToken(parameters["token"])(inputs["h"], inputs["ids"], backend)}


def _text_attention(parameters: dict[str, Any], inputs: Tensors, backend: str) -> Tensors:
    """Attention of a network of texts: its queries, keys and values side by side, and the ids that hide keys."""
    bias, ids = inputs.get("bias"), inputs.get("ids")
    module = Attention(
        parameters["heads"], parameters["head_dim"], parameters["scale"], qflash.Recipe(**parameters["recipe"]).key,
        None if bias is None else list(bias.shape), first=parameters["first"], padded=ids is not None,
        causal=parameters["causal"],
    ).to(inputs["x"].device)  # fmt: skip
    for name in ("query_scale", "key_scale", "value_scale", "output_scale"):
        module.get_buffer(name).copy_(inputs[name].view(torch.int32))
    if bias is not None:
        fill(module, inputs, "bias")
    return {"output": module(inputs["x"], *(() if ids is None else (ids,)), backend=backend)}


def _patches(parameters: dict[str, Any], inputs: Tensors, _backend: str) -> Tensors:
    return {"output": op.patches(inputs["images"], tuple(parameters["patch_size"]))}


def _windows(parameters: dict[str, Any], inputs: Tensors, _backend: str) -> Tensors:
    x = inputs["x"]
    grid, window, shift = (tuple(parameters[name]) for name in ("grid", "window", "shift"))
    order = op.window_order(grid, window, shift)
    moved = op.gather_tokens(x, order)
    return {
        "windows": moved.view(-1, window[0] * window[1], x.shape[-1]),
        "joined": op.scatter_tokens(moved, order.flatten()),
    }


def _patch_merging(parameters: dict[str, Any], inputs: Tensors, backend: str) -> Tensors:
    outputs, wide = inputs["weight"].shape
    order = op.merge_order(tuple(parameters["grid"]))
    norm, reduction = LayerNorm(wide, "int8", order.shape), Linear(wide, outputs, "int16")
    norm.get_buffer("gather").copy_(order)
    fill(norm, inputs, "gain", "offset")
    fill(reduction, inputs, "weight", "bias", "multiplier")
    norm.epsilon, norm.shift = parameters["epsilon"], parameters["norm_shift"]
    reduction.left = parameters["left"]
    return {"output": reduction(norm(inputs["h"], backend=backend), backend=backend)}


def _network(parameters: dict[str, Any], inputs: Tensors, backend: str) -> Tensors:
    """The outputs of a whole network, and of all of its nodes."""
    recipe = qflash.Recipe(**parameters["recipe"]).key
    nodes = [
        {**node, "sizes": node["sizes"] | ({"recipe": recipe} if node["operator"] == "Attention" else {})}
        for node in parameters["nodes"]
    ]
    header = {
        **parameters, "version": storage.VERSION, "arithmetic_version": ARITHMETIC_VERSION, "recipe": recipe, "nodes": nodes,
        "scales": dict.fromkeys(parameters["outputs"], 1.0), "units": [1.0],
    }  # fmt: skip
    tensors = {role.removeprefix("network."): x for role, x in inputs.items() if role != "images"}
    network = storage.network_from_header(header, tensors).eval().to(inputs["images"].device)
    network.backend = backend
    outputs: Tensors = {}
    with torch.inference_mode():
        found = network.run(inputs["images"], lambda name, x: outputs.update({f"node.{name}": x.clone()}))
    return outputs | found


OPERATIONS: dict[str, Callable[[dict[str, Any], Tensors, str], Tensors]] = {
    "quantize": _quantize,
    "quantize_with_scale": _quantize_with_scale,
    "quantize_bias": _quantize_bias,
    "score_multiplier": _score_multiplier,
    "column_multiplier": _column_multiplier,
    "exponential": _exponential,
    "reciprocal": _reciprocal,
    "output_ratio": _output_ratio,
    "multiply_add": _multiply_add,
    "inverse_root": _inverse_root,
    "row_constants": _row_constants,
    "normalise": _normalise,
    "int8_attention": _int8_attention,
    "attention": _attention,
    "linear": _linear,
    **{f"linear_{name}": _with_activation(name) for name in op.ACTIVATIONS},
    "gated": _gated,
    "layer_norm": _layer_norm,
    "head_norm": _head_norm,
    "rotary": _rotary,
    "norm": _norm,
    "narrow": _narrow,
    "mean": _mean,
    "token_embedding": _token_embedding,
    "select_token": _select_token,
    "text_attention": _text_attention,
    "patches": _patches,
    "windows": _windows,
    "patch_merging": _patch_merging,
    "network": _network,
}


def run(case: Case, backend: str = "reference") -> Tensors:
    """Return a case's outputs as a back end computes them, as files hold them: bfloat16 as its bits, in int16."""
    outputs = OPERATIONS[case.operation](case.parameters, case.inputs, backend)
    return {role: x.view(torch.int16) if x.dtype == torch.bfloat16 else x for role, x in outputs.items()}


# Files.


def write(path: Path, cases: dict[str, Case]) -> None:
    """Write cases; outputs that a case lacks are computed by the reference."""
    tensors: Tensors = {}
    described: dict[str, Any] = {}
    recipes: dict[str, Any] = {}
    for name, case in cases.items():
        parameters = dict(case.parameters)
        if "recipe" in parameters:
            # few recipes serve many cases
            number = next((key for key, fields in recipes.items() if fields == parameters["recipe"]), f"recipe {len(recipes)}")
            recipes[number] = parameters["recipe"]
            parameters["recipe"] = number
        bits = [role for role, x in case.inputs.items() if x.dtype == torch.bfloat16]
        described[name] = {"operation": case.operation, "parameters": parameters} | ({"bfloat16": bits} if bits else {})
        for part, group in (("in", case.inputs), ("out", case.outputs or run(case))):
            for role, x in group.items():
                x = x.view(torch.int16) if x.dtype == torch.bfloat16 else x
                tensors[f"{name}/{part}/{role}"] = x.contiguous().clone()
    header = {
        "format": FORMAT,
        "arithmetic_version": str(ARITHMETIC_VERSION),
        "recipes": json.dumps(recipes),
        "cases": json.dumps(described),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata=header)


def read(path: Path) -> tuple[int, dict[str, Case]]:
    """Return a file's arithmetic version and its cases; bfloat16 outputs stay as their bits."""
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    parts: dict[str, Tensors] = {}
    for full, x in tensors.items():
        name, role = full.rsplit("/", 1)
        parts.setdefault(name, {})[role] = x
    recipes = json.loads(header["recipes"])
    cases = {}
    for name, about in json.loads(header["cases"]).items():
        parameters, inputs = about["parameters"], parts[f"{name}/in"]
        if "recipe" in parameters:
            parameters["recipe"] = recipes[parameters["recipe"]]
        inputs |= {role: inputs[role].view(torch.bfloat16) for role in about.get("bfloat16", ())}
        cases[name] = Case(about["operation"], parameters, inputs, parts[f"{name}/out"])
    return int(header["arithmetic_version"]), cases


# Inputs of attention.


class Draw:
    """Random tensors of one case, repeatable by its name."""

    def __init__(self, name: str) -> None:
        self.chance = random.Random(name)
        self.generator = torch.Generator().manual_seed(self.chance.getrandbits(40))

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    def int8(self, *shape: int) -> torch.Tensor:
        return (40 * self.normal(*shape)).round().clamp(-128, 127).to(torch.int8)


def scale_shape(granularity: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of scales of a (batch, heads, tokens, channels) tensor."""
    batch, heads, tokens, channels = shape
    return {
        "tensor": (1, 1, 1, 1),
        "head": (batch, heads, 1, 1),
        "token": (batch, heads, tokens, 1),
        "channel": (batch, heads, 1, channels),
    }[granularity]


def float_bias(kind: str, draw: Draw, shape: tuple[int, ...]) -> torch.Tensor:
    """Return an additive mask in nats, (…, queries, keys)."""
    queries, keys = shape[-2:]
    bias = 2 * draw.normal(*shape)
    if kind == "slope":  # ALiBi over positions so far from 0 that rows are taken relative to their largest
        bias = -40.0 * torch.arange(keys).flip(0).expand(shape) - 900.0 * torch.arange(queries)[:, None]
    elif kind == "marks":
        bias[..., ::3] = -math.inf
        bias[..., 0, :] = -math.inf
        bias[..., 1, keys // 2] = math.nan
        bias[..., 2, 0] = math.inf
        bias[..., 3, :] = torch.finfo(torch.float32).min
        bias[..., 4, :] = torch.finfo(torch.float32).min
        bias[..., 4, 1] = -math.inf
        bias[..., 5, 2] = 1e30
        bias[..., 5, 3] = 1e30
        bias[..., 6, :] = 3000.0
        bias[..., 6, 0] = -9000.0
        bias[..., 6, 1] = 2000.0
    elif kind == "fine":  # past 128 octaves, where the product is no longer rounded at once
        bias = 300 * draw.normal(*shape)
    else:
        bias[..., ::4] = -math.inf
    return bias


def int8_attention(
    name: str,
    recipe: qflash.Recipe,
    *,
    queries: int = 6,
    keys: int = 21,
    dim: int = 16,
    value_dim: int | None = None,
    batch: int = 1,
    heads: int = 1,
    key_heads: int | None = None,
    granularities: tuple[str, str, str] | None = None,
    spread: float = 2.0,
    mask: str = "none",
    output: str = "int8",
    output_scale: str | None = None,
    offset: bool = False,
    scale: float | None = None,
    values: str = "random",
) -> Case:
    """Return a case on int8 tensors.

    Args:
        spread: deviation of the scores in nats.
        mask: ``none``, ``causal``, ``bool``, ``padding`` (the same for all queries), or a bias: ``bias``, ``slope``, ``marks``,
            ``fine``, ``padding-bias``.
        values: ``random``, ``extreme`` (−128 and 127) or ``lowest`` (−128).
    """
    draw = Draw(name)
    key_heads, value_dim = key_heads or heads, value_dim or dim
    shapes = {
        "query": (batch, heads, queries, dim),
        "key": (batch, key_heads, keys, dim),
        "value": (batch, key_heads, keys, value_dim),
    }
    given = granularities or (recipe.query_granularity, recipe.key_granularity, recipe.value_granularity)
    scale = dim**-0.5 if scale is None else scale
    each = math.sqrt(spread / (1600 * scale * math.sqrt(dim)))
    inputs = {}
    for (role, shape), granularity in zip(shapes.items(), given, strict=True):
        if values == "random":
            inputs[role] = draw.int8(*shape)
        else:
            inputs[role] = torch.full(shape, -128, dtype=torch.int8)
            if values == "extreme":
                inputs[role] = torch.where(draw.normal(*shape) > 0, 127, -128).to(torch.int8)
        jitter = (0.7 * draw.normal(*scale_shape(granularity, shape))).exp()
        inputs[f"{role}_scale"] = ((0.02 if role == "value" else each) * jitter).float()
    if offset:
        inputs["value_offset"] = 5 * draw.normal(batch, key_heads, 1, value_dim)
    if output_scale is not None:
        sizes = scale_shape(output_scale, (batch, heads, 1, value_dim))
        inputs["output_scale"] = 0.006 * (0.5 * draw.normal(*sizes)).exp()
    rows = (batch, heads, queries, keys)
    if mask == "bool":
        inputs["mask"] = draw.normal(batch, 1, queries, keys) > -0.3
        inputs["mask"][..., 2, :] = False
    elif mask == "padding":
        inputs["mask"] = draw.normal(batch, 1, 1, keys) > -0.3
    elif mask == "padding-bias":
        inputs["mask"] = qflash.quantize_bias(float_bias("bias", draw, (batch, heads, 1, keys)))
    elif mask not in ("none", "causal"):
        inputs["mask"] = qflash.quantize_bias(float_bias(mask, draw, rows))
    parameters = {"recipe": json.loads(recipe.key), "causal": mask == "causal", "scale": scale, "output": output}
    return Case("int8_attention", parameters, inputs)


def step_cases() -> dict[str, Case]:
    """Return the steps of attention by themselves, where whole attention hardly shows a last bit."""
    cases: dict[str, Case] = {}
    below_one = (1 - 2.0**-27) / math.log2(math.e)  # times log2(e) it rounds up to one more bit than 24
    for number, (dim, scale) in enumerate(((1, 1.0), (9, 1 / 3), (64, 0.125), (80, below_one), (512, 512**-0.5))):
        draw = Draw(f"step/scales-{dim}")
        count = 24
        spread = (80 * torch.arange(count) / count - 40)[torch.randperm(count, generator=draw.generator)]
        query, key = (draw.normal(count) - 3).exp(), (spread + draw.normal(count)).exp()
        about = {"scale": scale, "head_dim": dim}
        cases[f"step/score-multiplier-{dim}"] = Case("score_multiplier", about, {"query_scale": query, "key_scale": key})
        query = (0.4 * spread + draw.normal(count)).exp().view(1, count, 1, 1)
        key = (2 * draw.normal(1, count, 4, 1) - 3 - number).exp()
        cases[f"step/column-multiplier-{dim}"] = Case("column_multiplier", about, {"query_scale": query, "key_scale": key})
    for exponential in ("linear", "quadratic"):
        for bits in (7, 8, 15):
            draw = Draw(f"step/exponential-{exponential}-{bits}")
            F = torch.arange(25, dtype=torch.int32).repeat_interleave(6)
            t = (torch.exp2((F + 5.0) * torch.rand(len(F), generator=draw.generator)) - 1).to(torch.int32)
            t[::6], t[1::6] = 0, (1 << 31) - 1 - (1 << 24)
            about = {"exponential": exponential, "bits": bits}
            cases[f"step/exponential-{exponential}-{bits}"] = Case("exponential", about, {"t": t, "F": F})
    draw = Draw("step/reciprocal")
    divisors = draw.integers(1 << 30, (1 << 31) - 1, 200)
    divisors[:3] = torch.tensor([1 << 30, (1 << 31) - 1, (1 << 30) + 1])
    cases["step/reciprocal"] = Case("reciprocal", {}, {"D": divisors})
    value, output = (10 * draw.normal(150)).exp(), (10 * draw.normal(150)).exp()
    output[:20] = value[:20]
    # sums that lie beside the middle of two float32 by less than float64 holds, where rounding twice goes wrong
    near = (1 + torch.arange(1, 25) * 2.0**-23).float()
    a, b, c = torch.cat((near, -near, near, -near)), (2.0**-24 / near).float().repeat(4), torch.ones(96)
    c[:24] += 2.0**-23
    c[24:48] *= -1
    c[48:] *= 1 + 3 * 2.0**-23
    c[72:] *= -1
    cases["step/multiply-add"] = Case("multiply_add", {}, {"a": a, "b": b, "c": c})
    cases["step/output-ratio"] = Case("output_ratio", {}, {"value_scale": value, "output_scale": output})
    return cases


def int8_cases() -> dict[str, Case]:
    """Return attention on int8 tensors: presets, every field of a recipe, granularities, masks, shapes, outputs, extremes."""
    paper, default, accurate = qflash.PAPER, qflash.DEFAULT, qflash.ACCURATE
    cases: dict[str, Case] = {}

    def add(name: str, recipe: qflash.Recipe, **options: Any) -> None:
        cases[name] = int8_attention(name, recipe, **options)

    floor = {"probability_rounding": "floor"}
    for exponential in ("linear", "quadratic"):
        for bits in (7, 8, 15):
            arithmetic = {"exponential": exponential, "probability_bits": bits}
            add(f"exponential/{exponential}-{bits}-nearest", default.replace(**arithmetic), dim=8, output="float32")
            add(f"exponential/{exponential}-{bits}-floor", default.replace(**arithmetic, **floor), dim=8)
    for number, (preset, recipe) in enumerate(PRESETS.items()):
        for mask in ("none", "causal", "bool", "padding", "bias", "slope", "marks", "fine", "padding-bias"):
            add(f"mask/{preset}-{mask}", recipe, mask=mask, queries=7, heads=2, keys=11, dim=3)
        add(f"mask/{preset}-marks-float", recipe, mask="marks", queries=7, keys=67, dim=3, output="float32")
        add(f"mask/{preset}-padding-float", recipe, mask="padding", queries=3, keys=67, dim=3, output="float32")
        for dim in (1, (7, 9, 15)[number], 33, (40, 64, 80)[number]):
            add(f"dim/{preset}-{dim}", recipe, dim=dim, queries=2, keys=11, output="int8" if dim != 33 else "float16")
        add(f"wide/{preset}", recipe, dim=512, value_dim=9, queries=1, keys=5, spread=9.0, output_scale="tensor")
        for keys in (1, 64, 65, (49, 197, 130)[number]):
            add(f"keys/{preset}-{keys}", recipe, keys=keys, dim=6, queries=3, output_scale="channel" if keys > 64 else None)
        for values in ("extreme", "lowest"):
            mask = "bias" if values == "lowest" else "none"
            add(f"values/{preset}-{values}", recipe, values=values, keys=67, queries=3, dim=5, mask=mask, spread=6.0)
        for scale in (1e-30, 1e-6, 30.0, 1e4, 1e25):
            mask = "bias" if preset == "accurate" else "none"
            granularities = ("token", "token" if scale in (1e-6, 1e4) else "tensor", "tensor")
            name = f"scale/{preset}-{scale:g}"
            case = int8_attention(name, recipe, mask=mask, granularities=granularities, keys=12, dim=8)
            case.inputs["query_scale"] = case.inputs["query_scale"] * scale
            cases[name] = case
        add(f"causal/{preset}-more-keys", recipe, mask="causal", queries=(9, 67, 9)[number], keys=72, dim=2)
        add(f"causal/{preset}-more-queries", recipe, mask="causal", queries=12, keys=7, dim=4)
        masked = {"mask": "padding-bias", "keys": 12, "dim": 3, "output": "float32"}
        add(f"grouped/{preset}-padding-bias", recipe, heads=4, key_heads=2, **masked)
        add(f"grouped/{preset}", recipe, heads=4, key_heads=2, batch=2, keys=11, dim=4, output_scale="channel")
    for query in ("tensor", "head", "token"):
        for key in ("tensor", "head", "token"):
            value = {"tensor": "tensor", "head": "channel", "token": "head"}[query if key == "tensor" else key]
            output = "float32" if value == "head" else "int8"
            small = {"batch": 2, "heads": 2, "queries": 3, "keys": 9, "dim": 6}
            add(f"granularity/{query}-{key}", default, granularities=(query, key, value), output=output, **small)
    # much of the mass is missing, and goes to a mean in which copies of seen tokens stand for hidden ones
    add("row-sum/padding", default, mask="padding", keys=99, dim=3, queries=8, spread=8.0, output="float32")
    for block in (32, 64, 128, 256):
        for mask in ("none", "bool", "bias"):
            recipe = paper.replace(key_block=block)
            keys = 267 if block == 256 else 2 * block + 3
            if block == 32 or mask == "none":
                add(f"online/{block}-{mask}", recipe, keys=keys, dim=4, queries=4, mask=mask)
    online = paper.replace(output="accumulator")
    add("online/accumulator", online, keys=150, dim=5, output="float32")
    add("online/accumulator-int8", online.replace(probability_rounding="nearest"), keys=140, dim=4, output_scale="tensor")
    add("online/token-keys", paper, keys=140, dim=4, granularities=("token", "token", "channel"), spread=5.0)
    add("online/token-keys-bias", paper, keys=140, dim=4, granularities=("token", "token", "channel"), mask="bias")
    # every value −128: ScaleRelease leaves sums beyond what an average can be
    lowest = {"values": "lowest", "granularities": ("tensor", "token", "tensor"), "output": "float32"}
    add("online/lowest", online, heads=6, queries=1, keys=150, dim=1, spread=0.1, **lowest)
    floored = default.replace(output="value_scale")
    add("value-scale/int8", floored, keys=30)
    add("value-scale/output-scale", floored, keys=30, output_scale="channel")
    add("value-scale/float32", floored, keys=30, output="float32")
    add("value-scale/offset", floored, keys=30, output="float32", offset=True, mask="bool")
    for row_sum in ("exact", "rounded"):
        for keys in (64, 65, 100):
            recipe = default.replace(row_sum=row_sum)
            add(f"row-sum/{row_sum}-{keys}", recipe, keys=keys, dim=4, output="float32", spread=4.0)
        add(f"row-sum/{row_sum}-linear", recipe.replace(exponential="linear"), keys=100, dim=4, spread=4.0)
    for dtype in ("float16", "bfloat16", "float32"):
        add(f"output/{dtype}", default, output=dtype, keys=70, dim=8)
        add(f"output/{dtype}-offset", accurate, output=dtype, offset=True, mask="bool", keys=24, dim=8, heads=2, key_heads=1)
    add("output/ratio-large", default, keys=10, dim=4)
    cases["output/ratio-large"].inputs["output_scale"] = torch.tensor([1e-10, 1e-7, 0.02, 3.0]).view(1, 1, 1, 4)
    add("output/ratio-small", default, keys=10, dim=4)
    cases["output/ratio-small"].inputs["output_scale"] = torch.tensor([1e2, 1e9, 1e30, 2.0**127]).view(1, 1, 1, 4)
    for place in ("query", "key", "value"):
        # quantisation gives such scales to what holds a NaN; a float output shows it
        case = int8_attention(f"nan/{place}", accurate, heads=2, keys=12, queries=8, dim=4, output="float32", mask="bool")
        case.inputs[f"{place}_scale"].view(-1)[1] = math.nan
        cases[f"nan/{place}"] = case
    return cases


def attention(
    name: str,
    recipe: qflash.Recipe,
    *,
    dtype: torch.dtype = torch.float16,
    queries: int = 6,
    keys: int = 13,
    dim: int = 6,
    value_dim: int | None = None,
    heads: int = 2,
    key_heads: int | None = None,
    batch: int = 1,
    mask: str = "none",
    amplitude: float = 1.0,
) -> Case:
    """Return a case on float tensors; masks as in :func:`int8_attention`, hidden tokens of a padding mask are large or NaN."""
    draw = Draw(name)
    key_heads, value_dim = key_heads or heads, value_dim or dim
    loud = torch.ones(dim)
    loud[: dim // 4] = 6.0
    query = amplitude * loud * draw.normal(batch, heads, queries, dim)
    key = amplitude * (draw.normal(batch, key_heads, keys, dim) / loud + 3 * draw.normal(1, key_heads, 1, dim))
    value = amplitude * (draw.normal(batch, key_heads, keys, value_dim) + 4 * draw.normal(1, key_heads, 1, value_dim))
    inputs: Tensors = {}
    if mask == "bool":
        inputs["mask"] = draw.normal(1, heads, queries, keys) > -0.3
    elif mask in ("padding", "padding-bias"):
        seen = draw.normal(batch, 1, 1, keys) > -0.3
        seen[..., 0] = True
        hidden = ~seen[:, 0, 0, :, None]
        key = torch.where(hidden[:, None], 1e4, key)
        value = torch.where(hidden[:, None], math.nan, value)
        inputs["mask"] = seen if mask == "padding" else torch.where(seen, 0.5, -1e5).to(dtype)
    elif mask == "causal" and keys > queries:
        key[:, :, queries:], value[:, :, queries:] = math.inf, 1e4
    elif mask not in ("none", "causal"):
        inputs["mask"] = float_bias(mask, draw, (1, heads, queries, keys)).to(dtype)
    inputs |= {role: x.to(dtype) for role, x in (("query", query), ("key", key), ("value", value))}
    parameters = {"recipe": json.loads(recipe.key), "causal": mask == "causal", "scale": dim**-0.5, "output": _name(dtype)}
    return Case("attention", parameters, inputs)


def float_cases() -> dict[str, Case]:
    """Return quantisation, conversion of biases, and attention on float tensors."""
    cases: dict[str, Case] = {}

    def add(name: str, recipe: qflash.Recipe, **options: Any) -> None:
        cases[name] = attention(name, recipe, **options)

    for granularity in ("tensor", "head", "token", "channel"):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            name = f"quantize/{granularity}-{_name(dtype)}"
            x = (Draw(name).normal(2, 2, 5, 6) * 3).to(dtype)
            cases[name] = Case("quantize", {"granularity": granularity, "center": False}, {"x": x})
    rows = torch.tensor([
        [0.0, 0.0, 0.0, 0.0], [math.nan, 1.0, -2.0, 0.5], [1.0, math.inf, 2.0, 3.0], [1e-39, -1e-38, 1e-45, 0.0],
        [3.4028235e38, -3.4e38, 1e38, 1.0], [63.5, -0.5, 1.5, 127.0], [1.0, 0.5, 0.25, -1.0], [-0.0, 1e-3, 2e-3, 3e-3],
    ])  # fmt: skip
    cases["quantize/extremes"] = Case("quantize", {"granularity": "token", "center": False}, {"x": rows.view(1, 1, 8, 4)})
    for granularity in ("tensor", "head", "channel"):
        name = f"quantize/centred-{granularity}"
        draw = Draw(name)
        x = draw.normal(2, 2, 9, 6) + 30 * draw.normal(2, 2, 1, 6)
        x[0, 0, :, 0] = 0.0
        x[0, 1, :, 1] = 7.3
        if granularity == "channel":
            x[1, 0, 3, 2] = math.nan
            x[1, 1, :, 3] *= 1e-40
            x[1, 1, :, 4] *= 1e37
        cases[name] = Case("quantize", {"granularity": granularity, "center": True}, {"x": x})
    draw = Draw("quantize/given-scale")
    x, scale = 3 * draw.normal(1, 2, 7, 5), 0.01 * (draw.normal(1, 2, 1, 5)).exp()
    cases["quantize/given-scale"] = Case("quantize_with_scale", {}, {"x": x, "scale": scale})
    ties = torch.arange(-520, 520).view(1, 1, 40, 26) / 8
    cases["quantize/ties"] = Case("quantize_with_scale", {}, {"x": ties.half(), "scale": torch.full((1, 1, 1, 1), 0.25)})
    for kind in ("bias", "slope", "marks", "fine"):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            name = f"bias/{kind}-{_name(dtype)}"
            cases[name] = Case("quantize_bias", {}, {"bias": float_bias(kind, Draw(name), (7, 11)).to(dtype)})
    rows = torch.tensor([[1024.0, 0.3], [-1024.0, -1025.7], [1024.25, 9.1], [-1024.25, -1029.0], [2840.0, 1.0], [0.5, -2840.0]])
    edge = 1.8446743e19  # just below 2**64
    large = torch.tensor([[2.0**64, 1.0], [-(2.0**64), -1e20], [edge, 1.0], [-edge, -(2.0**64)], [-3e38, -math.inf]])
    cases["bias/bounds"] = Case("quantize_bias", {}, {"bias": torch.cat((rows, large))})
    for preset, recipe in PRESETS.items():
        masks = ("none", "causal", "bool", "padding", "padding-bias", "bias", "slope", "marks")
        for mask in masks if preset != "paper" else ("none", "padding", "bias"):
            dtype = (torch.float16, torch.bfloat16, torch.float32)[len(cases) % 3]
            add(f"attention/{preset}-{mask}", recipe, mask=mask, dtype=dtype, queries=7 if mask == "marks" else 6)
        add(f"attention/{preset}-grouped", recipe, heads=4, key_heads=2, batch=2, value_dim=5)
        add(f"attention/{preset}-tiny", recipe, amplitude=1e-18, dtype=torch.float32)
        add(f"attention/{preset}-huge", recipe, amplitude=1e15, dtype=torch.float32)
        add(f"attention/{preset}-long-padding", recipe, keys=70, heads=1, queries=3, mask="padding")
    add("attention/rotate", qflash.DEFAULT.replace(rotate=True), dim=12, dtype=torch.float32)
    add("attention/rotate-balance", qflash.ACCURATE.replace(rotate=True), dim=5, heads=4, key_heads=2)
    add("attention/balance", qflash.DEFAULT.replace(balance=True, smooth_key=False), heads=4, key_heads=2)
    zero = attention("attention/balance-zero", qflash.ACCURATE, dtype=torch.float32)
    zero.inputs["query"][..., 3] = 0
    zero.inputs["key"][:, 1, :, 2] = 0
    zero.inputs["value"][..., 1] = 0
    cases["attention/balance-zero"] = zero
    for granularity in ("tensor", "head"):
        add(f"attention/smooth-value-{granularity}", qflash.DEFAULT.replace(smooth_value=True, value_granularity=granularity))
    for role in ("query", "key", "value"):
        case = attention(f"attention/nan-{role}", qflash.DEFAULT)
        case.inputs[role][0, 0, 2, 1] = math.nan
        cases[f"attention/nan-{role}"] = case
    return cases


# Inputs of integer networks.


def linear(name: str, kind: str, rows: int = 5, inputs: int = 19, outputs: int = 6, values: str = "random") -> Case:
    """Return a linear layer with constants that suit its sums; kind is an output type, ``residual`` or an activation."""
    draw = Draw(name)
    x = draw.integers(-128, 128, rows, inputs, dtype=torch.int8)
    weight = draw.integers(-128, 128, outputs, inputs, dtype=torch.int8)
    if values == "wide":
        x = draw.integers(-32768, 32768, rows, inputs, dtype=torch.int16)
        x[0], x[1] = -32768, 32767
        weight = weight.sign()
    if values == "extreme":
        x, weight = torch.full_like(x, -128), torch.full_like(weight, -128)
        weight[::2] = 127
    largest = int((-int(torch.iinfo(x.dtype).min) * weight.long().abs().sum(dim=1)).max())
    left = draw.chance.randint(0, 30 - largest.bit_length())
    bias = draw.integers(-largest << left, largest << left, outputs)
    typical = 74 * 74 * math.sqrt(inputs) * 2**left if values == "random" else largest * 2**left
    wanted = {"int8": 6, "int16": 13, "residual": 14, "int32": 20}.get(kind, 12)
    bits = min(31, 32 + wanted - round(math.log2(typical)))
    multiplier = draw.integers(1 << (bits - 1), (1 << bits) - 1, outputs)
    layer = {"x": x, "weight": weight, "bias": bias, "multiplier": multiplier}
    parameters: dict[str, Any] = {"left": left}
    if kind in op.ACTIVATIONS:
        layer[f"{kind}_multiplier"] = draw.integers(1 << 11, (1 << 13) + 1, outputs)
        layer[f"{kind}_offset"] = draw.integers(-(1 << 21), 1 << 21, outputs)
        return Case(f"linear_{kind}", parameters | {f"{kind}_shift": 18}, layer)
    if kind == "residual":
        layer["residual"] = draw.integers(-32768, 32768, rows, outputs, dtype=torch.int16)
    return Case("linear", parameters | {"output": "int16" if kind == "residual" else kind}, layer)


def layer_norm(name: str, channels: int, output: str, rows: int = 9, epsilon: int | None = None) -> Case:
    """Return a normalisation of random, constant and extreme rows."""
    draw = Draw(name)
    h = (draw.normal(rows, channels) * torch.tensor([1.0, 30.0, 900.0])[torch.arange(rows) % 3, None]).round().to(torch.int16)
    h[0], h[1], h[2] = 0, -32768, 32767
    h[3, ::2], h[3, 1::2] = 32767, -32768
    h[4], h[4, 0] = 0, 1
    shift = {"int8": 22, "int16": 14, "int32": 4}[output]
    parameters = {"epsilon": 16 * channels if epsilon is None else epsilon, "shift": shift, "output": output}
    gain, offset = draw.integers(-(1 << 31), 1 << 31, channels), draw.integers(-(1 << 26), 1 << 26, channels)
    gain[0] = -(1 << 31)
    return Case("layer_norm", parameters, {"h": h, "gain": gain, "offset": offset})


def activation_ranges(kind: str) -> dict[str, Case]:
    """Return linear layers that go through the range of an activation."""
    cases = {}
    for step in (3, 40, 2000):
        # all of its range: one input, u is it times a step and -step, less some
        name = f"{kind}/{step}"
        case = linear(name, kind, rows=256, inputs=1, outputs=2)
        case.inputs["x"] = torch.arange(-128, 128).to(torch.int8).view(-1, 1)
        case.inputs["weight"] = torch.tensor([[64], [-64]], dtype=torch.int8)
        case.inputs["bias"] = Draw(name).integers(-(1 << 24), 1 << 24, 2)
        case.inputs["multiplier"] = torch.full((2,), step << 12, dtype=torch.int32)
        cases[name] = dataclasses.replace(case, parameters={"left": 14, f"{kind}_shift": 18})
    # its tail in its own unit, which the shift undoes
    case = linear(f"{kind}/tail", kind, rows=256, inputs=1, outputs=8)
    case.inputs["x"] = torch.arange(-128, 128).to(torch.int8).view(-1, 1)
    case.inputs["weight"] = torch.full((8, 1), 16, dtype=torch.int8)
    case.inputs["bias"] = torch.arange(-9000, 7000, 2000, dtype=torch.int32)
    case.inputs["multiplier"] = torch.full((8,), (1 << 31) - 1, dtype=torch.int32)
    case.inputs[f"{kind}_multiplier"] = torch.full((8,), 1 << 13, dtype=torch.int32)
    case.inputs[f"{kind}_offset"] = torch.tensor([0, 64, 128, 64], dtype=torch.int32).repeat(2) << 13
    cases[f"{kind}/tail"] = dataclasses.replace(case, parameters={"left": 1, f"{kind}_shift": 13})
    return cases


def activation_cases() -> dict[str, Case]:
    """Return linear layers with other activations than GELU, and gated products."""
    cases: dict[str, Case] = {}
    for kind in ("silu", "relu"):
        for number, values in enumerate(("random", "extreme")):
            name = f"linear/{kind}-{values}"
            cases[name] = linear(name, kind, inputs=(64, 33)[number], values=values)
        cases |= activation_ranges(kind)
    ends = torch.tensor([-32768, -32767, -1, 0, 1, 32767], dtype=torch.int16)
    for kind, output in (("silu", "int8"), ("silu", "int16"), ("gelu", "int16"), ("relu", "int8"), ("silu", "int32")):
        name = f"gated/{kind}-{output}"
        draw = Draw(name)
        x = draw.integers(-32768, 32768, 40, 10, dtype=torch.int16)
        # gates of a few units, where the tail is, and all corners
        x[:20, :5] //= 50
        x[:6, 0], x[:6, 5], x[6:12, 0], x[6:12, 5] = ends, 32767, ends, -32768
        bits = {"int8": 8, "int16": 16, "int32": 30}[output]
        inputs = {"x": x, "multiplier": draw.integers(1 << bits, 1 << (bits + 1), 5)}
        inputs["offset"] = draw.integers(-(1 << 25), 1 << 25, 5)
        inputs["multiplier"][4], inputs["offset"][4] = (1 << 31) - 1, (1 << 30) - 1
        parameters = {"gate_multiplier": draw.chance.getrandbits(30) + (1 << 29), "activation": kind, "output": output}
        cases[name] = Case("gated", parameters, inputs)
    return cases


def network_cases() -> dict[str, Case]:
    """Return the operators of integer networks."""
    cases: dict[str, Case] = {}
    for kind in ("int8", "int16", "int32", "residual", "gelu"):
        for number, values in enumerate(("random", "random", "extreme")):
            name = f"linear/{kind}-{values}-{number}"
            cases[name] = linear(name, kind, inputs=(19, 64, 33)[number], values=values)
    for kind in ("int16", "int32"):
        cases[f"linear/{kind}-wide"] = linear(f"linear/{kind}-wide", kind, inputs=64, values="wide")
    cases |= activation_ranges("gelu")
    for output in ("int8", "int32"):
        # ratios at their ends, ties, and sums at the ends of 32 bits
        case = linear(f"linear/ends-{output}", output, rows=256, inputs=1, outputs=7)
        case.inputs["x"] = torch.arange(-128, 128).to(torch.int8).view(-1, 1)
        case.inputs["weight"] = torch.tensor([1, 1, 1, 1, -1, 127, 127], dtype=torch.int8).view(-1, 1)
        end = (1 << 31) - 1 - (128 * 127 << 16)
        case.inputs["bias"] = torch.tensor([0, 0, 0, 0, 0, end, -end], dtype=torch.int32)
        ratios = [0, 1, 1 << 15, 3 << 15, 1 << 15, (1 << 31) - 1, (1 << 31) - 1]
        case.inputs["multiplier"] = torch.tensor(ratios, dtype=torch.int32)
        cases[f"linear/ends-{output}"] = dataclasses.replace(case, parameters={"left": 16, "output": output})
    wanted = {1: ("int8", "int32"), 2: ("int16",), 3: ("int8", "int32"), 7: ("int8", "int16", "int32"), 150: ("int8", "int32")}
    for channels, outputs in wanted.items():
        for output in outputs:
            name = f"layer-norm/{channels}-{output}"
            cases[name] = layer_norm(name, channels, output, rows=6)
    many = layer_norm("layer-norm/4096-int8", op.MAX_CHANNELS, "int8", rows=6)
    many.inputs["h"] = many.inputs["h"][3:]
    cases["layer-norm/4096-int8"] = many
    sizes = torch.cat((torch.arange(1, 70), torch.tensor([*range(127, 4097, 97), 1023, 1024, 1025, 4095, 4096])))
    cases["step/row-constants"] = Case("row_constants", {}, {"C": sizes.to(torch.int32)})
    for channels in (1, 2, 3, 16, 65):
        name = f"step/normalise-{channels}"
        draw = Draw(name)
        h = (draw.normal(40, channels) * torch.logspace(-1, 4.2, 40)[:, None] + 300 * draw.normal(40, 1)).round()
        h[0], h[1], h[2, 0] = -32768, 32767, 32767
        h[3, ::2], h[3, 1::2] = 32767, -32768
        h[4], h[4, -1] = 1000, 1001
        cases[name] = Case("normalise", {"epsilon": 0}, {"h": h.clamp(-32768, 32767).to(torch.int16)})
    # deviations so large that they are shifted to the right
    name = "layer-norm/1101-int32"
    cases[name] = layer_norm(name, 1101, "int32", rows=5)
    cases[name].inputs["h"] = Draw(f"{name}/rows").integers(-32768, 32768, 3, 1101, dtype=torch.int16)
    cases[name].inputs["gain"] |= 1 << 30
    draw = Draw("step/inverse-root")
    v = draw.integers(1 << 28, 1 << 30, 200)
    v[:3] = torch.tensor([1 << 28, (1 << 30) - 1, (1 << 28) + 1])
    cases["step/inverse-root"] = Case("inverse_root", {}, {"v": v})
    for epsilon in (0, 1, 1 << 30, 1 << 40, op.MAX_EPSILON):
        cases[f"layer-norm/epsilon-{epsilon}"] = layer_norm(f"layer-norm/epsilon-{epsilon}", 12, "int16", epsilon=epsilon)
    for output in ("int8", "int16", "int32"):
        draw = Draw(f"mean/{output}")
        h = draw.integers(-32768, 32768, 2, 9, 6, dtype=torch.int16)
        bits = {"int8": 10, "int16": 18, "int32": 28}[output]
        inputs = {"h": h, "multiplier": draw.integers(1 << (bits - 1), 1 << bits, 6), "offset": draw.integers(-9999, 9999, 6)}
        inputs["multiplier"] = inputs["multiplier"].to(torch.int32)
        parameters = {"left": 11, "output": output}
        cases[f"mean/{output}"] = Case("mean", parameters, inputs)
    draw = Draw("patches")
    images = draw.integers(0, 256, 2, 3, 6, 8, dtype=torch.uint8)
    cases["patches"] = Case("patches", {"patch_size": [3, 2]}, {"images": images})
    for name, shift in (("plain", [0, 0]), ("shifted", [1, 2])):
        x = Draw(f"windows/{name}").integers(-128, 128, 2, 24, 3, dtype=torch.int8)
        cases[f"windows/{name}"] = Case("windows", {"grid": [4, 6], "window": [2, 3], "shift": shift}, {"x": x})
    norm, reduction = layer_norm("merging/norm", 20, "int8"), linear("merging/linear", "int16", inputs=20, outputs=8)
    inputs = {name: norm.inputs[name] for name in ("gain", "offset")}
    inputs |= {name: reduction.inputs[name] for name in ("weight", "bias", "multiplier")}
    inputs["h"] = Draw("merging").integers(-3000, 3000, 2, 24, 5, dtype=torch.int16)
    parameters = {"grid": [4, 6], "epsilon": 320, "norm_shift": 22, "left": reduction.parameters["left"]}
    cases["patch-merging"] = Case("patch_merging", parameters, inputs)
    return cases


def rotary_cases() -> dict[str, Case]:
    """Return rotary positions, and the normalisation of queries and keys that can stand before them."""
    cases: dict[str, Case] = {}
    for name, tables, heads, half in (("all-heads", 1, 3, 4), ("each-head", 2, 4, 3), ("one-pair", 1, 1, 1), ("ends", 1, 1, 9)):
        name = f"rotary/{name}"
        draw = Draw(name)
        tokens, channels = 6, 2 * half * heads
        angle = 3.2 * draw.normal(tables, tokens, half)
        cos, sin = ((rotary.ONE * x).round() for x in (angle.cos(), angle.sin()))
        cos[:, 0], sin[:, 0] = rotary.ONE, 0
        x = (9000 * draw.normal(2, tokens, channels)).round().clamp(-32768, 32767).to(torch.int16)
        offset, multiplier = draw.integers(-(1 << 27), 1 << 27, channels), draw.integers(1 << 11, 1 << 12, channels)
        if name == "rotary/ends":
            # all pairs of ends, saturation, ties, and the largest offsets
            x = torch.tensor([-32768, 32767, 0]).repeat(3)
            x = torch.cat((x, torch.tensor([-32768, 32767, 0]).repeat_interleave(3))).to(torch.int16).expand(2, tokens, -1)
            cos[0, 1:5] = torch.tensor([rotary.ONE, -rotary.ONE]).repeat(2)[:, None]
            sin[0, 1:5] = torch.tensor([rotary.ONE, -rotary.ONE]).repeat_interleave(2)[:, None]
            offset[::3], offset[1::3] = rotary.MOST_OFFSET, -rotary.MOST_OFFSET
            offset[-2:] = torch.tensor([1 << 14, -(1 << 14)])
            multiplier[:3], multiplier[-2:] = torch.tensor([0, 1, (1 << 31) - 1]), 1 << 17
        inputs = {"x": x.contiguous(), "turns": rotary.pack_turns(cos, sin), "offset": offset, "multiplier": multiplier}
        cases[name] = Case("rotary", {}, inputs)
    for output in ("int8", "int16"):
        name = f"head-norm/{output}"
        norm = layer_norm(name, 8, output)
        h = Draw(f"{name}/rows").normal(2, 5, 40) * 2000
        norm.inputs["h"] = h.round().clamp(-32768, 32767).to(torch.int16)
        cases[name] = Case("head_norm", {**norm.parameters, "part": [16, 3]}, norm.inputs)
    return cases


def norm_cases() -> dict[str, Case]:
    """Return normalisations that leave the mean or add to a residual stream, and streams in other units."""
    cases: dict[str, Case] = {}
    kinds = (("int8", False, False), ("int16", False, False), ("int32", False, False), ("int16", False, True),
             ("int16", True, True))  # fmt: skip
    for channels in (1, 2, 16, 65, 150):
        for output, centred, adds in kinds:
            name = f"norm/{'layer' if centred else 'rms'}-{'residual' if adds else output}-{channels}"
            made = layer_norm(name, channels, output, rows=7)
            if adds:
                made.inputs["residual"] = Draw(f"{name}/residual").integers(-32768, 32768, 7, channels, dtype=torch.int16)
            cases[name] = Case("norm", made.parameters | {"centred": centred}, made.inputs)
    for epsilon in (0, 1, 1 << 30, op.MAX_EPSILON - 1):
        name = f"norm/rms-epsilon-{epsilon}"
        made = layer_norm(name, 12, "int16", epsilon=epsilon)
        cases[name] = Case("norm", made.parameters | {"centred": False}, made.inputs)
    # the largest sum of squares
    made = layer_norm("norm/rms-4096", op.MAX_CHANNELS, "int8", rows=5, epsilon=op.MAX_EPSILON - 1)
    made.inputs["h"] = made.inputs["h"][1:4]
    cases["norm/rms-4096"] = Case("norm", made.parameters | {"centred": False}, made.inputs)
    for output, bits, left in (("int8", 24, 0), ("int8", 12, 14), ("int16", 31, 0), ("int32", 31, 14)):
        name = f"narrow/{output}-{left}"
        draw = Draw(name)
        h = draw.integers(-32768, 32768, 6, 19, dtype=torch.int16)
        h[0], h[1] = -32768, 32767
        end = (1 << 31) - 1 - (1 << 15 << left)
        multiplier = draw.integers(0, 1 << bits, 19).clamp(max=(1 << 31) - 1).to(torch.int32)
        offset = draw.integers(-(1 << 15 << left), 1 << 15 << left, 19)
        offset[:2], multiplier[2:4] = torch.tensor([end, -end]), torch.tensor([0, (1 << 31) - 1], dtype=torch.int32)
        inputs = {"h": h, "multiplier": multiplier, "offset": offset.to(torch.int32)}
        cases[name] = Case("narrow", {"left": left, "output": output}, inputs)
    return cases


def text_attention(
    name: str, recipe: qflash.Recipe, *, tokens: int = 9, heads: int = 2, dim: int = 5, first: int = 0, causal: bool = False,
    padded: bool = True, bias: bool = False,
) -> Case:  # fmt: skip
    """Return attention of texts with tokens that are missing behind, before and between others, and of one without any."""
    draw, batch = Draw(name), 5 if padded else 2
    inputs = {"x": draw.int8(batch, tokens, 3 * heads * dim)}
    if padded:
        ids = draw.integers(0, 50, batch, tokens, dtype=torch.int32 if causal else torch.int64)
        ids[1, tokens // 2 :] = ids[2, : tokens // 3] = ids[4] = -1
        ids[3, draw.normal(tokens) > 0] = -7  # any number below 0
        inputs["ids"] = ids
    each = math.sqrt(2 / (1600 * dim**-0.5 * math.sqrt(dim)))
    for role, width, size in (("query", 1, each), ("key", 1, each), ("value", dim, 0.02), ("output", dim, 0.012)):
        inputs[f"{role}_scale"] = (size * (0.5 * draw.normal(1, heads, 1, width)).exp()).float()
    if bias:
        inputs["bias"] = qflash.quantize_bias(2 * draw.normal(1, heads, first or tokens, tokens))
    # the recipe of networks of texts: other row sums take the mean of all keys, hidden ones too
    parameters = {"heads": heads, "head_dim": dim, "scale": dim**-0.5, "first": first, "causal": causal}
    return Case("text_attention", parameters | {"recipe": json.loads(recipe.replace(row_sum="rounded").key)}, inputs)


def text_cases() -> dict[str, Case]:
    """Return embeddings of ids, attention that hides keys, and the token that stands for a text."""
    cases: dict[str, Case] = {}
    for kind in ("padded", "whole", "no-positions"):
        name = f"embedding/{kind}"
        draw = Draw(name)
        ids = draw.integers(0, 8, 3, 7, dtype=torch.int64 if kind == "padded" else torch.int32)
        table = draw.integers(-32768, 32768, 8, 5, dtype=torch.int16)
        table[1], table[2] = -32768, 32767
        inputs = {"ids": ids, "table": table}
        if kind != "no-positions":
            # more places than the texts have, where they may be shorter
            position = draw.integers(-32768, 32768, 9 if kind == "padded" else 7, 5, dtype=torch.int16)
            position[0], position[1] = -32768, 32767
            ids[0, :2], ids[1, :2] = torch.tensor([1, 2]), torch.tensor([2, 1])
            inputs["position"] = position
        if kind == "padded":
            ids[0, 4:], ids[2, 1:3] = -1, -9
        cases[name] = Case("token_embedding", {"padded": kind == "padded"}, inputs)
    ids = torch.tensor([[3, 9, 5, 9, 1], [1, 2, 8, -1, -1], [4, 4, 4, 4, 4], [-1, -1, 9, 2, 9]])
    h = Draw("select-token").integers(-32768, 32768, 4, 5, 3, dtype=torch.int16)
    for token in (None, 9, 8, 0):
        name = f"select-token/{'largest' if token is None else token}"
        cases[name] = Case("select_token", {"token": token}, {"h": h, "ids": ids.int() if token == 8 else ids})
    for preset, recipe in PRESETS.items():
        for causal in (False, True):
            name = f"text-attention/{preset}-{'causal' if causal else 'padding'}"
            cases[name] = text_attention(name, recipe, causal=causal)
    long = {"tokens": 67, "heads": 1, "dim": 4, "causal": True}
    options: dict[str, dict[str, Any]] = {
        "causal-alone": {"causal": True, "padded": False},
        "bias": {"bias": True},
        "bias-first": {"bias": True, "first": 2},
        "first": {"first": 1},
        "causal-first": {"first": 3, "causal": True},
        "long": long,
        "long-alone": {**long, "padded": False},
        "one-token": {"tokens": 1},
    }
    for kind, about in options.items():
        name = f"text-attention/{kind}"
        cases[name] = text_attention(name, qflash.DEFAULT, **about)
    return cases


def whole_networks(file: str, networks: Models) -> dict[str, Case]:
    """Return the quantised networks of a committed file, with an image each: small models of random weights.

    Those that the file lacks are quantised now.
    """
    path = GOLDEN / f"{file}.safetensors"
    cases = read(path)[1] if path.is_file() else {}
    found = {name: dataclasses.replace(case, outputs={}) for name, case in cases.items() if case.operation == "network"}
    added = converted_networks({name: about for name, about in networks.items() if f"network/{name}" not in found})
    return {f"network/{name}": (found | added)[f"network/{name}"] for name in networks}


_VIT: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "mlp_ratio": 2}
_SWIN: dict[str, Any] = {
    "img_size": 16, "patch_size": 2, "embed_dim": 8, "depths": (2, 1), "num_heads": (1, 2), "mlp_ratio": 2, "window_size": 4,
}  # fmt: skip
Models = dict[str, tuple[str, dict[str, Any]]]
NETWORKS: Models = {
    "vit": ("VisionTransformer", {"num_classes": 5, "reg_tokens": 2, "no_embed_class": True, "init_values": 0.2}),
    "vit-features": ("VisionTransformer", {"num_classes": 0}),
    "vit-qk-norm": ("VisionTransformer", {"num_classes": 4, "qk_norm": True, "global_pool": "avg"}),
    "vit-qk-norm-narrow": ("VisionTransformer", {"num_classes": 3, "qk_norm": True, "num_heads": 8}),
    "vit-norm-then-mean": (
        "VisionTransformer",
        {"num_classes": 4, "pre_norm": True, "class_token": False, "global_pool": "avg", "fc_norm": False},
    ),
    "vit-long": ("VisionTransformer", {"num_classes": 3, "img_size": 18, "patch_size": 2, "depth": 2}),
    # 18 channels are not rotated
    "vit-two-outputs": ("two outputs", {"num_classes": 0, "embed_dim": 18}),
    "vit-tokens": ("tokens", {"num_classes": 0, "embed_dim": 8, "patch_size": 8, "num_heads": 1, "mlp_ratio": 1}),
    "swin": ("SwinTransformer", {"num_classes": 5}),
    "swin-features": ("SwinTransformer", {"num_classes": 0, "window_size": 2}),
}
"""By a case's name: a class of timm, :func:`_two_outputs` or :func:`_tokens`, and how it differs from the above."""
ACTIVATION_NETWORKS: Models = {
    "vit-silu": ("VisionTransformer", {"num_classes": 3, "act_layer": "silu"}),
    "vit-quick-gelu": ("VisionTransformer", {"num_classes": 3, "act_layer": "quick_gelu"}),
    "vit-relu": ("VisionTransformer", {"num_classes": 3, "act_layer": "relu"}),
    "vit-swiglu": ("VisionTransformer", {"num_classes": 3, "mlp_layer": "SwiGLUPacked", "act_layer": "silu"}),
    "vit-swiglu-norm": ("VisionTransformer", {"num_classes": 3, "mlp_layer": "SwiGLU", "scale_mlp_norm": True}),
}
"""Those with other activations than GELU, and gated MLPs of ``timm.layers``."""
ROTARY_NETWORKS: Models = {
    "rotary": ("Eva", {"num_classes": 3, "num_reg_tokens": 1}),
    "rotary-qk-norm": ("Eva", {"num_classes": 3, "qk_norm": True, "rope_type": "mixed"}),
}
"""Those with rotary positions."""
NORM_NETWORKS: Models = {
    "vit-rms": ("RMS norms", {"num_classes": 4, "qk_norm": True}),
    "swin-v2": ("SwinTransformerV2", {"num_classes": 5, "depths": (1, 1)}),
    "text": ("text", {}),
}
"""The same, with other normalisations."""
TEXT_NETWORKS: Models = {
    "text-padded": ("text tower", {"padded": True}),
    "text-end": ("text tower", {"padded": True, "causal": True, "end": 29}),
    "text-largest": ("text tower", {"causal": True}),
}
"""Those of texts with padding, or in causal order."""


def _two_outputs(**options: Any) -> torch.nn.Module:
    """Return a model with two outputs: its residual stream; and classes, of a constant query's attention and the mean token."""
    import timm

    class TwoOutputs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = timm.models.vision_transformer.VisionTransformer(**options)
            wide = self.model.embed_dim
            self.query = torch.nn.Parameter(torch.randn(1, 2, 3, wide // 2))
            self.key_value, self.pool = torch.nn.Linear(wide, 2 * wide), torch.nn.Linear(wide, wide)
            self.norm, self.head = torch.nn.LayerNorm(wide), torch.nn.Linear(2 * wide, 3)

        def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
            model = self.model
            stream = model.blocks(model._pos_embed(model.patch_embed(images)))
            tokens = model.norm(stream)
            key, value = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in self.key_value(tokens).chunk(2, dim=-1))
            query = self.query.expand(images.shape[0], -1, -1, -1)
            pooled = torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
            pooled = self.norm(self.pool(pooled))[:, 0]
            return {"stream": stream, "classes": self.head(torch.cat((pooled, tokens[:, 1:].mean(dim=1)), dim=-1))}

    return TwoOutputs()


def _text_model() -> torch.nn.Module:
    """Return an encoder of ids of tokens, with normalisations behind the sums."""

    class Text(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.word, self.place = torch.nn.Embedding(30, 16), torch.nn.Parameter(torch.randn(12, 16))
            self.norm = torch.nn.LayerNorm(16)
            self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.layer(self.norm(self.word(ids) + self.place))

    return Text()


def _text_tower(padded: bool = False, causal: bool = False, end: int | None = None) -> torch.nn.Module:
    """Return an encoder of ids that takes a mask, and gives the token at the end of a text where it is causal.

    Args:
        padded: whether there is a mask.
        causal: whether a token sees those before it alone.
        end: the id of the last token of a text; None for the largest.
    """

    class TextTower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.word, self.place = torch.nn.Embedding(30, 16), torch.nn.Parameter(torch.randn(12, 16))
            self.norm1, self.norm2, self.norm = (torch.nn.LayerNorm(16) for _ in range(3))
            self.qkv, self.proj = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
            self.fc1, self.fc2 = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
            self.head = torch.nn.Linear(16, 8)

        def encode(self, ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
            h = self.word(ids) + self.place
            query, key, value = self.qkv(self.norm1(h)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            mask = None if attention_mask is None else attention_mask[:, None, None].bool()
            if causal:
                before = torch.ones(12, 12, dtype=torch.bool, device=ids.device).tril()
                mask = before if mask is None else mask & before
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
            h = h + self.proj(out.transpose(1, 2).flatten(2))
            tokens = self.norm(h + self.fc2(torch.nn.functional.gelu(self.fc1(self.norm2(h)))))
            if not causal:
                return tokens
            place = (ids if end is None else (ids == end).int()).argmax(dim=-1)
            return self.head(tokens[torch.arange(ids.shape[0], device=ids.device), place])

    class WithMask(TextTower):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.encode(input_ids, attention_mask)

    class WithoutMask(TextTower):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.encode(input_ids, None)

    return WithMask() if padded else WithoutMask()


def _tokens(**options: Any) -> torch.nn.Module:
    """Return a model whose outputs are patch tokens: as tokens, and as maps of both layouts."""
    import timm

    class PatchTokens(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = timm.models.vision_transformer.VisionTransformer(**options)

        def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
            patches = self.model.forward_features(images)[:, 1:]
            maps = patches.unflatten(1, self.model.patch_embed.grid_size)
            return {"patches": patches, "map": maps, "channels_first": maps.movedim(-1, 1)}

    return PatchTokens()


def converted_networks(networks: Models) -> dict[str, Case]:
    """Return networks, quantised now; the integers depend on PyTorch's and timm's versions."""
    if not networks:
        return {}
    import timm

    makers = {
        "VisionTransformer": lambda **options: timm.models.vision_transformer.VisionTransformer(**{**_VIT, **options}),
        "SwinTransformer": lambda **options: timm.models.swin_transformer.SwinTransformer(**{**_SWIN, **options}),
        "Eva": lambda **options: timm.models.eva.Eva(**{**_VIT, "use_rot_pos_emb": True, "head_init_scale": 1.0, **options}),
        "two outputs": lambda **options: _two_outputs(**{**_VIT, **options}),
        "tokens": lambda **options: _tokens(**{**_VIT, **options}),
        "RMS norms": lambda **options: timm.models.vision_transformer.VisionTransformer(
            **{**_VIT, "norm_layer": timm.layers.RmsNorm, **options}
        ),
        "text": _text_model,
        "text tower": _text_tower,
        "SwinTransformerV2": lambda **options: timm.models.swin_transformer_v2.SwinTransformerV2(**{**_SWIN, **options}),
    }
    cases = {}
    for name, (kind, options) in networks.items():
        draw = Draw(f"network/{name}")
        torch.manual_seed(draw.chance.getrandbits(40))
        layers = {option: getattr(timm.layers, x) for option, x in options.items() if option == "mlp_layer"}
        model = makers[kind](**{**options, **layers}).eval()
        with torch.no_grad():
            for x in model.parameters():
                # weights as timm draws them do little
                x.copy_(2 * x if x.dim() > 1 else x + 0.1 * draw.normal(*x.shape))
        side = options.get("img_size", 16)
        coarse = torch.nn.functional.interpolate(draw.normal(24, 3, 4, 4), size=(side, side))
        images = (128 + 50 * (coarse + 0.5 * draw.normal(24, 3, side, side))).clamp(0, 255).to(torch.uint8)
        if kind == "text":
            images = draw.integers(0, 30, 24, 12, dtype=torch.int64)
        batch: Any = images
        if kind == "text tower":
            images = draw.integers(0, 29, 24, 12, dtype=torch.int64)
            ends = draw.integers(2, 12, 24)
            images[torch.arange(24), ends.long()] = 29
            mask = torch.arange(12) <= ends[:, None]
            batch = {"input_ids": images, "attention_mask": mask.long()} if "padded" in options else images
        mean, std = (0.48, 0.45, 0.4), (0.22, 0.23, 0.25)
        network = qflash.quantize_model(model, [batch], mean=mean, std=std, progress=False)
        header = storage.network_header(network)
        nodes = [
            {**node, "sizes": {size: x for size, x in node["sizes"].items() if size != "recipe"}} for node in header["nodes"]
        ]
        parameters = {entry: header[entry] for entry in ("image", "outputs", "constants")}
        parameters |= {"recipe": json.loads(network.recipe.key), "nodes": nodes}
        tensors = {f"network.{own}": x for own, x in storage.network_tensors(network).items()}
        shown = images[:1]
        if kind == "text tower":
            shown = images[:3]
            if "padded" in options:
                # behind the end, at the start, everywhere
                shown = torch.where(mask[:4], images[:4], -1)
                shown[1, :2] = shown[3] = -1
        cases[f"network/{name}"] = Case("network", parameters, {**tensors, "images": shown})
    return cases


# Random cases.


MASKS = ("none", "none", "causal", "bool", "padding", "padding-bias", "bias", "slope", "marks", "fine")


def random_cases(count: int) -> dict[str, Case]:
    """Return random attention on int8 and float tensors, of larger shapes, and random layers."""
    cases: dict[str, Case] = {}
    for number in range(count):
        name = f"random/{number}"
        chance = random.Random(f"golden {number}")
        fields: dict[str, Any] = {
            "exponential": chance.choice(("linear", "quadratic")),
            "probability_bits": chance.choice((7, 8, 8, 15)),
            "probability_rounding": chance.choice(("nearest", "nearest", "floor")),
            "row_sum": chance.choice(("exact", "rounded")),
            "smooth_key": chance.random() < 0.5,
            "smooth_value": chance.random() < 0.4,
            "balance": chance.random() < 0.4,
            "rotate": chance.random() < 0.2,
            "key_block": chance.choice((32, 64, 128, 256)),
            "query_granularity": chance.choice(("tensor", "head", "token")),
            "key_granularity": chance.choice(("tensor", "head", "token")),
            "value_granularity": chance.choice(("tensor", "head", "channel")),
        }
        if fields["exponential"] == "linear" and fields["probability_bits"] == 7 and chance.random() < 0.6:
            fields["normalization"] = "online"
        if fields["probability_bits"] != 15 and chance.random() < 0.3:
            fields["output"] = "value_scale"
        heads = chance.choice((1, 2, 4))
        options: dict[str, Any] = {
            "queries": chance.randint(8, 80),
            "keys": chance.choice((chance.randint(1, 64), chance.randint(65, 300))),
            "dim": chance.choice((16, 32, 64, 128, chance.randint(1, 100))),
            "value_dim": chance.choice((None, chance.randint(1, 70))),
            "batch": chance.choice((1, 2)),
            "heads": heads,
            "key_heads": chance.choice((heads, 1)),
            "mask": chance.choice(MASKS),
        }
        if options["mask"] == "marks":
            options["keys"] = max(8, options["keys"])
        recipe = qflash.Recipe(**fields)
        if number % 3 == 0:
            dtype = chance.choice((torch.float16, torch.bfloat16, torch.float32))
            cases[name] = attention(name, recipe, dtype=dtype, amplitude=chance.choice((0.1, 1.0, 3.0)), **options)
            continue
        output = chance.choice(("int8", "int8", "float16", "float32"))
        options["output_scale"] = chance.choice((None, "tensor", "channel")) if output == "int8" else None
        options["offset"] = chance.random() < 0.3
        spread = 10 ** chance.uniform(-2, 2)
        cases[name] = int8_attention(name, recipe, output=output, spread=spread, **options)
    for number in range(count // 4):
        name = f"random-layer/{number}"
        chance = random.Random(f"golden layer {number}")
        kind = ("int8", "int16", "int32", "residual", "gelu")[number % 5]
        cases[name] = linear(name, kind, chance.randint(1, 40), chance.randint(1, 400), chance.randint(1, 70))
        channels = chance.randint(1, 700)
        name = f"random-norm/{number}"
        cases[name] = layer_norm(name, channels, ("int8", "int16", "int32")[number % 3], epsilon=chance.getrandbits(40))
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description="Write golden vectors; see docs/golden_vectors.md.")
    parser.add_argument("--output", type=Path, default=GOLDEN, help="folder (default: golden/, the committed set)")
    parser.add_argument("--random", type=int, metavar="N", help="write N random cases, of larger shapes, instead")
    parser.add_argument("--convert", action="store_true", help="quantise the small networks anew, too; needs timm")
    arguments = parser.parse_args()
    if arguments.random is not None and arguments.random < 1:
        parser.error(f"--random must be at least 1, got {arguments.random}")
    if arguments.random is not None and arguments.output == GOLDEN:
        parser.error("--random needs an --output: golden/ holds the committed set")
    if arguments.random is not None:
        made = {"random": random_cases(arguments.random)}
    else:
        made = {"attention": step_cases() | int8_cases(), "floats": float_cases()}
        layers = {
            "networks": (network_cases(), NETWORKS),
            "activations": (activation_cases(), ACTIVATION_NETWORKS),
            "rotary": (rotary_cases(), ROTARY_NETWORKS),
            "norms": (norm_cases(), NORM_NETWORKS),
            "texts": (text_cases(), TEXT_NETWORKS),
        }
        for file, (cases, models) in layers.items():
            made[file] = cases | (converted_networks(models) if arguments.convert else whole_networks(file, models))
    for name, cases in made.items():
        path = arguments.output / f"{name}.safetensors"
        write(path, cases)
        print(f"{path}: {len(cases)} cases, {path.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
