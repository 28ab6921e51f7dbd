"""The network that rules add nodes to, and what they ask of the float model: :class:`Builder`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ...specification.recipe import Recipe
from ..capture.captured import Captured
from ..capture.operations import BATCH, Operation, View, counted, whole
from ..conversion import Grid, Range
from ..float_parts import FloatTwin
from ..graph import IMAGES, Node
from ..modules import First, Mean
from ..operators.select_token import SelectToken
from .rows import refusal

Ranges = dict[fx.Node, Range]
"""What calibration saw, by node of the traced graph."""


@dataclasses.dataclass(eq=False)
class Group:
    """Streams with one unit.

    Attributes:
        seen: nodes of the traced graph whose ranges the unit must hold.
        most: a magnitude that the unit must hold, whatever calibration saw.
        unit: once the ranges are known.
    """

    seen: list[fx.Node] = dataclasses.field(default_factory=list)
    most: float = 0.0
    unit: float = 0.0


@dataclasses.dataclass(eq=False)
class Stream:
    """An int16 tensor (images, tokens, channels) of the integer network.

    Attributes:
        node: its name in the network.
        rows, channels: of an image.
        group: streams that share a unit.
        is_flat: whether it is (images, channels): see :attr:`Builder.flat`.
        term: what all that take the operation's output add to its rows, and the node has added already; or None.
    """

    node: str
    rows: int
    channels: int
    group: Group
    is_flat: bool = False
    term: torch.Tensor | None = None


class Builder:
    """An integer network in the making.

    Attributes:
        captured: the float network.
        recipe: of attention.
        image: (channels, height, width), or (tokens, vocabulary).
        users: see :meth:`.capture.Captured.users`.
        nodes, modules: of the network.
        fillers: fill modules in from ranges, in this order, each with the node that was added before it.
        groups: of streams.
        streams: by operation the residual stream that its output is.
        values: by operation the node whose int8 output a linear layer takes.
        observed: nodes of the traced graph whose ranges are needed, and whether their covariance is.
        mean, deviation: of the image channels, once known.
        grids: where the int8 output of a node lies, once it is filled in.
        scales: units of outputs by node, once known.
        twins: what nodes stand for in floating point.
        references: by node what its output stands for: a float tensor, and the group of a residual stream.
        selected: by node that takes tokens of another one the other.
        flat: nodes whose output is (images, channels), as the mean of an image or one token of it is, and what is made of it.
    """

    def __init__(self, captured: Captured, recipe: Recipe, image: tuple[int, ...]) -> None:
        self.captured, self.recipe, self.image = captured, recipe, image
        self.users = captured.users()
        self.nodes: list[Node] = []
        self.modules: dict[str, Any] = {}
        self.fillers: list[tuple[str, Callable[[Ranges], None]]] = []
        self.groups: list[Group] = []
        self.streams: dict[Operation, Stream] = {}
        self.values: dict[Operation, str] = {}
        self.observed: dict[fx.Node, bool] = {}
        self.mean: Any = ()
        self.deviation: Any = ()
        self.grids: dict[str, Grid] = {}
        self.scales: dict[str, float] = {}
        self.twins: dict[str, FloatTwin] = {}
        self.references: dict[str, tuple[View, Group | None]] = {}
        self.selected: dict[str, str] = {}
        self.flat: set[str] = set()

    # --- what the float network has -----------------------------------------------------------------------------

    def kinds_behind(self, operation: Operation) -> set[str]:
        """Return which kinds of operation take an operation's output; ``"output"`` stands for the network's."""
        kinds = {user.kind for user, _ in self.users[operation]}
        return kinds | {"output" for output in self.captured.outputs if output.view.source is operation}

    def only_kind(self, operation: Operation) -> str | None:
        """Return the kind of the one operation that takes an operation's output, once; None where there are others."""
        return (
            self.kinds_behind(operation).pop() if len(self.users[operation]) == len(self.kinds_behind(operation)) == 1 else None
        )

    def stands_before(self, operation: Operation) -> str:
        """Return the reason for which an operation is refused that stands before others than its pattern has."""
        return f"it stands before {', '.join(sorted(self.kinds_behind(operation))) or 'nothing'}"

    def layer_behind(self, operation: Operation) -> tuple[Operation, fx.Node, slice] | None:
        """Return the linear layer that alone takes an operation's output, perhaps with other tensors beside it.

        Returns:
            The layer, the node of the traced graph with what it takes of the operation, and which of its inputs that is; or
            None where something else takes it, or several do.
        """
        if self.only_kind(operation) not in ("linear", "join"):
            return None
        user, place = self.users[operation][0]
        first, seen = 0, user.seen[place]
        if user.kind == "join" and len(self.users[user]) == 1:
            first = sum(x.shape[-1] for x in user.inputs[:place])
            user, _ = self.users[user][0]
        return (user, seen, slice(first, first + operation.channels)) if user.kind == "linear" else None

    def is_sum(self, operation: Operation) -> bool:
        """Tell whether an operation is a sum of linear layers that a residual connection adds to its stream."""
        is_added = operation.kind == "add" and self.only_kind(operation) == "add"
        return is_added and all(self.is_summand(view.source) for view in operation.inputs)

    def is_summand(self, operation: Operation) -> bool:
        """Tell whether an operation is a linear layer, or a sum of some, which nothing but one sum takes."""
        if operation.kind != "linear":
            return self.is_sum(operation)
        is_added = self.only_kind(operation) == "add" and operation not in self.streams
        return is_added and operation.inputs[0].source.kind != "images"

    def is_branch(self, operation: Operation) -> bool:
        """Tell whether an operation is a normalisation between a linear layer and the sum of a residual connection."""
        if operation.kind != "norm" or self.only_kind(operation) != "add":
            return False
        linear = operation.inputs[0].source
        is_alone = linear.kind == "linear" and len(self.users[linear]) == 1
        return is_alone and linear.inputs[0].source.kind != "images"

    def is_open(self, operation: Operation) -> bool:
        """Tell whether an operation is a normalisation that has no node yet: what takes it chooses where its output lies."""
        return operation.kind == "norm" and operation not in self.streams

    # --- nodes --------------------------------------------------------------------------------------------------

    def watch(self, *nodes: fx.Node) -> None:
        """Have calibration look at nodes of the traced graph."""
        for node in nodes:
            self.observed.setdefault(node, False)

    def fills(self, filler: Callable[[Ranges], None]) -> Callable[[Ranges], None]:
        """Have a function fill modules in once ranges are known; a decorator."""
        self.fillers.append((self.nodes[-1].name if self.nodes else IMAGES, filler))
        return filler

    def add(self, name: str, module: Any, *inputs: str, twin: FloatTwin | None = None, shows: View | None = None) -> str:
        """Add a node; return its name, which no other has, and which is not below another's.

        Args:
            name: that it should have.
            module: of it.
            inputs: names of nodes.
            twin: what it stands for in floating point.
            shows: the float tensor that its output stands for.
        """
        for other in self.modules:
            if name.startswith(f"{other}."):
                name = f"{other}_{name[len(other) + 1 :]}"
        unique, number = name, 1
        while unique in self.modules or any(each.startswith(f"{unique}.") for each in self.modules):
            number += 1
            unique = f"{name}_{number}"
        self.modules[unique] = module
        self.nodes.append(Node(unique, tuple(inputs)))
        if isinstance(module, (Mean, SelectToken)) or getattr(module, "single", False) or inputs[0] in self.flat:
            self.flat.add(unique)
        if twin is not None:
            self.twins[unique] = twin
        if shows is not None:
            self.references[unique] = shows, None
        return unique

    def first(self, node: str, tokens: torch.Tensor, user: Operation) -> str:
        """Add a node that takes the first tokens of another's output."""
        if not torch.equal(tokens, counted(len(tokens))):
            raise refusal(user, "it takes some tokens that are not the first ones")
        name = self.add(f"{node}_first", First(len(tokens)), node)
        self.selected[name] = node
        return name

    def require_one_shape(self, nodes: Sequence[str], user: Operation) -> None:
        """Require nodes whose outputs are all (images, channels), or all (images, tokens, channels).

        Raises:
            UnsupportedError: they are not.
        """
        if len({node in self.flat for node in nodes}) > 1:
            raise refusal(user, "of what it takes one is (batch, channels) of one row, the other (batch, tokens, channels)")

    # --- residual streams ---------------------------------------------------------------------------------------

    def group(self) -> Group:
        """Return a new group of streams."""
        self.groups.append(Group())
        return self.groups[-1]

    def see(self, group: Group, node: fx.Node) -> None:
        """Note that a node's values lie in a group's unit."""
        group.seen.append(node)
        self.watch(node)

    def begin(self, operation: Operation, node: str, group: Group, view: View | None = None) -> Stream:
        """Return the stream that an operation's node makes.

        Args:
            operation: whose output it is.
            node: of the network.
            group: whose unit it has.
            view: what it stands for, if not the operation's output.
        """
        view = whole(operation) if view is None else view
        self.references[node] = view, group
        rows = math.prod(view.shape[:-1]) // BATCH
        self.streams[operation] = Stream(node, rows, view.shape[-1], group, node in self.flat)
        return self.streams[operation]
