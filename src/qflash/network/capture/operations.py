"""What capture finds in a float network: operations, and tensors that are views of their outputs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import fx

from ..matrix import Affine, Matrix

BATCH = 2
"""Images that are traced: enough to see that each is treated alike."""


class UnsupportedError(ValueError):
    """An operation has no integer form here; the message names it, the submodule and the line of source."""


class RefusedError(Exception):
    """An operation has no integer form, for which this is its name; :class:`.tracer.Tracer` adds the place."""


def counted(count: int, first: int = 0) -> torch.Tensor:
    """Return ``count`` whole numbers from ``first`` on, as int64 on the CPU."""
    return torch.arange(first, first + count, dtype=torch.int64, device="cpu")


def nowhere(*shape: int) -> torch.Tensor:
    """Return places where there is only a constant: -1, as int64 on the CPU."""
    return torch.full(shape, -1, dtype=torch.int64, device="cpu")


def on_meta(shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor that has a shape alone."""
    return torch.empty(tuple(shape), dtype=torch.float32, device="meta")


def wide(x: Any) -> torch.Tensor:
    """Return a constant as float64 on the CPU."""
    if isinstance(x, torch.Tensor):
        return x.detach().to("cpu", torch.float64)
    return torch.tensor(x, dtype=torch.float64, device="cpu")


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Tell whether two constants are equal, or both are None."""
    return a is b or (a is not None and b is not None and torch.equal(a, b))


ROWS_OF = "qflash_rows_of"
"""In what is known of a node of a traced graph: the node whose rows it has."""
PLACES = "qflash_places"
"""There, too: of which place of a text each of its rows is, int64, where it has other rows than the node it is made of."""


def call_behind(
    node: fx.Node, name: str, function: Callable[[torch.Tensor], torch.Tensor], of: fx.Node | None = None
) -> fx.Node:
    """Put a call of a function of a node's value, or of the value of an earlier node, behind a node of a traced graph."""
    with node.graph.inserting_after(node):
        made = node.graph.create_node("call_function", function, (node if of is None else of,), {}, name)
    made.meta = node.meta | {ROWS_OF: node if of is None else of}
    return made


@dataclasses.dataclass(eq=False)
class Operation:
    """One computing operation of the float network.

    Attributes:
        kind: ``"images"`` (or ids of tokens), ``"embedding"`` of ids, ``"linear"``, ``"norm"``, an activation of
            :data:`.layers.ACTIVATIONS`, ``"attention"``, ``"add"``, ``"mean"``, ``"product"`` of an activation and a tensor,
            ``"join"``, which puts channels side by side, ``"rotary"``, the sum of two views of one operation whose rows are the
            same and whose channels are not, ``"select"``, the token that stands for each text, or ``"unrotate"``, which takes
            an output out of a rotated stream (:mod:`.rotation`).
        inputs: what it takes. A linear layer and a normalisation take rows x channels; attention takes query, key and value,
            (batch, heads, tokens, channels); a mean takes (images, tokens, channels); a product takes the
            activation first.
        seen: for each input the node of the traced graph whose value it is, for calibration.
        node: of the traced graph, whose value is this operation's output.
        rows, channels: of its output.
        name: of the submodule that computes it.
        matrix: weights of a linear layer, or of what rotates back.
        weight: of a normalisation, float64 (channels,), or None; of an embedding, (vocabulary, channels).
        bias: of both, float64, or None.
        epsilon: of a normalisation.
        centred: of a normalisation: whether the mean is taken out of rows.
        scale: of attention, the factor of the scores.
        head_scale: of attention, float64 (heads,): a factor of the scores of each head beside it, or None.
        mask: of attention, what is added to the scores, float64 (windows of an image or 1, heads or 1, queries, keys), or None.
        is_causal: of attention.
        is_padded: of attention: whether keys that are no tokens take no part.
        token: of what selects a token: its id, or None for the largest.
        query: of attention whose query is a constant, float64 (heads, queries, channels).
        approximate: of GELU, as :func:`torch.nn.functional.gelu` has it.
        slope: of SiLU, which is ``x sigmoid(slope x)``.
        apart: of a linear layer that is two, one on another, the second alone; else None.
    """

    kind: str
    inputs: list[View]
    seen: list[fx.Node]
    node: fx.Node
    rows: int
    channels: int
    name: str
    matrix: Matrix | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    epsilon: float = 0.0
    centred: bool = True
    scale: float = 1.0
    head_scale: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    is_causal: bool = False
    is_padded: bool = False
    token: int | None = None
    query: torch.Tensor | None = None
    approximate: str = "none"
    slope: float = 1.0
    apart: Product | None = None

    @property
    def affine(self) -> Affine:
        """Weights and bias of a linear layer, or of what rotates back."""
        assert self.matrix is not None
        return Affine(self.matrix, self.bias)


class Symbol:
    """Stands for a tensor that the network computes, while the traced graph is interpreted.

    Attributes:
        shape: of the tensor.
        takers: operations of ATen that may take it, or None where they say so themselves.
        called: what it is, for a refusal.
    """

    shape: tuple[int, ...]
    takers: ClassVar[frozenset[Any] | None] = None
    called: ClassVar[str] = "a step on the way to an operation"


