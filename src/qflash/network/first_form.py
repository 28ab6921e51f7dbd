"""Networks as files of version 1 hold them, a class of model with sizes in place of nodes: :func:`from_first_form`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..specification import layers as op
from ..specification.fixed_point import MAX_KEYS
from .graph import IntegerNetwork

Form = tuple[object, tuple[int, ...]]
Table = tuple[tuple[int, ...], Callable[[], torch.Tensor]]
"""The shape of a table of tokens, and what makes it; tables are as long as hostile headers say."""
_SHAPE = ("image_size", "patch_size", "image_channels", "outputs", "recipe")
_BLOCKS = ("channels", "heads", "head_dim", "hidden")
_VISION_TRANSFORMER = (*_SHAPE, *_BLOCKS, "depth", "prefix_tokens", "pool", "first_norm", "softmax_scale")
_STAGE = (*_BLOCKS, "grid", "window", "shifts")


def is_first_form(header: Any) -> bool:
    """Tell whether a parsed header is of version 1."""
    return type(header) is dict and type(header.get("version")) is int and header["version"] == 1


def _require_names(what: str, found: Any, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    """Require an object of JSON with these names."""
    if type(found) is not dict or not set(required) <= found.keys() <= {*required, *optional}:
        raise ValueError(f"{what} must have the entries {', '.join(required)}, is {str(found)[:90]}")


def _numbers(what: str, found: Any, least: int = 1, most: int = 1 << 24) -> tuple[int, ...]:
    """Require a whole number, or a list of two."""
    numbers = tuple(found) if type(found) is list and len(found) == 2 else (found,)
    if not all(type(x) is int and least <= x <= most for x in numbers):
        raise ValueError(f"{what} must be whole, from {least} to {most}, is {str(found)[:90]}")
    return numbers


class _Nodes:
    """Collects the nodes of a header of version 2, and where their tensors and constants are in one of version 1.

    Attributes:
        entries: nodes, as the header has them.
        old: by node, the name of its module in the file; ``""`` for the network itself.
        tables: by name, the shape of a tensor that no file of version 1 holds, and what makes it.
    """

    def __init__(self, most: int) -> None:
        self.entries: list[dict[str, Any]] = []
        self.old: dict[str, str] = {}
        self.tables: dict[str, Table] = {}
        self.most = most

    def add(self, name: str, operator: str, *inputs: str, old: str | None = None, **sizes: Any) -> str:
        """Add a node; ``old`` is the name of its module in the file where that is another."""
        if len(self.entries) >= self.most:
            raise ValueError(f"its shape must not ask for more blocks than its {self.most} tensors fill")
        for table in ("gather", "scatter"):
            if (order := sizes.pop(table, None)) is not None:
                shape, make = order
                self.tables[f"{name}.{table}"] = shape, make
                sizes |= {"gather": list(shape)} if table == "gather" else {"tokens": shape[0]}
        self.entries.append({"name": name, "operator": operator, "inputs": list(inputs), "sizes": sizes})
        self.old[name] = name if old is None else old
        return name

    def norm(self, name: str, h: str, channels: int, dtype: str, **sizes: Any) -> str:
        return self.add(name, "LayerNorm", h, channels=channels, dtype=dtype, **sizes)

    def linear(self, name: str, inputs: int, outputs: int, dtype: str, *taken: str, **sizes: Any) -> str:
        return self.add(name, "Linear", *taken, inputs=inputs, outputs=outputs, dtype=dtype, **sizes)

    def block(
        self, name: str, h: str, s: Mapping[str, Any], scale: float, recipe: str, order: Table | None = None,
        bias: list[int] | None = None, window: int = 0, qk_norm: bool = False,
    ) -> str:  # fmt: skip
        """Add a transformer block on the stream ``h``; return its output."""
        (channels,), (heads,), (width,), (hidden,) = (_numbers(size, s[size]) for size in _BLOCKS)
        inner = heads * width
        x = self.norm(f"{name}.norm1", h, channels, "int8", gather=order)
        if qk_norm:
            both = self.linear(f"{name}.attn.qk", channels, 2 * inner, "int16", x)
            inputs = [
                self.norm(f"{name}.attn.{label}_norm", both, width, "int8", part=[number * inner, heads])
                for number, label in enumerate("qk")
            ]
            inputs.append(self.linear(f"{name}.attn.v", channels, inner, "int8", x))
        else:
            inputs = [self.linear(f"{name}.attn.qkv", channels, 3 * inner, "int8", x)]
        x = self.add(
            f"{name}.attn.core", "Attention", *inputs, old=f"{name}.attn", heads=heads, head_dim=width, softmax_scale=scale,
            recipe=recipe, bias=bias, tokens=window,
        )  # fmt: skip
        scatter = None if order is None else ((order[0][0],), lambda: order[1]().flatten())
        h = self.linear(f"{name}.attn.proj", inner, channels, "int16", x, h, scatter=scatter)
        x = self.norm(f"{name}.norm2", h, channels, "int8")
        x = self.add(f"{name}.fc1", "LinearGelu", x, inputs=channels, outputs=hidden)
        return self.linear(f"{name}.fc2", hidden, channels, "int16", x, h)

    def embed(self, s: Mapping[str, Any], channels: int, positions: bool, prefix: int) -> tuple[str, list[int]]:
        """Add the patch embedding; return it, and how many patches there are down and across."""
        image, patch = (_numbers(size, s[size]) for size in ("image_size", "patch_size"))
        if len(image) != 2 or len(patch) != 2 or any(a % b for a, b in zip(image, patch, strict=True)):
            raise ValueError(f"image_size must be a multiple of patch_size, are {image} and {patch}")
        grid = [a // b for a, b in zip(image, patch, strict=True)]
        if math.prod(grid) + prefix > MAX_KEYS:
            raise ValueError(f"an image must have at most {MAX_KEYS} tokens, has {math.prod(grid) + prefix}")
        sizes = {"image_channels": s["image_channels"], "patch_size": list(patch), "outputs": channels}
        count = math.prod(grid) if positions else 0
        return self.add("embed", "PatchEmbedding", "images", positions=count, prefix_tokens=prefix, **sizes), grid


def _first_token() -> torch.Tensor:
    return torch.zeros((1, 1), dtype=torch.int32, device="cpu")


def _vision_transformer(nodes: _Nodes, s: Mapping[str, Any]) -> None:
    _require_names("shape", s, _VISION_TRANSFORMER, ("qk_norm",))
    flags = s["first_norm"], s.get("qk_norm", False)
    if any(type(flag) is not bool for flag in flags) or s["pool"] not in ("token", "mean", "mean_then_norm"):
        raise ValueError(f"first_norm, qk_norm and pool must be known, are {flags} and {str(s['pool'])[:90]}")
    (channels,), (depth,) = (_numbers(size, s[size]) for size in ("channels", "depth"))
    (prefix,), (outputs,) = (_numbers(size, s[size], 0) for size in ("prefix_tokens", "outputs"))
    if s["pool"] == "token" and not prefix:
        raise ValueError("pool 'token' takes the first of prefix_tokens, and there are none")
    h, grid = nodes.embed(s, channels, True, prefix)
    patches = math.prod(grid)
    if s["first_norm"]:
        h = nodes.norm("norm_pre", h, channels, "int16")
    for number in range(depth):
        h = nodes.block(f"blocks.{number}", h, s, s["softmax_scale"], s["recipe"], qk_norm=flags[1])
    last = "int8" if outputs else "int32"
    if s["pool"] == "token":
        h = nodes.norm("norm", h, channels, last, gather=((1, 1), _first_token), single=True)
    elif s["pool"] == "mean":
        h = nodes.norm("norm", h, channels, "int16")
        h = nodes.add("mean", "Mean", h, tokens=patches, channels=channels, dtype=last, first=prefix)
    else:
        h = nodes.add("mean", "Mean", h, tokens=patches, channels=channels, dtype="int16", first=prefix)
        h = nodes.norm("norm", h, channels, last)
    if outputs:
        nodes.linear("head", channels, outputs, "int32", h)


def _swin_transformer(nodes: _Nodes, s: Mapping[str, Any]) -> None:
    _require_names("shape", s, (*_SHAPE, "stages"))
    if type(s["stages"]) is not list or not s["stages"]:
        raise ValueError(f"stages must be a list, are {str(s['stages'])[:90]}")
    for stage in s["stages"]:
        _require_names("a stage", stage, _STAGE)
    (outputs,) = _numbers("outputs", s["outputs"], 0)
    (channels,) = _numbers("channels", s["stages"][0]["channels"])
    h, grid = nodes.embed(s, channels, False, 0)
    h = nodes.norm("embed_norm", h, channels, "int16")
    for number, stage in enumerate(s["stages"]):
        (wide,) = _numbers("channels", stage["channels"])
        if number:
            if any(side % 2 for side in grid):
                raise ValueError(f"the grid of a stage that is merged must have even sides, has {grid}")
            order = (math.prod(grid) // 4, 4), functools.partial(op.merge_order, (grid[0], grid[1]))
            x = nodes.norm(f"merges.{number - 1}.norm", h, 4 * channels, "int8", gather=order)
            h = nodes.linear(f"merges.{number - 1}.reduction", 4 * channels, wide, "int16", x)
            grid = [side // 2 for side in grid]
        channels = wide
        window = _numbers("window", stage["window"])
        if stage["grid"] != grid or len(window) != 2 or any(a % b for a, b in zip(grid, window, strict=True)):
            raise ValueError(f"grid must be {grid}, a multiple of window, are {str(stage['grid'])[:90]} and {window}")
        _numbers("grid", stage["grid"])
        (heads,), (width,) = (_numbers(size, stage[size]) for size in ("heads", "head_dim"))
        tokens = math.prod(window)
        if type(stage["shifts"]) is not list or not stage["shifts"]:
            raise ValueError(f"shifts must be a list, are {str(stage['shifts'])[:90]}")
        for index, each in enumerate(stage["shifts"]):
            shift = _numbers("a shift", each, 0)
            if len(shift) != 2 or shift[0] >= window[0] or shift[1] >= window[1]:
                raise ValueError(f"a shift must be two numbers below the window's {window}, is {shift}")
            order = (math.prod(grid), 1), functools.partial(op.window_order, (grid[0], grid[1]), window, shift)
            bias = [math.prod(grid) // tokens if any(shift) else 1, heads, tokens, tokens]
            h = nodes.block(f"stages.{number}.{index}", h, stage, width**-0.5, s["recipe"], order, bias, tokens)
    h = nodes.norm("norm", h, channels, "int16")
    last = "int8" if outputs else "int32"
    h = nodes.add("mean", "Mean", h, tokens=math.prod(grid), channels=channels, dtype=last)
    if outputs:
        nodes.linear("head", channels, outputs, "int32", h)


_KINDS = {"VisionTransformer": _vision_transformer, "SwinTransformer": _swin_transformer}


def _second_form(header: Mapping[str, Any], nodes: _Nodes) -> dict[str, Any]:
    """Return a header of version 2 that says what one of version 1 does; fill the nodes in."""
    required = ("version", "kind", "shape", "constants", "output_scale", "units")
    _require_names("its header", header, required, ("arithmetic_version", "quality", "sha256"))
    if type(header["kind"]) is not str or header["kind"] not in _KINDS:
        raise ValueError(f"kind must be one of {', '.join(_KINDS)}, is {str(header['kind'])[:90]}")
    shape, constants = header["shape"], header["constants"]
    _KINDS[header["kind"]](nodes, shape)
    streams = len(shape.get("stages", "1"))
    if type(header["units"]) is not list or len(header["units"]) != streams:
        raise ValueError(f"units must be {streams} numbers, are {str(header['units'])[:90]}")
    if type(constants) is not dict:
        raise ValueError(f"constants must be an object of JSON, are {str(constants)[:90]}")
    new = {old: name for name, old in nodes.old.items()}
    last = nodes.entries[-1]["name"]
    rest = {name: header[name] for name in ("arithmetic_version", "units", "quality") if name in header}
    return {
        "version": 2, "image": [shape["image_channels"], *shape["image_size"]], "recipe": shape["recipe"],
        "nodes": nodes.entries, "outputs": {"output": last}, "scales": {"output": header["output_scale"]},
        "constants": {new.get(name, name): values for name, values in constants.items()}, **rest,
    }  # fmt: skip


def _names(nodes: _Nodes, forms: Mapping[str, Form]) -> dict[str, str]:
    """Return the name of each of a file's tensors in version 2."""
    new = {old: name for name, old in nodes.old.items()}
    found = {}
    for name, (_, shape) in forms.items():
        where, _, own = name.rpartition(".")
        if not where and own in ("position", "prefix"):
            if 0 not in shape:  # an empty one stood for none
                found[name] = f"embed.{own}_words"
        else:
            found[name] = f"{new.get(where, where)}.{own}"
    return found


