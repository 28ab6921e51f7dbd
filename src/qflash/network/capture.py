"""From any float module to a list of its computing operations: :func:`capture`.

``torch.export`` traces the module. Its graph is then interpreted with symbolic tensors: each is a rearrangement of the output
of one operation, times a constant, plus a constant (:class:`View`). So reshapes, transposes, window partitions, rolls, class
tokens, position embeddings, layer scale and dropout are no operations: they are the way from one operation to the next,
however a model spells them. What only depends on constants is computed once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.utils._pytree
from torch import fx, nn

from ..specification.layers import ACTIVATIONS
from ..specification.texts import is_token, place_of
from ..torch_internals import tracing_alone
from .matrix import Matrix
from .operators.tokens import arrange
from .outputs import WRAPPED, OutputsOf, Selected, copy_of, select_outputs
from .spelled_norms import RowSize, Squares

BATCH = 2
"""Images that are traced: enough to see that each is treated alike."""
aten = torch.ops.aten


ARGUMENTS = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError)
"""What an operation raises that has arguments which nobody has thought of."""


class UnsupportedError(ValueError):
    """An operation has no integer form here; the message names it, the submodule and the line of source."""


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


@dataclasses.dataclass(frozen=True, eq=False)
class View:
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
            index, shape = None, tuple(move(_on_meta(self.shape)).shape)
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
class Scores:
    """Scores of attention on their way to its output: ``factor * (query @ key) + term``, or their softmax.

    Attributes:
        query, key: (batch, heads, tokens, channels).
        shape: of this tensor; the order of elements is that of (batch, heads, queries, keys).
        factor: a number.
        term: float64 that broadcasts to the shape, or None.
        weights: whether softmax has been taken.
        head_scale: float64 (heads,), which the product is multiplied by, too, or None.
    """

    query: View
    key: View
    shape: tuple[int, ...]
    factor: float = 1.0
    term: torch.Tensor | None = None
    weights: bool = False
    head_scale: torch.Tensor | None = None

    def reshaped(self, shape: Sequence[int]) -> Scores:
        """Return the same elements in another shape."""
        term = None if self.term is None else self.term.expand(self.shape).reshape(tuple(shape))
        return dataclasses.replace(self, shape=tuple(shape), term=term)

    def plus(self, term: torch.Tensor) -> Scores:
        """Return the scores plus a constant."""
        return dataclasses.replace(self, term=term if self.term is None else self.term + term)


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """The place of a token in each text, or on the way to it: whether ids are those of a token.

    Attributes:
        shape: of the tensor.
        token: id of the token; None for the largest.
        found: whether it is the place.
    """

    shape: tuple[int, ...]
    token: int | None
    found: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Sigmoid:
    """The sigmoid of a tensor, which is SiLU once it is multiplied by what it is of.

    Attributes:
        view: what it is of.
        node: of the traced graph, whose value it is.
    """

    view: View
    node: fx.Node

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
class Stacked:
    """Tensors of different operations along a new dimension; only their sum can follow.

    Attributes:
        views: of one shape.
        nodes: of the traced graph, whose values they are.
        dim: the new dimension.
    """

    views: list[View]
    nodes: list[fx.Node]
    dim: int


@dataclasses.dataclass(frozen=True)
class Product:
    """A linear layer that is not yet an operation: ``view @ matrix.T + bias``.

    Attributes:
        view: (..., inputs).
        seen: the node of the traced graph whose value it is.
        matrix: (outputs, inputs).
        bias: float64 (outputs,) or None.
    """

    view: View
    seen: list[fx.Node]
    matrix: Matrix
    bias: torch.Tensor | None = None


def _product_of(x: View) -> Product | None:
    """Return a view of a linear layer's output as a linear layer of its own, or None where it is something else."""
    layer, channels = x.source, x.shape[-1]
    if layer.kind != "linear" or layer.matrix is None or channels != layer.channels:
        return None
    places = x.places().reshape(-1, channels)
    rows = places[:, 0] // channels
    constants = [None if each is None else each.expand(x.shape).reshape(-1, channels) for each in (x.factor, x.term)]
    if not torch.equal(places, rows[:, None] * channels + counted(channels)) or int(rows.min()) < 0:
        return None
    if any(each is not None and not bool((each == each[:1]).all()) for each in constants):
        return None
    view, matrix, bias = layer.inputs[0], layer.matrix, layer.bias
    view = view.moved(lambda y: y.reshape(layer.rows, -1)[rows].reshape(*x.shape[:-1], -1))
    factor, term = constants
    if factor is not None:
        matrix, bias = matrix.scaled(factor[0]), None if bias is None else bias * factor[0]
    if term is not None:
        bias = term[0] if bias is None else bias + term[0]
    return Product(view, layer.seen, matrix, bias)


def _sum_of_linear(a: View, b: View) -> Product | None:
    """Return the linear layer that the sum of two with the same input is, or None where it is something else."""
    if not a.source.kind == b.source.kind == "linear" or a.source.inputs[0].source is not b.source.inputs[0].source:
        return None
    one, other = _product_of(a), _product_of(b)
    if one is None or other is None or not torch.equal(one.view.places(), other.view.places()):
        return None
    for first, second in ((one.view.factor, other.view.factor), (one.view.term, other.view.term)):
        if (first is None) != (second is None) or (first is not None and second is not None and not torch.equal(first, second)):
            return None
    biases = [each.bias for each in (one, other) if each.bias is not None]
    return Product(one.view, one.seen, one.matrix.plus(other.matrix), sum(biases) if biases else None)  # type: ignore[arg-type]


def _mixes_channels(a: View, b: View) -> bool:
    """Tell whether the sum of two views mixes channels of the same rows of one linear layer or normalisation."""
    if a.source is not b.source or a.source.kind not in ("linear", "norm") or a.term is not None or b.term is not None:
        return False
    first, second, channels = a.places(), b.places(), a.source.channels
    if min(int(first.min()), int(second.min())) < 0 or torch.equal(first, second):
        return False
    return torch.equal(first // channels, second // channels)


def _base_of(x: View) -> Operation:
    """Return what a view is of, before channels were mixed."""
    return x.source.inputs[0].source if x.source.kind == "rotary" else x.source


def _two_terms(x: View) -> tuple[View, View]:
    """Return the two views whose sum a view is: of what mixes channels, or itself and zeros."""
    if x.source.kind == "rotary":
        return x.of(x.source.inputs[0]), dataclasses.replace(x, term=None).of(x.source.inputs[1])
    return x, View(x.source, x.shape, nowhere(*x.shape))


def _side_by_side(parts: Sequence[View], dim: int) -> View:
    """Return views of one operation joined to one."""
    index = torch.cat([x.places() for x in parts], dim)
    terms = factors = None
    if any(x.term is not None for x in parts):
        terms = torch.cat([(wide(0.0) if x.term is None else x.term).expand(x.shape) for x in parts], dim)
    if any(x.factor is not None for x in parts):
        factors = torch.cat([(wide(1.0) if x.factor is None else x.factor).expand(x.shape) for x in parts], dim)
    return View(parts[0].source, tuple(index.shape), index, factors, terms)


_IN_ORDER = {
    aten.view, aten.reshape, aten.flatten, aten.unflatten, aten.unsqueeze, aten.squeeze, aten.contiguous, aten.clone,
    aten._unsafe_view,
}  # fmt: skip
"""Rearrangements that leave elements in their order."""
_OF_ANY_STRIDES = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten.view_as.default: aten.reshape_as.default,
}
"""Rearrangements that need certain strides, and those that do the same without."""
_MOVES = {
    aten.transpose, aten.permute, aten.t, aten.expand, aten.select, aten.slice, aten.unbind, aten.split, aten.chunk,
    aten.split_with_sizes, aten.roll, aten.index, aten.index_select, aten.flip, aten.repeat, aten.narrow, aten.movedim,
    aten.swapaxes, aten.numpy_T, aten.unfold, aten.squeeze, aten.expand_as, aten.view_as, aten.diagonal, aten.tile,
    aten.repeat_interleave, aten.moveaxis, aten.tensor_split, aten.mT,
}  # fmt: skip
"""Other rearrangements of one tensor."""
_SAME = {
    aten.alias,
    aten.detach,
    aten.lift_fresh_copy,
    aten._to_copy,
    aten.to,
    aten.type_as,
    aten.detach_,
    aten._assert_tensor_metadata,
}
"""Leave the values as they are."""


