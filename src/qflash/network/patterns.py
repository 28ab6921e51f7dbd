"""From captured operations to the nodes of an integer network: which operator computes what, and on which grid.

The grammar is that of pre-norm transformers: ``norm, linear(s), attention, linear, +`` and ``norm, linear, activation, linear,
+`` on an int16 residual stream, patches before it, and a normalisation, a mean over tokens and a head behind it, in any order
that the operators allow. A normalisation may stand before the sum, or behind it, too. An operation that fits nowhere is refused
by name. Each rule makes an empty module with the sizes it needs, and leaves a function that fills it in from the ranges of a
calibration (:mod:`.conversion` has the numerics).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ..specification.layers import ACTIVATIONS, MAX_CHANNELS
from ..specification.quantization import bias_to_fixed
from ..specification.recipe import Recipe
from . import conversion as cv
from .capture import BATCH, Captured, Operation, Output, UnsupportedError, View, call_behind, counted, nowhere, wide
from .conversion import Grid, Range
from .float_parts import FloatTwin
from .graph import IMAGES, IntegerNetwork, Node
from .matrix import Matrix
from .modules import Attention, First, Join, LayerNorm, Linear, Mean, PatchEmbedding, WideLinear, Widen
from .operators import WITH_ACTIVATION
from .operators.gated import Gated
from .operators.narrow import Narrow
from .operators.norms import RmsNorm
from .operators.select_token import SelectToken
from .operators.token_embedding import TokenEmbedding
from .operators.tokens import Tokens
from .rotary_patterns import Turn, TurnedHeads, Values, turn_of

Ranges = dict[fx.Node, Range]
"""What calibration saw, by node of the traced graph."""


def _refuse(operation: Operation, why: str) -> UnsupportedError:
    return UnsupportedError(f"{operation.kind} of {operation.name or 'the model'} has no integer form: {why}")


@dataclasses.dataclass(eq=False)
class Rows:
    """A view as rows of its source: ``row i`` is made of ``pieces`` rows, of one image after the other.

    Attributes:
        view: what it is of.
        source: the operation that makes the rows.
        table: int64 (rows of an image, pieces): rows of an image of the source, -1 where a row is constant.
        columns: int64 (channels of a piece,): channels of the source.
        factor: float64 (channels,) or None.
        term: float64 (rows of an image, channels), or None.
    """

    view: View
    source: Operation
    table: torch.Tensor
    columns: torch.Tensor
    factor: torch.Tensor | None
    term: torch.Tensor | None

    @property
    def is_whole(self) -> bool:
        """Whether these are all rows and channels of the source, in their order."""
        return (
            self.table.shape[1] == 1
            and torch.equal(self.table[:, 0], counted(self.source.rows // BATCH))
            and self.has_all_columns
        )

    @property
    def has_all_columns(self) -> bool:
        """Whether a piece is a whole row of the source."""
        return torch.equal(self.columns, counted(self.source.channels))


def rows_of(view: View, user: Operation) -> Rows:
    """Return a view (..., channels) as rows.

    Raises:
        UnsupportedError: it is something else.
    """
    source, channels = view.source, view.shape[-1]
    per_image = source.rows // BATCH
    places = view.places().reshape(-1, channels)
    if source.rows % BATCH or len(places) % BATCH:
        raise _refuse(user, "rows are shared between images")
    count = len(places) // BATCH
    first, second = places[:count], places[count : 2 * count]
    stride = per_image * source.channels
    if not torch.equal(torch.where(first < 0, first, first + stride), second):
        raise _refuse(user, "images are not treated alike")
    known = first[(first >= 0).all(dim=1)]
    if not len(known):
        raise _refuse(user, "it takes constants")
    row, column = known // source.channels, known % source.channels
    # where the row of the source changes, or a channel comes again, a piece ends
    new = (row[0, 1:] != row[0, :-1]) | (column[0, 1:] == column[0, 0])
    width = int(new.nonzero()[0]) + 1 if bool(new.any()) else channels
    if channels % width:
        raise _refuse(user, "channels come from several rows in an irregular way")
    row, column = row.view(len(row), -1, width), column.view(len(column), -1, width)
    if not bool((row == row[..., :1]).all()) or not bool((column == column[:1, :1]).all()):
        raise _refuse(user, "channels come from several rows in an irregular way")
    table = nowhere(count, channels // width)
    table[(first >= 0).all(dim=1)] = row[..., 0]
    if bool(((first < 0).any(dim=1) & (first >= 0).any(dim=1)).any()):
        raise _refuse(user, "rows are constant in part")
    return Rows(view, source, table, column[0, 0], _channels(view, user), _terms(view, count, user))


def _channels(view: View, user: Operation) -> torch.Tensor | None:
    """Return the factor of each channel."""
    if view.factor is None:
        return None
    factor = view.factor.expand(view.shape).reshape(-1, view.shape[-1])
    # rows that are constants have no factor
    factor = factor[view.places().reshape(-1, view.shape[-1])[:, 0] >= 0]
    if not bool((factor == factor[:1]).all()):
        raise _refuse(user, "tokens are multiplied by different factors")
    return None if bool((factor[0] == 1).all()) else factor[0].clone()


def _terms(view: View, count: int, user: Operation) -> torch.Tensor | None:
    """Return what is added to each row of an image."""
    if view.term is None:
        return None
    term = view.term.expand(view.shape).reshape(-1, view.shape[-1])
    if not torch.equal(term[:count], term[count : 2 * count]):
        raise _refuse(user, "images are not treated alike")
    return term[:count].clone() if bool(term[:count].any()) else None


@dataclasses.dataclass(eq=False)
class Stream:
    """An int16 tensor (images, tokens, channels) of the integer network.

    Attributes:
        node: its name in the network.
        rows, channels: of an image.
        group: streams that share a unit.
        is_flat: whether it is (images, channels): the mean of an image.
        term: what all that take the operation's output add to its rows, and the node has added already; or None.
    """

    node: str
    rows: int
    channels: int
    group: Group
    is_flat: bool = False
    term: torch.Tensor | None = None


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


class Lowering:
    """Makes the nodes of an integer network out of captured operations.

    Attributes:
        grids: where the int8 output of a node lies, once it is filled in.
        twins: what nodes stand for in floating point.
        references: by node what its output stands for: a float tensor, and the group of a residual stream.
    """

    def __init__(self, captured: Captured, recipe: Recipe, image: tuple[int, ...]) -> None:
        self.captured, self.recipe, self.image = captured, recipe, image
        self.users: dict[int, list[tuple[Operation, int]]] = defaultdict(list)
        for operation in captured.operations:
            for place, view in enumerate(operation.inputs):
                self.users[id(view.source)].append((operation, place))
        self.nodes: list[Node] = []
        self.modules: dict[str, Any] = {}
        self.fillers: list[Callable[[Ranges], None]] = []
        self.groups: list[Group] = []
        self.streams: dict[tuple[int, ...], Stream] = {}
        self.observed: dict[fx.Node, bool] = {}
        self.values: dict[int, str] = {}
        self.grids: dict[str, Grid] = {}
        self.scales: dict[str, float] = {}
        self.references: dict[str, tuple[View, Group | None]] = {}
        self.twins: dict[str, FloatTwin] = {}
        self.selected: dict[str, str] = {}

    # --- helpers ----------------------------------------------------------------------------------------------

    def kinds_behind(self, operation: Operation) -> set[str]:
        """Return which kinds of operation take an operation's output; ``"output"`` stands for the network's."""
        kinds = {user.kind for user, _ in self.users[id(operation)]}
        if any(output.view.source is operation for output in self.captured.outputs):
            kinds.add("output")
        return kinds

    def layer_behind(self, operation: Operation) -> tuple[Operation, fx.Node, slice] | None:
        """Return the linear layer that alone takes an operation's output, perhaps with other tensors beside it.

        Returns:
            The layer, the node of the traced graph with what it takes of the operation, and which of its inputs that is; or
            None where something else takes it, or several do.
        """
        users = self.users[id(operation)]
        if len(users) != 1 or "output" in self.kinds_behind(operation):
            return None
        user, place = users[0]
        first = 0
        if user.kind == "join" and len(self.users[id(user)]) == 1:
            first = sum(x.shape[-1] for x in user.inputs[:place])
            seen, (user, _) = user.seen[place], self.users[id(user)][0]
        else:
            seen = user.seen[place] if user.kind == "linear" else operation.node
        return (user, seen, slice(first, first + operation.channels)) if user.kind == "linear" else None

    def is_sum(self, operation: Operation) -> bool:
        """Tell whether an operation is a sum of linear layers that a residual connection adds to its stream."""
        return (
            operation.kind == "add"
            and [user.kind for user, _ in self.users[id(operation)]] == ["add"]
            and self.kinds_behind(operation) == {"add"}
            and all(self.is_summand(view.source) for view in operation.inputs)
        )

    def is_summand(self, operation: Operation) -> bool:
        """Tell whether an operation is a linear layer, or a sum of some, which nothing but one sum takes."""
        if operation.kind != "linear":
            return self.is_sum(operation)
        return (
            [user.kind for user, _ in self.users[id(operation)]] == ["add"]
            and self.kinds_behind(operation) == {"add"}
            and (id(operation),) not in self.streams
            and operation.inputs[0].source.kind != "images"
        )

    def watch(self, *nodes: fx.Node) -> None:
        """Have calibration look at nodes of the traced graph."""
        for node in nodes:
            self.observed.setdefault(node, False)

    def add(self, name: str, module: Any, *inputs: str) -> str:
        """Add a node; return its name, which no other has, and which is not below another's."""
        for other in self.modules:
            if name.startswith(f"{other}."):
                name = f"{other}_{name[len(other) + 1 :]}"
        unique, number = name, 1
        while unique in self.modules or any(each.startswith(f"{unique}.") for each in self.modules):
            number += 1
            unique = f"{name}_{number}"
        self.modules[unique] = module
        self.nodes.append(Node(unique, tuple(inputs)))
        return unique

    def group(self) -> Group:
        """Return a new group of streams."""
        self.groups.append(Group())
        return self.groups[-1]

    def see(self, group: Group, node: fx.Node) -> None:
        """Note that a node's values lie in a group's unit."""
        group.seen.append(node)
        self.watch(node)

    # --- streams ----------------------------------------------------------------------------------------------

    def stream(self, view: View, seen: fx.Node, user: Operation) -> tuple[Stream, Rows]:
        """Return the stream that a view is of, made if it is patches with constants around them; and its rows there."""
        rows = rows_of(view, user)
        key = (id(rows.source),)
        if rows.source.kind == "embedding":
            if not rows.is_whole:
                raise _refuse(user, "it takes some tokens, or some channels, of an embedding")
            if key not in self.streams:
                self.streams[key], self.embedded = self.embed_tokens(rows), rows
            elif not _same(rows.term, self.embedded.term) or not _same(rows.factor, self.embedded.factor):
                raise _refuse(user, "tokens are used with different constants around them")
            self.see(self.streams[key].group, seen)
            return self.streams[key], Rows(view, rows.source, rows.table, rows.columns, None, None)
        if rows.source.kind == "linear" and rows.source.inputs[0].source.kind == "images":
            if not rows.has_all_columns:
                raise _refuse(user, "it takes some channels of patch embeddings")
            tokens = rows.table[:, 0]
            prefix = int((tokens < 0).sum())
            if not torch.equal(tokens[prefix:], counted(len(tokens) - prefix)) or rows.table.shape[1] != 1:
                raise _refuse(user, "tokens are not class tokens, then patches in their order")
            made = self.streams.get(key)
            if made is None:
                made = self.streams[key] = self.embed(rows, prefix)
                self.embedded = rows
            elif (
                not _same(rows.term, self.embedded.term)
                or not _same(rows.factor, self.embedded.factor)
                or not torch.equal(rows.table, self.embedded.table)
            ):
                raise _refuse(user, "patches are used with different constants around them")
            self.see(made.group, seen)
            whole = counted(len(tokens))[:, None]
            return made, Rows(view, rows.source, whole, rows.columns, None, None)
        if key not in self.streams:
            raise _refuse(user, f"it takes what {rows.source.kind} of {rows.source.name or 'the model'} computes")
        if not _same(rows.term, self.streams[key].term) or rows.factor is not None or not rows.has_all_columns:
            raise _refuse(user, "constants are added to, or multiplied with, the residual stream")
        self.see(self.streams[key].group, seen)
        return self.streams[key], rows

    def begin(self, node: str, view: View, group: Group, *, is_flat: bool = False) -> Stream:
        """Return the stream that a node makes."""
        self.references[node] = view, group
        return Stream(node, math.prod(view.shape[:-1]) // BATCH, view.shape[-1], group, is_flat)

    def embed(self, rows: Rows, prefix: int) -> Stream:
        """Add the patch embedding: patches, position embeddings, class tokens."""
        operation = rows.source
        assert operation.matrix is not None
        matrix, bias = operation.matrix.scaled(rows.factor), operation.bias
        if bias is not None and rows.factor is not None:
            bias = bias * rows.factor
        patch, order = self.patch_size(operation)
        matrix = matrix if order is None else matrix.columns(order)
        count = len(rows.table) - prefix
        module = PatchEmbedding(self.image[0], patch, operation.channels, count if rows.term is not None else 0, prefix)
        group = self.group()
        name = self.add(operation.name or "embed", module, IMAGES)
        term = rows.term
        view = operation.inputs[0]
        pixels = slice(None) if order is None else order
        seen = call_behind(
            self.captured.operations[0].node, "patches", lambda images: view.evaluate(images.flatten(1))[..., pixels]
        )
        self.observed[seen] = True

        def fill(ranges: Ranges) -> None:
            covariance = ranges[seen].covariance
            cv.convert_pixels(module, matrix.make(), bias, self.mean, self.deviation, group.unit, covariance)
            if term is not None and module.position is not None:
                module.position.copy_(cv.to_int16(term[prefix:], group.unit)[None])
            if term is not None and module.prefix is not None:
                module.prefix.copy_(cv.to_int16(term[:prefix], group.unit)[None])
            position = prefixes = None
            if term is not None:
                position, prefixes = term[None, prefix:], term[None, :prefix] if prefix else None
            of_pixels = cv.pixel_layer(matrix.make(), bias, self.mean, self.deviation)
            self.twins[name] = FloatTwin(*of_pixels, position=position, prefix=prefixes)

        self.fillers.append(fill)
        return self.begin(name, rows.view, group)

    def embed_tokens(self, rows: Rows) -> Stream:
        """Add the embedding of ids: a table, and what is added to each place."""
        operation, term = rows.source, rows.term
        assert operation.weight is not None
        table = operation.weight if rows.factor is None else operation.weight * rows.factor
        vocabulary, channels = table.shape
        if term is not None and bool((term == term[:1]).all()):
            # the same for all places, as that of the one segment
            table, term = table + term[:1], None
        module = TokenEmbedding(vocabulary, channels, 0 if term is None else len(term), bool(self.captured.tokens))
        group = self.group()
        # words that calibration did not see are in the table
        group.most = float(table.abs().max()) + (0.0 if term is None else float(term.abs().max()))
        name = self.add(operation.name or "embed", module, IMAGES)

        def fill(ranges: Ranges) -> None:
            module.table.copy_(cv.to_int16(table, group.unit))
            if term is not None and module.position is not None:
                module.position.copy_(cv.to_int16(term, group.unit))

        self.fillers.append(fill)
        return self.begin(name, rows.view, group)

    def patch_size(self, operation: Operation) -> tuple[tuple[int, int], torch.Tensor | None]:
        """Return the (height, width) of patches that a linear layer takes, and the order of its inputs.

        Patches cut the image without overlap; pixels behind the last whole patch are left out. The order says which of the
        layer's inputs is each pixel of (channels, height, width); None where they lie so.
        """
        view = operation.inputs[0]
        channels, height, width = self.image[:3]
        pixels = counted(channels * height * width).view(1, channels, height, width)
        places = view.places()
        one = places[: len(places) // BATCH].reshape(-1, places.shape[-1])
        for high in range(1, height + 1):
            area = places.shape[-1] // channels
            wide = area // high
            if wide * high * channels != places.shape[-1] or (height // high) * (width // max(wide, 1)) != len(one):
                continue
            cut = pixels.unfold(2, high, high).unfold(3, wide, wide).permute(0, 2, 3, 1, 4, 5).reshape(-1, places.shape[-1])
            if torch.equal(cut, one):
                return (high, wide), None
            # the pixels of a patch in another order, the same in all patches
            order = one[0].argsort()[cut[0].argsort().argsort()]
            if torch.equal(cut, one[:, order]):
                return (high, wide), order
        raise _refuse(operation, "it takes pixels, but not in patches that tile the image")

    # --- one operation after the other -------------------------------------------------------------------------

    def lower(self) -> IntegerNetwork:
        """Return the network with empty modules.

        Raises:
            UnsupportedError: an operation fits into no pattern.
        """
        for operation in self.captured.operations:
            if operation.kind in ACTIVATIONS:
                self.lower_activation(operation)
            elif operation.kind not in ("images", "embedding", "join", "unrotate", "rotary"):
                getattr(self, f"lower_{operation.kind}")(operation)
        ends = {output.name: self.arranged(output, self.lower_output(output)) for output in self.captured.outputs}
        return IntegerNetwork(self.nodes, self.modules, self.image, self.recipe, ends)

    def lower_norm(self, operation: Operation) -> None:
        kinds = self.kinds_behind(operation)
        if kinds <= {"attention", "rotary"} and operation.inputs[0].source.kind == "linear":
            return  # of query or key, which attention takes
        if self.is_branch(operation):
            return  # which the sum adds
        if kinds & {"norm", "add"} or any(self.takes_stream(user, place) for user, place in self.users[id(operation)]):
            self.stream_norm(operation)
        # else where it is used: linear layers, means and outputs choose its grid

    def takes_stream(self, user: Operation, place: int) -> bool:
        """Tell whether an operation takes a normalisation as a stream: several tokens as one row, or a mean to normalise."""
        if user.kind == "linear":
            rows = rows_of(user.inputs[place], user)
            return rows.table.shape[1] > 1 and rows.has_all_columns
        return user.kind == "mean" and self.kinds_behind(user) == {"norm"}

    def is_branch(self, operation: Operation) -> bool:
        """Tell whether an operation is a normalisation between a linear layer and the sum of a residual connection."""
        if operation.kind != "norm" or [user.kind for user, _ in self.users[id(operation)]] != ["add"]:
            return False
        linear = operation.inputs[0].source
        return (
            self.kinds_behind(operation) == {"add"}
            and linear.kind == "linear"
            and linear.inputs[0].source.kind != "images"
            and len(self.users[id(linear)]) == 1
        )

    def first(self, node: str, tokens: torch.Tensor, user: Operation) -> str:
        """Add a node that takes the first tokens of another's output."""
        if not torch.equal(tokens, counted(len(tokens))):
            raise _refuse(user, "it takes some tokens that are not the first ones")
        name = self.add(f"{node}_first", First(len(tokens)), node)
        self.selected[name] = node
        return name

    def stream_norm(self, operation: Operation) -> None:
        """Add a normalisation whose output is the residual stream."""
        stream, rows = self.stream(operation.inputs[0], operation.seen[0], operation)
        gather = None if rows.is_whole else rows.table
        module = _norm_module(operation, "int16", gather)
        group = self.group()
        term = self.term_behind(operation)
        residual = [] if term is None else [self.constant_stream(operation, term, group)]
        name = self.add(operation.name or "norm", module, stream.node, *residual)
        made = View(operation, (BATCH, operation.rows // BATCH, operation.channels), term=None if term is None else term[None])
        self.streams[(id(operation),)] = self.begin(name, made, group)
        self.streams[(id(operation),)].term = term
        float_norm = _norm(operation)
        self.twins[name] = float_norm.twin()
        self.fillers.append(lambda ranges: cv.finish_norm(module, float_norm, stream.group.unit, group.unit))

    def term_behind(self, operation: Operation) -> torch.Tensor | None:
        """Return what all that take an operation's output add to its rows, float64 (rows of an image, channels), or None."""
        views = [(user.inputs[place], user) for user, place in self.users[id(operation)]]
        views += [(output.view, operation) for output in self.captured.outputs if output.view.source is operation]
        if any(view.term is None for view, _ in views):
            return None
        found = [rows_of(view, user) for view, user in views]
        first = found[0].term
        return first if all(rows.is_whole and _same(rows.term, first) for rows in found) else None

    def constant_stream(self, operation: Operation, term: torch.Tensor, group: Group) -> str:
        """Add a node that gives position embeddings, for a normalisation of patches that adds them.

        It is a patch embedding whose weights are 0: no other operator gives a constant.

        Args:
            operation: the normalisation.
            term: the positions, float64 (tokens, channels).
            group: in whose unit they are.
        """
        patches = operation.inputs[0].source
        if patches.inputs[0].source.kind != "images":
            raise _refuse(operation, "position embeddings are added behind it, and it does not take patches of the image")
        patch, _ = self.patch_size(patches)
        module = PatchEmbedding(self.image[0], patch, operation.channels, len(term), 0)
        name = self.add(f"{operation.name or 'norm'}_positions", module, IMAGES)
        weight = torch.zeros(operation.channels, math.prod((self.image[0], *patch)), dtype=torch.float64, device="cpu")
        self.twins[name] = FloatTwin(weight, position=term[None])
        self.references[name] = View(patches, (BATCH, *term.shape), nowhere(BATCH, *term.shape), term=term[None]), group

        def fill(ranges: Ranges) -> None:
            cv.convert_pixels(module, weight, None, self.mean, self.deviation, group.unit, ())
            if module.position is not None:
                module.position.copy_(cv.to_int16(term, group.unit)[None])

        self.fillers.append(fill)
        return name

    def norm_before(
        self, rows: Rows, user: Operation, dtype: str, *, single: bool = False, suffix: str = "", residual: Sequence[str] = ()
    ) -> tuple[str, LayerNorm, Any, Group]:
        """Add the normalisation whose rows a linear layer (or a mean, a sum, or the output) takes, in the order it takes them.

        A sum's residual is the second input.

        Returns:
            name of the node, the module, the float normalisation with what is multiplied and added behind it, the group of
            its input.
        """
        operation = rows.source
        if operation.kind != "norm":
            raise _refuse(
                user, f"it takes what {operation.kind} of {operation.name or 'the model'} computes, not a normalisation"
            )
        stream, before = self.stream(operation.inputs[0], operation.seen[0], operation)
        if not rows.has_all_columns:
            raise _refuse(user, "it takes some channels of a normalisation")
        # rows of the normalisation, each made of rows of the stream
        table = before.table[rows.table.flatten()].view(len(rows.table), -1)
        if rows.table.shape[1] > 1 and before.table.shape[1] > 1:
            raise _refuse(user, "tokens are merged on both sides of a normalisation")
        if rows.table.shape[1] > 1:
            raise _refuse(user, "tokens are merged behind a normalisation")
        gather = None if torch.equal(table, counted(stream.rows)[:, None]) else table
        module = _norm_module(operation, dtype, gather, single and not stream.is_flat)
        name = self.add((operation.name or "norm") + suffix, module, stream.node, *residual)
        term = None
        if rows.term is not None:
            if not bool((rows.term == rows.term[:1]).all()):
                raise _refuse(user, "position embeddings are added behind a normalisation")
            term = rows.term[0]
        float_norm = _norm(operation, rows.factor, term)
        self.twins[name] = float_norm.twin()
        return name, module, float_norm, stream.group

    def take(
        self, rows: Rows, user: Operation, seen: fx.Node, matrix: Matrix, layer: str, room: float = 1.0, *,
        single: bool = False,
    ) -> tuple[str, Callable[[Ranges], tuple[Grid, torch.Tensor]]]:  # fmt: skip
        """Return the node whose int8 output a linear layer takes, and a function that fills it in.

        Args:
            rows: that the layer takes.
            user: the layer.
            seen: node of the traced graph with its input.
            matrix: of the layer.
            layer: of :data:`.conversion.SPREADS`.
            room: how much wider than what calibration saw the range is taken.
            single: whether the layer takes one token of an image, (batch, channels).

        Returns:
            The node, and what returns where its output lies and the mean of it.
        """
        self.watch(seen)
        source = rows.source
        # a head takes too few rows for a covariance
        self.observed[seen] |= layer != "head"
        if id(source) in self.values:
            tokens = rows.table[:, 0]
            if rows.table.shape[1] != 1 or not rows.has_all_columns or rows.term is not None or rows.factor is not None:
                raise _refuse(user, f"it takes a part of what {source.kind} of {source.name or 'the model'} computes")
            whole = self.values[id(source)]
            node = whole
            if not torch.equal(tokens, counted(source.rows // BATCH)):
                node = self.first(whole, tokens, user)
            return node, lambda ranges: (ranges[seen].on(self.grids[whole]), ranges[seen].mean)
        if source.kind == "norm" and (id(source),) not in self.streams:
            name, norm, float_norm, group = self.norm_before(rows, user, "int8", single=single)
            self.references[name] = rows.view, None

            def fill(ranges: Ranges) -> tuple[Grid, torch.Tensor]:
                inputs = ranges[seen] if room == 1.0 else ranges[seen].widened(room)
                self.grids[name] = cv.convert_norm_linear(
                    norm, float_norm, group.unit, matrix.make(), inputs, cv.SPREADS[layer]
                )
                return ranges[seen].on(self.grids[name]), ranges[seen].mean

            return name, fill
        stream, there = self.stream(rows.view, seen, user)
        module: Mean | Narrow
        if rows.table.shape == (1, 1) and single:
            # one token of the residual stream, whose mean is itself
            module = Mean(1, stream.channels, "int8", int(there.table[0, 0]))
            name = self.add(f"{stream.node}_token", module, stream.node)
        else:
            if bool((there.table < 0).any()):
                raise _refuse(user, "some tokens that it takes are constants")
            gather = None if torch.equal(there.table, counted(stream.rows)[:, None]) else there.table
            module = Narrow(stream.channels * there.table.shape[1], None if gather is None else gather.shape)
            if gather is not None and module.gather is not None:
                module.gather.copy_(gather)
            name = self.add(f"{user.name or stream.node}_input", module, stream.node)
            self.references[name] = rows.view, None
        self.twins[name] = FloatTwin()

        def fill_token(ranges: Ranges) -> tuple[Grid, torch.Tensor]:
            inputs = ranges[seen].widened(room)
            grid = Grid(cv.SPREADS[layer].steps(inputs.half, matrix.make()), inputs.middle)
            cv.finish_mean(module, torch.full_like(grid.step, stream.group.unit), grid.step, grid.middle)
            self.grids[name] = grid
            return grid, ranges[seen].mean

        return name, fill_token

    def lower_activation(self, operation: Operation) -> None:
        """norm, linear, activation: the first half of an MLP."""
        if self.kinds_behind(operation) == {"product"}:
            return  # where it is used
        rows = rows_of(operation.inputs[0], operation)
        first = rows.source
        if (
            first.kind != "linear"
            or first.matrix is None
            or not rows.is_whole
            or rows.term is not None
            or rows.factor is not None
        ):
            raise _refuse(operation, "it follows no linear layer")
        if self.users[id(first)] != [(operation, 0)]:
            raise _refuse(operation, "something else takes its linear layer, too")
        matrix = first.matrix
        if self.kinds_behind(operation) == {"norm"} and len(self.users[id(operation)]) == 1:
            self.activation_stream(operation, first, matrix)
            return
        behind = self.layer_behind(operation)
        if behind is None:
            raise _refuse(operation, "it stands before something else than one linear layer or normalisation")
        second, seen, columns = behind
        name, grid_of = self.take(rows_of(first.inputs[0], first), first, first.seen[0], matrix, "fc1")
        module = WITH_ACTIVATION[operation.kind](matrix.shape[1], matrix.shape[0])
        node = self.values[id(operation)] = self.add(first.name or "fc1", module, name)
        self.references[node] = _whole(operation), None
        self.twins[node] = FloatTwin(matrix, first.bias, slope=operation.slope)
        self.watch(seen)
        after = self.scaled(second)[0].columns(columns)

        def fill(ranges: Ranges) -> None:
            made = ranges[seen]
            unit = cv.activation_unit(operation.kind, operation.slope, made)
            cv.fill_linear(module, matrix.make(), first.bias, *grid_of(ranges), unit)
            self.grids[node] = cv.activation_steps(module, unit, made, after.make())

        self.fillers.append(fill)

    def lower_product(self, operation: Operation) -> None:
        """norm, linear layer(s), activation of some channels times others: the first half of a gated MLP."""
        gates = rows_of(operation.inputs[0], operation)
        activation = gates.source
        parts = [rows_of(activation.inputs[0], operation), rows_of(operation.inputs[1], operation)]
        plain = [gates, *parts]
        if any(each.term is not None or each.factor is not None for each in plain) or not gates.is_whole:
            raise _refuse(operation, "constants stand between its linear layers and it, or it takes some rows of them")
        linears = [part.source for part in parts]
        tables = [rows_of(each.inputs[0], each) for each in linears if each.kind == "linear"]
        if len(tables) != 2 or tables[0].source is not tables[1].source or not _same_rows(tables):
            raise _refuse(operation, "gate and value are not linear layers of the same tokens")
        whole = counted(operation.rows // BATCH)[:, None]
        if any(not torch.equal(part.table, whole) for part in parts):
            raise _refuse(operation, "tokens are rearranged between its linear layers and it")
        if {id(user) for each in linears for user, _ in self.users[id(each)]} != {id(activation), id(operation)} or len(
            self.users[id(activation)]
        ) != 1:
            raise _refuse(operation, "gate or value are used elsewhere, too")
        kinds = self.kinds_behind(operation)
        if len(self.users[id(operation)]) != 1 or kinds not in ({"linear"}, {"norm"}):
            raise _refuse(operation, f"it stands before {', '.join(sorted(kinds)) or 'nothing'}, not one layer")
        matrices = [
            each.matrix.rows(part.columns) for each, part in zip(linears, parts, strict=True) if each.matrix is not None
        ]
        matrix, bias = Matrix.join(matrices, 0), None
        if any(each.bias is not None for each in linears):
            zeros = torch.zeros(operation.channels, dtype=torch.float64, device="cpu")
            bias = torch.cat(
                [zeros if each.bias is None else each.bias[part.columns] for each, part in zip(linears, parts, strict=True)]
            )
        prefix = operation.name or "mlp"
        source, grid_of = self.take(tables[0], operation, linears[0].seen[0], matrix, "fc1")
        name = linears[0].name if linears[0] is linears[1] and linears[0].name else f"{prefix}.gate_value"
        self.watch(operation.seen[1])

        def value_of(ranges: Ranges) -> Range:
            return ranges[operation.seen[1]]

        self.gated(operation, activation, (matrix, bias), (source, grid_of), (name, f"{prefix}.product"), value_of)

    def activation_stream(self, operation: Operation, first: Operation, matrix: Matrix) -> None:
        """An activation whose output a normalisation takes: a gated product whose values are 1, since that makes int16.

        Args:
            operation: the activation.
            first: the linear layer before it.
            matrix: of the layer.
        """
        count = operation.channels
        nothing = Matrix(matrix.shape, lambda: torch.zeros(matrix.shape, dtype=torch.float64, device="cpu"))
        ones = torch.ones(count, dtype=torch.float64, device="cpu")
        bias = torch.cat((torch.zeros_like(ones) if first.bias is None else first.bias, ones))
        taken = self.take(rows_of(first.inputs[0], first), first, first.seen[0], matrix, "fc1")
        names = first.name or "fc1", f"{operation.name or 'activation'}.product"
        both = Matrix.join([matrix, nothing], 0)
        self.gated(operation, operation, (both, bias), taken, names, lambda ranges: Range(ones, ones, ones))

    def gated(
        self, operation: Operation, activation: Operation, layer: tuple[Matrix, torch.Tensor | None],
        taken: tuple[str, Callable[[Ranges], tuple[Grid, torch.Tensor]]], names: tuple[str, str],
        value_of: Callable[[Ranges], Range],
    ) -> None:  # fmt: skip
        """Add the linear layer of gates and values, and their product.

        Args:
            operation: whose output it is.
            activation: of the gates.
            layer: weights and bias of gates, then values.
            taken: the layer's input, see :meth:`take`.
            names: of both nodes.
            value_of: returns the range of the values.
        """
        (matrix, bias), (source, grid_of) = layer, taken
        behind = self.users[id(operation)][0][0]
        both = Linear(matrix.shape[1], matrix.shape[0], "int16")
        linear = self.add(names[0], both, source)
        self.twins[linear] = FloatTwin(matrix, bias)
        module = Gated(operation.channels, "int8" if behind.kind == "linear" else "int16", activation.kind)
        node = self.add(names[1], module, linear)
        self.twins[node] = FloatTwin(slope=activation.slope)
        self.watch(activation.node)
        group = after = None
        if behind.kind == "norm":
            group = self.group()
            self.streams[(id(operation),)] = self.begin(node, _whole(operation), group)
            self.see(group, operation.node)
        else:
            self.values[id(operation)] = node
            self.references[node] = _whole(operation), None
            self.watch(behind.seen[0])
            after, _ = self.scaled(behind)

        def fill(ranges: Ranges) -> None:
            units = cv.gated_units(activation.kind, activation.slope, ranges[activation.node], value_of(ranges))
            steps = torch.cat((torch.full_like(units.value, units.gate), units.value))
            cv.fill_linear(both, matrix.make(), bias, *grid_of(ranges), steps)
            self.grids[linear] = Grid(steps, torch.zeros_like(steps))
            if after is not None:
                made = ranges[behind.seen[0]]
                self.grids[node] = cv.finish_gated(module, units, cv.SPREADS["fc2"].steps(made.half, after.make()), made.middle)
            elif group is not None:
                cv.finish_gated(module, units, torch.full_like(units.value, group.unit), torch.zeros_like(units.value))

        self.fillers.append(fill)

    def scaled(self, linear: Operation) -> tuple[Matrix, torch.Tensor | None]:
        """Return weight and bias of a linear layer with what its one user multiplies and adds (layer scale)."""
        assert linear.matrix is not None
        matrix, bias, source = linear.matrix, linear.bias, linear
        while len(users := self.users[id(source)]) == 1 and users[0][0].kind == "add":
            user, place = users[0]
            rows = rows_of(user.inputs[place], user)
            if not rows.has_all_columns:
                raise _refuse(user, "it adds some channels of a linear layer")
            if rows.factor is not None:
                matrix, bias = matrix.scaled(rows.factor), None if bias is None else bias * rows.factor
            if rows.term is not None:
                if not bool((rows.term == rows.term[:1]).all()):
                    raise _refuse(user, "what is added to tokens differs")
                bias = rows.term[0] if bias is None else bias + rows.term[0]
            if not self.is_sum(user):
                break
            source = user
        return matrix, bias

    def lower_linear(self, operation: Operation) -> None:
        kinds = self.kinds_behind(operation)
        alone = len(kinds) == 1 and kinds <= {*ACTIVATIONS, "product", "attention", "add", "output"}
        gates = "product" in kinds and kinds <= {*ACTIVATIONS, "product"}
        if alone or gates or operation.inputs[0].source.kind == "images":
            return  # where it is used
        behind = {kind for user, _ in self.users[id(operation)] if user.kind in ("norm", "rotary")
                  for kind in self.kinds_behind(user)}  # fmt: skip
        if kinds <= {"norm", "attention", "rotary"} and behind and behind <= {"attention", "rotary"}:
            return
        if not kinds <= {"norm", "add", "linear", "mean", "output"} or kinds == {"linear"}:
            raise _refuse(operation, f"it stands before {', '.join(sorted(kinds)) or 'nothing'}")
        self.begin_stream(operation)

    def begin_stream(self, operation: Operation) -> None:
        """A linear layer whose output is a residual stream: patch merging, the projection of a pooling by attention."""
        matrix = operation.matrix
        assert matrix is not None
        name, grid_of = self.take(rows_of(operation.inputs[0], operation), operation, operation.seen[0], matrix, "fc1")
        module = Linear(matrix.shape[1], matrix.shape[0], "int16")
        node = self.add(operation.name or "reduction", module, name)
        group = self.group()
        self.streams[(id(operation),)] = self.begin(node, _whole(operation), group)
        self.twins[node] = FloatTwin(matrix, operation.bias)

        def fill(ranges: Ranges) -> None:
            cv.fill_linear(module, matrix.make(), operation.bias, *grid_of(ranges), group.unit)

        self.fillers.append(fill)

    def lower_add(self, operation: Operation) -> None:
        """A residual connection: a linear layer that adds to the stream, or a normalisation behind one."""
        if self.is_sum(operation):
            return  # where it is added
        branches = [place for place in (0, 1) if self.is_summand(operation.inputs[place].source)]
        if self.kinds_behind(operation) == {"output"} and len(branches) == 2 and operation.rows == BATCH:
            return  # two heads, of which the output is the sum
        norms = [place for place in (0, 1) if self.is_branch(operation.inputs[place].source)]
        if norms:
            if branches:
                # the layer begins a stream, to which the normalisation adds
                begun = operation.inputs[branches[0]].source
                if begun.kind != "linear":
                    raise _refuse(operation, "it adds a normalisation to a sum of linear layers")
                self.begin_stream(begun)
            self.add_norm(operation, norms[-1])
            return
        if not branches:
            raise _refuse(operation, "neither side is a linear layer")
        place = branches[-1]
        stream, old = self.stream(operation.inputs[1 - place], operation.seen[1 - place], operation)
        view = operation.inputs[place]
        rows = rows_of(view, operation)
        if rows.table.shape[1] != 1 or not bool((old.table.diff(dim=0) > 0).all()):
            raise _refuse(operation, "tokens of the residual stream are rearranged before the sum")
        residual, count = stream.node, len(old.table)
        if count != stream.rows:
            residual = self.first(stream.node, old.table[:, 0], operation)
        layers = list(self.summands(view, operation))
        matrices = [self.scaled(layer)[0] for layer in layers]
        matrix, bias = Matrix.join(matrices, 1), self.bias_of(view, operation)
        scatter = None
        if not torch.equal(rows.table[:, 0], counted(count)):
            scatter = nowhere(count)
            scatter[rows.table[:, 0]] = counted(count)
        source, grid_of = self.take_joined(layers, matrices, "fc1")
        module = Linear(matrix.shape[1], matrix.shape[0], "int16", 0 if scatter is None else len(scatter))
        if scatter is not None and module.scatter is not None:
            module.scatter.copy_(scatter)
        node = self.add(layers[0].name or "projection", module, source, residual)
        self.streams[(id(operation),)] = self.begin(node, _whole(operation), stream.group)
        self.twins[node] = FloatTwin(matrix, bias)
        self.see(stream.group, operation.node)

        def fill(ranges: Ranges) -> None:
            cv.fill_linear(module, matrix.make(), bias, *grid_of(ranges), stream.group.unit)

        self.fillers.append(fill)

    def summands(self, view: View, user: Operation) -> Iterator[Operation]:
        """Yield the linear layers whose sum a view is of: one, or several with whole rows.

        Args:
            view: of what :meth:`is_summand` finds.
            user: the sum that takes it.
        """
        if view.source.kind == "linear":
            yield view.source
            return
        for each in (view, *view.source.inputs):
            if not rows_of(each, user).is_whole:
                raise _refuse(user, "it adds some rows or channels of a sum of linear layers")
        for each in view.source.inputs:
            yield from self.summands(each, view.source)

    def bias_of(self, view: View, user: Operation) -> torch.Tensor | None:
        """Return the bias of a sum of linear layers, with what is multiplied and added behind; arguments as before."""
        found = [view.source.bias]
        if view.source.kind == "add":
            found = [self.bias_of(each, view.source) for each in view.source.inputs]
        rows = rows_of(view, user)
        parts = [each if rows.factor is None else each * rows.factor for each in found if each is not None]
        if rows.term is not None:
            if not bool((rows.term == rows.term[:1]).all()):
                raise _refuse(user, "what is added to tokens differs")
            parts.append(rows.term[0])
        return functools.reduce(torch.add, parts) if parts else None

    def take_joined(
        self, layers: Sequence[Operation], matrices: Sequence[Matrix], kind: str, room: float = 1.0, *, is_head: bool = False
    ) -> tuple[str, Callable[[Ranges], tuple[Grid, torch.Tensor]]]:
        """Return what :meth:`take` does for several layers that become one, which takes the inputs of all side by side.

        Args:
            layers: each takes one tensor, or several that are put side by side.
            matrices: of the layers.
            kind, room: see :meth:`take`.
            is_head: whether they make an output, of which one token can be taken.
        """
        taken: list[tuple[str, Callable[[Ranges], tuple[Grid, torch.Tensor]]]] = []
        for layer, matrix in zip(layers, matrices, strict=True):
            inner = layer.inputs[0].source
            pieces = [(layer.inputs[0], layer.seen[0])]
            if inner.kind == "join":
                if not rows_of(layer.inputs[0], layer).is_whole:
                    raise _refuse(layer, "it takes some of several tensors")
                pieces = list(zip(inner.inputs, inner.seen, strict=True))
            first = 0
            for view, seen in pieces:
                part = matrix.columns(slice(first, first + view.shape[-1]))
                first += view.shape[-1]
                rows = rows_of(view, layer)
                if is_head and len(rows.table) != 1 and len(view.shape) == 2:
                    raise _refuse(layer, f"it takes {len(rows.table)} tokens of an image")
                taken.append(self.take(rows, layer, seen, part, kind, room, single=is_head and len(rows.table) == 1))
        if len(taken) == 1:
            return taken[0]
        source = self.add(f"{layers[0].name or 'output'}_join", Join(), *(name for name, _ in taken))

        def fill(ranges: Ranges) -> tuple[Grid, torch.Tensor]:
            grids, means = zip(*(grid_of(ranges) for _, grid_of in taken), strict=True)
            self.grids[source] = cv.side_by_side(grids)
            return self.grids[source], torch.cat(means)

        return source, fill

    def add_norm(self, operation: Operation, place: int) -> None:
        """A residual connection to which a normalisation behind a linear layer adds."""
        stream, old = self.stream(operation.inputs[1 - place], operation.seen[1 - place], operation)
        if not bool((old.table.diff(dim=0) > 0).all()):
            raise _refuse(operation, "tokens of the residual stream are rearranged before the sum")
        residual = stream.node
        if len(old.table) != stream.rows:
            residual = self.first(stream.node, old.table[:, 0], operation)
        rows = rows_of(operation.inputs[place], operation)
        node, module, float_norm, group = self.norm_before(rows, operation, "int16", residual=[residual])
        self.streams[(id(operation),)] = self.begin(node, _whole(operation), stream.group)
        self.see(stream.group, operation.node)
        self.fillers.append(lambda ranges: cv.finish_norm(module, float_norm, group.unit, stream.group.unit))

    # --- attention --------------------------------------------------------------------------------------------

    def lower_attention(self, operation: Operation) -> None:
        """norm, linear(s), attention. The projection behind it comes with what takes it."""
        query, key, value = operation.inputs
        batch, heads, queries, width = query.shape
        tokens = key.shape[2]
        if key.shape != value.shape or key.shape[:2] != query.shape[:2] or key.shape[3] != width:
            raise _refuse(operation, "query, key and value have different heads or channels")
        projection = self.layer_behind(operation)
        is_normed = self.kinds_behind(operation) == {"norm"} and len(self.users[id(operation)]) == 1
        if projection is None and not is_normed:
            raise _refuse(operation, "it stands before something else than one linear layer or normalisation")
        seen_behind = self.users[id(operation)][0][0].seen[0] if projection is None else projection[1]
        parts = [self.heads_of(view, operation) for view in (key, value)]
        if operation.query is None:
            parts.insert(0, self.heads_of(query, operation, parts[0].turn))
        with_norms = [part for part in parts if part.norm is not None]
        if with_norms and (len(parts) != 3 or with_norms not in (parts[:2], parts)):
            raise _refuse(operation, "only query and key together, or both with the values, can be normalised")
        if any(not torch.equal(part.tokens, counted(len(part.tokens))) for part in parts):
            raise _refuse(operation, "it takes some tokens of its linear layers that are not the first ones")
        if any(len(part.tokens) != part.linear.rows // batch for part in parts[-2:]):
            raise _refuse(operation, "keys or values are some tokens of those that its linear layers take")
        rows = rows_of(parts[0].linear.inputs[0], parts[0].linear)
        for part in parts:
            other = rows_of(part.linear.inputs[0], part.linear)
            if other.source is not rows.source or not torch.equal(other.table, rows.table):
                raise _refuse(operation, "query, key and value are not of the same tokens")
            if any(user.kind not in ("attention", "norm", "rotary") for user, _ in self.users[id(part.linear)]):
                raise _refuse(operation, "query, key or value are used elsewhere, too")
        matrix = Matrix.join([part.matrix for part in parts], 0)
        bias = None
        if any(part.bias is not None for part in parts):
            zeros = [torch.zeros(part.matrix.shape[0], dtype=torch.float64, device="cpu") for part in parts]
            bias = torch.cat([zero if part.bias is None else part.bias for part, zero in zip(parts, zeros, strict=True)])
        first = parts[0].linear
        source, grid_of = self.take(rows, operation, first.seen[0], matrix, "qkv")
        prefix = operation.name or "attention"
        mask = operation.mask
        if operation.is_causal and mask is not None:
            raise _refuse(operation, "it is causal and has a bias")
        shape = None if mask is None else (mask.shape[0], heads, queries, tokens)
        window = tokens if batch > BATCH else 0
        module = Attention(
            heads, width, operation.scale, self.recipe.key, shape, window, 0 if operation.query is None else queries,
            queries if operation.query is None and queries != tokens else 0, operation.is_padded, operation.is_causal,
        )  # fmt: skip
        norms: list[LayerNorm] = []
        turned = None
        if any(part.turn is not None for part in parts):
            turned = TurnedHeads(self, operation, prefix, source, parts, matrix, bias)
            names = turned.names
        elif with_norms:
            # in a unit each, for the normalisations
            split = 2 * heads * width
            biases = (None, None) if bias is None else (bias[:split], bias[split:])
            layers = [Linear(matrix.shape[1], split, "int16")]
            both = self.add(f"{prefix}.qk", layers[0], source)
            with_norms = parts[:2]
            norms = [
                _norm_kind(part.norm)(width, "int8", part=(number * heads * width, heads))
                for number, part in enumerate(with_norms)
            ]
            names = []
            for letter, part, each in zip("qk", with_norms, norms, strict=True):
                # a norm that is spelled out has the attention's name
                own = part.norm.name if part.norm is not None and part.norm.name != operation.name else ""
                names.append(self.add(own or f"{prefix}.{letter}_norm", each, both))
            of_values = Values(self, prefix, source, parts[2], matrix.rows(slice(split, None)), biases[1])
            names.append(of_values.name)
        else:
            layers = [Linear(matrix.shape[1], matrix.shape[0], "int8")]
            alone = all(part.linear is first for part in parts)
            names = [self.add(first.name if alone and first.name else f"{prefix}.qkv", layers[0], source)]
        node = self.add(f"{prefix}.core", module, *names, *([IMAGES] if operation.is_padded else []))
        fill_stream = None
        if projection is None:
            fill_stream = self.attention_stream(operation, node, seen_behind)
        else:
            self.values[id(operation)] = node
        self.references[node] = _whole(operation), None
        float_mask = None if mask is None or shape is None else mask.expand(shape)
        self.twins[node] = FloatTwin(mask=float_mask, query=None if operation.query is None else operation.query[None],
                                     head_scale=operation.head_scale)  # fmt: skip
        if turned is None:
            linears = [both] if norms else names
            for made, rows_made in self.split_rows(linears, layers):
                self.twins[made] = FloatTwin(matrix.rows(rows_made), None if bias is None else bias[rows_made])
            for part, made in zip(with_norms[: len(norms)], names, strict=False):
                self.twins[made] = part.float_norm().twin()
        for part in parts:
            self.watch(part.linear.node, *(() if part.norm is None else (part.norm.seen[0], part.norm.node)))
        self.watch(seen_behind)
        after = None if projection is None else self.scaled(projection[0])[0].columns(projection[2])
        constant = operation.query

        def fill(ranges: Ranges) -> None:
            grid, mean = grid_of(ranges)
            weight = matrix.make()
            ends = [part.ends(ranges) for part in parts]
            if constant is not None:
                ends.insert(0, (constant.amin(dim=1), constant.amax(dim=1)))
            grids = cv.attention_grids(*ends)
            middle_of_values = grids.value_middle.expand(heads, width).flatten()
            if turned is not None:
                turned.fill(ranges, grids, grid, mean)
            elif norms:
                # the normalisations have the same weights in all heads, whose rows they take in one unit
                units = [cv.unit_of(ranges[part.norm.seen[0]]) for part in with_norms if part.norm is not None]
                unit = cv.each(units, heads * width)
                cv.fill_linear(layers[0], weight[:split], biases[0], grid, mean, unit)
                self.grids[both] = Grid(unit, torch.zeros_like(unit))
                query_step = grids.query_step[0]
                self.grids[names[0]] = Grid(query_step, torch.zeros_like(query_step))
                self.grids[names[1]] = Grid(grids.key_step[0], grids.key_middle[0])
                of_values.fill(ranges, grids, grid, mean)
                floats = [part.float_norm() for part in with_norms]
                cv.finish_norm(norms[0], floats[0], units[0], grids.query_step[0])
                cv.finish_norm(norms[1], floats[1], units[1], grids.key_step[0], grids.key_middle[0])
            else:
                steps, middles = [grids.key_step, grids.value_step], [grids.key_middle, grids.value_middle]
                if constant is None:
                    steps.insert(0, grids.query_step)
                    middles.insert(0, torch.zeros_like(grids.query_step))
                step, middle = torch.cat(steps).flatten(), torch.cat(middles).flatten()
                whole = cv.quantized_linear(weight, bias, grid, mean, step, middle)
                for layer, (name, part) in zip(layers, self.split_rows(names, layers), strict=True):
                    whole.fill(layer, part)
                    self.grids[name] = Grid(step[part], middle[part])
            if constant is not None and module.query is not None:
                values8 = (constant / grids.query_step[:, None]).round().clamp(-127, 127)
                module.query.copy_(values8.to(torch.int8)[None])
            grids.fill(module, operation.head_scale)
            weight_behind = None if after is None else after.make()
            self.grids[node] = cv.fill_output(module, ranges[seen_behind], middle_of_values, weight_behind)
            if fill_stream is not None:
                fill_stream(ranges)
            if mask is not None and module.bias is not None:
                module.bias.copy_(bias_to_fixed(mask.to(torch.float32).expand(module.bias.shape)))

        self.fillers.append(fill)

    def attention_stream(self, operation: Operation, core: str, seen: fx.Node) -> Callable[[Ranges], None]:
        """Add what brings attention's outputs, with a step a channel, to one int16 unit, which a normalisation takes.

        A linear layer whose matrix is diagonal: there is no other operator from int8 to int16.

        Args:
            operation: attention.
            core: its node.
            seen: node of the traced graph with its output.

        Returns:
            What fills it in, once attention is filled in.
        """
        channels = operation.channels
        module, group = Linear(channels, channels, "int16"), self.group()
        node = self.add(f"{core}_wide", module, core)
        self.streams[(id(operation),)] = self.begin(node, _whole(operation), group)
        same = Matrix((channels, channels), lambda: torch.eye(channels, dtype=torch.float64, device="cpu"))
        self.twins[node] = FloatTwin(same)
        self.see(group, seen)
        return lambda ranges: cv.fill_linear(module, same.make(), None, self.grids[core], ranges[seen].mean, group.unit)

    def split_rows(self, names: Sequence[str], layers: Sequence[Linear]) -> Iterator[tuple[str, slice]]:
        """Yield nodes of linear layers that follow each other in one matrix, and their rows of it."""
        first = 0
        for name, layer in zip(names, layers, strict=True):
            last = first + layer.bias.numel()
            yield name, slice(first, last)
            first = last

    def heads_of(self, view: View, user: Operation, like: Turn | None = None) -> Part:
        """Return the linear layer behind query, key or value, and which of its channels each head takes.

        Args:
            view: (batch, heads, tokens, channels).
            user: attention.
            like: of a query, how the keys were turned.
        """
        batch, _, _, width = view.shape
        norm = turn = None
        if view.source.kind == "rotary":
            turn, view = turn_of(view, user, like)
        if view.source.kind == "norm":
            norm = view.source
            # (batch, heads, tokens, channels) of rows (batch x heads x tokens), in any order
            inner, outer = norm.inputs[0].places().reshape(norm.rows, norm.channels), view.places()
            rows = outer // norm.channels
            if not bool((outer % norm.channels == counted(width)).all()):
                raise _refuse(user, "heads of query or key are not what was normalised")
            view = View(norm.inputs[0].source, view.shape, inner[rows[..., 0]])
            if norm.inputs[0].factor is not None or norm.inputs[0].term is not None:
                raise _refuse(norm, "constants stand before it")
        linear = view.source
        if linear.kind != "linear" or linear.matrix is None:
            raise _refuse(user, f"its input comes of {linear.kind} of {linear.name or 'the model'}, no linear layer")
        places = view.places()
        row, column = places // linear.channels, places % linear.channels
        per_batch = linear.rows // batch
        some = row[0, 0, :, 0]
        same = (row == some[None, None, :, None] + per_batch * counted(batch)[:, None, None, None]).all()
        if int(places.min()) < 0 or linear.rows % batch or not bool(same) or not bool((some.diff() > 0).all()):
            raise _refuse(user, "tokens are rearranged between its linear layers and its scores")
        if not bool((column == column[:1, :, :1]).all()):
            raise _refuse(user, "heads take different channels for different tokens")
        columns = column[0, :, 0] if turn is None else column[0, :, 0][:, turn.order]
        flat = columns.flatten()
        bias = None if linear.bias is None else linear.bias[flat]
        return Part(linear, norm, some, columns, linear.matrix.rows(flat), bias, turn)

    # --- behind the blocks ------------------------------------------------------------------------------------

    def lower_select(self, operation: Operation) -> None:
        """The token that stands for a text, of the stream before the last normalisation."""
        stream, rows = self.stream(operation.inputs[0], operation.seen[0], operation)
        if not rows.is_whole or stream.is_flat:
            raise _refuse(operation, "it takes some tokens of the residual stream")
        name = self.add(f"{operation.name}.select".lstrip("."), SelectToken(operation.token), stream.node, IMAGES)
        self.streams[(id(operation),)] = self.begin(name, _whole(operation), stream.group, is_flat=True)

    def lower_mean(self, operation: Operation) -> None:
        """A mean over tokens: of a normalisation behind the blocks, or of the stream before one."""
        view = operation.inputs[0]
        rows = rows_of(view, operation)
        kinds = self.kinds_behind(operation)
        if rows.table.shape[1] != 1 or not rows.has_all_columns or len(kinds) != 1:
            raise _refuse(operation, f"it stands before {', '.join(sorted(kinds))}")
        tokens = rows.table[:, 0]
        first = int(tokens[0])
        if not torch.equal(tokens, counted(len(tokens), first)):
            order = tokens.sort().values
            first = int(order[0])
            if not torch.equal(order, counted(len(tokens), first)):
                raise _refuse(operation, "it averages tokens that do not follow each other")
        if rows.source.kind != "norm" or (id(rows.source),) in self.streams:
            stream, _ = self.stream(view, operation.seen[0], operation)
            matrix, seen = self.matrix_behind(operation)
            if not kinds <= {"norm", "output", "unrotate"} and matrix is None:
                raise _refuse(operation, "only a normalisation, a linear layer or an output can follow it")
            module = Mean(len(tokens), operation.channels, "int16" if matrix is None else "int8", first)
            name = self.add(f"{operation.name}.mean".lstrip("."), module, stream.node)
            if matrix is not None and seen is not None:
                self.mean_before(operation, module, name, matrix, seen, stream.group)
                return
            group = self.group()
            self.streams[(id(operation),)] = self.begin(name, _whole(operation), group, is_flat=True)
            self.twins[name] = FloatTwin()

            def fill_first(ranges: Ranges) -> None:
                units = torch.full((operation.channels,), stream.group.unit, dtype=torch.float64, device="cpu")
                cv.finish_mean(module, units, units * (group.unit / stream.group.unit))

            self.fillers.append(fill_first)
            return
        norm_rows = Rows(view, rows.source, counted(rows.source.rows // BATCH)[:, None], rows.columns, rows.factor, rows.term)
        name, norm, float_norm, group = self.norm_before(norm_rows, operation, "int16")
        matrix, seen = self.matrix_behind(operation)
        if kinds not in ({"linear"}, {"join"}, {"output"}, {"unrotate"}):
            raise _refuse(operation, f"it stands before {', '.join(sorted(kinds))}")
        dtype = "int8"
        if matrix is None:
            dtype = "int32" if seen is None else "int16"
        module = Mean(len(tokens), operation.channels, dtype, first)
        node = self.values[id(operation)] = self.add(f"{operation.name}.mean".lstrip("."), module, name)
        self.twins[node] = FloatTwin()
        self.watch(rows.source.node, *(() if seen is None else (seen,)))

        def fill(ranges: Ranges) -> None:
            inputs = None if seen is None else ranges[seen]
            made = ranges[rows.source.node]
            weight = None if matrix is None else matrix.make()
            grid, scale, self.grids[name] = cv.fill_norm_mean(norm, module, float_norm, made, inputs, group.unit, weight)
            if grid is None:
                self.scales[node] = scale
            else:
                self.grids[node] = grid

        self.fillers.append(fill)

    def mean_before(
        self, operation: Operation, module: Mean, name: str, matrix: Matrix, seen: fx.Node, group: Group
    ) -> None:  # fmt: skip
        """Have a mean of the residual stream give what a linear layer takes.

        Args:
            operation, module, name: the mean, and its node.
            matrix, seen: of the layer, see :meth:`matrix_behind`.
            group: of the stream.
        """
        self.values[id(operation)] = name
        self.twins[name] = FloatTwin()
        self.watch(seen)

        def fill(ranges: Ranges) -> None:
            inputs = ranges[seen]
            grid = Grid(cv.SPREADS["head"].steps(inputs.half * cv.HEAD_ROOM, matrix.make()), inputs.middle)
            cv.finish_mean(module, torch.full_like(grid.step, group.unit), grid.step, grid.middle)
            self.grids[name] = grid

        self.fillers.append(fill)

    def matrix_behind(self, operation: Operation) -> tuple[Matrix | None, fx.Node | None]:
        """Return the weights of the one linear layer behind a mean, perhaps with other tensors beside it, and what it takes.

        There are no weights where an output is taken out of a rotated stream, and nothing where the mean is an output.
        """
        users = self.users[id(operation)]
        if len(users) != 1:
            return None, None
        user, place = users[0]
        if user.kind == "unrotate":
            return None, user.seen[0]
        if user.kind == "linear":
            return user.matrix, user.seen[0]
        if user.kind == "join" and [each.kind for each, _ in self.users[id(user)]] == ["linear"]:
            first = sum(x.shape[-1] for x in user.inputs[:place])
            head = self.users[id(user)][0][0]
            assert head.matrix is not None
            return head.matrix.columns(slice(first, first + operation.channels)), user.seen[place]
        return None, None

    # --- outputs ----------------------------------------------------------------------------------------------

    def lower_output(self, output: Output) -> str:
        """Return the node that makes an output."""
        source = output.view.source
        if len(output.view.shape) > 3:
            raise _refuse(source, f"the output has shape (batch, {', '.join(map(str, output.view.shape[1:]))}), not tokens")
        if source.kind == "linear" and (id(source),) not in self.streams:
            return self.heads([source], output)
        if source.kind == "add" and (id(source),) not in self.streams:
            return self.heads([view.source for view in source.inputs], output)
        if source.kind == "mean" and id(source) in self.values:
            return self.values[id(source)]
        if source.kind == "unrotate":
            return self.unrotate(source)
        rows = rows_of(output.view, source)
        if source.kind == "norm" and (id(source),) not in self.streams:
            single = len(rows.table) == 1 and len(output.view.shape) == 2
            name, module, float_norm, group = self.norm_before(rows, source, "int32", single=single)
            self.watch(source.node)

            def fill(ranges: Ranges) -> None:
                self.scales[name] = cv.feature_unit(ranges[source.node])
                cv.finish_norm(module, float_norm, group.unit, self.scales[name])

            self.fillers.append(fill)
            return name
        if source.kind == "join":
            raise _refuse(source, "an output is several tensors side by side; outputs can name them one by one")
        stream, there = self.stream(output.view, output.node, source)
        if there.table.shape[1] > 1:
            raise _refuse(source, "several tokens are a row of an output, with constants")
        token = int(there.table[0, 0]) if len(there.table) == 1 and len(output.view.shape) == 2 else None
        if token is None and not torch.equal(there.table, counted(stream.rows)[:, None]):
            raise _refuse(source, "an output is some tokens of the residual stream")
        name = self.add(output.name, Widen(None if stream.is_flat else token), stream.node)
        self.fillers.append(lambda ranges: self.scales.__setitem__(name, stream.group.unit))
        return name

    def arranged(self, output: Output, node: str) -> str:
        """Return the node with the tokens of an output, of the one with all."""
        if (tokens := output.arrangement) is None:
            return node
        made = Tokens(tokens.first, tokens.count, tokens.shape, tokens.channels_first, tokens.joined)
        name = self.add(output.name, made, node)
        self.fillers.append(lambda ranges: self.scales.__setitem__(name, self.scales[node]))
        return name

    def unrotate(self, operation: Operation) -> str:
        """Add what rotates an output back: the stream, or what a normalisation behind it computes, in int16."""
        view, seen, matrix = operation.inputs[0], operation.seen[0], operation.matrix
        rows, source = rows_of(view, operation), view.source
        single = len(rows.table) == 1 and len(view.shape) == 2
        assert matrix is not None
        self.watch(seen, operation.node)
        if id(source) in self.values:
            name = self.values[id(source)]
        elif source.kind == "norm" and (id(source),) not in self.streams:
            name, norm, float_norm, group = self.norm_before(rows, operation, "int16", single=single, suffix="_rotated")

            def fill_norm(ranges: Ranges) -> None:
                self.scales[name] = cv.unit_of(ranges[seen])
                cv.finish_norm(norm, float_norm, group.unit, self.scales[name])

            self.fillers.append(fill_norm)
        else:
            stream, there = self.stream(view, seen, operation)
            name = stream.node
            if single and not stream.is_flat:
                token = Mean(1, stream.channels, "int16", int(there.table[0, 0]))
                name = self.add(f"{stream.node}_token", token, stream.node)
                self.twins[name] = FloatTwin()
            elif not torch.equal(there.table, counted(stream.rows)[:, None]):
                raise _refuse(source, "an output is some tokens of the residual stream")

            def fill_stream(ranges: Ranges) -> None:
                self.scales[name] = stream.group.unit
                if name != stream.node:
                    unit = torch.full((stream.channels,), stream.group.unit, dtype=torch.float64, device="cpu")
                    cv.finish_mean(token, unit, unit)

            self.fillers.append(fill_stream)
        module = WideLinear(matrix.shape[1], matrix.shape[0])
        node = self.add(operation.name, module, name)
        self.twins[node] = FloatTwin(matrix, operation.bias)

        def fill(ranges: Ranges) -> None:
            self.scales[node] = cv.feature_unit(ranges[operation.node])
            unit = torch.full((matrix.shape[1],), self.scales[name], dtype=torch.float64, device="cpu")
            grid = Grid(unit, torch.zeros_like(unit))
            cv.convert_back(module, matrix.make(), operation.bias, grid, ranges[seen].mean, self.scales[node])

        self.fillers.append(fill)
        return node

    def heads(self, layers: Sequence[Operation], output: Output) -> str:
        """Add the last linear layer; several whose sum is the output become one, which takes the inputs of all."""
        columns = rows_of(output.view, layers[0])
        if not columns.has_all_columns:
            raise _refuse(layers[0], "the output is a part of it")
        bias = torch.zeros(columns.columns.numel(), dtype=torch.float64, device="cpu")
        matrices = []
        for layer in layers:
            assert layer.matrix is not None
            matrices.append(layer.matrix)
            if layer.bias is not None:
                bias = bias + layer.bias
        source, grid_of = self.take_joined(layers, matrices, "head", cv.HEAD_ROOM, is_head=True)
        whole = Matrix.join(matrices, 1)
        if columns.factor is not None:
            whole, bias = whole.scaled(columns.factor), bias * columns.factor
        if columns.term is not None:
            bias = bias + columns.term[0]
        no_bias = all(layer.bias is None for layer in layers) and columns.term is None
        module = Linear(whole.shape[1], whole.shape[0], "int32")
        node = self.add(layers[0].name or output.name, module, source)
        self.twins[node] = FloatTwin(whole, None if no_bias else bias)

        def fill(ranges: Ranges) -> None:
            grid, mean = grid_of(ranges)
            self.grids[source] = grid
            self.scales[node] = cv.convert_head(module, whole.make(), None if no_bias else bias, grid, mean)

        self.fillers.append(fill)
        return node

    # --- integers ---------------------------------------------------------------------------------------------

    def fill(self, network: IntegerNetwork, ranges: Ranges, mean: Sequence[float], deviation: Sequence[float]) -> None:
        """Fill the network's modules in from what calibration saw.

        Args:
            network: of :meth:`lower`.
            ranges: of :attr:`observed`.
            mean, deviation: of the image channels, of pixels in [0, 1].
        """
        self.mean, self.deviation = mean, deviation
        for group in self.groups:
            group.unit = max(cv.unit_of(*(ranges[node] for node in group.seen)), group.most / 32767)
        for fill in self.fillers:
            fill(ranges)
        numbers = {name: stream.unit for name, (_, stream) in self.references.items() if stream is not None}
        for name, unit in {IMAGES: 1.0, **numbers, **self.scales}.items():
            self.grids[name] = Grid(wide(unit), wide(0.0))
        self.grids.update({name: self.grids[source] for name, source in self.selected.items()})
        network.scales = {name: self.scales[node] for name, node in network.outputs.items()}
        network.units = tuple(dict.fromkeys(group.unit for group in self.groups))


@dataclasses.dataclass(eq=False)
class Part:
    """Query, key or value of attention: some channels of a linear layer.

    Attributes:
        linear, norm: operations; the second may be None.
        tokens: int64, rows of an image (or window) of the layer.
        columns: int64 (heads, channels): channels of the layer.
        matrix, bias: of those channels.
        turn: rotary positions behind them, in whose order the channels are, or None.
    """

    linear: Operation
    norm: Operation | None
    tokens: torch.Tensor
    columns: torch.Tensor
    matrix: Matrix
    bias: torch.Tensor | None
    turn: Turn | None = None

    def float_norm(self) -> _FloatNorm:
        """Return the normalisation, its channels in the order of :attr:`columns`."""
        assert self.norm is not None
        found = _norm(self.norm)
        if self.turn is not None:
            found.weight, found.bias = found.weight[self.turn.order], found.bias[self.turn.order]
        return found

    def ends(self, ranges: Ranges) -> cv.Ends:
        """Return the ends of the ranges, (heads, channels), or (1, channels) behind a normalisation."""
        if self.turn is not None:
            made = ranges[self.turn.seen]
            return made.low.view(self.columns.shape), made.high.view(self.columns.shape)
        return self.ends_before_turn(ranges)

    def ends_before_turn(self, ranges: Ranges) -> cv.Ends:
        """Return the same of what rotary positions take."""
        if self.norm is not None:
            made, order = ranges[self.norm.node], slice(None) if self.turn is None else self.turn.order
            return made.low[order][None], made.high[order][None]
        made = ranges[self.linear.node]
        return made.low[self.columns], made.high[self.columns]


def _norm_kind(operation: Operation | None) -> type[LayerNorm]:
    return LayerNorm if operation is None or operation.centred else RmsNorm


def _norm_module(operation: Operation, dtype: str, gather: torch.Tensor | None, single: bool = False) -> LayerNorm:
    if operation.channels > MAX_CHANNELS:
        raise _refuse(operation, f"it has {operation.channels} channels, more than {MAX_CHANNELS}")
    module = _norm_kind(operation)(operation.channels, dtype, None if gather is None else gather.shape, single)
    if gather is not None and module.gather is not None:
        module.gather.copy_(gather)
    return module


def _whole(operation: Operation) -> View:
    return View(operation, (BATCH, operation.rows // BATCH, operation.channels))


def _same_rows(parts: Sequence[Rows]) -> bool:
    """Whether views are of the same rows, with the same constants."""
    first = parts[0]
    return all(
        torch.equal(part.table, first.table) and torch.equal(part.columns, first.columns)
        and _same(part.factor, first.factor) and _same(part.term, first.term)
        for part in parts
    )  # fmt: skip


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b))


class _FloatNorm:
    """Weight, bias and epsilon of a normalisation, with what is multiplied and added behind it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, epsilon

    def twin(self) -> FloatTwin:
        """Return what its node stands for in floating point."""
        return FloatTwin(self.weight, self.bias, self.eps)


def _norm(operation: Operation, factor: torch.Tensor | None = None, term: torch.Tensor | None = None) -> _FloatNorm:
    weight = torch.ones(operation.channels, dtype=torch.float64, device="cpu") if operation.weight is None else operation.weight
    bias = torch.zeros(operation.channels, dtype=torch.float64, device="cpu") if operation.bias is None else operation.bias
    if factor is not None:
        weight, bias = weight * factor, bias * factor
    return _FloatNorm(weight, bias if term is None else bias + term, operation.epsilon)
