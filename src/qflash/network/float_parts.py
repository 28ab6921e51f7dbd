"""Nodes of an integer network that compute in floating point, to find out what integers cost: :func:`with_float_parts`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..specification import layers as op
from . import activations
from .capture.captured import rms_norm
from .conversion import Grid
from .graph import IMAGES, IntegerNetwork
from .matrix import Matrix
from .modules import (
    Attention,
    IntegerModule,
    LayerNorm,
    Linear,
    LinearActivation,
    Mean,
    PatchEmbedding,
    require_lists,
    shapes_only,
)
from .operators import OPERATORS
from .operators.gated import Gated
from .operators.narrow import Narrow
from .operators.rotary import Rotary


@dataclasses.dataclass(frozen=True)
class FloatTwin:
    """What a node stands for in floating point.

    Attributes:
        weight, bias: of a linear layer or a normalisation, in the order of the node's channels.
        epsilon: of a normalisation.
        slope: of an activation f, which is ``f(slope x) / slope``.
        mask, query: of attention; the second where it is a constant.
        head_scale: of attention, (heads,): a factor of the scores of each head, beside that of all.
        position, prefix: of a patch embedding, (tokens, channels), whose weights take pixels from 0 to 255.
        cos, sin: of rotary positions, (heads or 1, tokens, pairs).
    """

    weight: Matrix | torch.Tensor | None = None
    bias: torch.Tensor | None = None
    epsilon: float = 0.0
    slope: float = 1.0
    mask: torch.Tensor | None = None
    query: torch.Tensor | None = None
    head_scale: torch.Tensor | None = None
    position: torch.Tensor | None = None
    prefix: torch.Tensor | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None


KEPT = (
    "PatchEmbedding",
    "LayerNorm",
    "Linear",
    "WideLinear",
    "LinearGelu",
    "LinearSilu",
    "LinearRelu",
    "Attention",
    "Mean",
    "Gated",
    "Rotary",
    "RmsNorm",
    "Narrow",
)
"""Operators that can be kept in floating point; others move values."""
_TABLES = ("gather", "scatter", "query", "position", "prefix")


class FloatNode(IntegerModule):
    """A node in floating point. Between two of them values stay floats; elsewhere they lie on the grids of integers.

    Attributes:
        inner: an integer module of the operator that it stands for, without numbers.
        weight, bias: float32, of a linear layer or a normalisation, in the order of the node's channels.
        mask: float32 (1 or windows, heads, queries, keys), of attention, or None.
        query, position, prefix: float32, as the integer module has them.
        cos, sin: float32, of rotary positions.
        head_scale: float32 (heads,), of attention, or None.
        gather, scatter: int32, as the integer module has them.
        step0, middle0, step1, ...: float32, where each input lies, and last the output; None for floats.
    """

    weight: Any
    bias: Any
    mask: torch.Tensor | None
    head_scale: torch.Tensor | None
    query: torch.Tensor | None
    position: torch.Tensor | None
    prefix: torch.Tensor | None
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    gather: torch.Tensor | None
    scatter: torch.Tensor | None

    def __init__(
        self, operator: str, sizes: dict[str, Any], given: Sequence[Sequence[int] | None], made: Sequence[int] | None,
        has_bias: bool = False, mask: Sequence[int] | None = None, epsilon: float = 0.0,
        slope: float = 1.0, head_scale: bool = False,
    ) -> None:  # fmt: skip
        """Make it empty.

        Args:
            operator, sizes: of the integer module: one of :data:`KEPT`, and what it is made with.
            given: shapes of the inputs' grids; None for floats.
            made: of the output's.
            has_bias: whether a linear layer has a bias.
            mask: shape of :attr:`mask`.
            epsilon: of a normalisation.
            slope: of an activation.
            head_scale: whether the heads of attention have a factor each.
        """
        if operator not in KEPT or type(sizes) is not dict:
            raise ValueError(f"operator must be one of {', '.join(KEPT)} with its sizes, got {operator!r} and {sizes!r}")
        if not isinstance(given, (list, tuple)) or not 0 < len(given) <= 4 or {type(has_bias), type(head_scale)} != {bool}:
            raise ValueError(
                f"given must be a list of 1 to 4 shapes, has_bias and head_scale True or False, got {given!r}, {has_bias!r}, "
                f"{head_scale!r}"
            )
        if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float)) or not 0 <= epsilon < math.inf:
            raise ValueError(f"epsilon must be at least 0, got {epsilon!r}")
        if isinstance(slope, bool) or not isinstance(slope, (int, float)) or not 0 < slope < math.inf:
            raise ValueError(f"slope must be above 0, got {slope!r}")
        shapes = [None if x is None else list(x) for x in (*given, made)]
        super().__init__(
            operator=operator, sizes=sizes, given=shapes[:-1], made=shapes[-1], has_bias=has_bias,
            mask=mask and list(mask), epsilon=float(epsilon), slope=float(slope),
            **({"head_scale": True} if head_scale else {}),
        )  # fmt: skip
        with shapes_only():
            # in a tuple, since its tensors are no part of this module's state
            self._inner: tuple[Any] = (OPERATORS[operator](**sizes),)
        self.epsilon, self.slope, self._grids = float(epsilon), float(slope), len(given)
        require_lists(4, mask=mask)
        own = self.inner
        weight = own.weight.shape if isinstance(own, Linear) else own.gain.shape if isinstance(own, LayerNorm) else None
        self._buffer("weight", weight, torch.float32)
        bias = weight[:1] if weight is not None and (has_bias or isinstance(own, LayerNorm)) else None
        self._buffer("bias", bias, torch.float32)
        self._buffer("mask", tuple(mask) if mask else None, torch.float32)
        has_heads = head_scale and isinstance(own, Attention)
        self._buffer("head_scale", (own.heads,) if has_heads else None, torch.float32)
        for name in _TABLES:
            table = getattr(own, name, None)
            dtype = torch.int32 if name in ("gather", "scatter") else torch.float32
            self._buffer(name, None if table is None else tuple(table.shape), dtype)
        for name in ("cos", "sin"):
            self._buffer(name, tuple(own.turns.shape) if isinstance(own, Rotary) else None, torch.float32)
        for number, shape in enumerate(shapes):
            if shape is not None and len(shape) > 1:
                raise ValueError(f"grids must be a number or one of each channel, got the shape {shape}")
            if shape:
                require_lists(1, grids=shape)
            for end in ("step", "middle"):
                self._buffer(f"{end}{number}", None if shape is None else tuple(shape), torch.float32)

    @classmethod
    def of(cls, inner: IntegerModule, twin: FloatTwin, given: Sequence[Grid | None], made: Grid | None) -> FloatNode:
        """Return the node that stands for an integer module.

        Args:
            inner: of :data:`KEPT`.
            twin: what it stands for.
            given: grids of the inputs; None for floats.
            made: of the output; None for floats.
        """
        shapes = [None if grid is None else list(grid.step.shape) for grid in (*given, made)]
        mask = None if twin.mask is None else list(twin.mask.shape)
        node = cls(
            type(inner).__name__, inner.sizes, shapes[:-1], shapes[-1], twin.bias is not None and isinstance(inner, Linear),
            mask, twin.epsilon, twin.slope, twin.head_scale is not None,
        )  # fmt: skip
        values = {
            field.name: getattr(twin, field.name)
            for field in dataclasses.fields(twin)
            if field.name not in ("epsilon", "slope")
        }
        values |= {name: getattr(inner, name, None) for name in ("gather", "scatter")}
        for number, grid in enumerate((*given, made)):
            if grid is not None:
                values |= {f"step{number}": grid.step, f"middle{number}": grid.middle}
        for name, x in values.items():
            if x is not None:
                getattr(node, name).copy_(x.make() if isinstance(x, Matrix) else x)
        return node

    @property
    def inner(self) -> Any:
        """The integer module that this one stands for, on the meta device."""
        return self._inner[0]

    def grid(self, number: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return step and middle of an input, or behind all of them of the output; None for floats."""
        step, middle = getattr(self, f"step{number}"), getattr(self, f"middle{number}")
        return None if step is None else (step, middle)

    @property
    def dtype(self) -> torch.dtype:
        """Of the output where an integer node takes it."""
        found: torch.dtype = torch.int8 if isinstance(self.inner, Attention) else self.inner.dtype
        return found

    def check_values(self) -> None:
        for name, x in self.tensors().items():
            if not x.is_floating_point():
                continue
            if name != "mask" and not bool(x.isfinite().all()):
                raise ValueError(f"{name} must be finite")
            if name.startswith("step") and not bool((x > 0).all()):
                raise ValueError(f"{name} must be positive")
            if name == "mask" and not bool((x < math.inf).all()):
                raise ValueError("mask must be numbers or minus infinity")

    def _compute(self, x: torch.Tensor, more: Sequence[torch.Tensor]) -> torch.Tensor:
        inner, weight = self.inner, self.weight
        if isinstance(inner, Narrow):
            return x if self.gather is None else op.gather_tokens(x, self.gather)
        if isinstance(inner, Mean):
            return x[:, inner.first : inner.first + inner.tokens].mean(dim=1)
        if isinstance(inner, PatchEmbedding):
            high, wide = inner.patch_size
            x = F.conv2d(x, weight.unflatten(1, (-1, high, wide)), self.bias, (high, wide)).flatten(2).mT
            x = x if self.position is None else x + self.position
            return x if self.prefix is None else torch.cat((self.prefix.expand(x.shape[0], -1, -1), x), dim=1)
        if isinstance(inner, LayerNorm):
            if inner.part is not None:
                first, heads = inner.part
                x = x[..., first : first + heads * weight.numel()].unflatten(-1, (heads, -1))
            if self.gather is not None:
                x = op.gather_tokens(x, self.gather)
            norm = F.layer_norm if inner.centred else rms_norm
            x = norm(x, weight.shape, weight, self.bias, self.epsilon)
            x = x[:, 0] if inner.single else x
            return x + more[0] if more else x
        if isinstance(inner, Linear):
            x = F.linear(x, weight, self.bias)
            if isinstance(inner, LinearActivation):
                return activations.floating(inner.activation, self.slope, x)
            if self.scatter is not None:
                x = op.scatter_tokens(x, self.scatter)
            return x + more[0] if more else x
        if isinstance(inner, Gated):
            gate, value = x.chunk(2, dim=-1)
            return activations.floating(inner.activation, self.slope, gate) * value
        if isinstance(inner, Rotary):
            assert self.cos is not None and self.sin is not None
            return inner.turned(x, self.cos, self.sin)
        ids = None
        if inner.padded:
            *more, ids = more
        query, key, value = inner.heads_of((x, *more), self.query)
        if self.head_scale is not None:
            query = query * self.head_scale[:, None, None]
        mask = self.mask
        if mask is not None:
            mask = mask.repeat(query.shape[0] // mask.shape[0], 1, 1, 1)
        visible, is_causal = inner.mask_of(ids, query.shape[2], biased=False)
        if visible is not None:
            mask = visible if mask is None else mask.masked_fill(~visible, -math.inf)
        out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=inner.softmax_scale)
        windows = x.shape[1] // inner.tokens if inner.tokens else 1
        return out.transpose(1, 2).reshape(x.shape[0], windows * out.shape[2], inner.heads * inner.head_dim)

    def forward(self, *inputs: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        """Return what the node computes, as integers on its grid where an integer node takes it."""
        floats = []
        for number, x in enumerate(inputs):
            grid = self.grid(number)
            floats.append(x if grid is None else x.to(torch.float32) * grid[0] + grid[1])
        out = self._compute(floats[0], floats[1:])
        if (grid := self.grid(self._grids)) is None:
            return out
        step, middle = grid
        return ((out - middle) / step).round().clamp(*op.LIMITS[self.dtype]).to(self.dtype)


def kept_nodes(network: IntegerNetwork, twins: Mapping[str, FloatTwin], names: Sequence[str]) -> list[str]:
    """Return the nodes that names of submodules stand for.

    Raises:
        TypeError: it is one name and no list.
        ValueError: a name stands for none that can be kept in floating point.
    """
    if isinstance(names, str):
        raise TypeError(f"keep_float must be a list of names, got {names!r}")
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

    A normalisation, or what narrows a stream, whose output only goes into kept nodes, and the nodes between kept ones, are
    kept, too: their outputs would only be rounded on the way.

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
        is_norm = isinstance(network.part(node.name), (LayerNorm, Narrow)) and node.name in twins
        if is_norm and behind and floats.issuperset(behind):
            floats.add(node.name)
    modules: dict[str, IntegerModule] = {}
    for node in network.nodes:
        part = network.part(node.name)
        if node.name in floats:
            ids = len(node.inputs) > 1
            given = [
                # ids beside another input are no numbers on a grid
                None if (name in floats and floats.issuperset(users[name])) or (ids and name == IMAGES) else grids[name]
                for name in node.inputs
            ]
            only_floats = bool(users[node.name]) and floats.issuperset(users[node.name])
            part = FloatNode.of(part, twins[node.name], given, None if only_floats else grids[node.name])
        modules[node.name] = part
    made = IntegerNetwork(network.nodes, modules, network.image, network.recipe, network.outputs)
    made.scales, made.units, made.backend = network.scales, network.units, network.backend
    device = next(network.buffers()).device
    return made.to(device).eval()


def float_nodes(network: nn.Module) -> list[str]:
    """Name the nodes of a network that compute in floating point."""
    named = network.named_modules()
    return [name.removeprefix("parts.") for name, x in named if isinstance(x, FloatNode) and name.startswith("parts.")]
