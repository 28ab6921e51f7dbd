"""What a float network's activations span on calibration images: :class:`Observer`, :func:`observing`."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from ..scalars import unboxed
from ..specification.texts import is_token
from ..validation import is_number
from .capture.operations import PLACES, ROWS_OF
from .conversion import Range

METHODS = ("minmax", "percentile", "mse")
EXPECTED = "expected"
"""Method of whole networks, whose observers see one image at a time: see :meth:`Observer.range`."""
_DEVIATIONS = 2.5
"""How many deviations of the ends of groups :data:`EXPECTED` goes beyond their mean."""
_GROUP = 128
"""Rows whose ends are taken together, at least: short texts and small images differ too much in theirs."""
_LEAST_GROUPS = 8
"""Fewer say too little of how far a further one may go."""
_ROWS = 4096
"""Rows of a tensor that are kept for percentiles and errors, at most; a quarter more between two looks."""
_BLOCK = 256
"""Rows that are added up at a time."""
MOST_RELATED = 1024
"""Channels whose covariance is kept, at most; more are taken in parts, each by itself."""
_LAST_MARK = (1 << 63) - 1


def check_method(method: object, percentile: float, methods: Sequence[str] = METHODS) -> float:
    """Require one of some methods, and a percentile that makes sense; return that as a float.

    Raises:
        TypeError: the percentile is no number.
        ValueError: something else; the message names it.
    """
    if method not in methods:
        raise ValueError(f"method must be one of {tuple(methods)}, got {method!r}")
    number = unboxed(percentile)
    if not is_number(number):
        raise TypeError(f"percentile must be a number, got {type(number).__name__}")
    if not 50 < number <= 100:
        raise ValueError(f"percentile must be above 50 and at most 100, got {number}")
    return float(number)


def _marks(first: int, count: int) -> torch.Tensor:
    """Return a number for each of some rows, int64 (count,): the last steps of SplitMix64 on the row's place in the stream.

    Different places have different numbers, and their order has nothing to do with that of the places.

    Args:
        first: place of the first row.
        count: of rows.
    """
    signed = 1 << 64  # the factors are from 2**63 to 2**64
    x = torch.arange(first, first + count, dtype=torch.int64, device="cpu") * (0x9E3779B97F4A7C15 - signed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - signed), (27, 0x94D049BB133111EB - signed), (31, 1)):
        # zeros come in from the left
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x


_scratch = threading.local()


@torch.inference_mode(False)
def _kept(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory that can be written to in any mode."""
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def _sum_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of a block's rows in float64. A copy that stays is 30 times as fast as one that is allocated each time."""
    key = rows.device, rows.shape[1]
    if getattr(_scratch, "key", None) != key:
        _scratch.key, _scratch.rows = key, _kept(rows.shape, torch.float64, rows.device)
    wide: torch.Tensor = _scratch.rows
    return wide.copy_(rows).sum(dim=0)


