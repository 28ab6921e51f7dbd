"""Vectors for hardware: inputs, constants, steps and outputs of operators as files for testbenches: :func:`write_vectors`.

A case is a golden case, or a node of a network. docs/hardware.md describes the files.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from .. import api
from ..specification import fixed_point as fp
from ..specification import layers as op
from ..specification.gated import gated
from ..specification.quantization import QuantizedTensor
from ..specification.recipe import Recipe
from ..specification.reference import ARITHMETIC_VERSION
from ..specification.rotary import rotary
from . import storage
from .graph import IMAGES, IntegerNetwork, check_integer
from .inputs import check_input, takes_ids
from .modules import DTYPES, Attention
from .onnx_check import self_test_ids, self_test_images

FORMATS = ("hex", "npy", "c")
"""What files hold tensors: ``$readmemh``, NumPy's, a C header."""
FORMAT = "qflash vectors"
_GOLDEN = "qflash golden vectors"
_PREFIX = {"input": "in", "constant": "in", "step": "step", "output": "out"}

Tensors = dict[str, torch.Tensor]
Kind = Literal["input", "constant", "step", "output"]


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A tensor of a case.

    Attributes:
        kind: ``"constant"`` for what a network holds, ``"step"`` for what is between inputs and outputs.
        name: of its role, or as the documents call it.
        type: of a tensor that a caller sees, as ``int8`` or ``float32``; None of a step.
        values: integers; the bits of a float, as an unsigned number.
        width: bits of an element, two's complement if ``signed``.
        signed: whether elements may be negative.
        bounds: least and largest number there may be; None of floats.
    """

    kind: Kind
    name: str
    type: str | None
    values: np.ndarray
    width: int
    signed: bool
    bounds: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class VectorCase:
    """An operator with its numbers.

    Attributes:
        name: of the golden case or the node.
        operation: a golden operation (docs/golden_vectors.md) or the kind of node.
        parameters: what is no tensor, as JSON holds it.
        constants: integers that follow from sizes and recipe alone.
        quantities: inputs, constants, steps in the order in which they are computed, outputs.
    """

    name: str
    operation: str
    parameters: dict[str, Any]
    constants: dict[str, int]
    quantities: list[Quantity]


def _given(kind: Kind, name: str, x: torch.Tensor) -> Quantity:
    """Return a tensor that a caller sees: all numbers of its type may be there."""
    label = str(x.dtype).removeprefix("torch.")
    x = x.detach().cpu().contiguous()
    if x.is_floating_point():
        width = 8 * x.element_size()
        bits = x.view({16: torch.int16, 32: torch.int32}[width]).numpy()
        return Quantity(kind, name, label, bits.view(f"uint{width}"), width, False, None)
    if x.dtype == torch.bool:
        return Quantity(kind, name, label, x.numpy().astype(np.uint8), 1, False, (0, 1))
    ends = torch.iinfo(x.dtype)
    return Quantity(kind, name, label, x.numpy(), ends.bits, ends.min < 0, (ends.min, ends.max))


def _step(name: str, x: torch.Tensor, low: int, high: int) -> Quantity:
    """Return a named step, as wide as its declared range."""
    width = max(high.bit_length(), (-low - 1).bit_length() if low < 0 else 0) + (low < 0)
    return Quantity("step", name, None, x.detach().cpu().contiguous().numpy(), max(width, 1), low < 0, (low, high))


class _Trace(list[Quantity]):
    """Steps in their order; of names that come again the second gets a 2, and so on."""

    def __call__(self, name: str, x: torch.Tensor, low: int, high: int) -> None:
        before = sum(step.name == name or step.name.startswith(f"{name} #") for step in self)
        self.append(_step(name if not before else f"{name} #{before + 1}", x.clone(), low, high))


# What computes a golden case by the reference, where the documents name steps of it.


def _attention(p: dict[str, Any], x: Tensors) -> torch.Tensor:
    options: dict[str, Any] = {"is_causal": p["causal"], "scale": p["scale"], "recipe": Recipe(**p["recipe"])}
    options |= {"enable_gqa": x["query"].shape[1] != x["key"].shape[1], "backend": "reference"}
    roles = ("query", "key", "value")
    if x["query"].is_floating_point():
        return api.attention(x["query"], x["key"], x["value"], x.get("mask"), **options)
    query, key, value = (QuantizedTensor.from_kernel(x[role], x[f"{role}_scale"], x.get(f"{role}_offset")) for role in roles)
    if p["output"] != "int8":
        options["out_dtype"] = getattr(torch, p["output"])
    out: QuantizedTensor | torch.Tensor = api.int8_attention(
        query, key, value, x.get("mask"), output_scale=x.get("output_scale"), **options
    )
    return out.values if isinstance(out, QuantizedTensor) else out


def _linear(p: dict[str, Any], x: Tensors) -> torch.Tensor:
    arguments = x["x"], x["weight"], x["bias"], x["multiplier"], p["left"]
    for name in op.ACTIVATIONS:
        if f"{name}_shift" in p:
            run = getattr(torch.ops.qflash, f"int8_linear_{name}")
            return run(*arguments, x[f"{name}_multiplier"], x[f"{name}_offset"], p[f"{name}_shift"], "reference")
    return torch.ops.qflash.int8_linear(*arguments, x.get("residual"), None, DTYPES[p["output"]], "reference")


def _layer_norm(p: dict[str, Any], x: Tensors) -> torch.Tensor:
    return op.layer_norm(x["h"], p["epsilon"], x["gain"], x["offset"], p["shift"], DTYPES[p["output"]])


def _head_norm(p: dict[str, Any], x: Tensors) -> torch.Tensor:
    first, heads = p["part"]
    rows = x["h"].narrow(-1, first, heads * x["gain"].numel()).unflatten(-1, (heads, -1))
    return _layer_norm(p, {**x, "h": rows})


def _gated(p: dict[str, Any], x: Tensors) -> torch.Tensor:
    return gated(x["x"], p["gate_multiplier"], x["multiplier"], x["offset"], p["activation"], DTYPES[p["output"]])


def _rotary(_: dict[str, Any], x: Tensors) -> torch.Tensor:
    return rotary(x["x"], x["turns"], x["offset"], x["multiplier"])


def _norm(p: dict[str, Any], x: Tensors) -> torch.Tensor:
    constants = p["epsilon"], x["gain"], x["offset"], p["shift"], None, x.get("residual"), p["centred"]
    return torch.ops.qflash.integer_norm(x["h"], *constants, DTYPES[p["output"]], "reference")


def _narrow(p: dict[str, Any], x: Tensors) -> torch.Tensor:
    constants = x["multiplier"], p["left"], x["offset"], None
    return torch.ops.qflash.integer_narrow(x["h"], *constants, DTYPES[p["output"]], "reference")


def _text_attention(p: dict[str, Any], x: Tensors) -> torch.Tensor:
    bias, ids = x.get("bias"), x.get("ids")
    module = Attention(
        p["heads"], p["head_dim"], p["scale"], Recipe(**p["recipe"]).key, None if bias is None else bias.shape,
        first=p["first"], padded=ids is not None, causal=p["causal"],
    )  # fmt: skip
    for name in ("query_scale", "key_scale", "value_scale", "output_scale"):
        module.get_buffer(name).copy_(x[name].view(torch.int32))
    if bias is not None:
        module.get_buffer("bias").copy_(bias)
    return module(x["x"], *(() if ids is None else (ids,)), backend="reference")


def _token_embedding(p: dict[str, Any], x: Tensors) -> torch.Tensor:
    ids, position = x["ids"].clamp(min=0) if p["padded"] else x["ids"], x.get("position")
    return op.embed_tokens(ids, x["table"], None if position is None else position[: ids.shape[1]])


def _mean(p: dict[str, Any], x: Tensors) -> torch.Tensor:
    return op.token_mean(x["h"], x["multiplier"], p["left"], x["offset"], DTYPES[p["output"]])


def _patch_merging(p: dict[str, Any], x: Tensors) -> torch.Tensor:
    joined = op.gather_tokens(x["h"], op.merge_order(tuple(p["grid"])))
    rows = op.layer_norm(joined, p["epsilon"], x["gain"], x["offset"], p["norm_shift"], torch.int8)
    return _linear({**p, "output": "int16"}, {**x, "x": rows})


_TRACED: dict[str, tuple[str, Callable[[dict[str, Any], Tensors], torch.Tensor]]] = {
    "int8_attention": ("output", _attention),
    "attention": ("output", _attention),
    "linear": ("output", _linear),
    **{f"linear_{name}": ("output", _linear) for name in op.ACTIVATIONS},
    "gated": ("output", _gated),
    "layer_norm": ("output", _layer_norm),
    "head_norm": ("output", _head_norm),
    "rotary": ("output", _rotary),
    "norm": ("output", _norm),
    "narrow": ("output", _narrow),
    "normalise": ("N", lambda p, x: op.normalise(x["h"], p["epsilon"]).to(torch.int32)),
    "mean": ("output", _mean),
    "patch_merging": ("output", _patch_merging),
    "text_attention": ("output", _text_attention),
    "token_embedding": ("output", _token_embedding),
}
"""By golden operation, its output and what computes it. The others are steps themselves, and have none inside."""


def _constants(parameters: dict[str, Any], quantities: Sequence[Quantity]) -> dict[str, int]:
    """Return the integers that sizes and recipe give: of a normalisation, and of attention."""
    found: dict[str, int] = {}
    # a step that has an input's name comes later, and is what the operator works on
    sizes = {x.name: x.values.shape for x in quantities}
    if "epsilon" in parameters and "h" in sizes:
        channels = sizes.get("gain", sizes["h"])[-1]
        by = op.row_constants(channels)
        found |= {
            "row_channels": channels,
            "row_inverse": by.inverse,
            "row_bits": by.bits,
            "row_root": by.root,
            "row_shift": by.shift,
        }
    recipe = parameters.get("recipe")
    if recipe is not None and "value" in sizes:
        recipe = Recipe.from_key(recipe) if isinstance(recipe, str) else Recipe(**recipe)
        offset, up, down = fp.probability_constants(recipe.exponential, recipe.probability_bits)
        keys = sizes["value"][2]
        found |= {"c0": offset, "up": up, "down": down, "nearest": int(recipe.probability_rounding == "nearest")}
        found |= {"two_pass": int(recipe.normalization == "two_pass"), "exact_sum": int(recipe.takes_exact_sum(keys))}
        found |= {"inverse_count": fp.inverse_count(keys)} if keys else {}
    return found


def _golden_cases(path: Path, wanted: Callable[[str], bool], trace: bool) -> Iterator[VectorCase]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        header = file.metadata()
        if int(header["arithmetic_version"]) != ARITHMETIC_VERSION:
            raise ValueError(
                f"{path} is of arithmetic version {header['arithmetic_version']}, this QFlash computes {ARITHMETIC_VERSION}"
            )
        names = list(file.keys())
        recipes = json.loads(header["recipes"])
        for name, about in json.loads(header["cases"]).items():
            parameters, operation = dict(about["parameters"]), about["operation"]
            if "recipe" in parameters:
                parameters["recipe"] = recipes[parameters["recipe"]]
            inner = [f"{name}/{node['name']}" for node in parameters["nodes"]] if operation == "network" else [name]
            if not any(wanted(each) for each in inner):
                continue
            parts = {
                part: {full.rsplit("/", 1)[1]: file.get_tensor(full) for full in names if full.startswith(f"{name}/{part}/")}
                for part in ("in", "out")
            }
            inputs, outputs = parts["in"], parts["out"]
            if operation == "network":
                network = _golden_network(parameters, inputs)
                yield from _network_cases(network, inputs["images"], wanted, trace, f"{name}/", outputs)
                continue
            inputs |= {role: inputs[role].view(torch.bfloat16) for role in about.get("bfloat16", ())}
            if parameters.get("output") == "bfloat16":
                outputs["output"] = outputs["output"].view(torch.bfloat16)
            steps = _Trace()
            if trace and operation in _TRACED:
                role, compute = _TRACED[operation]
                with fp.observed(steps):
                    found = compute(parameters, inputs)
                _require_equal(name, found, outputs[role])
            quantities = [_given("input", role, x) for role, x in inputs.items()]
            quantities += [*steps, *(_given("output", role, x) for role, x in outputs.items())]
            yield VectorCase(name, operation, parameters, _constants(parameters, quantities), quantities)


def _require_equal(name: str, found: torch.Tensor, stored: torch.Tensor) -> None:
    if not np.array_equal(_given("output", "", found).values, _given("output", "", stored).values):
        raise ValueError(f"{name} of the golden file has other outputs than the reference computes: the file is damaged")


def _golden_network(parameters: dict[str, Any], inputs: Tensors) -> IntegerNetwork:
    """Return a network of a golden case, whose header leaves out what does not change a bit."""
    recipe = Recipe(**parameters["recipe"]).key
    nodes = [
        {**node, "sizes": node["sizes"] | ({"recipe": recipe} if node["operator"] == "Attention" else {})}
        for node in parameters["nodes"]
    ]
    header = {
        **parameters, "version": storage.VERSION, "arithmetic_version": ARITHMETIC_VERSION, "recipe": recipe, "nodes": nodes,
        "scales": dict.fromkeys(parameters["outputs"], 1.0), "units": [1.0],
    }  # fmt: skip
    return storage.network_from_header(header, {role[8:]: x for role, x in inputs.items() if role.startswith("network.")})


def _network_cases(
    network: IntegerNetwork, images: torch.Tensor, wanted: Callable[[str], bool], trace: bool, prefix: str = "",
    stored: Tensors | None = None,
) -> Iterator[VectorCase]:  # fmt: skip
    """Run a network node by node.

    Args:
        network: of integers only.
        images: uint8 (count, channels, height, width).
        wanted: tells by its name whether a case is.
        trace: with the steps of each node.
        prefix: of the names.
        stored: outputs of the nodes that a golden file has.
    """
    values = {IMAGES: images}
    for node in network.nodes:
        part, name = network.part(node.name), prefix + node.name
        inputs = [values[each] for each in node.inputs]
        steps, chosen = _Trace(), wanted(name)
        if chosen and trace:
            with fp.observed(steps):
                out = part(*inputs, backend="reference")
        else:
            out = part(*inputs, backend=network.backend)
        values[node.name] = out
        if stored is not None:
            _require_equal(name, out, stored[f"node.{node.name}"])
        if not chosen:
            continue
        parameters = {**part.sizes, **{constant: getattr(part, constant) for constant in part.constants}}
        quantities = [_given("input", role, x) for role, x in zip(part.input_names(len(inputs)), inputs, strict=True)]
        quantities += [_given("constant", role, x) for role, x in part.tensors().items()]
        quantities += [*steps, _given("output", "output", out)]
        parameters["inputs"] = list(node.inputs)
        yield VectorCase(name, type(part).__name__, parameters, _constants(parameters, quantities), quantities)


def _images(path: Path | None, network: IntegerNetwork) -> torch.Tensor:
    if path is None:
        return (self_test_ids if takes_ids(network.image) else self_test_images)(1, *network.image)
    try:
        images = torch.from_numpy(np.load(path, allow_pickle=False))
    except (ValueError, TypeError, EOFError) as error:
        raise ValueError(f"images must be a .npy file of uint8, or of ids of tokens, {path} is not: {error}") from error
    check_input(images, network.image)
    return images


# Files.


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")


def hex_lines(x: Quantity) -> str:
    """Return elements in row-major order, one a line, in two's complement of the width, as ``$readmemh`` reads them."""
    mask, digits = (1 << x.width) - 1, -(-x.width // 4)
    return "".join(f"{number & mask:0{digits}x}\n" for number in x.values.ravel().tolist())


def _container(x: Quantity) -> str:
    """Return the smallest integer type of 8 to 64 bits that holds a width."""
    bits = next(bits for bits in (8, 16, 32, 64) if bits >= x.width)
    return f"{'' if x.signed else 'u'}int{bits}"


def _identifier(prefix: str, name: str) -> str:
    # the case stays: m and M are two quantities of one operator
    return f"{prefix}_{_slug(name).replace('-', '_')}"


def _size_macros(name: str, x: Quantity) -> dict[str, int]:
    sizes = {f"{name}_D{axis}": size for axis, size in enumerate(x.values.shape)}
    return {f"{name}_WIDTH": x.width, f"{name}_SIGNED": int(x.signed), f"{name}_SIZE": x.values.size, **sizes}


def _case_macros(case: VectorCase) -> dict[str, int]:
    numbers = {_identifier("PARAM", name): int(x) for name, x in case.parameters.items() if isinstance(x, int)}
    return numbers | {_identifier("CONST", name): x for name, x in case.constants.items()}


def _verilog(number: int) -> str:
    """Return a number as Verilog has it: its own are of 32 bits."""
    return str(number) if -(1 << 31) <= number < 1 << 31 else f"64'sd{number}" if number >= 0 else f"-64'sd{-number}"


def _c_array(name: str, x: Quantity) -> str:
    kind = _container(x)
    suffix = {"int64": "LL", "uint64": "ULL", "uint32": "U"}.get(kind, "")
    # the least number of a type has no literal of its own
    least = -(1 << 63) if kind == "int64" else -(1 << 31)
    spelt = (f"({n + 1}{suffix} - 1)" if n == least else f"{n}{suffix}" for n in x.values.ravel().tolist())
    rows, numbers = [], list(spelt)
    for start in range(0, len(numbers), 16):
        rows.append("    " + ", ".join(numbers[start : start + 16]))
    return f"static const {kind}_t {name}[{max(len(numbers), 1)}] = {{\n" + (",\n".join(rows) or "    0") + "\n};\n"


def _write_case(folder: Path, case: VectorCase, formats: Sequence[str]) -> None:
    folder.mkdir(parents=True)
    title = f"{case.name}: {case.operation}"
    entries, verilog, c = [], [f"// {title}"], [f"/* {title} */", "#include <stdint.h>"]
    for name, number in _case_macros(case).items():
        verilog.append(f"`define {name} {_verilog(number)}")
        c.append(f"#define {name} {number}{'LL' if abs(number) >= 1 << 31 else ''}")
    steps = 0
    for x in case.quantities:
        steps += x.kind == "step"
        name = _identifier(_PREFIX[x.kind].upper(), x.name)
        stem = f"{_PREFIX[x.kind]}.{f'{steps:02}.' if x.kind == 'step' else ''}{_slug(x.name)}"
        files = {}
        if "hex" in formats:
            files["hex"] = f"{stem}.hex"
            (folder / files["hex"]).write_text(hex_lines(x), encoding="ascii")
            verilog += [f"`define {macro} {value}" for macro, value in _size_macros(name, x).items()]
            verilog.append(f'`define {name}_FILE "{files["hex"]}"')
        if "npy" in formats:
            files["npy"] = f"{stem}.npy"
            np.save(folder / files["npy"], x.values.astype(_container(x)), allow_pickle=False)
        if "c" in formats:
            files["c"] = "case.h"
            c += [f"#define {macro} {value}" for macro, value in _size_macros(name, x).items()]
            c.append(_c_array(_identifier(_PREFIX[x.kind], x.name), x))
        entries.append({
            "kind": x.kind, "name": x.name, "type": x.type, "shape": list(x.values.shape), "width": x.width,
            "signed": x.signed, "bounds": x.bounds and list(x.bounds), "files": files,
        })  # fmt: skip
    manifest = {
        "name": case.name, "operation": case.operation, "arithmetic_version": ARITHMETIC_VERSION,
        "parameters": case.parameters, "constants": case.constants, "tensors": entries,
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for kind, name, lines in (("hex", "case.svh", verilog), ("c", "case.h", c)):
        if kind in formats:
            (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_vectors(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    cases: Sequence[str] = (),
    images: str | os.PathLike[str] | None = None,
    trace: bool = False,
    formats: Sequence[str] = ("hex",),
) -> list[str]:
    """Write a folder for each case of a golden file, or each node of a network, with a manifest and its tensors.

    Args:
        source: a file of golden vectors, or of an integer network.
        output: a folder, new or empty.
        cases: patterns of names with ``*``, ``?`` and ``[]``; none: all.
        images: of a network: a ``.npy`` file, uint8 (count, channels, height, width), or ids (count, tokens). None: one image,
            or text, of the formula of docs/onnx.md.
        trace: with every step that the documents name, computed by the reference with all declared bounds required.
        formats: of :data:`FORMATS`, at least one.

    Returns:
        the names of the cases.

    Raises:
        ValueError: the source is neither, of another arithmetic version, or damaged; a pattern matches nothing; the folder is
            not empty; a format is not known; images do not fit, or are given for golden vectors.
        OSError: a file cannot be read or written.
    """
    from safetensors import SafetensorError, safe_open

    source, output = Path(source), Path(output)
    if odd := [x for x in formats if x not in FORMATS]:
        raise ValueError(f"formats must be of {', '.join(FORMATS)}, got {odd[0]!r}")
    if not formats:
        raise ValueError(f"formats must name at least one of {', '.join(FORMATS)}")
    if not source.is_file():
        raise FileNotFoundError(f"no file of golden vectors or of an integer network at {source}")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"output must be a new or an empty folder, {output} is not")
    try:
        with safe_open(source, framework="pt") as file:
            is_golden = (file.metadata() or {}).get("format") == _GOLDEN
    except SafetensorError as error:
        raise ValueError(f"{source} holds neither golden vectors nor an integer network: {error}") from error
    unmet = set(cases)

    def wanted(name: str) -> bool:
        met = [pattern for pattern in cases if fnmatch.fnmatchcase(name, pattern)]
        unmet.difference_update(met)
        return bool(met) or not cases

    if is_golden:
        if images is not None:
            raise ValueError("images are for networks; golden vectors have their own")
        found = _golden_cases(source, wanted, trace)
    else:
        network = storage.load_model(source)
        check_integer(network)
        found = _network_cases(network, _images(None if images is None else Path(images), network), wanted, trace)
    written = []
    with torch.inference_mode():
        for case in found:
            _write_case(output / case.name, case, formats)
            written.append({"name": case.name, "operation": case.operation})
    if unmet:
        raise ValueError(f"no case of {source} has a name like {sorted(unmet)[0]!r}")
    index = {"format": FORMAT, "arithmetic_version": ARITHMETIC_VERSION, "source": source.name, "cases": written}
    (output / "index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return [each["name"] for each in written]
