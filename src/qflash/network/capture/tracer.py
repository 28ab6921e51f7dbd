"""Interprets a traced graph with views of operations in the place of tensors: :class:`Tracer`."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree
from torch import fx

from ...specification.layers import ACTIVATIONS
from ..outputs import WRAPPED
from .operations import BATCH, Operation, RefusedError, Symbol, UnsupportedError, View, counted, nowhere, wide

aten = torch.ops.aten
ARGUMENTS = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError)
"""What an operation raises that has arguments which nobody has thought of."""
_SAME = {
    aten.alias, aten.detach, aten.lift_fresh_copy, aten._to_copy, aten.to, aten.type_as, aten.detach_,
    aten._assert_tensor_metadata,
}  # fmt: skip
"""Leave the values as they are."""
_OF_SHAPE = {aten.new_zeros, aten.new_ones, aten.new_full, aten.zeros_like, aten.ones_like, aten.full_like, aten.new_empty}
"""Constants that take their shape from a tensor."""

Handler = Callable[..., Any]
"""Takes the tracer and an operation's arguments; returns what stands for its output, or raises a ``RefusedError``."""


def is_computed(x: Any) -> bool:
    """Tell whether an argument is, or holds, something that the network computes; others are constants."""
    return any(map(is_computed, x)) if isinstance(x, (list, tuple)) else isinstance(x, Symbol)


class Step(Symbol):
    """A step on the way to an activation; where it goes elsewhere, the operation that made it is refused.

    Attributes:
        node: of the traced graph, of that operation.
        what: name of the operation.
    """

    node: fx.Node
    what: str


@dataclasses.dataclass(frozen=True, eq=False)
class Sigmoid(Step):
    """The sigmoid of a tensor, which is SiLU once it is multiplied by what it is of.

    Attributes:
        view: what it is of.
        node: of the traced graph, whose value it is.
    """

    takers = frozenset((aten.mul, aten.mul_, aten.multiply))
    view: View
    node: fx.Node
    what: str = "aten.sigmoid"

    def slope(self, x: View) -> float | None:
        """Return s where this is ``sigmoid(s x)``, s > 0, or None where it is something else."""
        view = self.view
        if view.source is not x.source or view.shape != x.shape or not torch.equal(view.places(), x.places()):
            return None
        if x.factor is not None or x.term is not None or view.term is not None:
            return None
        slopes = [1.0] if view.factor is None else view.factor.unique().tolist()
        return float(slopes[0]) if len(slopes) == 1 and slopes[0] > 0 else None


@dataclasses.dataclass(frozen=True, eq=False)
class Counted(Symbol):
    """Which ids are tokens, and places counted of them: known while texts are filled up behind their tokens.

    Padding's own numbers are not known, and nobody looks at them where they end in an embedding of places.

    Attributes:
        shape: of the tensor.
        values: in texts that have tokens alone.
    """

    takers = frozenset((aten.cumsum, aten.add, aten.add_, aten.mul, aten.mul_, aten.multiply, aten.embedding))
    shape: tuple[int, ...]
    values: torch.Tensor


