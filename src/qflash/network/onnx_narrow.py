"""An ONNX graph whose arithmetic has no number of more than 32 bits: :class:`NarrowGraph`.

It is made for runtimes that compute 64 bits as 32, and some operators of int32 in float32. OpenVINO's CPU plugin does both: its
``Add``, ``Sub``, ``Mul``, ``Min``, ``Max``, ``Abs``, ``BitwiseAnd``, ``Gather`` and ``TopK`` are exact and sums and products
keep the low 32 bits; ``Div``, ``ReduceSum`` and ``MatMulInteger`` have the 24 bits of a float32. So there is no ``BitShift``,
comparison or ``Clip`` here, and

* ``x >> k`` is ``Div(And(x, -2**k), 2**k)``, a quotient of at most 24 bits;
* sums and matrix products are cut into parts below ``2**24``;
* the high half of a product of 64 bits comes from two things: its low 32 bits, which are exact, and a sum that is near its high
  bits. With ``E = q 2**32 + L``, ``-2**31 <= L < 2**31``, and y near ``E / 2**(32 - f)`` by less than ``2**(f - 1)``,
  ``(y - L / 2**(32 - f) + 2**(f - 1)) >> f`` is q, E divided and rounded.

A graph knows the least and the largest number of each of its values and refuses (OverflowError) what does not fit. Bounds that
do not follow from single operations are told to it by :meth:`NarrowGraph.known`; they are those of :mod:`qflash.specification`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from onnx import helper

from .onnx_graph import ZERO_POINT, Graph, Operand, Value

FLOAT_BITS = 24
"""Of a float32's mantissa."""
_INT32 = -(1 << 31), (1 << 31) - 1
_MOVES = ("Reshape", "Transpose", "Slice", "Squeeze", "Identity", "Expand")
"""Operators whose output has elements of their first input alone."""

Range = tuple[int, int]
"""The least and the largest number of a value."""


def _exact(x: Any) -> np.ndarray:
    """Return whole numbers as Python's integers, which have any size."""
    return np.atleast_1d(np.asarray(x).astype(object))


def _wrapped(x: Any) -> Any:
    """Return the low 32 bits of integers as int32 has them; numbers or arrays of Python's integers."""
    return (x + (1 << 31)) % (1 << 32) - (1 << 31)


def _rounded(x: Any, shift: int) -> Any:
    """Return ``x / 2**shift`` rounded, of Python's integers; the shift may be negative."""
    return x << -shift if shift <= 0 else (x + (1 << shift >> 1)) >> shift


def _rest(x: Any, rounded: Any, shift: int) -> Any:
    """Return how far ``x`` is from ``rounded * 2**shift``."""
    return abs(x - (rounded << shift)) if shift > 0 else 0 * x