def _words(x: torch.Tensor) -> torch.Tensor:
    """Return int16 numbers two by two, as a patch embedding has them."""
    flat = x.flatten()
    return torch.cat((flat, flat.new_zeros(len(flat) % 2))).view(torch.int32)


def _words_of(name: str, form: Form, channels: int, tokens: int) -> Form:
    """Return the form of words, of embeddings that are as they must be."""
    if form != (torch.int16, (1, tokens, channels)):
        raise ValueError(f"{name} must be torch.int16 {(1, tokens, channels)}, is {form[0]} {form[1]}")
    return torch.int32, ((tokens * channels + 1) // 2,)


def from_first_form(
    header: Mapping[str, Any], forms: Mapping[str, Form], read: Callable[[], Mapping[str, torch.Tensor]]
) -> IntegerNetwork:
    """Return the network of a header of version 1: it is written as one of version 2, which is then read.

    Args:
        header: parsed.
        forms: (type, shape) of all tensors, by their names.
        read: returns the tensors; called when all forms are as they must be.

    Raises:
        ValueError: the header is not one, or tensors do not fit it.
    """
    from .storage import fill_network, make_network

    nodes = _Nodes(len(forms))
    second = _second_form(header, nodes)
    names = _names(nodes, forms)
    sizes = nodes.entries[0]["sizes"]
    counts = {"position": sizes["positions"], "prefix": sizes["prefix_tokens"]}
    wanted: dict[str, Form] = {name: (torch.int32, shape) for name, (shape, _) in nodes.tables.items()}
    for old, name in names.items():
        form = forms[old]
        wanted[name] = _words_of(old, form, sizes["outputs"], counts[old]) if old in counts else form
    network = make_network(second, wanted)
    tensors = read()
    given = {name: _words(tensors[old]) if old in counts else tensors[old] for old, name in names.items()}
    return fill_network(network, second, given | {name: make() for name, (_, make) in nodes.tables.items()})