_OF_SHAPE = {aten.new_zeros, aten.new_ones, aten.new_full, aten.zeros_like, aten.ones_like, aten.full_like, aten.new_empty}
"""Constants that take their shape from a tensor."""


def _has_view(x: Any) -> bool:
    if isinstance(x, (list, tuple)):
        return any(_has_view(each) for each in x)
    return isinstance(x, (View, Scores, Sigmoid, Squares, RowSize, Stacked, Place))


def _shape_of(x: Any) -> tuple[int, ...]:
    return tuple(x.shape)


def counted(count: int, first: int = 0) -> torch.Tensor:
    """Return ``count`` whole numbers from ``first`` on, as int64 on the CPU."""
    return torch.arange(first, first + count, dtype=torch.int64, device="cpu")


ROWS_OF = "qflash_rows_of"
"""In what is known of a node of a traced graph: the node whose rows it has."""


def call_behind(
    node: fx.Node, name: str, function: Callable[[torch.Tensor], torch.Tensor], of: fx.Node | None = None
) -> fx.Node:
    """Put a call of a function of a node's value, or of the value of an earlier node, behind a node of a traced graph."""
    with node.graph.inserting_after(node):
        made = node.graph.create_node("call_function", function, (node if of is None else of,), {}, name)
    made.meta = node.meta | {ROWS_OF: node if of is None else of}
    return made


def nowhere(*shape: int) -> torch.Tensor:
    """Return places where there is only a constant: -1, as int64 on the CPU."""
    return torch.full(shape, -1, dtype=torch.int64, device="cpu")