@dataclasses.dataclass(frozen=True, eq=False)
class View(Symbol):
    """A tensor whose elements are ``factor * source[index] + term``.

    Attributes:
        source: the operation whose output, (rows, channels), the elements come from.
        shape: of the tensor.
        index: int64, of the tensor's shape: places in the flat output, or -1 where there is only ``term``. None for all
            places in their order.
        factor, term: float64 tensors that broadcast to the shape, or None for 1 and 0.
    """

    source: Operation
    shape: tuple[int, ...]
    index: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    term: torch.Tensor | None = None

    def places(self) -> torch.Tensor:
        """Return :attr:`index`, spelled out."""
        if self.index is not None:
            return self.index
        return counted(math.prod(self.shape)).view(self.shape)

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor], *, in_order: bool = False) -> View:
        """Return the view behind a rearrangement of elements.

        Args:
            move: takes a tensor of this shape.
            in_order: whether it leaves the elements in their order.
        """
        if in_order and self.index is None:
            index, shape = None, tuple(move(on_meta(self.shape)).shape)
        else:
            index = move(self.places())
            shape = tuple(index.shape)
        factor, term = (None if x is None else move(x.expand(self.shape)) for x in (self.factor, self.term))
        return View(self.source, shape, index, factor, term)

    def scaled(self, factor: torch.Tensor) -> View:
        """Return the view times a constant."""
        shape = tuple(torch.broadcast_shapes(self.shape, factor.shape))
        view = self if shape == self.shape else self.moved(lambda x: x.expand(shape))
        term = None if view.term is None else view.term * factor
        return dataclasses.replace(view, factor=factor if view.factor is None else view.factor * factor, term=term)

    def plus(self, term: torch.Tensor) -> View:
        """Return the view plus a constant."""
        shape = tuple(torch.broadcast_shapes(self.shape, term.shape))
        view = self if shape == self.shape else self.moved(lambda x: x.expand(shape))
        return dataclasses.replace(view, term=term if view.term is None else view.term + term)

    def constants_of_rows(self) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
        """Return the factor and the term of every row, (channels,) each or None; None where rows have different ones."""
        width = self.shape[-1]
        found = [None if x is None else x.expand(self.shape).reshape(-1, width) for x in (self.factor, self.term)]
        if any(x is not None and not bool((x == x[:1]).all()) for x in found):
            return None
        factor, term = (None if x is None else x[0] for x in found)
        return factor, term

    def of(self, inner: View) -> View:
        """Return the view with another one in the place of its source, whose output has the elements of ``inner``."""
        places, known = self.places(), self.places() >= 0

        def found(x: torch.Tensor) -> torch.Tensor:
            return x.expand(inner.shape).reshape(-1)[places.clamp(min=0)]

        view = View(inner.source, self.shape, torch.where(known, found(inner.places()), -1))
        if inner.factor is not None:
            view = view.scaled(found(inner.factor))
        if inner.term is not None:
            view = view.plus(torch.where(known, found(inner.term), 0.0))
        if self.factor is not None:
            view = view.scaled(self.factor)
        return view if self.term is None else view.plus(self.term)

    def evaluate(self, output: torch.Tensor) -> torch.Tensor:
        """Return the tensor for any number of images.

        Args:
            output: of the source, (images, elements of an image).
        """
        images = len(output)
        shape = (self.shape[0] // BATCH, *self.shape[1:])
        if self.index is None:
            x = output.reshape(images, *shape)
        else:
            index = self.index[: shape[0]].to(output.device)
            x = torch.where(index < 0, 0, output[:, index.clamp(min=0).flatten()].view(images, *shape))
        for constant, combine in ((self.factor, torch.mul), (self.term, torch.add)):
            if constant is not None:
                x = combine(x, constant.expand(self.shape)[: shape[0]].to(x))
        return x.flatten(0, 1)


@dataclasses.dataclass(frozen=True)
class Product:
    """A linear layer that is not yet an operation: weights times a view, plus a bias.

    Attributes:
        view: (..., inputs).
        seen: the node of the traced graph whose value it is.
        layer: weights and bias.
    """

    view: View
    seen: list[fx.Node]
    layer: Affine


def whole(operation: Operation) -> View:
    """Return an operation's output as (batch, rows of an image, channels)."""
    return View(operation, (BATCH, operation.rows // BATCH, operation.channels))


def are_apart(view: View) -> bool:
    """Tell whether the first half of a view is of the first image, and the second of the second."""
    if view.shape[0] % BATCH or view.source.rows % BATCH:
        return False
    if view.index is None:
        return True
    image = view.index.reshape(BATCH, -1) // (view.source.rows // BATCH * view.source.channels)
    return bool(((image == counted(BATCH)[:, None]) | (view.index.reshape(BATCH, -1) < 0)).all())


def begins_with_batch(view: View) -> bool:
    """Tell whether a view's first dimension is that of images."""
    return view.shape[:1] == (BATCH,) and are_apart(view)


def place_of_rows(operation: Operation, tokens: int) -> torch.Tensor | None:
    """Return of which place of a text each row of an operation is, int64 (rows,), or None where that is not known.

    A normalisation of queries has a row for each head of a token.
    """
    if operation.rows == BATCH * tokens:
        return counted(tokens).repeat(BATCH)
    if operation.kind != "norm":
        return None
    view = operation.inputs[0]
    places, below = view.places().reshape(operation.rows, -1), place_of_rows(view.source, tokens)
    if below is None or int(places.min()) < 0:
        return None
    found = below[places // view.source.channels]
    return found[:, 0] if bool((found == found[:, :1]).all()) else None