class Observer:
    """Ranges of the channels (last dimension) of a tensor over batches.

    The rows of all batches are one stream, and all but ``"expected"`` ranges are functions of that stream alone: where one
    batch ends and the next begins changes no bit. So rows are added up in blocks of the stream, and the sample for percentiles
    and errors is the rows with the least :func:`_marks`, at most :data:`_ROWS`. A stride would meet the same tokens of every
    image. ``"expected"`` ranges are of calls, so an image a call is given; they leave out fewer than :data:`_GROUP` rows at the
    end.

    Attributes:
        count: rows that were seen.
    """

    def __init__(self, keep: bool, products: bool = False) -> None:
        """Begin.

        Args:
            keep: whether a sample is kept, which ``"percentile"`` and ``"mse"`` need.
            products: whether products of channels are added up, for their covariance.
        """
        self.keep, self.count = keep, 0
        self._adds_products = products
        self._origin: torch.Tensor | None = None
        self._products: list[torch.Tensor] = []
        self._ends: tuple[torch.Tensor, torch.Tensor] | None = None
        # minima with the other sign and maxima, float64 (2, channels), of so many rows:
        self._group: torch.Tensor | None = None
        self._grouped = 0
        # of groups that are full: how many, their mean, and the sum of squared distances from it
        self._groups, self._usual, self._spread = 0, *torch.zeros(2, dtype=torch.float64, device="cpu")
        self._total: torch.Tensor | None = None
        self._open: torch.Tensor | None = None  # the rows of the last block, of which so many are there:
        self._filled = 0
        self._sample: list[tuple[torch.Tensor, torch.Tensor]] = []  # marks and rows
        self._last = _LAST_MARK  # no row with a larger mark can be of the sample

    def add(self, x: torch.Tensor) -> None:
        """Look at a tensor (..., channels).

        Raises:
            ValueError: it holds a NaN or an infinity.
        """
        flat = x.detach().reshape(-1, x.shape[-1]).contiguous()
        if not flat.shape[0]:
            return
        low, high = (end.double().cpu() for end in (flat.amin(dim=0), flat.amax(dim=0)))
        if not (low.isfinite().all() and high.isfinite().all()):
            raise ValueError("NaN or infinity in an activation of the float network on the calibration images")
        self._end_of_group(torch.stack((-low, high)), flat.shape[0])
        if self._ends is not None:
            low, high = torch.minimum(self._ends[0], low), torch.maximum(self._ends[1], high)
        self._ends = low, high
        if self.keep:
            self._add_to_sample(flat)
        self._add_up(flat)
        self.count += flat.shape[0]

    def _end_of_group(self, ends: torch.Tensor, rows: int) -> None:
        """Add a call's ends to those of a group of calls, which has at least :data:`_GROUP` rows."""
        self._group = ends if self._group is None else torch.maximum(self._group, ends)
        self._grouped += rows
        if self._grouped >= _GROUP:
            self._groups += 1
            change = self._group - self._usual
            self._usual = self._usual + change / self._groups
            self._spread = self._spread + change * (self._group - self._usual)
            self._group, self._grouped = None, 0

    def _add_up(self, flat: torch.Tensor) -> None:
        if self._open is None:
            self._open = _kept((_BLOCK, flat.shape[1]), flat.dtype, flat.device)
        for part in flat.tensor_split(tuple(range(_BLOCK - self._filled, len(flat), _BLOCK))):
            self._open[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            if self._filled == _BLOCK:
                total = _sum_of_rows(self._open)
                self._total = total if self._total is None else self._total + total
                self._multiply(self._open)
                self._filled = 0

    def _multiply(self, rows: torch.Tensor) -> None:
        """Add up the products of channels less the first rows' mean, in float32."""
        if not self._adds_products:
            return
        if self._origin is None:
            self._origin = rows.float().mean(dim=0)
            sizes = [len(part) for part in self._origin.tensor_split(-(-rows.shape[1] // MOST_RELATED))]
            self._products = [_kept((size, size), torch.float32, rows.device).zero_() for size in sizes]
        centred = (rows.float() - self._origin).split([len(x) for x in self._products], dim=1)
        for products, part in zip(self._products, centred, strict=True):
            products.addmm_(part.T, part)

    def _add_to_sample(self, flat: torch.Tensor) -> None:
        marks, order = _marks(self.count, flat.shape[0]).sort()
        least = min(int(torch.searchsorted(marks, self._last, right=True)), _ROWS)
        self._sample.append((marks[:least].clone(), flat[order[:least].to(flat.device)].float().cpu()))
        if sum(len(each) for each, _ in self._sample) > _ROWS + _ROWS // 4:
            marks, rows = self._least_marks()
            self._sample, self._last = [(marks, rows)], int(marks[-1])

    def _least_marks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return marks and rows of the sample, float32 (rows, channels), in the order of the marks."""
        marks, rows = (torch.cat(parts) for parts in zip(*self._sample, strict=True))
        order = marks.argsort()[:_ROWS]
        return marks[order], rows[order]

    def range(self, method: str, percentile: float) -> Range:
        """Return the channels' ranges.

        Args:
            method: of :data:`METHODS`, or :data:`EXPECTED`, for which a call of :meth:`add` has one image: where the ends of
                further images are expected, 2.5 deviations beyond the mean of those that were seen; of too few images minima
                and maxima. More images make this more certain, while minima and maxima grow with their number.
            percentile: for that method.
        """
        assert self._ends is not None and self._open is not None
        (low, high), total = self._ends, self._open[: self._filled].sum(dim=0, dtype=torch.float64)
        mean = (total if self._total is None else self._total + total).cpu() / self.count
        if method == EXPECTED and self._groups >= _LEAST_GROUPS:
            far = self._usual + _DEVIATIONS * (self._spread / (self._groups - 1)).sqrt()
            low, high = -far[0], far[1]
        if method in ("percentile", "mse"):
            rows = self._least_marks()[1].double()
        if method == "percentile":
            ends = torch.tensor([1 - percentile / 100, percentile / 100], dtype=torch.float64, device="cpu")
            inner_low, inner_high = torch.quantile(rows, ends, dim=0)
            low, high = torch.maximum(low, inner_low), torch.minimum(high, inner_high)
        elif method == "mse":
            low, high = _least_error(rows, low, high)
        self._multiply(self._open[: self._filled])
        covariance = []
        # fewer rows than channels say little of how these go together
        if self._origin is not None and self.count >= max(map(len, self._products)):
            offsets = (mean - self._origin.double().cpu()).float().split([len(x) for x in self._products])
            for products, offset in zip(self._products, offsets, strict=True):
                covariance.append((products.cpu() / self.count).sub_(offset[:, None] * offset))
        return Range(low, high, mean.clamp(low, high), tuple(covariance))


def _least_error(rows: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Shrink ranges about their middles by the one factor that makes the squared error of 8 bits least."""
    middle, half = (low + high) / 2, ((high - low) / 2).clamp(min=1e-12)
    best, chosen = math.inf, 1.0
    for factor in (x / 20 for x in range(20, 5, -1)):
        step = half * factor / 127
        values = ((rows - middle) / step).round().clamp(-128, 127)
        error = float((((values * step + middle - rows) / half) ** 2).sum())
        if error < best:
            best, chosen = error, factor
    return middle - half * chosen, middle + half * chosen


_locks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
_guard = threading.Lock()


def lock_of(model: nn.Module) -> Any:
    """Return the lock of those who change a model for as long as they look at what it computes; it may be taken twice."""
    with _guard:
        return _locks.setdefault(model, threading.RLock())


class Calibration(fx.Interpreter):
    """Runs a traced graph and looks at some of its values.

    Attributes:
        observers: by node of the graph.
    """

    def __init__(
        self, module: fx.GraphModule, nodes: Mapping[fx.Node, bool], keep: bool, like: Calibration | None = None,
        tokens: Mapping[fx.Node, torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Make observers.

        Args:
            module: traced.
            nodes: to look at; of those with True products of channels are added up.
            keep: whether observers keep rows.
            like: of the same model at another image size, whose observers look at these nodes, too, in the same order.
            tokens: :attr:`.capture.Captured.tokens`. Rows of places without a token are not looked at.
        """
        super().__init__(module)
        self.extra_traceback = False  # of the traced graph, which nobody has seen
        self.tokens = tokens or {}
        self.visible = torch.empty(0, dtype=torch.bool, device="cpu")
        observers = (Observer(keep, products) for products in nodes.values()) if like is None else like.observers.values()
        self.observers: dict[fx.Node, Observer] = dict(zip(nodes, observers, strict=True))

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        if n.op == "placeholder" and self.tokens and isinstance(out, torch.Tensor):
            self.visible = is_token(out[0])
        if n in self.observers:
            self.observers[n].add(self.rows_of(n, out) if self.tokens else out)
        return out

    def rows_of(self, node: fx.Node, out: torch.Tensor) -> torch.Tensor:
        """Return the rows of one text's value that are of tokens.

        Raises:
            ValueError: of a row it is not known of which token it is.
        """
        like, rows = node, out.reshape(-1, out.shape[-1])
        while like not in self.tokens and PLACES not in like.meta and ROWS_OF in like.meta:
            like = like.meta[ROWS_OF]
        places = self.tokens.get(like, like.meta.get(PLACES))
        if len(rows) == 1 and (places is None or len(places) != 1):
            return rows  # of the text as a whole
        if places is None or len(places) != len(rows):
            raise ValueError(f"ranges cannot be found of texts with padding: {node.name} rearranges its tokens")
        return rows[self.visible[places]]

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        # torch.export's check of shapes, which the caller has made
        return None if str(target).endswith("_guards_fn") else super().call_module(target, args, kwargs)

    def ranges(self, method: str, percentile: float) -> dict[fx.Node, Range]:
        """Return what was seen, by :meth:`Observer.range`. Observers are given up one by one: they take much memory."""
        return {node: self.observers.pop(node).range(method, percentile) for node in list(self.observers)}


@contextmanager
def progress_bar(shown: bool, unit: str) -> Iterator[Callable[[int], None]]:
    """Show how many images or batches have been seen; yields what is told of each batch."""
    if not shown:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("calibrating"), BarColumn(), TextColumn(f"{{task.completed}} {unit}"), TimeElapsedColumn()
    # older releases of rich allow one bar on a console, and several threads may calibrate
    with Progress(*columns, transient=True, console=Console()) as progress:
        task = progress.add_task("", total=None)
        yield lambda count: progress.advance(task, count)