def _on_meta(shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor that has a shape alone."""
    return torch.empty(tuple(shape), dtype=torch.float32, device="meta")


def wide(x: Any) -> torch.Tensor:
    """Return a constant as float64 on the CPU."""
    if isinstance(x, torch.Tensor):
        return x.detach().to("cpu", torch.float64)
    return torch.tensor(x, dtype=torch.float64, device="cpu")


class _Tracer(fx.Interpreter):
    """Interprets a traced graph with symbolic tensors."""

    def __init__(
        self, module: fx.GraphModule, wrapped: bool, refusals: list[str] | None, visible: torch.Tensor | None = None
    ) -> None:
        """Begin.

        Args:
            module: traced.
            wrapped: whether the model is in a :class:`.outputs.Selected`.
            refusals: see :func:`capture`.
            visible: bool (batch, tokens), which places of the traced texts count as tokens, in all of the first text; None
                where there are no masks.
        """
        super().__init__(module, garbage_collect_values=False)
        self.wrapped, self.refusals, self.visible = wrapped, refusals, visible
        self.operations: list[Operation] = []
        self.node: fx.Node
        self.handlers: dict[Any, Callable[..., Any]] = {
            aten.linear: self.linear, aten.conv2d: self.convolution, aten.convolution: self.convolution,
            aten.addmm: self.addmm, aten.matmul: self.matmul, aten.mm: self.matmul, aten.bmm: self.matmul,
            aten.layer_norm: self.layer_norm, aten.gelu: self.gelu, aten.add: self.add, aten.add_: self.add, aten.sub: self.sub,
            aten.mul: self.mul, aten.mul_: self.mul, aten.div: self.div, aten.neg: self.neg, aten.softmax: self.softmax,
            aten._softmax: self.softmax, aten.scaled_dot_product_attention: self.attention, aten.cat: self.cat,
            aten.mean: self.mean, aten.dropout: self.dropout, aten.pad: self.pad, aten.constant_pad_nd: self.pad,
            aten.adaptive_avg_pool1d: self.pool_all, aten.adaptive_avg_pool2d: self.pool_all,
            aten.masked_fill: self.masked_fill, aten.baddbmm: self.baddbmm, aten.stack: self.stack, aten.silu: self.silu,
            aten.silu_: self.silu, aten.relu: self.relu, aten.relu_: self.relu, aten.sigmoid: self.sigmoid,
            aten.embedding: self.embedding, aten.rms_norm: self.rms_norm, aten.linalg_vector_norm: self.vector_norm,
            aten.clamp_min: self.clamp_min, aten.clamp: self.clamp, aten.ge: self.at_least, aten.eq: self.is_id,
            aten.argmax: self.argmax, aten.index: self.index,
            aten.pow: self.power, aten.square: lambda x: self.power(x, 2), aten.sqrt: lambda x: self.power(x, 0.5),
            aten.rsqrt: lambda x: self.power(x, -0.5), aten.reciprocal: lambda x: self.power(x, -1), aten.sum: self.row_sum,
        }  # fmt: skip

    # --- the machine -----------------------------------------------------------------------------------------

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
            return _shape_of(args[0])[args[1]]
        if not _has_view(args) and not _has_view(tuple(kwargs.values())):
            return super().call_function(target, args, kwargs)
        if packet not in (aten.mul, aten.mul_):
            self.refuse_sigmoid(*args)
        if target is operator.getitem:
            return args[0][args[1]]
        if packet in _SAME:
            return args[0]
        if isinstance(args[0], Place) and packet is not aten.argmax:
            raise self.refusal(f"{packet} of the place of a token")
        if packet in _OF_SHAPE:
            like = torch.empty(args[0].shape, dtype=torch.float32, device="cpu")
            kwargs = {name: x for name, x in kwargs.items() if name not in ("device", "pin_memory")}
            return target(like, *args[1:], **kwargs)
        if packet in self.handlers:
            return self.handlers[packet](*args, **kwargs)
        if packet in _IN_ORDER or packet in _MOVES:
            return self.move(target, packet in _IN_ORDER, *args, **kwargs)
        raise self.refusal(str(packet))

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        self.refuse_sigmoid(*args[0])
        return super().output(target, args, kwargs)

    def refuse_sigmoid(self, *values: Any) -> None:
        """Refuse a sigmoid among values."""
        for x in values:
            if isinstance(x, Sigmoid):
                self.node = x.node
                raise self.refusal("aten.sigmoid")

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
        if kind in ("linear", "norm", "add", "product", *ACTIVATIONS) and (order := _image_order(inputs[0])) is not None:
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

    # --- rearrangements ---------------------------------------------------------------------------------------

    def move(self, target: Any, in_order: bool, x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, RowSize) and target.overloadpacket in (aten.expand, aten.expand_as):
            return x
        if not isinstance(x, (View, Scores)) or _has_view(args):
            raise self.refusal(f"{target} that depends on what is computed")
        if isinstance(x, Scores):
            if not in_order:
                raise self.refusal(f"{target} of scores")
            return x.reshaped(target(_on_meta(x.shape), *args, **kwargs).shape)
        kwargs.pop("memory_format", None)
        # the traced tensor may have had strides that let it be viewed, which places do not have
        target = _OF_ANY_STRIDES.get(target, target)
        found = target(_on_meta(x.shape), *args, **kwargs) if not in_order else None
        if isinstance(found, (list, tuple)):

            def piece(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
                return lambda y: target(y, *args, **kwargs)[number]

            return [x.moved(piece(number)) for number in range(len(found))]
        return x.moved(lambda y: target(y, *args, **kwargs), in_order=in_order)

    def cat(self, tensors: Sequence[Any], dim: int = 0) -> Any:
        views = [x for x in tensors if isinstance(x, View)]
        if any(isinstance(x, Scores) for x in tensors):
            raise self.refusal("cat of scores")
        if len({id(view.source) for view in views}) != 1:
            shape = list(tensors[0].shape)
            if len(views) == len(tensors) and len({id(_base_of(view)) for view in views}) == 1:
                both = [_side_by_side(parts, dim) for parts in zip(*map(_two_terms, views), strict=True)]
                return self.made("rotary", both, (), both[0].shape)
            if len(views) != len(tensors) or dim % len(shape) != len(shape) - 1:
                raise self.refusal("cat of what different operations compute")
            nodes = self.node.args[0]
            assert isinstance(nodes, (list, tuple))
            shape[-1] = sum(x.shape[-1] for x in views)
            return self.made("join", views, [x for x in nodes if isinstance(x, fx.Node)], shape)
        parts = [x if isinstance(x, View) else _constant_view(views[0].source, x) for x in tensors]
        return _side_by_side(parts, dim)

    def stack(self, tensors: Sequence[Any], dim: int = 0) -> Any:
        nodes = self.node.args[0]
        assert isinstance(nodes, (list, tuple))
        views = [x for x in tensors if isinstance(x, View)]
        if len(views) == len(tensors) and len({id(_base_of(x)) for x in views}) > 1:
            return Stacked(views, [x for x in nodes if isinstance(x, fx.Node)], dim % (len(views[0].shape) + 1))
        wide = [x.moved(lambda y: y.unsqueeze(dim)) if isinstance(x, View) else x.unsqueeze(dim) for x in tensors]
        return self.cat(wide, dim)

    def pad(self, x: Any, amounts: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
        if not any(amounts):
            return x
        raise self.refusal("padding")

    def dropout(self, x: Any, rate: float, train: bool = False) -> Any:
        return x

    # --- element by element -----------------------------------------------------------------------------------

    def add(self, a: Any, b: Any, *, alpha: Any = 1) -> Any:
        if not _has_view(a):
            a, b = b, a
            if alpha != 1:
                raise self.refusal("add with alpha")
        if isinstance(a, RowSize):
            return self.row_size(None if _has_view(b) or wide(b).numel() != 1 else a.plus(float(wide(b)) * alpha), "sum")
        if not _has_view(b):
            return a.plus(wide(b) * alpha)
        if isinstance(a, Scores) or isinstance(b, Scores) or alpha != 1:
            raise self.refusal("sum of scores")
        if a.shape != b.shape:
            raise self.refusal(f"sum of shapes {a.shape} and {b.shape}")
        if (both := _sum_of_linear(a, b)) is not None:
            return self.product(both)
        if _mixes_channels(a, b):
            return self.made("rotary", (a, b), (), a.shape)
        return self.made("add", (a, b), self.seen(0, 1), a.shape)

    def sub(self, a: Any, b: Any, *, alpha: Any = 1) -> Any:
        if isinstance(a, View) and isinstance(b, View) and alpha == 1 and a.source is b.source:
            return self.add(a, b.scaled(wide(-1.0)))
        if _has_view(b) or not isinstance(a, (View, Scores)):
            raise self.refusal("difference")
        return a.plus(-wide(b) * alpha)

    def mul(self, a: Any, b: Any) -> Any:
        for place, (x, other) in enumerate(((a, b), (b, a))):
            if isinstance(x, View) and isinstance(other, Sigmoid) and (slope := other.slope(x)) is not None:
                return self.made("silu", (x,), self.seen(place), x.shape, slope=slope)
        self.refuse_sigmoid(a, b)
        if isinstance(a, RowSize):
            a, b = b, a
        if isinstance(b, RowSize):
            return self.normalised(a, b, times=True)
        if isinstance(a, View) and a is b:
            return self.power(a, 2)
        if _has_view(a) and _has_view(b):
            for place, (gate, value) in enumerate(((a, b), (b, a))):
                if isinstance(gate, View) and isinstance(value, View) and gate.source.kind in ACTIVATIONS:
                    if gate.shape != value.shape:
                        break
                    return self.made("product", (gate, value), self.seen(place, 1 - place), gate.shape)
            raise self.refusal("product of two computed tensors")
        if not _has_view(a):
            a, b = b, a
        if isinstance(a, Scores):
            number = wide(b)
            term = None if a.term is None else a.term * number
            if number.numel() == 1 and not a.weights:
                return dataclasses.replace(a, factor=a.factor * float(number), term=term)
            heads = a.shape[-3] if len(a.shape) == 4 else 0
            if a.weights or tuple(number.shape[-3:]) != (heads, 1, 1) or number.numel() != heads:
                raise self.refusal("product of scores with a tensor")
            own = number.flatten()
            return dataclasses.replace(a, head_scale=own if a.head_scale is None else a.head_scale * own, term=term)
        if isinstance(a, Squares):
            raise self.refusal("product of squares")
        return self.scaled_norm(a, wide(b)) or a.scaled(wide(b))

    def div(self, a: Any, b: Any, *, rounding_mode: Any = None) -> Any:
        if isinstance(b, RowSize) and rounding_mode is None:
            return self.normalised(a, b, times=False)
        if _has_view(b) or rounding_mode is not None:
            raise self.refusal("division")
        return self.mul(a, 1 / wide(b))

    def neg(self, a: Any) -> Any:
        return self.mul(a, -1.0)

    def gelu(self, x: Any, *, approximate: str = "none") -> Any:
        return self.made("gelu", (x,), self.seen(0), x.shape, approximate=approximate)

    def silu(self, x: Any) -> Any:
        return self.made("silu", (x,), self.seen(0), x.shape)

    def relu(self, x: Any) -> Any:
        return self.made("relu", (x,), self.seen(0), x.shape)

    def sigmoid(self, x: Any) -> Any:
        return Sigmoid(x, self.node)

    # --- products ---------------------------------------------------------------------------------------------

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        if not isinstance(x, View) or _has_view(weight) or _has_view(bias):
            raise self.refusal("linear layer with computed weights")
        return self.product(Product(x, self.seen(0), Matrix.of(weight), None if bias is None else wide(bias)))

    def product(self, layer: Product) -> View:
        """Add a linear layer. One on another is one with the product of their weights, as a low-rank update of weights is.

        Of several tokens joined channel by channel it takes one token after the other. What a model multiplies pixels by, and
        adds to them, is in the weights.
        """
        if layer.view.source.kind == "images" and (layer.view.factor is not None or layer.view.term is not None):
            layer = self.of_pixels(layer)
        if (order := _token_order(layer.view)) is not None:
            view = layer.view.moved(ordered := functools.partial(_ordered, order=order))
            layer = Product(view, [call_behind(layer.seen[0], "ordered", ordered)], layer.matrix.columns(order), layer.bias)
        alone = layer
        if (first := _product_of(layer.view)) is not None:
            bias = layer.bias
            if first.bias is not None:
                bias = layer.matrix.make() @ first.bias + (0 if bias is None else bias)
            layer = Product(first.view, first.seen, layer.matrix.times(first.matrix), bias)
        shape = *layer.view.shape[:-1], layer.matrix.shape[0]
        out = self.made("linear", (layer.view,), layer.seen, shape, matrix=layer.matrix, bias=layer.bias)
        if alone is not layer:
            if (order := _image_order(layer.view)) is not None:
                moved = alone.view.moved(lambda y: y.reshape(-1, y.shape[-1])[order])
                alone = dataclasses.replace(alone, view=moved)
            self.operations[-1].apart = alone
        return out

    def of_pixels(self, layer: Product) -> Product:
        """Return a linear layer on pixels with what is multiplied with them, and added to them, in its weights and bias."""
        view, matrix, bias, width = layer.view, layer.matrix, layer.bias, layer.view.shape[-1]
        factor, term = (None if x is None else x.expand(view.shape).reshape(-1, width) for x in (view.factor, view.term))
        for x in (factor, term):
            if x is not None and not bool((x == x[:1]).all()):
                raise self.refusal("linear layer on pixels that a model treats differently from patch to patch")
        if term is not None:
            bias = matrix.make() @ term[0] + (0 if bias is None else bias)
        if factor is not None:
            matrix = matrix.with_inputs(factor[0])
        return Product(dataclasses.replace(view, factor=None, term=None), layer.seen, matrix, bias)

    def addmm(self, bias: Any, x: Any, weight: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
        if not isinstance(x, View) or _has_view(weight) or _has_view(bias) or (beta, alpha) != (1, 1):
            raise self.refusal("addmm")
        return self.product(Product(x, self.seen(1), Matrix.of(weight).transposed(), wide(bias)))

    def convolution(
        self, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, *rest: Any
    ) -> Any:
        """A convolution is a linear layer on patches."""
        sizes = weight.shape[2:]
        each = [(x_,) * len(sizes) if isinstance(x_, int) else tuple(x_) for x_ in (stride, padding, dilation)]
        steps, pads, gaps = (e * len(sizes) if len(e) == 1 else e for e in each)
        groups = rest[-1] if rest else 1
        if not isinstance(x, View) or any(pads) or any(g != 1 for g in gaps) or groups != 1 or (len(rest) > 1 and rest[0]):
            raise self.refusal("convolution with padding, dilation or groups")
        count = len(sizes)
        # (batch, channels, *grid, *sizes) -> (batch, *grid, channels, *sizes)
        order = (0, *range(2, 2 + count), 1, *range(2 + count, 2 + 2 * count))

        def patches(y: torch.Tensor) -> torch.Tensor:
            for dim, (size, step) in enumerate(zip(sizes, steps, strict=True), 2):
                y = y.unfold(dim, size, step)
            return y.permute(order).flatten(1 + count)

        out = self.product(Product(x.moved(patches), self.seen(0), Matrix.of(weight), None if bias is None else wide(bias)))
        return out.moved(lambda y: y.movedim(-1, 1))

    def matmul(self, a: Any, b: Any) -> Any:
        if isinstance(a, View) and not _has_view(b) and b.dim() == 2:
            return self.product(Product(a, self.seen(0), Matrix.of(b).transposed()))
        if isinstance(b, View) and not _has_view(a) and (means := self.means_of_tokens(a, b)) is not None:
            return means
        if isinstance(b, View) and len(a.shape) == len(b.shape) >= 3 and not isinstance(a, Scores):
            query = a if isinstance(a, View) else _constant_view(b.source, a)
            key = b.moved(lambda y: y.transpose(-1, -2))
            return Scores(_with_heads(query), _with_heads(key), (*query.shape[:-1], b.shape[-1]))
        if isinstance(a, Scores) and a.weights and isinstance(b, View):
            value = _with_heads(b)
            out = self.attend(a.query, a.key, value, a.factor, a.term, a.shape, False, a.head_scale)
            return out.moved(lambda y: y.reshape(*a.shape[:-1], b.shape[-1]))
        raise self.refusal("matrix product")

    def means_of_tokens(self, weights: torch.Tensor, x: View) -> View | None:
        """Return means of as many tokens each that a constant matrix gives: a linear layer on those tokens side by side.

        Args:
            weights: (images or 1, means, tokens).
            x: (images, tokens, channels).

        Returns:
            (images, means, channels), or None where the matrix is something else.
        """
        if weights.dim() != 3 or len(x.shape) != 3 or not bool((weights == weights[:1]).all()):
            return None
        used = weights[0].cpu() != 0
        count, channels = int(used[0].sum()), x.shape[-1]
        if (
            count < 2
            or not bool((used.sum(dim=1) == count).all())
            or not torch.allclose(wide(weights[0])[used], wide(1 / count))
        ):
            return None
        tokens = used.nonzero()[:, 1].view(-1, count)
        together = functools.partial(_joined, tokens=tokens)
        same = torch.eye(channels, dtype=torch.float64, device="cpu")
        matrix = Matrix((channels, count * channels), lambda: same.repeat(1, count) / count)
        return self.product(Product(x.moved(together), [call_behind(self.seen(1)[0], "together", together)], matrix))

    def baddbmm(self, term: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
        scores = self.matmul(a, b)
        if _has_view(term) or not isinstance(scores, Scores):
            raise self.refusal("baddbmm")
        scores = self.mul(scores, alpha)
        return scores if beta == 0 else scores.plus(wide(term) * beta)

    def masked_fill(self, x: Any, mask: Any, value: Any) -> Any:
        if not isinstance(x, Scores) or _has_view(mask) or x.weights:
            raise self.refusal("masked_fill")
        term = wide(0.0) if x.term is None else x.term
        return dataclasses.replace(x, term=torch.where(mask.cpu(), wide(value), term))

    def softmax(self, x: Any, dim: int, *rest: Any, **more: Any) -> Any:
        if not isinstance(x, Scores) or x.weights or dim not in (-1, len(x.shape) - 1):
            raise self.refusal("softmax of what are no scores of attention")
        return dataclasses.replace(x, weights=True)

    def attention(
        self, query: Any, key: Any, value: Any, mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, *,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        if not all(isinstance(x, View) for x in (key, value)) or _has_view(mask):
            raise self.refusal("attention of constants, or with a computed mask")
        if not isinstance(query, View):
            query = _constant_view(key.source, query)
        shape = query.shape
        factor = shape[-1] ** -0.5 if scale is None else float(scale)
        scores_shape = (*shape[:-1], key.shape[-2])
        term = None
        if mask is not None:
            mask = mask.detach().cpu()
            term = torch.where(mask, 0.0, -math.inf).to(torch.float64) if mask.dtype == torch.bool else wide(mask)
            if not term.any():
                term = None
        q, k, v = (_with_heads(x) for x in (query, key, value))
        out = self.attend(q, k, v, factor, term, scores_shape, is_causal)
        return out.moved(lambda y: y.reshape(*shape[:-1], value.shape[-1]))

    def attend(
        self, query: View, key: View, value: View, factor: float, term: torch.Tensor | None, shape: tuple[int, ...],
        is_causal: bool, head_scale: torch.Tensor | None = None,
    ) -> View:  # fmt: skip
        """Add attention and return its output, in the shape of the query."""
        before = (*query.shape[:-1], value.shape[-1])
        query, key, value = _split_heads(query, key, value)
        constant = None
        if query.index is not None and bool((query.index < 0).all()):
            assert query.term is not None
            constant = query.term.expand(query.shape)
            if query.factor is not None or not bool((constant == constant[:1]).all()):
                raise self.refusal("attention whose constant query differs from image to image")
            constant = constant[0]
            query = dataclasses.replace(query, term=None)
        for x in (query, key, value):
            if x.term is not None or (x.factor is not None and x.factor.unique().numel() != 1):
                raise self.refusal("attention whose query, key or value had a tensor added or multiplied")
        for x in (query, key):
            if x.factor is not None:
                factor *= float(x.factor.flatten()[0])
        if value.factor is not None:
            raise self.refusal("attention whose value was multiplied")
        batch, heads, queries, _ = query.shape
        is_padded = False
        if term is not None:
            term = term.expand(shape).reshape(batch, heads, queries, key.shape[2])
            each = batch // BATCH
            is_padded = self.hides_padding(term)
            if not is_padded and not torch.equal(term[:each], term[each : 2 * each]):
                raise self.refusal("attention with a mask that differs from image to image")
            term = _least(term[:each])
            if _is_causal(term):
                term, is_causal = None, True
            elif not term.any():
                term = None
        width = value.shape[-1]
        out = self.made(
            "attention", [dataclasses.replace(x, factor=None) for x in (query, key, value)], (),
            (batch, queries, heads * width), scale=factor, mask=term, is_causal=is_causal, query=constant,
            head_scale=head_scale, is_padded=is_padded,
        )  # fmt: skip
        return out.moved(lambda y: y.view(batch, queries, heads, width).transpose(1, 2).reshape(before))

    # --- texts ------------------------------------------------------------------------------------------------

    def is_ids(self, x: Any) -> bool:
        """Tell whether a value is the model's ids of tokens, in their order."""
        plain = isinstance(x, View) and x.source.kind == "images" and x.index is None and x.factor is None and x.term is None
        return plain and len(x.shape) == 2

    def hides_padding(self, term: torch.Tensor) -> bool:
        """Tell whether scores, (batch, heads, queries, keys), have a term that is the same in both texts but at hidden keys."""
        if self.visible is None or len(term) != len(self.visible):
            return False
        whole, hidden = term[0], ~self.visible[1]
        other = term[1][..., hidden]
        # what is hidden in the first text may have any number in the second
        gone = (other - whole[..., hidden] <= _HIDDEN) | (whole[..., hidden] <= _HIDDEN)
        return bool(hidden.any()) and bool(gone.all()) and torch.equal(term[1][..., ~hidden], whole[..., ~hidden])

    def clamp(self, x: Any, least: Any = None, most: Any = None, **named: Any) -> Any:
        least, most = named.get("min", least), named.get("max", most)
        if self.visible is not None and self.is_ids(x) and least == 0 and most is None:
            return x  # where there is no token there may be any
        ends = [] if _has_view((least, most)) else [wide(y) * sign for y, sign in ((least, -1), (most, 1)) if y is not None]
        if isinstance(x, View) and ends and all(bool((end == math.inf).all()) for end in ends):
            return x  # which clips nothing
        if most is not None or least is None:
            self._refuse_call()
        return self.clamp_min(x, least)

    def at_least(self, x: Any, least: Any) -> Any:
        if self.visible is None or not self.is_ids(x) or least != 0:
            self._refuse_call()
        return self.visible

    def is_id(self, x: Any, token: Any) -> Any:
        if not self.is_ids(x) or type(token) is not int:
            self._refuse_call()
        return Place(x.shape, token)

    def argmax(self, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        if keepdim or dim not in (1, -1) or not (isinstance(x, Place) or self.is_ids(x)):
            self._refuse_call()
        return Place(x.shape[:1], x.token if isinstance(x, Place) else None, found=True)

    def index(self, x: Any, places: Sequence[Any]) -> Any:
        if not any(isinstance(place, Place) for place in places):
            return self.move(self.node.target, False, x, places)
        each, place, *rest = *places, None, None
        rows = isinstance(each, torch.Tensor) and torch.equal(each.flatten().cpu(), counted(BATCH))
        if rest[:-2] or not rows or not isinstance(place, Place) or not place.found or not isinstance(x, View):
            self._refuse_call()
        return self.selected(x, place.token)

    def selected(self, x: View, token: int | None) -> View:
        """Return the token that stands for each text, of (batch, tokens, channels).

        A normalisation before comes behind it.
        """
        norm = x.source
        plain = x.index is None and x.factor is None and x.term is None and len(x.shape) == 3
        if not plain or norm.kind != "norm" or norm.inputs[0].index is not None:
            raise self.refusal("the token of a text, of what is no normalisation")
        hidden, (seen,) = norm.inputs[0], norm.seen
        ids = next(n for n in self.node.graph.nodes if n.op == "placeholder")

        def select(h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return h[torch.arange(len(ids), dtype=torch.int64, device=ids.device), place_of(ids, token)]

        # before this node, so that nobody interprets it
        with self.node.graph.inserting_before(self.node):
            node = self.node.graph.create_node("call_function", select, (seen, ids), {}, "selected")
        node.meta = dict(self.node.meta)
        shape = (x.shape[0], x.shape[2])
        chosen = self.made("select", (dataclasses.replace(hidden, shape=x.shape),), (seen,), shape, token=token)
        chosen.source.node = node
        out = self.made(
            "norm", (chosen,), (node,), shape, weight=norm.weight, bias=norm.bias, epsilon=norm.epsilon,
            centred=norm.centred,
        )  # fmt: skip
        out.source.name = norm.name
        return out

    def _refuse_call(self) -> NoReturn:
        raise self.refusal(str(getattr(self.node.target, "overloadpacket", self.node.target)))

    # --- rows -------------------------------------------------------------------------------------------------

    def embedding(self, weight: Any, ids: Any, *rest: Any) -> Any:
        if not self.is_ids(ids) or _has_view(weight):
            raise self.refusal("embedding of what are not the model's ids of tokens")
        return self.made("embedding", (ids,), self.seen(1), (*ids.shape, weight.shape[1]), weight=wide(weight))

    def layer_norm(self, x: Any, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Any:
        if not isinstance(x, View) or len(shape) != 1:
            raise self.refusal("layer normalisation over several dimensions")
        return self.made(
            "norm", (x,), self.seen(0), x.shape, weight=None if weight is None else wide(weight),
            bias=None if bias is None else wide(bias), epsilon=float(eps),
        )  # fmt: skip

    def rms_norm(self, x: Any, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
        if not isinstance(x, View) or len(shape) != 1 or _has_view(weight):
            raise self.refusal("RMS normalisation over several dimensions")
        epsilon = torch.finfo(self.node.meta["val"].dtype).eps if eps is None else float(eps)
        weight = None if weight is None else wide(weight)
        return self.made("norm", (x,), self.seen(0), x.shape, weight=weight, epsilon=epsilon, centred=False)

    def row_size(self, made: RowSize | None, what: str) -> RowSize:
        """Return a number of each row, or refuse what is not one."""
        if made is None:
            raise self.refusal(f"{what} of norms of rows")
        return made

    def power(self, x: Any, exponent: Any) -> Any:
        node = self.node.args[0]
        if isinstance(x, View) and exponent == 2 and isinstance(node, fx.Node):
            return Squares(x, node)
        if not isinstance(x, RowSize) or _has_view(exponent):
            raise self.refusal(f"power {exponent}")
        return x.power(float(exponent))

    def row_sum(self, x: Any, dims: Any = None, keepdim: bool = False, **more: Any) -> Any:
        if isinstance(x, Stacked):
            over = [dims] if isinstance(dims, int) else dims
            if over not in ([x.dim], [x.dim - len(x.views[0].shape) - 1]) or keepdim or len(x.views) != 2:
                raise self.refusal("sum of more than two stacked tensors, or over another dimension")
            return self.made("add", x.views, x.nodes, x.views[0].shape)
        last = len(x.shape) - 1
        given = None if dims is None else [d % len(x.shape) for d in ([dims] if isinstance(dims, int) else dims)]
        if not isinstance(x, Squares) or given != [last] or not keepdim:
            raise self.refusal("sum over a dimension")
        return RowSize(x, 1.0)

    def vector_norm(self, x: Any, order: Any = 2, dims: Any = None, keepdim: bool = False, **more: Any) -> Any:
        if not isinstance(x, View) or order != 2:
            raise self.refusal(f"norm of order {order}")
        return self.row_sum(self.power(x, 2), dims, keepdim).power(0.5)

    def clamp_min(self, x: Any, least: Any) -> Any:
        number = None if _has_view(least) or not isinstance(x, RowSize) else x.at_least(float(least))
        return self.row_size(number, "least number")

    def normalised(self, x: Any, size: RowSize, *, times: bool) -> Any:
        """Return a tensor over the norm of its own rows: a normalisation that leaves the mean."""
        if not isinstance(x, View) or not size.normalises(x, times=times):
            raise self.refusal("product with norms of rows of another tensor")
        # x / sqrt(scale * sum + epsilon) in terms of the mean of the squares
        per_mean = size.scale * x.shape[-1]
        weight = None if per_mean == 1 else wide([per_mean**-0.5]).expand(x.shape[-1])
        return self.made(
            "norm", (x,), [size.squares.seen], x.shape, weight=weight, epsilon=size.epsilon / per_mean, centred=False
        )

    def scaled_norm(self, x: View, factor: torch.Tensor) -> View | None:
        """Return a normalisation that leaves the mean with its weight, or None where it is something else."""
        norm, width = x.source, x.shape[-1]
        if norm.kind != "norm" or norm.centred or norm.channels != width or (x.factor is not None) or (x.term is not None):
            return None
        if factor.numel() != width or factor.shape[-1:] != (width,) or norm.bias is not None:
            return None
        if x.index is not None and not bool((x.index % width == counted(width)).all()):
            return None
        weight = factor.flatten() if norm.weight is None else norm.weight * factor.flatten()
        self.operations.append(dataclasses.replace(norm, weight=weight, node=self.node))
        return dataclasses.replace(x, source=self.operations[-1])

    def mean(self, x: Any, dims: Any = None, keepdim: bool = False, **more: Any) -> Any:
        if isinstance(x, Squares):
            return dataclasses.replace(self.row_sum(x, dims, keepdim), scale=1 / x.shape[-1])
        if not isinstance(x, View) or dims is None:
            raise self.refusal("mean of everything")
        dims = sorted(d % len(x.shape) for d in ([dims] if isinstance(dims, int) else dims))
        kept = [d for d in range(len(x.shape)) if d not in dims]
        if len(kept) != 2 or kept[0] != 0:
            raise self.refusal(f"mean over dimensions {dims} of {x.shape}")
        rows = x.moved(lambda y: y.permute(kept[0], *dims, kept[1]).flatten(1, -2))
        out = self.made("mean", (rows,), self.seen(0), (rows.shape[0], rows.shape[2]))
        shape = [1 if d in dims else size for d, size in enumerate(x.shape)] if keepdim else out.shape
        return out.moved(lambda y: y.reshape(tuple(shape)), in_order=True)

    def pool_all(self, x: Any, size: Any) -> Any:
        if not isinstance(x, View) or any(s != 1 for s in ([size] if isinstance(size, int) else size)):
            raise self.refusal("pooling")
        dims = list(range(2, len(x.shape)))
        return self.mean(x, dims, True)


def _image_order(view: View) -> torch.Tensor | None:
    """Return an order of a view's rows (..., channels) that has one image after the other, or None where they lie so."""
    if view.index is None:
        return None
    places = view.index.reshape(-1, view.shape[-1])[:, 0]
    image = places // (view.source.rows * view.source.channels // BATCH)
    if bool((places < 0).any()) or bool((image.diff() >= 0).all()):
        return None
    return image.argsort(stable=True)


def _joined(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return x[:, tokens.to(x.device)].flatten(2)


def _ordered(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return x[..., order.to(x.device)]


def _token_order(view: View) -> torch.Tensor | None:
    """Return an order of channels, int64, that has one token after the other; None where they lie so or are something else."""
    channels, width = view.source.channels, view.shape[-1]
    if view.source.kind == "images" or view.index is None or width <= channels or width % channels:
        return None
    places = view.index.reshape(-1, width)
    places = places[(places >= 0).all(dim=1)]
    if not len(places):
        return None
    tokens, column = places[0] // channels, places[0] % channels
    # tokens in the order in which the first row has them
    rank = (tokens == tokens[:, None]).int().argmax(dim=1)
    order = (rank * channels + column).argsort()
    found = places[:, order].unflatten(1, (-1, channels))
    if bool((found[..., :1] % channels).any()) or not torch.equal(found, found[..., :1] + counted(channels)):
        return None
    return None if torch.equal(order, counted(width)) else order


def _constant_view(source: Operation, x: torch.Tensor) -> View:
    return View(source, tuple(x.shape), nowhere(*x.shape), None, wide(x))


def _with_heads(x: View) -> View:
    """Return a view as (batch, heads, tokens, channels)."""
    if len(x.shape) == 4:
        return x
    if len(x.shape) == 3:
        return x.moved(lambda y: y.unsqueeze(1), in_order=True)
    return x.moved(lambda y: y.flatten(0, -4), in_order=True)


def _split_heads(query: View, key: View, value: View) -> tuple[View, View, View]:
    """Return (batch, heads, tokens, channels) where batch and heads are one dimension."""
    if key.shape[1] != 1:
        return query, key, value
    rows = key.places()[:, 0, :, 0] // key.source.channels
    heads = int((rows == rows[:1]).all(dim=1).sum())
    if heads == 1 or len(rows) % heads:
        return query, key, value
    query, key, value = (x.moved(lambda y: y.squeeze(1).unflatten(0, (-1, heads)), in_order=True) for x in (query, key, value))
    return query, key, value


_HIDDEN = -9999.0
"""What is added to a score that takes no part, at most; models write minus infinity, the least number of a type, or -10000."""


def _is_causal(term: torch.Tensor) -> bool:
    """Tell whether a term of scores, (windows, heads, queries, keys), hides the keys behind each query and nothing else."""
    behind = torch.ones(term.shape[2:], dtype=torch.bool, device="cpu").triu(1)
    few = term.shape[:2] == (1, 1) and term.shape[2] == term.shape[3] > 1
    return few and bool((term[0, 0][behind] <= _HIDDEN).all()) and not bool(term[0, 0][~behind].any())


def _least(term: torch.Tensor) -> torch.Tensor:
    """Return a mask with one row where all windows, or all heads, have the same."""
    for dim in (0, 1):
        if term.shape[dim] > 1 and bool((term == term.narrow(dim, 0, 1)).all()):
            term = term.narrow(dim, 0, 1)
    return term.contiguous()


@dataclasses.dataclass
class Output:
    """One output of the float network.

    Attributes:
        name: of it.
        view: what it is.
        node: of the traced graph.
        place: of it among all tensors that the model returns.
        arrangement: which tokens of ``view`` are the output, where it is not the view itself.
    """

    name: str
    view: View
    node: fx.Node
    place: int
    arrangement: Arrangement | None = None

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the output of the view's values."""
        return values if self.arrangement is None else self.arrangement(values)


@dataclasses.dataclass
class Captured:
    """A float network as operations.

    Attributes:
        module: the traced graph, which runs: images to outputs, for any batch.
        operations: in order; the first is the images.
        outputs: of the network.
        select: returns the module that gives a model's outputs.
        tokens: by node of the traced graph, int64 (rows,): of which place of a text each row of the node's value is, for one
            text. Empty where there are no masks.
    """

    module: fx.GraphModule
    operations: list[Operation]
    outputs: list[Output]
    select: Callable[[nn.Module], nn.Module] = lambda model: model
    tokens: dict[fx.Node, torch.Tensor] = dataclasses.field(default_factory=dict)

    def pick(self, returned: Any) -> dict[str, torch.Tensor]:
        """Return the outputs, by name, of what :attr:`select`'s module returned."""
        leaves = torch.utils._pytree.tree_leaves(returned)
        return {output.name: leaves[output.place] for output in self.outputs}

    def compute(self, images: torch.Tensor, *, whole: bool = True) -> dict[int, torch.Tensor]:
        """Compute every operation without the model's own code.

        Args:
            images: as the model takes them, any number.
            whole: whether all outputs are returned; else those that the network's outputs are made of.

        Returns:
            By the operation's ``id``, (images, elements of an image).
        """
        last_use = {id(x.source): place for place, operation in enumerate(self.operations) for x in operation.inputs}
        kept = {id(output.view.source) for output in self.outputs}
        computed: dict[int, torch.Tensor] = {}
        for place, operation in enumerate(self.operations):
            inputs = [x.evaluate(computed[id(x.source)]) for x in operation.inputs]
            computed[id(operation)] = _compute(operation, inputs, images).reshape(len(images), -1)
            for source in {id(x.source) for x in operation.inputs}:
                if not whole and last_use[source] == place and source not in kept:
                    del computed[source]
        return computed

    def __call__(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute the outputs, by name, from the operations alone."""
        computed = self.compute(images, whole=False)
        return {output.name: output.of(output.view.evaluate(computed[id(output.view.source)])) for output in self.outputs}


def rms_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Divide rows by their root mean square; arguments are those of ``layer_norm``, of which ``shape`` has one number."""
    out = x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def _compute(operation: Operation, inputs: list[torch.Tensor], images: torch.Tensor) -> torch.Tensor:
    """Return an operation's output."""
    if operation.kind == "images":
        return images
    if operation.kind == "embedding":
        assert operation.weight is not None
        return nn.functional.embedding(inputs[0].clamp(min=0), operation.weight.to(images.device, torch.float32))
    if operation.kind == "select":
        return inputs[0][torch.arange(len(images), dtype=torch.int64, device=images.device), place_of(images, operation.token)]
    ids = images
    images = inputs[0]  # for the type and the device
    weight, bias = (None if x is None else x.to(images) for x in (operation.weight, operation.bias))
    if operation.kind in ("linear", "unrotate"):
        assert operation.matrix is not None
        return nn.functional.linear(inputs[0], operation.matrix.make().to(images), bias)
    if operation.kind == "norm":
        norm = nn.functional.layer_norm if operation.centred else rms_norm
        return norm(inputs[0], inputs[0].shape[-1:], weight, bias, operation.epsilon)
    if operation.kind == "gelu":
        return nn.functional.gelu(inputs[0], approximate=operation.approximate)
    if operation.kind == "silu":
        return inputs[0] * torch.sigmoid(inputs[0] * operation.slope)
    if operation.kind == "relu":
        return nn.functional.relu(inputs[0])
    if operation.kind in ("add", "rotary"):
        return inputs[0] + inputs[1]
    if operation.kind == "product":
        return inputs[0] * inputs[1]
    if operation.kind == "mean":
        return inputs[0].mean(dim=1)
    if operation.kind == "join":
        return torch.cat(inputs, dim=-1)
    query, key, value = inputs
    if operation.query is not None:
        query = operation.query.to(images).expand(query.shape)
    if operation.head_scale is not None:
        query = query * operation.head_scale.to(images)[:, None, None]
    mask = operation.mask
    if mask is not None:
        mask = mask.to(images).repeat(query.shape[0] // mask.shape[0], 1, 1, 1)
    is_causal = operation.is_causal
    if operation.is_padded:
        visible = is_token(ids)[:, None, None]
        if is_causal:
            square = torch.ones((query.shape[2], key.shape[2]), dtype=torch.bool, device=ids.device)
            visible, is_causal = visible & square.tril(), False
        mask = visible if mask is None else mask.masked_fill(~visible, -math.inf)
    out = nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=operation.scale)
    return out.transpose(1, 2)


def drop_unread_rows(captured: Captured) -> None:
    """Leave out what no output depends on in the last block: a class token's head needs no other token's query and MLP.

    Every row that stays has the values it had.
    """
    # what attention needs that was shortened: keys and values are of all tokens, and queries come of the same layer
    needed: set[int] = set()
    for place in range(len(captured.operations) - 1, 0, -1):
        operation = captured.operations[place]
        if id(operation) in needed:
            needed.update(id(view.source) for view in operation.inputs)
            continue
        users = [(each.inputs, number) for each in captured.operations[place + 1 :]
                 for number, view in enumerate(each.inputs) if view.source is operation]  # fmt: skip
        ends = [output for output in captured.outputs if output.view.source is operation]
        views = [inputs[number] for inputs, number in users] + [output.view for output in ends]
        count = operation.rows // BATCH
        whole = not views or any(view.index is None for view in views)
        if operation.kind in ("mean", "join") or (whole and operation.kind != "attention"):
            continue
        if whole:
            return
        read = torch.cat([view.index[: view.shape[0] // BATCH].flatten() for view in views if view.index is not None])
        keep = (read[read >= 0] // operation.channels).unique()
        heads = operation.inputs[0].shape if operation.kind == "attention" else (BATCH,)
        # the first tokens alone, where that saves much
        few = 2 * len(keep) <= count and torch.equal(keep, counted(len(keep)))
        if not few or operation.inputs[0].source.kind == "images" or heads[0] != BATCH:
            if operation.kind == "attention":
                return
            continue
        if operation.kind == "attention":
            if operation.query is not None or operation.inputs[0].source.kind not in ("linear", "rotary"):
                return
            operation.inputs[0] = operation.inputs[0].moved(_queries_of(keep))
            needed.update(id(view.source) for view in operation.inputs)
            operation.mask = None if operation.mask is None else operation.mask[:, :, keep]
        else:
            fewer = [x.moved(_rows_of(count, keep)) for x in operation.inputs]
            if any(x.index is not None and bool((x.index < 0).all()) for x in fewer):
                continue  # what a lone block makes of its class token, a constant: no part of a stream
            operation.inputs = fewer
        operation.rows = BATCH * len(keep)
        position = nowhere(count)
        position[keep] = counted(len(keep))

        def renumbered(view: View, operation: Operation = operation, position: torch.Tensor = position) -> View:
            assert view.index is not None
            row, column = view.index // operation.channels, view.index % operation.channels
            image, row = row // len(position), position[row % len(position)]
            index = (image * (operation.rows // BATCH) + row) * operation.channels + column
            return dataclasses.replace(view, index=torch.where(view.index < 0, -1, index))

        for inputs, number in users:
            inputs[number] = renumbered(inputs[number])
        for output in ends:
            output.view = renumbered(output.view)


def split_layers(captured: Captured) -> None:
    """Make a layer of its own of those channels of a linear layer that an activation takes, where attention takes others.

    Blocks that compute attention and MLP next to each other have one layer before both.
    """
    for layer in [each for each in captured.operations if each.kind == "linear" and each.inputs[0].source.kind != "images"]:
        users = [(each, view) for each in captured.operations for view in each.inputs if view.source is layer]
        if not any(user.kind in ("attention", "norm", "rotary") for user, _ in users):
            continue
        for user, view in users:
            rows = view.places().reshape(-1, view.shape[-1])
            columns = rows[0]
            if user.kind not in ACTIVATIONS or len(rows) != layer.rows or len(columns) == layer.channels:
                continue
            constants = [None if x is None else x.expand(view.shape).reshape(rows.shape) for x in (view.factor, view.term)]
            if not torch.equal(rows, layer.channels * counted(len(rows))[:, None] + columns) or any(
                x is not None and not bool((x == x[:1]).all()) for x in constants
            ):
                continue
            assert layer.matrix is not None
            factor, term = (None if x is None else x[0] for x in constants)
            bias = None if layer.bias is None else layer.bias[columns] if factor is None else layer.bias[columns] * factor
            if term is not None:
                bias = term if bias is None else bias + term
            alone = dataclasses.replace(
                layer, node=user.seen[0], channels=len(columns), bias=bias, inputs=list(layer.inputs), seen=list(layer.seen),
                matrix=layer.matrix.rows(columns).scaled(factor),
            )  # fmt: skip
            captured.operations.insert(captured.operations.index(user), alone)
            user.inputs[0] = View(alone, view.shape)


def _queries_of(keep: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what takes some tokens of (batch, heads, tokens, channels)."""
    return lambda x: x[:, :, keep]


def _rows_of(count: int, keep: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what takes some of an image's rows of (..., channels)."""
    return lambda x: x.reshape(BATCH, count, x.shape[-1])[:, keep].flatten(0, 1)


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """Some tokens of (batch, tokens, channels), perhaps as a map, or several in a row.

    Attributes:
        first, count: which tokens.
        shape: (height, width) of a map, or None where they stay tokens.
        channels_first: whether a map is (batch, channels, height, width), otherwise (batch, height, width, channels).
        joined: (rows, channels) or (channels,), where several tokens are a row, or None.
    """

    first: int
    count: int
    shape: tuple[int, int] | None = None
    channels_first: bool = False
    joined: tuple[int, ...] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return them of (batch, tokens, channels); see :func:`.operators.tokens.arrange`."""
        return arrange(x, self.first, self.count, self.shape, self.channels_first, self.joined)


def _arrangement(view: View) -> Arrangement | None:
    """Return which tokens of its source an output is, or None where it is one token, all in their order, or something else."""
    source, shape = view.source, view.shape
    count = source.rows // BATCH
    if (view.index is None and len(shape) == 3) or len(shape) not in (3, 4) or view.factor is not None or view.term is not None:
        return None
    for channels_first in (False, True)[: len(shape) - 2]:
        rows = view.moved(lambda x: x.movedim(1, -1)) if channels_first else view
        if rows.shape[-1] != source.channels:
            continue
        places = rows.places().reshape(BATCH, -1, source.channels)
        first = int(places[0, 0, 0]) // source.channels
        tokens = count * counted(BATCH)[:, None] + first + counted(places.shape[1])
        if first < 0 or not torch.equal(places, tokens[..., None] * source.channels + counted(source.channels)):
            continue
        if len(shape) == 3 and places.shape[1] == count:
            return None
        return Arrangement(first, places.shape[1], rows.shape[1:3] if len(shape) == 4 else None, channels_first)  # type: ignore[arg-type]
    return None


def _tokens_of_rows(view: View) -> View | None:
    """Return (batch, tokens, channels) of an output whose rows are several tokens each, or None where they are not."""
    channels, shape = view.source.channels, view.shape
    if len(shape) not in (2, 3) or shape[-1] == channels or shape[-1] % channels:
        return None
    if view.factor is not None or view.term is not None:
        return None
    tokens = view.moved(lambda x: x.reshape(BATCH, -1, channels), in_order=True)
    places = tokens.places()
    first = places[..., :1]
    whole = (first >= 0) & (first % channels == 0) & (places == first + counted(channels))
    return tokens if bool(whole.all()) else None


def _output(name: str, view: View, node: fx.Node, place: int) -> Output:
    tokens = _tokens_of_rows(view)
    arrangement = _arrangement(view if tokens is None else tokens)
    if tokens is not None:
        joined = tuple(view.shape[1:])
        if arrangement is None:
            return Output(name, tokens, view.source.node, place, Arrangement(0, tokens.shape[1], joined=joined))
        arrangement = dataclasses.replace(arrangement, joined=joined)
    if arrangement is None:
        return Output(name, view, node, place)
    source = view.source
    whole = View(source, (BATCH, source.rows // BATCH, source.channels))
    return Output(name, whole, source.node, place, arrangement)


def capture(
    model: nn.Module, images: torch.Tensor, outputs: Sequence[str] | OutputsOf | None = None,
    refusals: list[str] | None = None, *, padded: bool = False,
) -> Captured:  # fmt: skip
    """Trace a module in eval mode and list its operations.

    Args:
        model: takes images (batch, channels, height, width), or ids (batch, tokens), and returns a tensor, or several with
            names.
        images: of the model's dtype and device, :data:`BATCH` of them; or ids.
        outputs: those that are wanted, see :func:`qflash.quantize_model`.
        refusals: where messages go for operations without an integer form, which are passed over; None raises the first.
        padded: whether the model takes ids with an attention mask; here ids are negative where there is no token.

    Raises:
        UnsupportedError: an operation has no integer form.
        TypeError, ValueError: ``outputs`` are no such, or an output is unknown.
    """
    selected = select_outputs(model, outputs, padded)
    wanted, outputs = outputs, None if callable(outputs) else outputs
    with torch.no_grad():
        try:
            with tracing_alone():
                program = torch.export.export(
                    copy_of(selected), (images,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), strict=False
                )
        except Exception as error:
            reason = traceback.format_exception_only(error)[-1].strip()[:500]
            if isinstance(error, TypeError) and "missing a required argument" in reason:
                reason += "; a network takes images or texts alone, and outputs can be a function that gives the model the rest"
            raise UnsupportedError(f"torch.export cannot trace the model: {reason}") from error
        module: Any = program.module()
        last = next(n for n in module.graph.nodes if n.op == "output")
        nodes = dict(zip(_output_names(program), last.args[0], strict=True))
        names = (
            list(outputs)
            if outputs is not None
            else ["logits"]
            if "logits" in nodes and wanted is None
            else [x for x in nodes if nodes[x] is not None]
        )
        for name in names:
            if nodes.get(name) is None:
                raise ValueError(f"outputs must be of {', '.join(map(repr, nodes))}, or a submodule's name, got {name!r}")
        last.args = (tuple(nodes[name] for name in names),)
        module.graph.eliminate_dead_code()
        # takes images and returns a tuple, whatever the model's own arguments and results are
        module.graph.set_codegen(fx.graph.CodeGen())
        module.recompile()
        visible = None
        if padded:
            # the second text ends in the middle
            visible = torch.ones(images.shape, dtype=torch.bool, device=images.device)
            visible[1, (images.shape[1] + 1) // 2 :] = False
        tracer = _Tracer(module, isinstance(selected, Selected), refusals, visible)
        places = [n for n in module.graph.nodes if n.op == "placeholder"]
        tracer.node = places[0]
        view = tracer.made("images", (), (), (images.numel() // images.shape[-1], images.shape[-1]))
        try:
            found = tracer.run(dataclasses.replace(view, shape=tuple(images.shape)), *[None] * (len(places) - 1))
        except UnsupportedError as error:
            raise UnsupportedError(str(error.args[0]).partition("\n\nWhile executing")[0]) from None
        except ARGUMENTS as error:
            reason = str(error).partition("\n\nWhile executing")[0]
            raise tracer.refusal(f"{tracer.node.target} ({type(error).__name__}: {reason})") from error
    for name, each in zip(names, found, strict=True):
        if not isinstance(each, View):
            what = (
                "is a step on the way to attention or a normalisation" if _has_view(each) else "does not depend on the images"
            )
            raise UnsupportedError(f"output {name!r} {what}")
        if each.source.kind == "images":
            raise UnsupportedError(f"output {name!r} is the images, rearranged; outputs can name others")
    return Captured(
        module,
        _used(tracer.operations, found),
        [_output(name, x, nodes[name], list(nodes).index(name)) for name, x in zip(names, found, strict=True)],
        functools.partial(select_outputs, outputs=wanted, padded=padded),
        _places(tracer, images.shape[1]) if padded else {},
    )


def _places(tracer: _Tracer, tokens: int) -> dict[fx.Node, torch.Tensor]:
    """Return :attr:`Captured.tokens` of what was interpreted, of texts of so many tokens."""
    found: dict[fx.Node, torch.Tensor] = {}
    for node, x in tracer.env.items():
        if not isinstance(x, View) or x.source.rows != BATCH * tokens:
            continue
        rows = x.places().reshape(-1, x.shape[-1])
        row = rows[:, 0].div(x.source.channels, rounding_mode="floor")
        if bool((row >= 0).all()) and torch.equal(rows[:, -1] // x.source.channels, row):
            found[node] = row[row < tokens]
    return found


def _used(operations: Sequence[Operation], outputs: Sequence[View]) -> list[Operation]:
    """Return the operations that outputs depend on, and the images.

    A linear layer on another one, whose output is a residual stream as well, takes the stream.
    """
    used = {id(operations[0]), *(id(view.source) for view in outputs)}
    streams: set[int] = set()
    for operation in reversed(operations):
        if id(operation) in used:
            used.update(id(view.source) for view in operation.inputs)
            if operation.kind in ("add", "norm"):
                streams.update(id(view.source) for view in operation.inputs)
    merged = [each for each in operations if id(each) in used and each.apart and id(each.apart.view.source) in streams]
    for operation in merged:
        assert operation.apart is not None
        operation.inputs, operation.seen = [operation.apart.view], operation.apart.seen
        operation.matrix, operation.bias, operation.apart = operation.apart.matrix, operation.apart.bias, None
    return _used(operations, outputs) if merged else [each for each in operations if id(each) in used]


def _output_names(program: torch.export.ExportedProgram) -> list[str]:
    """Return names of a program's outputs: fields, or ``"output"`` with a number where there are several."""
    spec = program.call_spec.out_spec
    assert spec is not None
    count = spec.num_leaves
    made = torch.utils._pytree.tree_unflatten(list(range(count)), spec)
    if isinstance(made, dict):
        names = [""] * count
        for name, x in made.items():
            leaves = torch.utils._pytree.tree_leaves(x)
            for number, leaf in enumerate(leaves):
                names[leaf] = name if len(leaves) == 1 else f"{name}.{number}"
        return names
    return ["output"] if count == 1 else [f"output{number}" for number in range(count)]