def _cuts(count: int, number: int) -> list[Range]:
    """Return first and last place of so many parts of about one size."""
    return list(itertools.pairwise(count * i // number for i in range(number + 1)))


class _Scheme(NamedTuple):
    """How a product with constants is divided by ``2**32``; see :meth:`NarrowGraph.affine`.

    Attributes:
        split: x is ``high * 2**split + low``; 0 if x is not split.
        bits: fraction bits f of the sum.
        whole: by what ``high`` is multiplied beside the sum, or None.
        high, low: by what the parts are multiplied in the sum; without a split x by ``low``.
        offset: of the sum.
        range: of the sum less L and with half a unit.
    """

    split: int
    bits: int
    whole: Any
    high: Any
    low: Any
    offset: Any
    range: Range


class NarrowGraph(Graph):
    """Nodes and constants of an ONNX graph, with int32 where :class:`.onnx_graph.Graph` has int64."""

    wide: Any = np.int32

    def __init__(self) -> None:
        super().__init__()
        self._ends: dict[str, Range] = {}
        self._digits: dict[tuple[str, int], tuple[Value, Value]] = {}
        self._products: set[str] = set()
        self._barriers: dict[str, Value] = {}

    @contextlib.contextmanager
    def scope(self, *about: Any, **more: Any) -> Iterator[None]:
        # an operator takes nothing from inside of another
        self._digits.clear()
        with super().scope(*about, **more):
            yield
        self._digits.clear()

    # --- ranges ---------------------------------------------------------------------------------------------

    def ends(self, x: Value) -> Range:
        """Return the least and the largest number that a value can have."""
        if x.name in self._ends:
            return self._ends[x.name]
        info = np.iinfo(x.dtype)
        return int(info.min), int(info.max)

    def known(self, x: Value, low: int, high: int) -> Value:
        """Note that a value is within these ends as well; return it."""
        least, most = self.ends(x)
        self._ends[x.name] = max(least, low), min(most, high)
        return x

    def constant(self, values: int | Sequence[int] | np.ndarray | torch.Tensor, dtype: Any, name: str = "constant") -> Value:
        value = super().constant(values, dtype, name)
        array = np.asarray(values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values)
        if array.size:
            self._ends[value.name] = int(array.min()), int(array.max())
        return value

    def node(self, operator: str, *inputs: Value, dtype: Any = None, **attributes: Any) -> Value:
        out = super().node(operator, *inputs, dtype=dtype, **attributes)
        found = self._found(operator, inputs, out.dtype)
        if found is not None:
            if out.dtype == np.int32 and not _INT32[0] <= found[0] <= found[1] <= _INT32[1]:
                raise OverflowError(f"{out.name} spans {list(found)}, which int32 does not hold")
            self.known(out, *found)
        return out

    def _found(self, operator: str, inputs: Sequence[Value], dtype: np.dtype[Any]) -> Range | None:
        """Return the ends of what an operator gives; None for those of its type."""
        ends = [self.ends(x) for x in inputs]
        (low, high), (least, most) = ends[0], ends[min(1, len(ends) - 1)]
        if operator in _MOVES or operator in ("Gather", "GatherND"):
            return low, high
        if operator == "Concat":
            return min(x for x, _ in ends), max(x for _, x in ends)
        if operator == "Add":
            return low + least, high + most
        if operator == "Sub":
            return low - most, high - least
        if operator == "Mul":
            products = [a * b for a in (low, high) for b in (least, most)]
            return min(products), max(products)
        if operator == "Min":
            return min(low, least), min(high, most)
        if operator == "Max":
            return max(low, least), max(high, most)
        if operator == "Abs":
            return max(0, low, -high), max(-low, high)
        if operator == "BitwiseAnd" and least >= 0:
            return 0, most if low < 0 else min(high, most)
        if operator == "Div" and least > 0:
            return (low // least if low < 0 else low // most), (high // least if high > 0 else -(-high // most))
        if operator == "Cast" and dtype.kind in "iu" and np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return low, high
        return None

    def cast(self, x: Value, dtype: Any) -> Value:
        if np.dtype(dtype).kind in "iu" and np.dtype(dtype).itemsize > 4:
            raise ValueError(f"{self._name('a cast')} has no form without 64 bits")
        return super().cast(x, dtype)

    def wrap(self, operator: str, x: Value, y: Operand) -> Value:
        """Add, subtract or multiply int32 and keep the low 32 bits."""
        if not isinstance(y, Value):
            numbers = _wrapped(_exact(y))
            y = self.constant(numbers if numbers.size > 1 else numbers.item(), np.int32, "low_bits")
        return super().node(operator, x, y)

    # --- arithmetic -----------------------------------------------------------------------------------------

    def clip(self, x: Value, low: int, high: int) -> Value:
        least, most = self.ends(x)
        x = self.maximum(x, low) if least < low else x
        return self.minimum(x, high) if most > high else x

    def divide(self, x: Value, by: int | np.ndarray | Value) -> Value:
        """Divide by a power of two, of which x is a multiple, or which rounds positive numbers below ``2**24`` down."""
        return self._binary("Div", x, by)

    def shift_right(self, x: Value, shift: int | np.ndarray, bound: int, before: int | np.ndarray = 0, after: int = 0) -> Value:
        return self._shifted(x, shift, bound, before, after)

    def _shifted(
        self, x: Value, shift: int | np.ndarray, bound: int, before: int | np.ndarray, after: int, quotient: int | None = None
    ) -> Value:
        """Write :meth:`shift_right`; the quotient is at most ``quotient`` in magnitude, where that is less than follows."""
        shifts, first = (np.asarray(each, dtype=np.int64) for each in (shift, before))
        least, most = int(shifts.min()), int(shifts.max())
        low, high = self.ends(x)
        low, high = max(low + int(first.min()), -bound), min(high + int(first.max()), bound)
        # what is added behind may as well be added before
        behind = after << shifts
        if low + int(behind.min()) >= _INT32[0] and high + int(behind.max()) <= _INT32[1]:
            first, after = first + behind, 0
            low, high = low + int(behind.min()), high + int(behind.max())
        if first.any():
            x = self.known(self.wrap("Add", x, first), low, high)
        quotients = low >> (least if low < 0 else most), high >> (most if high < 0 else least)
        if not most:
            out = x
        elif min(quotient or 1 << 31, max(-low, high) >> least) <= 1 << FLOAT_BITS:
            if low < 0 or high >= 1 << FLOAT_BITS:
                x = self.node("BitwiseAnd", x, self.constant(-(1 << shifts), np.int32, "mask"))
            out = self.divide(x, 1 << shifts)
        elif most <= 16:
            # the upper and the lower half, so that quotients are small
            upper, lower = self.halves(x, 16, centred=False)
            out = self.wrap("Add", self.wrap("Mul", upper, 1 << (16 - shifts)), self.divide(lower, 1 << shifts))
        else:
            raise OverflowError(f"{x.name} spans {[low, high]}, too much to be shifted by {least} to {most}")
        self.known(out, *quotients)
        if after and quotients[1] > _INT32[1] - after:
            # a zero point, which is added to what is clipped next
            out = self.minimum(out, _INT32[1] - after)
        return self.add(out, after) if after else out

    def _binary(self, operator: str, x: Value, y: Operand, dtype: Any = None) -> Value:
        y = self.barrier(y) if isinstance(y, Value) else y
        return super()._binary(operator, self.barrier(x), y, dtype)

    def barrier(self, x: Value) -> Value:
        """Return x; if it is a matrix product, so that a runtime does not go on with its float32.

        OpenVINO computes what alone reads a product, and has constants or another product beside it, together with that. What
        has two readers it rounds to int32 first.
        """
        if x.name not in self._products:
            return x
        if x.name not in self._barriers:
            out = super().node("BitwiseAnd", x, self.constant(-1, np.int32, "barrier"))
            self._barriers[x.name] = self.known(out, *self.ends(x))
        return self._barriers[x.name]

    def halves(self, x: Value, bits: int, centred: bool = True) -> tuple[Value, Value]:
        """Return ``high, low`` with ``x = high * 2**bits + low``.

        Args:
            x: int32.
            bits: of the lower half, 8 or more unless x is small.
            centred: ``-2**(bits - 1) <= low < 2**(bits - 1)``, if not ``0 <= low < 2**bits``.
        """
        key = x.name, bits if centred else -bits
        if key in self._digits:
            return self._digits[key]
        low, high = self.ends(x)
        half = 1 << bits >> 1
        if not centred:
            lower = self.node("BitwiseAnd", x, self.constant((1 << bits) - 1, np.int32, "mask"))
            multiple = self.known(super().node("Sub", x, lower), low - low % (1 << bits), high - high % (1 << bits))
            upper = self.divide(multiple, 1 << bits)
        elif high + half <= _INT32[1]:
            multiple = super().node("BitwiseAnd", self.wrap("Add", x, half), self.constant(-(1 << bits), np.int32, "mask"))
            self.known(multiple, (low + half) >> bits << bits, (high + half) >> bits << bits)
            lower = super().node("Sub", x, multiple)
            upper = self.divide(multiple, 1 << bits)
        else:
            # no room for half a unit: it is added to what is shifted by one less
            twice = self.shift_right(x, bits - 1, max(-low, high))
            upper = self.shift_right(twice, 1, max(-low, high) + 1, 1)
            lower = self.wrap("Sub", x, self.wrap("Mul", upper, 1 << bits))
        if centred:
            self.known(lower, -half, half - 1)
        self._digits[key] = upper, lower
        return upper, lower

    def _divided(self, total: Value, low_bits: Value, bits: int, drop: int, before: int, ends: Range) -> Value:
        """Return ``(total - low_bits / 2**drop + before) >> bits``, where all but ``total`` is within ``ends``."""
        x = self.wrap("Sub", total, self.divide(low_bits, 1 << drop))
        if before:
            x = self.wrap("Add", x, before)
        self.known(x, *ends)
        return self.shift_right(x, bits, max(-ends[0], ends[1]))

    def affine(
        self,
        x: Value,
        bound: np.ndarray | int,
        factor: Any,
        offset: Any,
        shift: int,
        after: int = 0,
        limits: Range | None = None,
    ) -> Value:
        # numbers of any size
        times, plus = (_exact(each) for each in (factor, offset))
        if shift > 32:
            # rounding down twice is rounding down once
            out = self.affine(x, bound, times, plus, 32)
            ends = self.ends(out)
            return self.shift_right(out, shift - 32, max(-ends[0], ends[1]), 0, after)
        times, plus = times << (32 - shift), (plus << (32 - shift)) + (after << 32)
        own = self.ends(x)
        most = np.broadcast_to(_exact(bound), np.broadcast_shapes(np.shape(bound), times.shape, plus.shape))
        low: Any = np.maximum(-most, own[0])
        high: Any = np.minimum(most, own[1])
        if limits is not None:
            low, high = self._within(low, high, times, plus, (limits[0] + after, limits[1] + after))
            if (low > np.maximum(-most, own[0])).any():
                x = super().node("Max", x, self.constant(low.astype(np.int64), np.int32, "least"))
            if (high < np.minimum(most, own[1])).any():
                x = super().node("Min", x, self.constant(high.astype(np.int64), np.int32, "most"))
        self.known(x, int(low.min()), int(high.max()))
        scheme = _scheme(low, high, times, plus)
        if scheme is None:
            raise OverflowError(f"{x.name} times up to {int(abs(times).max())} has no form without 64 bits")
        # E mod 2**32, of which half a unit is taken so that dividing rounds down
        exact = self.wrap("Mul", x, times)
        if np.any(_wrapped(plus - (1 << 31))):
            exact = self.wrap("Add", exact, plus - (1 << 31))
        if scheme.split:
            upper, lower = self.halves(x, scheme.split)
            total = self.wrap("Add", self.wrap("Mul", upper, scheme.high), self.wrap("Mul", lower, scheme.low))
        else:
            total = self.wrap("Mul", x, scheme.low)
        total = self.wrap("Add", total, scheme.offset)
        out = self._divided(total, exact, scheme.bits, 32 - scheme.bits, 0, scheme.range)
        results = [(each * times + plus) >> 32 for each in (low, high)]
        if scheme.whole is not None:
            out = self.wrap("Add", out, self.wrap("Mul", upper, scheme.whole[0]))
            if np.any(scheme.whole[1]):
                out = self.wrap("Add", out, scheme.whole[1])
        return self.known(out, int(np.minimum(*results).min()), int(np.maximum(*results).max()))

    @staticmethod
    def _within(low: Any, high: Any, times: Any, plus: Any, limits: Range) -> tuple[Any, Any]:
        """Return from where to where x counts: beyond it ``(x times + plus) >> 32`` is beyond the limits."""
        times, plus, low, high = np.broadcast_arrays(times, plus, low, high)
        if (times < 0).any():
            return low, high
        divisor = np.where(times > 0, times, 1)
        # the largest x of a result at most the lower limit, the least of one at least the upper
        first = (((limits[0] + 1) << 32) - 1 - plus) // divisor
        last = -((plus - (limits[1] << 32)) // divisor)
        first, last = np.where(times > 0, first, low), np.where(times > 0, last, high)
        return np.minimum(np.maximum(low, first), high), np.maximum(np.minimum(high, last), low)

    def multiply_round(self, x: Value, y: Operand, shift: int = 32, name: str = "constant", *, down: bool = False) -> Value:
        half = 0 if down else 1 << (shift - 1)
        if not isinstance(y, Value):
            numbers = np.asarray(y.detach().cpu().numpy() if isinstance(y, torch.Tensor) else y)
            low, high = self.ends(x)
            return self.affine(x, max(-low, high), numbers, half, shift)
        own = self.ends(x), self.ends(y)
        products = [a * b for a in own[0] for b in own[1]]
        low, high = min(products), max(products)
        known = (low + half) >> shift, (high + half) >> shift
        if low >= _INT32[0] and high + half <= _INT32[1]:
            return self.shift_right(self.multiply(x, y), shift, max(-low, high) + half, half)
        most = max(-own[1][0], own[1][1])
        if most << shift < 1 << 31 and max(-own[0][0], own[0][1]) >> shift <= 1 << FLOAT_BITS:
            upper, lower = self.halves(x, shift, centred=False)
            part = self.multiply(lower, y)
            return self.add(self.multiply(upper, y), self.shift_right(part, shift, (most << shift) - 1 + half, half))
        first = -(-shift // 2)
        second, bits = shift - first, first
        (upper, lower), (over, under) = self.halves(x, first), self.halves(y, second)
        ranges = [self.ends(each) for each in (upper, lower, over, under)]
        a, b, c, d = (max(-each[0], each[1]) for each in ranges)
        total = self.wrap("Mul", upper, under)
        if first > second:
            total = self.wrap("Mul", total, 1 << (first - second))
        total = self.wrap("Add", total, self.wrap("Mul", lower, over))
        reach = (a * d << (first - second)) + b * c
        error = (b * d >> (shift - bits)) + 3
        if error >= 1 << (bits - 1) or reach + (1 << bits) + error > _INT32[1]:
            raise OverflowError(f"{x.name} times {y.name} has no form without 64 bits")
        exact = self.wrap("Mul", x, y)
        if shift < 32:
            exact = self.wrap("Mul", exact, 1 << (32 - shift))
        if down:
            exact = self.wrap("Add", exact, 1 << 31)
        within = reach + (1 << bits) + error
        out = self._divided(total, exact, bits, 32 - bits, 0 if down else 1 << (bits - 1), (-within, within))
        out = self.wrap("Add", out, self.wrap("Mul", upper, over))
        return self.known(out, *known)

    def affine_rounded(
        self, x: Value, bound: int, factor: Any, offset: Any, shift: int, after: int = 0, name: str = "multiplier"
    ) -> Value:
        low, high = self.ends(x)
        half = _exact(offset) + (1 << (shift - 1))
        return self.affine(x, max(-low, high), factor, half, shift, after)

    def multiply_known(self, x: Value, y: Value, low: int, high: int) -> Value:
        return self.known(self.wrap("Mul", self.barrier(x), y), low, high)

    def shift_positive(self, x: Value, shift: int | np.ndarray, dtype: Any = np.int32) -> Value:
        self.known(x, 0, _INT32[1])
        return self.cast(self.shift_right(x, shift, self.ends(x)[1]), dtype)

    def times_power(self, x: Value, powers: np.ndarray, index: Value) -> Value:
        factors = np.left_shift(np.int64(1), np.maximum(powers, 0))
        return self.wrap("Mul", self.barrier(x), self.gather(self.table(factors, np.int32, "of_bit_length"), index))

    def multiply_shift(self, x: Value, y: Value, shift: np.ndarray, after: int) -> Value:
        product = self.multiply_round(x, y, down=True)
        low, high = self.ends(product)
        bound = max(-low, high)
        if bound >= 1 << 29:
            raise OverflowError(f"{product.name} spans {[low, high]}, too much to be rounded")
        # a larger shift leaves nothing either
        shift = np.minimum(shift, 30)
        half = (np.int64(1) << shift) >> 1
        if bound >> int(shift.min()) <= 1 << FLOAT_BITS:
            return self.shift_right(product, shift, bound + int(half.max()), half, after)
        # beyond int8 it saturates
        ends = np.minimum(np.int64(256) << shift, bound)
        product = self.minimum(self.maximum(product, -ends), ends)
        return self._shifted(product, shift, bound + int(half.max()), half, after, 257)

    def bit_length(self, x: Value, most: int) -> Value:
        powers = np.left_shift(np.int64(1), np.arange(most, dtype=np.int64))
        masked = super().node("BitwiseAnd", x, self.table(-powers, np.int32, "masks"))
        self.known(masked, 0, self.ends(x)[1])
        # positive numbers divided by a power of two are 0 below it
        reached = self.minimum(self.divide(masked, self.table(powers, np.int32, "powers_of_two")), 1)
        return self.total(reached, -1, most)

    # --- sums and products ----------------------------------------------------------------------------------

    def total(self, x: Value, axis: int, count: int, keep: bool = True) -> Value:
        low, high = self.ends(x)
        each = max(-low, high, 1)
        if each * count < 1 << FLOAT_BITS:
            out = self.node("ReduceSum", x, self.constant([axis], np.int64), keepdims=int(keep))
            return self.known(out, count * min(low, 0), count * max(high, 0))
        if count == 1:
            return x if keep else self.node("Squeeze", x, self.constant([axis], np.int64))
        # parts whose sums are small; of large numbers two
        number = each * count // (1 << FLOAT_BITS) + 1
        if number > count // 2:
            half, rest = divmod(count, 2)
            parts = self.pieces(x, [half, half, rest] if rest else [half, half], axis)
            out = self.total(self.add(parts[0], parts[1]), axis, half, keep)
            return out if not rest else self.add(out, self.total(parts[2], axis, 1, keep))
        while (sizes := [last - first for first, last in _cuts(count, number)]) and max(sizes) * each >= 1 << FLOAT_BITS:
            number += 1
        sums = [self.total(part, axis, size, keep) for part, size in zip(self.pieces(x, sizes, axis), sizes, strict=True)]
        out = sums[0]
        for part in sums[1:]:
            out = self.add(out, part)
        return out

    def pieces(self, x: Value, sizes: Sequence[int], axis: int) -> list[Value]:
        """Cut an axis into pieces of these sizes."""
        out = [Value(self._name("Split"), x.dtype) for _ in sizes]
        names = [y.name for y in out]
        inputs = [x.name, self.constant(sizes, np.int64).name]
        self._nodes.append(helper.make_node("Split", inputs, names, name=names[0], axis=axis))
        return [self.known(y, *self.ends(x)) for y in out]

    def row_maximum(self, x: Value) -> Value:
        return self.known(super().row_maximum(x), *self.ends(x))

    def split(self, x: Value, parts: int) -> list[Value]:
        return [self.known(y, *self.ends(x)) for y in super().split(x, parts)]

    def _product(self, x: Value, y: Value, x_zero: int, y_zero: int, bound: int) -> Value:
        out = super().matmul(x, y, x_zero, y_zero, inner=0)
        self._products.add(out.name)
        return self.known(out, -bound, bound)

    def matmul(
        self,
        x: Value,
        y: Value,
        x_zero: int = ZERO_POINT,
        y_zero: int = ZERO_POINT,
        *,
        inner: int,
        weight: np.ndarray | None = None,
    ) -> Value:
        ends = [max(zero - low, high - zero) for zero, (low, high) in ((x_zero, self.ends(x)), (y_zero, self.ends(y)))]

        def most(first: int, last: int) -> int:
            if weight is None:
                return ends[0] * ends[1] * (last - first)
            return ends[0] * int(np.abs(weight[first:last].astype(np.int64)).sum(axis=0).max())

        count = 1
        while True:
            cuts = _cuts(inner, count)
            bounds = [most(first, last) for first, last in cuts]
            if max(bounds) < 1 << FLOAT_BITS:
                break
            count += 1
        if count == 1:
            return self._product(x, y, x_zero, y_zero, bounds[0])
        sizes = [last - first for first, last in cuts]
        parts = zip(self.pieces(x, sizes, -1), self.pieces(y, sizes, -2), bounds, strict=True)
        out, *others = [self._product(left, right, x_zero, y_zero, bound) for left, right, bound in parts]
        for each in others:
            out = self.add(out, each)
        return self.known(out, -most(0, inner), most(0, inner))


def _scheme(low: Any, high: Any, times: Any, plus: Any) -> _Scheme | None:
    """Return how ``(x times + plus) >> 32`` is computed for ``low <= x <= high``, proved for every channel; None if it is not.

    All are arrays of Python's integers, which broadcast.
    """
    most = np.maximum(abs(low), abs(high))
    results = [(each * times + plus) >> 32 for each in (low, high)]
    least, largest = int(np.minimum(*results).min()), int(np.maximum(*results).max())
    for split in (0, *range(8, 18)):
        half = 1 << split >> 1
        if split:
            upper = np.maximum(abs((low + half) >> split), abs((high + half) >> split))
            lower = np.minimum(half, most)
        for whole in (False, True) if split else (False,):
            product = times << split
            outside = (product + (1 << 31)) >> 32 if whole else 0 * product
            over = (plus >> 32) if whole else 0 * plus
            inside, offset = product - (outside << 32), plus - (over << 32)
            for bits in range(7, 24):
                drop = 32 - bits
                factors = [_rounded(inside, drop), _rounded(times, drop), _rounded(offset, drop)]
                if split:
                    error = upper * _rest(inside, factors[0], drop) + lower * _rest(times, factors[1], drop)
                else:
                    error = most * _rest(times, factors[1], drop)
                error = (int((error + _rest(offset, factors[2], drop)).max()) >> drop) + 3
                if error >= 1 << (bits - 1):
                    continue
                if whole:
                    reach = upper * abs(inside) + lower * abs(times) + abs(offset)
                    reach = int(reach.max() >> drop) + (2 << bits)
                    ends = -reach, reach
                else:
                    ends = least << bits, (largest + 1 << bits) - 1
                if ends[0] < _INT32[0] or ends[1] > _INT32[1]:
                    break
                return _Scheme(split, bits, (outside, over) if whole else None, factors[0], factors[1], factors[2], ends)
    return None
