"""Parts of an integer network kept in floating point, and what each part costs: :func:`compare_layers`."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from . import operators as op
from .families import read
from .float_network import FloatBlock, FloatNetwork
from .models import IntegerNetwork
from .modules import Block
from .quality import sqnr_db


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


def _pairs(network: IntegerNetwork, plan: FloatNetwork) -> list[tuple[str, Block, FloatBlock, float]]:
    """Return (our name, our block, the float one, unit of the stream) of every block."""
    ours = [(name, module) for name, module in network.named_modules() if isinstance(module, Block)]
    theirs = [(block, unit) for stage, unit in zip(plan.stages, network.units, strict=True) for block in stage.blocks]
    return [(name, module, *each) for (name, module), each in zip(ours, theirs, strict=True)]


def keep_in_float(network: IntegerNetwork, plan: FloatNetwork, model: nn.Module, names: Sequence[str]) -> None:
    """Let parts of a network be computed by those of a float model, of which the network gets copies.

    Raises:
        ValueError: there is no such part.
    """
    known = {
        f"{name}.{kind}": (ours, block, kind, unit)
        for name, ours, block, unit in _pairs(network, plan)
        for kind in ("attention", "mlp")
    }
    for name in names:
        if name not in known:
            raise ValueError(f"keep_float must name parts such as {next(iter(known))!r} or {list(known)[-1]!r}, got {name!r}")
        ours, block, kind, unit = known[name]
        copied = copy.deepcopy(model.get_submodule(block.name))
        setattr(ours, f"float_{kind}", FloatPart(copied, kind, unit, getattr(ours, "grid", None)))


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
    return layer_errors(network, read(model), images, normalised)


@torch.inference_mode()
def layer_errors(
    network: IntegerNetwork, plan: FloatNetwork, images: torch.Tensor, normalised: torch.Tensor
) -> list[LayerError]:
    """Compare as :func:`compare_layers` does, with what was read of a float model."""
    pairs = _pairs(network, plan)
    exact: dict[str, torch.Tensor] = {}
    wanted = {name for _, _, block, _ in pairs for name in (f"{block.norm2.name}:in", f"{block.name}:out")}

    def watch(name: str, x: torch.Tensor) -> None:
        if name in wanted:
            exact[name] = x

    plan.run(normalised.to(torch.promote_types(normalised.dtype, torch.float32)), watch)
    rows: list[LayerError] = []

    def compare(key: str, name: str, out: torch.Tensor, unit: float) -> None:
        ends = (out == op.INT16[0]) | (out == op.INT16[1])
        rows.append(LayerError(key, sqnr_db(exact[name], out.to(torch.float64) * unit), float(ends.to(torch.float64).mean())))

    with ExitStack() as stack:
        for name, ours, block, unit in pairs:

            def middle(
                _: nn.Module, arguments: Any, key: str = f"{name}.attention", want: str = f"{block.norm2.name}:in",
                unit: float = unit,
            ) -> None:  # fmt: skip
                compare(key, want, arguments[0], unit)

            def end(
                _: nn.Module, __: Any, out: torch.Tensor, key: str = f"{name}.mlp", want: str = f"{block.name}:out",
                unit: float = unit,
            ) -> None:  # fmt: skip
                compare(key, want, out, unit)

            if ours.float_mlp is None:
                stack.callback(ours.norm2.register_forward_pre_hook(middle).remove)
            stack.callback(ours.register_forward_hook(end).remove)
        network(images)
    return rows
