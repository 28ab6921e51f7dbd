"""Nodes of an integer network that compute in floating point, to find out what integers cost: :func:`with_float_parts`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..specification import layers as op
from .conversion import Grid
from .graph import IntegerNetwork
from .modules import Attention, IntegerModule, LayerNorm, Linear, LinearGelu


@dataclasses.dataclass(frozen=True)
class FloatTwin:
    """What a node stands for in floating point.

    Attributes:
        weight, bias: of a linear layer or a normalisation, in the order of the node's channels.
        epsilon: of a normalisation.
        mask: of attention, or None.
    """

    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    epsilon: float = 0.0
    mask: torch.Tensor | None = None


class FloatNode(IntegerModule):
    """A node in floating point. Between two of them values stay floats; elsewhere they lie on the grids of integers.

    Attributes:
        inner: the integer module that it stands for, for its sizes and tables.
    """

    def __init__(self, inner: IntegerModule, twin: FloatTwin, given: Sequence[Grid | None], made: Grid | None) -> None:
        """Make it.

        Args:
            inner: a :class:`.modules.LayerNorm`, :class:`.modules.Linear` or :class:`.modules.Attention`.
            twin: what it stands for.
            given: grids of the inputs; None for floats.
            made: of the output; None for floats.
        """
        super().__init__()
        self.inner = inner
        self.epsilon = twin.epsilon
        self._grids = len(given)
        for name, x in (("weight", twin.weight), ("bias", twin.bias), ("mask", twin.mask)):
            self.register_buffer(name, None if x is None else x.float(), persistent=False)
        for number, grid in enumerate([*given, made]):
            for end in ("step", "middle"):
                x = None if grid is None else getattr(grid, end).float()
                self.register_buffer(f"{end}{number}", x, persistent=False)

    def _compute(self, x: torch.Tensor, more: Sequence[torch.Tensor]) -> torch.Tensor:
        inner: Any = self.inner
        weight: Any = self.weight
        if isinstance(inner, LayerNorm):
            if inner.part is not None:
                first, heads = inner.part
                x = x[..., first : first + heads * weight.numel()].unflatten(-1, (heads, -1))
            if inner.gather is not None:
                x = op.gather_tokens(x, inner.gather)
            x = F.layer_norm(x, weight.shape, weight, self.bias, self.epsilon)  # type: ignore[arg-type]
            return x[:, 0] if inner.single else x
        if isinstance(inner, Linear):
            x = F.linear(x, weight, self.bias)  # type: ignore[arg-type]
            if isinstance(inner, LinearGelu):
                return F.gelu(x)
            if inner.scatter is not None:
                x = op.scatter_tokens(x, inner.scatter)
            return x + more[0] if more else x
        query, key, value = inner.heads_of((x, *more))
        mask: torch.Tensor | None = self.mask  # type: ignore[assignment]
        if mask is not None:
            mask = mask.repeat(len(query) // len(mask), 1, 1, 1)
        out = F.scaled_dot_product_attention(query, key, value, mask, scale=inner.softmax_scale)
        return out.transpose(1, 2).reshape(len(x), -1, inner.heads * inner.head_dim)

    def forward(self, *inputs: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        """Return what the node computes, as integers on its grid where an integer node takes it."""
        floats = []
        for number, x in enumerate(inputs):
            step, middle = getattr(self, f"step{number}"), getattr(self, f"middle{number}")
            floats.append(x if step is None else x.to(torch.float32) * step + middle)
        out = self._compute(floats[0], floats[1:])
        step, middle = getattr(self, f"step{self._grids}"), getattr(self, f"middle{self._grids}")
        if step is None:
            return out
        inner: Any = self.inner
        dtype = torch.int8 if isinstance(inner, Attention) else inner.dtype
        return ((out - middle) / step).round().clamp(*op.LIMITS[dtype]).to(dtype)


def kept_nodes(network: IntegerNetwork, twins: Mapping[str, FloatTwin], names: Sequence[str]) -> list[str]:
    """Return the nodes that names of submodules stand for.

    Raises:
        ValueError: a name stands for none that can be kept in floating point.
    """
    found: list[str] = []
    for name in names:
        under = [node.name for node in network.nodes if node.name == name or node.name.startswith(f"{name}.")]
        kept = [node for node in under if node in twins]
        if not kept:
            known = list(dict.fromkeys(node.rpartition(".")[0] or node for node in twins))
            raise ValueError(f"keep_float must name submodules such as {known[0]!r} or {known[-1]!r}, got {name!r}")
        found += kept
    return list(dict.fromkeys(found))


def with_float_parts(
    network: IntegerNetwork, twins: Mapping[str, FloatTwin], grids: Mapping[str, Grid], kept: Sequence[str]
) -> IntegerNetwork:
    """Return a network in which some nodes compute in floating point; it shares all other parts with the first.

    A normalisation whose output only goes into kept nodes, and the nodes between kept ones, are kept, too: their outputs
    would only be rounded on the way.

    Args:
        network: integer.
        twins: of the nodes that can be kept.
        grids: where the outputs of nodes lie.
        kept: names of nodes.
    """
    users = {node.name: [user.name for user in network.nodes if node.name in user.inputs] for node in network.nodes}
    floats = set(kept)
    for node in reversed(network.nodes):
        behind = users[node.name]
        is_norm = isinstance(network.part(node.name), LayerNorm) and node.name in twins
        if is_norm and behind and floats.issuperset(behind):
            floats.add(node.name)
    modules: dict[str, IntegerModule] = {}
    for node in network.nodes:
        part = network.part(node.name)
        if node.name in floats:
            given = [None if name in floats and floats.issuperset(users[name]) else grids[name] for name in node.inputs]
            only_floats = bool(users[node.name]) and floats.issuperset(users[node.name])
            part = FloatNode(part, twins[node.name], given, None if only_floats else grids[node.name])
        modules[node.name] = part
    made = IntegerNetwork(network.nodes, modules, network.image, network.recipe, network.outputs)
    made.scales, made.units, made.backend = network.scales, network.units, network.backend
    device = next(network.buffers()).device
    return made.to(device).eval()


def float_nodes(network: nn.Module) -> list[str]:
    """Name the nodes of a network that compute in floating point."""
    return [name.removeprefix("parts.") for name, module in network.named_modules() if isinstance(module, FloatNode)]
