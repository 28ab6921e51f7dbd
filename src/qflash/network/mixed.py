"""Parts of an integer network kept in floating point, and what each part costs: :func:`compare_layers`."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from . import operators as op
from .models import IntegerNetwork, SwinTransformer
from .modules import Block


class FloatPart(nn.Module):
    """A float block's attention or MLP between int16 residual streams.

    Attributes:
        block: timm's.
        kind: ``"attention"`` or ``"mlp"``.
        unit: of the stream.
        grid: Swin's rows and columns of tokens.
    """

    def __init__(self, block: Any, kind: str, unit: float, grid: tuple[int, int] | None) -> None:
        super().__init__()
        self.block, self.kind, self.unit, self.grid = block, kind, unit, grid

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Return int16 of int16 (batch, tokens, channels)."""
        block: Any = self.block
        x = h.to(next(block.parameters()).dtype) * self.unit
        if self.kind == "mlp":
            part = block.mlp(block.norm2(x))
            part = block.ls2(part) if hasattr(block, "ls2") else part
        elif self.grid is None:
            part = block.ls1(block.attn(block.norm1(x)))
        else:
            part = block._attn(block.norm1(x.unflatten(1, self.grid))).flatten(1, 2)
        return ((x + part) / self.unit).round().clamp(*op.INT16).to(torch.int16)


def _pairs(network: Any, model: Any) -> list[tuple[str, str, Block, Any, float]]:
    """Return (our name, timm's name, our block, timm's block, unit) of every block."""
    if isinstance(network, SwinTransformer):
        return [
            (f"stages.{i}.{j}", f"layers.{i}.blocks.{j}", ours, block, network.units[i])
            for i, stage in enumerate(network.stages)
            for j, (ours, block) in enumerate(zip(stage, model.layers[i].blocks, strict=True))
        ]
    return [
        (f"blocks.{i}", f"blocks.{i}", ours, block, network.units[0])
        for i, (ours, block) in enumerate(zip(network.blocks, model.blocks, strict=True))
    ]


def keep_in_float(network: IntegerNetwork, model: Any, names: Sequence[str]) -> None:
    """Let parts of a network be computed by those of a float model, of which the network gets copies.

    Raises:
        ValueError: there is no such part.
    """
    known = {
        f"{name}.{kind}": (ours, block, kind, unit)
        for name, _, ours, block, unit in _pairs(network, model)
        for kind in ("attention", "mlp")
    }
    for name in names:
        if name not in known:
            raise ValueError(f"keep_float must name parts such as {next(iter(known))!r} or {list(known)[-1]!r}, got {name!r}")
        ours, block, kind, unit = known[name]
        setattr(ours, f"float_{kind}", FloatPart(copy.deepcopy(block), kind, unit, getattr(ours, "grid", None)))


@dataclasses.dataclass(frozen=True)
class LayerError:
    """How far the residual stream is from the float model's.

    Attributes:
        name: of the part it was taken behind.
        sqnr_db: signal-to-quantisation-noise ratio of the stream, which holds the errors of all parts before.
        saturated: share of its elements at the end of int16.
    """

    name: str
    sqnr_db: float
    saturated: float


def compare_layers(
    network: IntegerNetwork, model: nn.Module, images: torch.Tensor, normalised: torch.Tensor
) -> list[LayerError]:
    """Compare the residual stream behind every part with the float model's.

    Args:
        network: quantised from the model.
        model: the float one.
        images: uint8, for the network.
        normalised: the same as the float model takes them.
    """
    exact: dict[str, torch.Tensor] = {}
    rows: list[LayerError] = []
    pairs = _pairs(network, model)
    with ExitStack() as stack, torch.inference_mode():
        for name, theirs, *_ in pairs:

            def before(_: nn.Module, arguments: Any, key: str = f"{name}.attention") -> None:
                exact[key] = arguments[0]

            def after(_: nn.Module, __: Any, out: torch.Tensor, key: str = f"{name}.mlp") -> None:
                exact[key] = out

            stack.callback(model.get_submodule(f"{theirs}.norm2").register_forward_pre_hook(before).remove)
            stack.callback(model.get_submodule(theirs).register_forward_hook(after).remove)
        model(normalised)

    def compare(key: str, out: torch.Tensor, unit: float) -> None:
        want = exact[key].reshape(out.shape).to(torch.float64)
        noise = float(((out.to(torch.float64) * unit - want) ** 2).sum())
        sqnr = 10 * math.log10(float((want**2).sum()) / noise) if noise else math.inf
        ends = (out == op.INT16[0]) | (out == op.INT16[1])
        rows.append(LayerError(key, sqnr, float(ends.to(torch.float64).mean())))

    with ExitStack() as stack, torch.inference_mode():
        for name, _, ours, _, unit in pairs:

            def middle(_: nn.Module, arguments: Any, key: str = f"{name}.attention", unit: float = unit) -> None:
                compare(key, arguments[0], unit)

            def end(_: nn.Module, __: Any, out: torch.Tensor, key: str = f"{name}.mlp", unit: float = unit) -> None:
                compare(key, out, unit)

            if ours.float_mlp is None:
                stack.callback(ours.norm2.register_forward_pre_hook(middle).remove)
            stack.callback(ours.register_forward_hook(end).remove)
        network(images)
    return rows