class Tracer(fx.Interpreter):
    """Interprets a traced graph with symbolic tensors.

    Attributes:
        operations: that were found, in order.
        refused: nodes of the traced graph without an integer form, that were passed over.
        node: of the traced graph, at which it is.
        visible: bool (batch, tokens), which places of the traced texts count as tokens, in all of the first text; None where
            there are no masks.
        filler: see :class:`.captured.Captured`.
    """

    def __init__(
        self, module: fx.GraphModule, handlers: Mapping[Any, Handler], wrapped: bool, refusals: list[str] | None,
        visible: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Begin.

        Args:
            module: traced.
            handlers: by operation of ATen.
            wrapped: whether the model is in a :class:`.outputs.Selected`.
            refusals: see :func:`.capture.capture`.
            visible: see there.
        """
        super().__init__(module, garbage_collect_values=False)
        self.extra_traceback = False  # messages name the place themselves
        self.handlers, self.wrapped, self.refusals, self.visible = handlers, wrapped, refusals, visible
        self.operations: list[Operation] = []
        self.refused: list[fx.Node] = []
        self.filler: int | None = None
        self.node: fx.Node

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        try:
            return super().run_node(n)
        except ARGUMENTS as error:
            if self.refusals is None or n.op == "output":
                raise
            known = isinstance(error, UnsupportedError)
            found = error if known else self.refusal(f"{n.target} ({type(error).__name__}: {error})")
            views = torch.utils._pytree.tree_leaves([self.env.get(x) for x in n.all_input_nodes])
            # of what follows an operation that was refused nothing is known
            if not any(isinstance(x, View) and x.source.kind == "unknown" for x in views):
                self.refusals.append(str(found))
                self.refused.append(self.node)
        return torch.utils._pytree.tree_map_only(torch.Tensor, self._unknown, n.meta["val"])

    def _unknown(self, like: torch.Tensor) -> View:
        shape = [BATCH if isinstance(size, torch.SymInt) else size for size in like.shape]
        return dataclasses.replace(self.made("unknown", (), (), shape or (1,)), shape=tuple(shape))

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        if str(target).endswith("_guards_fn"):
            return None
        raise self.refusal(f"submodule {target}")

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        packet = getattr(target, "overloadpacket", target)
        if packet is aten.sym_size and not isinstance(args[0], torch.Tensor):
            return tuple(args[0].shape)[args[1]]
        if not is_computed(args) and not is_computed(tuple(kwargs.values())):
            # dropout in eval mode draws none
            if packet not in self.handlers and torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
                raise self.refusal(f"{packet}, which draws random numbers,")
            return super().call_function(target, args, kwargs)
        if target is operator.getitem:
            return args[0][args[1]]
        if packet in _SAME:
            return args[0]
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        if any(isinstance(x, Counted) for x in leaves):
            return self._count(target, packet, args, kwargs)
        self.refuse_steps(*leaves, but_for=packet)
        if isinstance(args[0], Symbol) and args[0].takers is not None and packet not in args[0].takers:
            raise self.refusal(f"{packet} of the place of a token")
        if packet in _OF_SHAPE:
            like = torch.empty(args[0].shape, dtype=self.node.meta["val"].dtype, device="cpu")
            kwargs = {name: x for name, x in kwargs.items() if name not in ("device", "pin_memory")}
            return target(like, *args[1:], **kwargs)
        if packet not in self.handlers:
            raise self.refusal(str(packet))
        try:
            return self.handlers[packet](self, *args, **kwargs)
        except RefusedError as refused:
            raise self.refusal(str(refused)) from None

    def _count(self, target: Any, packet: Any, args: Any, kwargs: Any) -> Any:
        """Compute what only counts places, or what is looked up by these, a constant.

        A table of equal numbers, as of types of tokens, gives the same wherever it is looked up.
        """
        given = torch.utils._pytree.tree_map_only(Counted, lambda x: x.values, (args, kwargs))
        others = torch.utils._pytree.tree_leaves(given)
        equal = packet is aten.gather and isinstance(args[0], torch.Tensor) and bool((args[0] == args[0].flatten()[0]).all())
        if not (equal or packet in Counted.takers) or any(isinstance(x, Symbol) for x in others):
            raise self.refusal(f"{packet} of which ids are tokens (read that from an attention_mask: ids only count places)")
        made = super().call_function(target, *given)
        return made if equal or packet is aten.embedding else Counted(tuple(made.shape), made)

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        if any(isinstance(x, Counted) for x in args[0]):
            raise self.refusal("an output that says which ids are tokens")
        self.refuse_steps(*args[0])
        return super().output(target, args, kwargs)

    def refuse_steps(self, *values: Any, but_for: Any = None) -> None:
        """Refuse steps on the way to an activation among values, but for those that an operation of ATen may take."""
        for x in values:
            if isinstance(x, Step) and but_for not in (x.takers or ()):
                self.node = x.node
                raise self.refusal(x.what)

    def refusal(self, what: str) -> UnsupportedError:
        """Return the error that names the current node."""
        line = ""
        if trace := self.node.meta.get("stack_trace"):
            frames = [text.strip() for text in trace.strip().splitlines() if text.strip()]
            line = f" ({' '.join(frames[-2:])})"
        return UnsupportedError(f"{what} in {self.owner() or 'the model'}{line} has no integer form")

    def owner(self) -> str:
        """Return the name of the submodule that the current node belongs to."""
        stack = self.node.meta.get("nn_module_stack") or {}
        names = [path for path, _ in stack.values()]
        name = str(names[-1]) if names else ""
        return name.removeprefix(WRAPPED).removeprefix(".") if self.wrapped else name

    def made(self, kind: str, inputs: Sequence[View], seen: Sequence[fx.Node], shape: Sequence[int], **constants: Any) -> View:
        """Add an operation whose output has a shape, and return its output."""
        channels, rows = shape[-1], math.prod(shape[:-1])
        order = None
        if kind in ("linear", "norm", "add", "product", *ACTIVATIONS):
            order = image_order(inputs[0])
            if order is None and inputs[0].shape[0] % BATCH:
                # one token before the batch: in order, but not batch first
                order = counted(rows)
        if order is not None:
            # rows of one image after the other, whichever way the model lays batches out
            inputs = [x.moved(lambda y: y.reshape(rows, -1)[order]) for x in inputs]
        self.operations.append(Operation(kind, list(inputs), list(seen), self.node, rows, channels, self.owner(), **constants))
        view = View(self.operations[-1], tuple(shape))
        if order is None:
            return view
        return view.moved(lambda y: y.reshape(rows, channels)[order.argsort()].reshape(tuple(shape)))

    def seen(self, *places: int) -> list[fx.Node]:
        """Return the nodes behind arguments of the current node."""
        return [x for x in (self.node.args[place] for place in places) if isinstance(x, fx.Node)]


def image_order(view: View) -> torch.Tensor | None:
    """Return an order of a view's rows (..., channels) that has one image after the other, or None where they lie so."""
    if view.index is None:
        return None
    places = view.index.reshape(-1, view.shape[-1])[:, 0]
    image = places // (view.source.rows * view.source.channels // BATCH)
    known = places >= 0
    if bool((image[known].diff() >= 0).all()):
        return None
    if not bool(known.all()):
        # constants, as a class token, are of the images whose turn it is
        image, found = counted(len(image)) % BATCH, image
        if not torch.equal(image[known], found[known]):
            return None
    return image.argsort(stable=True)


def constant_view(source: Operation, x: torch.Tensor) -> View:
    """Return a constant as a view of an operation's output."""
    return View(source, tuple(x.shape), nowhere(*x.shape), None, wide(x))
