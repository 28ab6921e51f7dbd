"""A TOSA graph under construction, in operators of TOSA's integer profile, without an extension or with EXT-INT16.

A tensor has a static shape and is int8, int32 or bool; int16 is what tables take. Arithmetic is int32. TOSA leaves overflow
undefined, so who calls knows the bounds. An operator that would change nothing is not written. Both operands of an operator
must have as many axes; a constant gets the leading ones here.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tosa_serializer as ts

from .export_checks import exact_array

VERSION = 1, 0
"""Of TOSA: the first that has all operators used here; later ones can read it."""
MOST_BYTES = (1 << 31) - (1 << 24)
"""Of constants: a flatbuffer has less than 2**31 bytes, and the rest of a graph takes some."""
Shape = tuple[int, ...]
_TYPES = {
    np.dtype(np.int8): ts.DType.INT8, np.dtype(np.int16): ts.DType.INT16, np.dtype(np.int32): ts.DType.INT32,
    np.dtype(np.bool_): ts.DType.BOOL,
}  # fmt: skip
_WORDS = {"MATMUL": "MatMul"}
"""Of operators' names, in names of attributes, where it is more than a capital."""
_NAN = ts.NanPropagationMode.PROPAGATE
"""What maxima must say, also of integers."""


class Value(NamedTuple):
    """A tensor of the graph."""

    name: str
    dtype: np.dtype[Any]
    shape: Shape


Operand = Value | int | np.ndarray
"""What arithmetic takes: a tensor of the graph, or a constant, which takes the other operand's type."""


