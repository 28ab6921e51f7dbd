"""The residual stream in rotated channels: :func:`rotate_streams`.

A few massive activations make a stream's unit coarse, and where they lie differs from image to image. So channels are mixed by
an orthogonal matrix Q with Q 1 = 1: ``h' = Q h``. A normalisation stays one, since Q keeps the mean, the deviation and the root
mean square of a row; its weight and bias go into what reads it. Layers that write or read the stream take Q into their weights.
Only an output that is the stream, or a normalisation of it, has to be rotated back. A stream that normalisations write stays as
it is: their weights, which differ from channel to channel, cannot take Q in.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import fx, nn

from .capture.captured import Captured, Output, rms_norm
from .capture.operations import ROWS_OF, Operation, View, call_behind, counted
from .matrix import Matrix

MOST_MIXED = 64
"""Channels that are mixed with each other, at most."""


class Rotation:
    """The matrix Q of a stream, block by block on n channels: K, K ⊗ K or K ⊗ K ⊗ K, so n is 4, 16 or 64.

    K is 4 x 4, 1/2 everywhere but -1/2 on the diagonal from below left to above right. K and so Q are symmetric, their own
    inverse, and their rows add up to 1. The entries of Q on n channels are plus or minus 1 / sqrt(n).

    Attributes:
        signs: those of a block, float64 (n, n).
    """

    def __init__(self, size: int) -> None:
        one = torch.ones(1, 1, dtype=torch.float64, device="cpu")
        quarter = one.expand(4, 4) - 2 * torch.eye(4, dtype=torch.float64, device="cpu").flip(0)
        self.signs = one
        while len(self.signs) < size:
            self.signs = torch.kron(self.signs, quarter)

    @classmethod
    def of(cls, channels: int) -> Rotation | None:
        """Return the rotation of so many channels, or None where they cannot be mixed."""
        size = 1
        while size < MOST_MIXED and channels % (4 * size) == 0:
            size *= 4
        return cls(size) if size > 1 else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return float (..., channels), or channels of several tokens side by side, with each token multiplied by Q."""
        tiles = x.unflatten(-1, (-1, len(self.signs)))
        return (tiles @ (self.signs / math.sqrt(len(self.signs))).to(tiles)).flatten(-2)

    def of_inputs(self, matrix: Matrix, gain: torch.Tensor | None = None) -> Matrix:
        """Return the matrix of a layer that takes rotated channels where it took them times ``gain``."""
        return Matrix(matrix.shape, lambda: self(matrix.make() if gain is None else matrix.make() * gain))

    def of_outputs(self, matrix: Matrix) -> Matrix:
        """Return the matrix of a layer whose outputs are rotated."""
        return Matrix(matrix.shape, lambda: self(matrix.make().t()).t().contiguous())

    def back(self, channels: int, gain: torch.Tensor | None) -> Matrix:
        """Return the matrix that takes the rotation back, and multiplies channels by ``gain``."""
        same = Matrix((channels, channels), lambda: torch.eye(channels, dtype=torch.float64, device="cpu"))
        return self.of_inputs(same).scaled(gain)


Users = dict[int, list[tuple[Operation, int]]]
"""By the ``id`` of an operation those that take its output, and which of their inputs it is."""


def rotate_streams(captured: Captured) -> int:
    """Rotate the channels of each residual stream that can be, in place, and return how many; the outputs stay what they are.

    A stream is what linear layers, sums, and means over tokens compute in the same channels. It stays as it is where it has a
    writer or a reader that cannot take Q in, such as a normalisation whose output is a stream.
    """
    users: Users = defaultdict(list)
    for operation in captured.operations:
        for place, view in enumerate(operation.inputs):
            users[id(view.source)].append((operation, place))
    count = 0
    for members in _streams(captured.operations):
        rotation = Rotation.of(members[0].channels)
        if rotation is None:
            continue
        try:
            changes = _Stream(captured, members, users, rotation).changes()
        except _FixedError:
            continue
        for change in changes:
            change()
        count += 1
    return count