class Graph:
    """Operators and constants of a TOSA graph under construction.

    Attributes:
        int16: whether it may have operators of EXT-INT16.
        counts: how many operators each part has, without constants: by the part's name and the operator's.
    """

    def __init__(self, int16: bool = False) -> None:
        self.int16 = int16
        self._serializer = ts.TosaSerializer(
            "", targetMajor=VERSION[0], targetMinor=VERSION[1], targetPatch=0, targetDraft=False
        )
        self._block = self._serializer.currRegion.currBasicBlock
        self._constants: dict[tuple[str, Shape, bytes], Value] = {}
        self._shapes: dict[Shape, str] = {}
        self._scope = ""
        self._count = 0
        self.counts: dict[str, Counter[str]] = {}

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Put a part's name before the names of what is made inside, and count its operators."""
        before, self._scope = self._scope, name
        self.counts.setdefault(name, Counter())
        yield
        self._scope = before

    def _name(self, what: str) -> str:
        self._count += 1
        return f"{self._scope}/{what}_{self._count}"

    def input(self, name: str, dtype: Any, shape: Shape) -> Value:
        """Add an input."""
        value = self._tensor(name, dtype, shape)
        self._block.addInput(name)
        return value

    def output(self, x: Value, name: str, shape: Shape) -> None:
        """Make a tensor an output, under a name and in a shape."""
        out = self._tensor(name, x.dtype, shape)
        self._operator("RESHAPE", (x.name, self._shape(shape)), out)
        self._block.addOutput(name)

    def _tensor(self, name: str, dtype: Any, shape: Shape) -> Value:
        value = Value(name, np.dtype(dtype), tuple(shape))
        self._block.addTensor(name, list(value.shape), _TYPES[value.dtype])
        return value

    def _shape(self, shape: Sequence[int]) -> str:
        key = tuple(shape)
        if key not in self._shapes:
            name = self._name("shape")
            self._serializer.addConst([len(key)], ts.DType.SHAPE, np.array(key, dtype=np.int64), name)
            self._shapes[key] = name
        return self._shapes[key]

    def constant(self, values: int | Sequence[int] | np.ndarray, dtype: Any, name: str = "constant") -> Value:
        """Return a constant; the same values are stored once."""
        array = exact_array(values, dtype, name)
        key = (array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).digest())
        if key not in self._constants:
            value = Value(self._name(name), array.dtype, array.shape)
            self._serializer.addConst(list(array.shape), _TYPES[array.dtype], array, value.name)
            self._constants[key] = value
        return self._constants[key]

    def _operator(self, operator: str, inputs: Sequence[str], out: Value, *attributes: Any) -> Value:
        made = ts.TosaSerializerAttribute()
        words = operator.split("_")
        getattr(made, "".join(_WORDS.get(word, word.capitalize()) for word in words) + "Attribute")(*attributes)
        self._block.addOperator(getattr(ts.Op, operator), list(inputs), [out.name], made)
        self.counts.setdefault(self._scope, Counter())[operator] += 1
        return out

    def node(self, operator: str, inputs: Sequence[Value], dtype: Any, shape: Sequence[int], *attributes: Any) -> Value:
        """Add an operator.

        Args:
            operator: its name in TOSA.
            inputs: what it takes.
            dtype, shape: of its output.
            attributes: in the serializer's order.
        """
        out = self._tensor(self._name(operator.lower()), dtype, tuple(shape))
        return self._operator(operator, [x.name for x in inputs], out, *attributes)

    def _operand(self, y: Operand, like: Value) -> Value:
        """Return an operand beside another one, of its type and with as many axes."""
        if isinstance(y, Value):
            return y
        array = np.asarray(y)
        return self.constant(array.reshape((1,) * (len(like.shape) - array.ndim) + array.shape), like.dtype)

    def _binary(self, operator: str, x: Value, y: Operand, *attributes: Any, dtype: Any = None) -> Value:
        other = self._operand(y, x)
        shape = np.broadcast_shapes(x.shape, other.shape)
        return self.node(operator, (x, other), x.dtype if dtype is None else dtype, shape, *attributes)

    def add(self, x: Value, y: Operand) -> Value:
        """Add int32."""
        return x if _is(y, 0) else self._binary("ADD", x, y)

    def subtract(self, x: Operand, y: Value) -> Value:
        """Return x less y, int32."""
        return self._binary("SUB", self._operand(x, y), y)

    def multiply(self, x: Value, y: Operand, shift: int = 0) -> Value:
        """Return :func:`qflash.specification.fixed_point.multiply_round` of int32, the product itself if ``shift`` is 0."""
        other = self._operand(y, x)
        inputs = x, other, self.constant([shift], np.int8)
        return self.node("MUL", inputs, np.int32, np.broadcast_shapes(x.shape, other.shape))

    def minimum(self, x: Value, y: Operand) -> Value:
        """Return the smaller int32."""
        return self._binary("MINIMUM", x, y, _NAN)

    def maximum(self, x: Value, y: Operand) -> Value:
        """Return the larger int32."""
        return self._binary("MAXIMUM", x, y, _NAN)

    def shift_left(self, x: Value, y: Operand) -> Value:
        """Shift left by 0 to 31; bits that leave are lost."""
        return x if _is(y, 0) else self._binary("LOGICAL_LEFT_SHIFT", x, y)

    def shift_right(self, x: Value, y: Operand, rounded: bool = False) -> Value:
        """Shift right by 0 to 31, the sign staying; rounded half up if asked."""
        return x if _is(y, 0) else self._binary("ARITHMETIC_RIGHT_SHIFT", x, y, rounded)

    def bit_and(self, x: Value, y: Operand) -> Value:
        """Return the bits that are in both."""
        return self._binary("BITWISE_AND", x, y)

    def bit_or(self, x: Value, y: Operand) -> Value:
        """Return the bits that are in one."""
        return self._binary("BITWISE_OR", x, y)

    def greater(self, x: Value, y: Operand) -> Value:
        """Tell where x is larger."""
        return self._binary("GREATER", x, y, dtype=np.bool_)

    def select(self, condition: Value, x: Operand, y: Operand) -> Value:
        """Take x, int32, where a condition holds, else y."""
        like = Value("", np.dtype(np.int32), condition.shape)
        parts = self._operand(x, like), self._operand(y, like)
        shape = np.broadcast_shapes(condition.shape, *(part.shape for part in parts))
        return self.node("SELECT", (condition, *parts), np.int32, shape)

    def absolute(self, x: Value) -> Value:
        """Return the magnitude."""
        return self.node("ABS", (x,), x.dtype, x.shape)

    def leading_zeros(self, x: Value) -> Value:
        """Count the zeros before the highest bit: 32 of 0."""
        return self.node("CLZ", (x,), x.dtype, x.shape)

    def reduce_sum(self, x: Value, axis: int) -> Value:
        """Add an axis up, which stays with size 1."""
        return self.node("REDUCE_SUM", (x,), x.dtype, _with(x.shape, axis, 1), axis)

    def reduce_max(self, x: Value, axis: int) -> Value:
        """Return the maximum over an axis, which stays with size 1."""
        return self.node("REDUCE_MAX", (x,), x.dtype, _with(x.shape, axis, 1), axis, _NAN)

    def cast(self, x: Value, dtype: Any) -> Value:
        """Change the type, keeping the low bits."""
        return x if x.dtype == np.dtype(dtype) else self.node("CAST", (x,), dtype, x.shape)

    def rescale(
        self, x: Value, multiplier: int | np.ndarray, shift: int | np.ndarray, dtype: Any, zero: int = 0, unsigned: bool = False
    ) -> Value:
        """Return ``(x multiplier + 2**(shift - 1)) >> shift``, plus a zero point, saturated to a type.

        Args:
            x: any integer type; ``|x| < 2**(shift - 1)``.
            multiplier: ``[0, 2**31)``, a number or one for each of the last axis.
            shift: 2 to 62, the same.
            dtype: of the output.
            zero: added to an int8 output.
            unsigned: x holds the bytes of uint8, of which 128 are taken first.
        """
        factor, shifts = np.broadcast_arrays(np.atleast_1d(multiplier), np.atleast_1d(shift))
        if (factor == factor[0]).all() and (shifts == shifts[0]).all():
            factor, shifts = factor[:1], shifts[:1]
        inputs = (
            x, self.constant(factor, np.int32), self.constant(shifts, np.int8),
            self.constant([-128 if unsigned else 0], x.dtype), self.constant([zero], dtype),
        )  # fmt: skip
        attributes = True, ts.RoundingMode.SINGLE_ROUND, factor.size > 1, unsigned, False
        return self.node("RESCALE", inputs, dtype, x.shape, *attributes)

    def table(self, x: Value, entries: np.ndarray) -> Value:
        """Return int32 of a table of EXT-INT16, whose entry k stands for ``128 k - 32768``; between them lie straight lines.

        Args:
            x: int16.
            entries: int16 (513,), a 128th of what is returned; neighbours differ by less than ``2**15``.
        """
        return self.node("TABLE", (x, self.constant(entries, np.int16, "table")), np.int32, x.shape)

    def reshape(self, x: Value, *shape: int) -> Value:
        """Change the shape."""
        return x if x.shape == shape else self.node("RESHAPE", (x, Value(self._shape(shape), x.dtype, ())), x.dtype, shape)

    def transpose(self, x: Value, *order: int) -> Value:
        """Permute the axes."""
        if order == tuple(range(len(order))):
            return x
        return self.node("TRANSPOSE", (x,), x.dtype, [x.shape[axis] for axis in order], list(order))

    def arrange(self, x: Value, parts: Sequence[int], order: Sequence[int], *shape: int) -> Value:
        """Reshape to parts, permute these, and reshape again, with as few axes and operators as that takes."""
        axes = [axis for axis in order if parts[axis] != 1]
        runs: list[list[int]] = []
        for axis in axes:
            # what is side by side before and behind is one axis
            if runs and all(parts[i] == 1 for i in range(runs[-1][-1] + 1, axis)) and runs[-1][-1] < axis:
                runs[-1].append(axis)
            else:
                runs.append([axis])
        before = sorted(runs)
        x = self.reshape(x, *(math.prod(parts[axis] for axis in run) for run in before))
        return self.reshape(self.transpose(x, *(before.index(run) for run in runs)), *shape)

    def cut(self, x: Value, first: int, last: int, axis: int) -> Value:
        """Take a stretch of an axis."""
        if (first, last) == (0, x.shape[axis]):
            return x
        start, size = _with((0,) * len(x.shape), axis, first), _with(x.shape, axis, last - first)
        inputs = x, Value(self._shape(start), x.dtype, ()), Value(self._shape(size), x.dtype, ())
        return self.node("SLICE", inputs, x.dtype, size)

    def concat(self, parts: Sequence[Value], axis: int) -> Value:
        """Put tensors side by side."""
        size = sum(part.shape[axis] for part in parts)
        return self.node("CONCAT", parts, parts[0].dtype, _with(parts[0].shape, axis, size), axis)

    def take(self, x: Value, order: np.ndarray) -> Value:
        """Take tokens, the axis before the last, by their numbers: (batch, 1, tokens, channels)."""
        batch, _, tokens, channels = x.shape
        index = self.constant(np.tile(order.reshape(1, -1), (batch, 1)), np.int32, "order")
        flat = self.reshape(x, batch, tokens, channels)
        found = self.node("GATHER", (flat, index), x.dtype, (batch, order.size, channels))
        return self.reshape(found, batch, 1, order.size, channels)

    def matmul(self, x: Value, y: Value, x_zero: int = 0) -> Value:
        """Multiply int8 matrices (batch, rows, inner) less a zero point, and (batch, inner, columns): int32."""
        inputs = x, y, self.constant([x_zero], np.int8), self.constant([0], np.int8)
        return self.node("MATMUL", inputs, np.int32, (*x.shape[:2], y.shape[2]))

    def convolve(self, x: Value, weight: np.ndarray, bias: np.ndarray) -> Value:
        """Multiply int8 patches that do not overlap by weights.

        Args:
            x: int8 (batch, height, width, channels).
            weight: int8 (outputs, patch height, patch width, channels).
            bias: int32 (outputs,).

        Returns:
            int32 (batch, rows, columns, outputs).
        """
        batch, height, width, _ = x.shape
        outputs, high, wide, _ = weight.shape
        zero = self.constant([0], np.int8)
        inputs = x, self.constant(weight, np.int8, "weight"), self.constant(bias, np.int32, "bias"), zero, zero
        shape = batch, height // high, width // wide, outputs
        return self.node("CONV2D", inputs, np.int32, shape, [0] * 4, [high, wide], [1, 1], False, ts.DType.INT32)

    def serialize(self) -> bytes:
        """Return the file's content.

        Raises:
            ValueError: its constants have more than :data:`MOST_BYTES`.
        """
        size = sum(x.dtype.itemsize * math.prod(x.shape) for x in self._constants.values())
        if size > MOST_BYTES:
            raise ValueError(f"network must have at most {MOST_BYTES} bytes of constants to be written as TOSA, has {size}")
        return bytes(self._serializer.serialize())


def _is(y: Operand, number: int) -> bool:
    return not isinstance(y, Value) and bool(np.all(np.asarray(y) == number))


def _with(shape: Sequence[int], axis: int, size: int) -> Shape:
    out = list(shape)
    out[axis] = size
    return tuple(out)