def _streams(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Return the operations that compute each stream: those whose outputs are added, and means of these."""
    streams: dict[int, list[Operation]] = {}
    for operation in operations:
        mine = streams[id(operation)] = [operation]
        if operation.kind not in ("add", "select") and (operation.kind != "mean" or operation.inputs[0].source.kind == "norm"):
            continue
        for view in operation.inputs:
            other = streams[id(view.source)]
            if other is not mine:
                mine += other
                streams.update({id(each): mine for each in other})
    return list({id(stream): stream for stream in streams.values()}.values())


def _is_whole(view: View) -> bool:
    """Tell whether a view's rows are whole rows of its source, or several side by side, or constants."""
    channels = view.source.channels
    if view.shape[-1] % channels:
        return False
    if view.index is None:
        return True
    places = view.index.reshape(-1, channels)
    first = places[:, :1]
    whole = (first % channels == 0) & (places == first + counted(channels))
    return bool(torch.where(first < 0, places < 0, whole).all())


def _is_plain(view: View) -> bool:
    """Tell whether a view is rows of its source and nothing else."""
    return _is_whole(view) and view.factor is None and view.term is None


def _factors(view: View) -> torch.Tensor:
    """Return what the rows of a view's source are multiplied by, float64 (different ones, channels)."""
    channels = view.source.channels
    if view.factor is None:
        return torch.ones(1, channels, dtype=torch.float64, device="cpu")
    computed = view.places().reshape(-1, channels)[:, 0] >= 0
    return view.factor.expand(view.shape).reshape(-1, channels)[computed].unique(dim=0)


def _copied(end: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return a node of a traced graph computed from other nodes; what is between is copied.

    Args:
        end: the node.
        copies: by node what stands in its place; those that are made here are added. The first is the earliest.
    """
    start, node, needed, path = next(iter(copies)), end, {end}, []
    while node is not start:
        if node in needed and node not in copies:
            path.append(node)
            needed.update(node.all_input_nodes)
        node = node.prev
    for node in reversed(path):
        if not copies.keys().isdisjoint(node.all_input_nodes):
            with node.graph.inserting_after(node):
                copies[node] = node.graph.node_copy(node, lambda x: copies.get(x, x))
            copies[node].meta[ROWS_OF] = node
    return copies[end]


class _FixedError(Exception):
    """A stream cannot be rotated."""


def _require(condition: bool) -> None:
    if not condition:
        raise _FixedError


class _Stream:
    """A residual stream of a captured network, and how it is rotated.

    Attributes:
        members: the operations that compute it.
        planned: what is to be done, in this order.
    """

    def __init__(self, captured: Captured, members: list[Operation], users: Users, rotation: Rotation) -> None:
        self.captured, self.members, self.users, self.rotation = captured, members, users, rotation
        self.planned: list[Callable[[], None]] = []
        self.nodes: dict[fx.Node, fx.Node] = {}

    def changes(self) -> list[Callable[[], None]]:
        """Return what rotates the stream.

        Raises:
            _FixedError: it cannot be rotated, or no normalisation reads it.
        """
        norms = [user for each in self.members for user, _ in self.users[id(each)] if user.kind == "norm"]
        _require(bool(norms))
        for member in self.members:
            self._write(member)
            for user, place in self.users[id(member)]:
                if user.kind != "norm" and (user.kind == "linear" or user not in self.members):
                    self._read(user, place, self._rotated)
            self._output(member, self._rotated)
        for norm in dict.fromkeys(norms):
            self._normalise(norm)
        return self.planned

    def _rotated(self, node: fx.Node) -> fx.Node:
        """Return the node of the traced graph with the rotated values of a node."""
        if node not in self.nodes:
            self.nodes[node] = call_behind(node, "rotated", self.rotation)
        return self.nodes[node]

    def _write(self, member: Operation) -> None:
        """Plan that an operation computes rotated channels."""
        kinds = ("linear", "embedding", "add", "mean", "select")
        _require(member.kind in kinds and member.channels == self.members[0].channels)
        # the mean of a normalisation is no stream
        _require(member.kind != "mean" or member.inputs[0].source in self.members)
        users = self.users[id(member)]
        views = [user.inputs[place] for user, place in users]
        views += [output.view for output in self.captured.outputs if output.view.source is member]
        _require(all(map(_is_whole, views)))
        if member.kind not in ("linear", "embedding"):
            _require(all(map(_is_plain, views)))
            # a mean may have its channels before the dimension that it is taken over
            _require(all(node.meta["val"].shape[-1] == member.channels for node in (member.node, *member.seen)))

            def rotate_sum() -> None:
                member.node, member.seen = self._rotated(member.node), [self._rotated(node) for node in member.seen]

            self.planned.append(rotate_sum)
            return
        factors = torch.cat([_factors(view) for view in views]).unique(dim=0)
        _require(len(factors) == 1)
        factor = factors[0]

        def rotate_layer() -> None:
            # what its users multiply its outputs by goes into it, what they add is rotated
            if member.matrix is None:
                assert member.weight is not None
                member.weight = self.rotation(member.weight * factor)
            else:
                member.matrix = self.rotation.of_outputs(member.matrix.scaled(factor))
            member.bias = None if member.bias is None else self.rotation(member.bias * factor)
            for user, place in users:
                view = user.inputs[place]
                term = None if view.term is None else self.rotation(view.term.expand(view.shape))
                user.inputs[place] = View(member, view.shape, view.index, None, term)

        self.planned.append(rotate_layer)

    def _read(
        self, reader: Operation, place: int, moved: Callable[[fx.Node], fx.Node], gain: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Plan that linear layers take in what rotates their inputs.

        Args:
            reader: a linear layer, or what puts channels side by side for some.
            place: of the input.
            moved: returns the node with the new values of a node.
            gain, bias: of the normalisation before, which no longer has them.
        """
        view = reader.inputs[place]
        _require(reader.kind in ("linear", "join") and _is_plain(view))
        _require(reader.seen[place].meta["val"].shape[-1] == view.shape[-1])
        layers = [reader]
        if reader.kind == "join":
            _require(all(output.view.source is not reader for output in self.captured.outputs))
            layers = [user for user, _ in self.users[id(reader)]]
            _require(all(user.kind == "linear" and _is_plain(user.inputs[0]) for user in layers))
        first = sum(x.shape[-1] for x in reader.inputs[:place])
        last = first + view.shape[-1]
        # several tokens can be joined behind the normalisation
        gain, bias = (None if x is None else x.repeat(view.shape[-1] // len(x)) for x in (gain, bias))

        def take_in() -> None:
            reader.seen[place] = moved(reader.seen[place])
            for layer in layers:
                assert layer.matrix is not None
                matrix, part = layer.matrix, layer.matrix.columns(slice(first, last))
                if bias is not None:
                    layer.bias = part.make() @ bias + (0 if layer.bias is None else layer.bias)
                parts = [matrix.columns(slice(first)), self.rotation.of_inputs(part, gain), matrix.columns(slice(last, None))]
                layer.matrix = Matrix.join([part for part in parts if part.shape[1]], 1)

        self.planned.append(take_in)

    def _normalise(self, norm: Operation) -> None:
        """Plan that a normalisation takes rotated channels, and leaves its weight and bias to its readers."""
        gain, bias = norm.weight, norm.bias
        _require(norm.seen[0].meta["val"].shape[-1] == norm.channels)
        copies: dict[fx.Node, fx.Node] = {}

        def moved(node: fx.Node) -> fx.Node:
            return _copied(node, copies)

        def normalise() -> None:
            (seen,), epsilon, rotation = norm.seen, norm.epsilon, self.rotation
            normalised = nn.functional.layer_norm if norm.centred else rms_norm
            norm.seen = [self._rotated(seen)]
            copies[norm.node] = call_behind(
                norm.node, "normalised", lambda x: rotation(normalised(x, x.shape[-1:], eps=epsilon)), seen
            )
            norm.node = copies[norm.node]
            norm.weight = norm.bias = None

        self.planned.append(normalise)
        for user, place in self.users[id(norm)]:
            if user.kind != "mean":
                self._read(user, place, moved, gain, bias)
                continue
            _require(_is_plain(user.inputs[0]) and user.seen[0].meta["val"].shape[-1] == norm.channels)
            self.planned.append(functools.partial(_move_seen, user, moved))
            for behind, there in self.users[id(user)]:
                self._read(behind, there, moved, gain, bias)
            self._output(user, moved, gain, bias)
        self._output(norm, moved, gain, bias)

    def _output(
        self, operation: Operation, moved: Callable[[fx.Node], fx.Node], gain: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Plan that outputs of the network are rotated back; arguments as of :meth:`_read`."""
        outputs = [output for output in self.captured.outputs if output.view.source is operation]
        _require(all(_is_plain(output.view) and output.view.shape[-1] == operation.channels for output in outputs))
        self.planned.extend(_back(self.captured, output, moved, self.rotation, gain, bias) for output in outputs)


def _move_seen(mean: Operation, moved: Callable[[fx.Node], fx.Node]) -> None:
    mean.seen = [moved(node) for node in mean.seen]


def _back(
    captured: Captured, output: Output, moved: Callable[[fx.Node], fx.Node], rotation: Rotation, gain: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> Callable[[], None]:  # fmt: skip
    """Return what puts an operation before an output that rotates it back; arguments as of :meth:`_Stream._read`."""

    def rotate_back() -> None:
        view = output.view
        rows, channels = math.prod(view.shape[:-1]), view.shape[-1]
        name = (view.source.kind == "norm" and view.source.name) or output.name
        matrix = rotation.back(channels, gain)
        made = Operation("unrotate", [view], [moved(output.node)], output.node, rows, channels, name, matrix, bias=bias)
        captured.operations.append(made)
        output.view = View(made, view.shape)

    return rotate_back
