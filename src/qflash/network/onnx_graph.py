"""A graph of ONNX's integer operators, written node by node: :class:`Graph`.

ONNX shifts unsigned integers only, its integer division truncates towards zero, and it has no product of two int32 that keeps
the high half. The methods here express those with operators whose result is defined for every input they meet:

* A cast between integers keeps the low bits. So the top half of an int64 product is a cast to uint64, a shift by 32 and a cast
  to int32, which brings the sign back.
* Where the sign would be lost, a power of two is added first that makes the number positive and whose shifted value is taken
  off behind. ``bound`` arguments are magnitudes: they decide whether there is room for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from .export_checks import exact_array

OPSET = 18
"""The first with bitwise operators."""
IR_VERSION = 8
"""Of the file, the oldest that this opset may have."""
ZERO_POINT = 128
"""Of int8 activations and weights, which a graph multiplies as uint8: see :meth:`Graph.matmul`."""

_UNSIGNED = {np.dtype(np.int8): np.uint8, np.dtype(np.int32): np.uint32, np.dtype(np.int64): np.uint64}


class Span(NamedTuple):
    """The nodes of an operator of the network.

    Attributes:
        name: of the operator.
        kind: of it, the function's name.
        about: what the kind computes.
        choices: what operators of one function have in common.
        start, end: of its nodes among the graph's.
        inputs: how it calls its inputs.
    """

    name: str
    kind: str
    about: str
    choices: str
    start: int
    end: int
    inputs: tuple[str, ...]


class Value(NamedTuple):
    """A tensor of the graph."""

    name: str
    dtype: np.dtype[Any]


Operand = Value | int | np.ndarray | torch.Tensor
"""What arithmetic takes: a tensor of the graph, or a constant, which takes the other operand's type."""


class Graph:
    """Nodes and constants of an ONNX graph under construction.

    Attributes:
        wide: the type of numbers of more than 32 bits.
        spans: operators of the network.
        tables: names of constants that belong to what an operator computes.
    """

    wide: Any = np.int64

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Value] = {}
        self._initializers: list[onnx.TensorProto] = []
        self._scopes: list[str] = []
        self._count = 0
        self.spans: list[Span] = []
        self.tables: set[str] = set()

    @contextlib.contextmanager
    def scope(
        self, name: str, kind: str = "", about: str = "", choices: str = "", inputs: tuple[str, ...] = ()
    ) -> Iterator[None]:
        """Put a module's name before the names of what is made inside, and note its nodes as a :class:`Span`."""
        self._scopes.append(name)
        start = len(self._nodes)
        yield
        self.spans.append(Span(name, kind, about, choices, start, len(self._nodes), inputs))
        self._scopes.pop()

    def _name(self, what: str) -> str:
        self._count += 1
        return f"{'.'.join(self._scopes)}/{what}_{self._count}"

    def constant(self, values: int | Sequence[int] | np.ndarray | torch.Tensor, dtype: Any, name: str = "constant") -> Value:
        """Return a constant; the same values are stored once."""
        if isinstance(values, torch.Tensor):
            values = values.detach().cpu().numpy()
        array = exact_array(values, dtype, name)
        key = (array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).digest())
        if key not in self._constants:
            value = Value(self._name(name), array.dtype)
            self._initializers.append(numpy_helper.from_array(array, value.name))
            self._constants[key] = value
        return self._constants[key]

    def table(self, values: Sequence[int] | np.ndarray | torch.Tensor, dtype: Any, name: str) -> Value:
        """Return a constant that belongs to what an operator computes, not to its weights."""
        value = self.constant(values, dtype, name)
        self.tables.add(value.name)
        return value

    def node(self, operator: str, *inputs: Value, dtype: Any = None, **attributes: Any) -> Value:
        """Add a node of one output, which has the first input's type unless it is given."""
        out = Value(self._name(operator), inputs[0].dtype if dtype is None else np.dtype(dtype))
        names = [x.name for x in inputs]
        self._nodes.append(helper.make_node(operator, names, [out.name], name=out.name, **attributes))
        return out

    def cast(self, x: Value, dtype: Any) -> Value:
        """Change the type, keeping the low bits."""
        if x.dtype == np.dtype(dtype):
            return x
        return self.node("Cast", x, dtype=dtype, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def _binary(self, operator: str, x: Value, y: Operand, dtype: Any = None) -> Value:
        x = self.cast(x, x.dtype if dtype is None else dtype)
        other = self.cast(y, x.dtype) if isinstance(y, Value) else self.constant(y, x.dtype)
        return self.node(operator, x, other)

    def add(self, x: Value, y: Operand, dtype: Any = None) -> Value:
        """Add, in ``dtype`` if it is given and in x's type else."""
        return self._binary("Add", x, y, dtype)

    def subtract(self, x: Value, y: Operand, dtype: Any = None) -> Value:
        """Subtract; see :meth:`add`."""
        return self._binary("Sub", x, y, dtype)

    def multiply(self, x: Value, y: Operand, dtype: Any = None) -> Value:
        """Multiply; see :meth:`add`. A shift to the left is a product with a power of two."""
        return self._binary("Mul", x, y, dtype)

    def minimum(self, x: Value, y: Operand) -> Value:
        """Return the smaller."""
        return self._binary("Min", x, y)

    def maximum(self, x: Value, y: Operand) -> Value:
        """Return the larger."""
        return self._binary("Max", x, y)

    def clip(self, x: Value, low: int, high: int) -> Value:
        """Saturate."""
        return self.node("Clip", x, self.constant(low, x.dtype), self.constant(high, x.dtype))

    def shift_unsigned(self, x: Value, shift: Operand, direction: str = "RIGHT") -> Value:
        """Shift uint32 or uint64."""
        other = self.cast(shift, x.dtype) if isinstance(shift, Value) else self.constant(shift, x.dtype)
        return self.node("BitShift", x, other, direction=direction)

    def shift_right(self, x: Value, shift: int | np.ndarray, bound: int, before: int | np.ndarray = 0, after: int = 0) -> Value:
        """Return ``((x + before) >> shift) + after``, the shift of a signed number rounding down.

        Args:
            x: int32 or int64.
            shift: at least 0 and below x's width; an array broadcasts to x.
            bound: ``|x + before| <= bound``, below ``2**31`` or ``2**63`` as x's type.
            before: constant or constants.
            after: constant.

        Returns:
            int32 if every result fits, else int64.
        """
        bits, unsigned = 8 * x.dtype.itemsize, _UNSIGNED[x.dtype]
        if bound >= 1 << (bits - 1):
            raise OverflowError(f"a number up to {bound} does not fit {x.dtype}")
        least, most = int(np.min(shift)), int(np.max(shift))
        result = np.int32 if (bound >> least) + abs(after) < 1 << 31 else np.int64
        by = self.constant(np.asarray(shift, dtype=np.uint64), unsigned, "shift") if most else None

        def added(number: int | np.ndarray) -> Value:
            return self.add(x, self.constant(number, x.dtype, "bias")) if np.any(number) else x

        if by is None:
            out = self.cast(added(before), result)
            return self.add(out, after) if after else out
        if bits == 64 and most <= 32 and result is np.int32:
            # the low 32 bits of the result are those of a logical shift
            out = self.cast(self.shift_unsigned(self.cast(added(before), unsigned), by), result)
            return self.add(out, after) if after else out
        offset = 1 << max(bound.bit_length(), most)
        if offset + bound < 1 << (bits - 1):
            x = self.cast(added(np.asarray(before, dtype=np.int64) + offset), unsigned)
        else:
            offset = 1 << (bits - 1)
            x = self.node("BitwiseXor", self.cast(added(before), unsigned), self.constant(np.uint64(offset), unsigned))
        if (offset + bound) >> least >= 1 << 31:
            result = np.int64
        back = (np.uint64(offset) >> np.asarray(shift, dtype=np.uint64)).astype(np.int64) - after
        return self.subtract(self.cast(self.shift_unsigned(x, by), result), self.constant(back, result, "back"))

    def round_shift(self, x: Value, shift: int, bound: int, before: int | np.ndarray = 0, after: int = 0) -> Value:
        """Return :meth:`shift_right` by ``shift >= 1``, rounded half up: ``((x + before + half) >> shift) + after``.

        Args:
            x: int64.
            shift: of all elements.
            bound: ``|x + before| <= bound``, at most ``2**63 - 2``.
            before, after: see :meth:`shift_right`.
        """
        half = 1 << (shift - 1)
        if bound + half < 1 << 63:
            return self.shift_right(x, shift, bound + half, np.asarray(before, dtype=np.int64) + half, after)
        # no room for the half: the last bit goes by itself
        part = self.cast(self.shift_right(x, shift - 1, bound, before), np.int64)
        return self.shift_right(part, 1, (bound >> (shift - 1)) + 1, 1, after)

    def multiply_round(self, x: Value, y: Operand, shift: int = 32, name: str = "constant") -> Value:
        """Return :func:`qflash.specification.fixed_point.multiply_round` as int64, for results that fit int32.

        Args:
            x, y: int32 or int64, whose product is below ``2**62`` in magnitude.
            shift: 1 to 32, or more of constants in :class:`.onnx_narrow.NarrowGraph`.
            name: of y if it is constant.
        """
        if not isinstance(y, Value):
            y = self.constant(y, np.int64, name)
        product = self.cast(self.add(self.multiply(x, y, np.int64), 1 << (shift - 1)), np.uint64)
        return self.cast(self.cast(self.shift_unsigned(product, shift), np.int32), np.int64)

    def multiply_known(self, x: Value, y: Value, low: int, high: int) -> Value:
        """Multiply int32 to a product of which the caller knows that it is within these ends."""
        return self.multiply(x, y, self.wide)

    def shift_positive(self, x: Value, shift: int | np.ndarray, dtype: Any = np.int32) -> Value:
        """Shift int32 that is not negative to the right, and change its type."""
        by = self.constant(shift, np.uint32, "shift")
        return self.cast(self.shift_unsigned(self.cast(x, np.uint32), by), dtype)

    def times_power(self, x: Value, powers: np.ndarray, index: Value) -> Value:
        """Return ``floor(x 2**powers[index])`` of int32, which int32 holds; powers of at most 24."""
        raised = self.cast(self.multiply(x, 1 << 24, np.int64), np.uint64)
        fall = self.gather(self.table(24 - powers, np.uint64, "of_bit_length"), index)
        return self.cast(self.shift_unsigned(raised, fall), np.int32)

    def multiply_shift(self, x: Value, y: Value, shift: np.ndarray, after: int) -> Value:
        """Return ``round_shift(multiply_high(x, y), shift) + after``; see :mod:`qflash.specification.fixed_point`.

        Args:
            x, y: int32 or int64, whose product is below ``2**60`` in magnitude.
            shift: for each channel, 0 to 31.
            after: constant.
        """
        # both roundings down are one; a shift of 0 has no half
        half = np.where(shift > 0, np.left_shift(np.int64(1), 31 + shift), 0)
        product = self.multiply(x, y)
        return self.shift_right(product, 32 + shift, (1 << 60) + int(half.max()), half, after)

    def affine(
        self, x: Value, bound: np.ndarray | int, factor: Any, offset: Any, shift: int, after: int = 0,
        limits: tuple[int, int] | None = None,
    ) -> Value:  # fmt: skip
        """Return ``((x factor + offset) >> shift) + after``.

        Args:
            x: int32 or int64.
            bound: of its magnitude; for each channel, or for all.
            factor, offset: whole numbers, for each channel or for all.
            shift: at least 32.
            after: constant.
            limits: ends that the result without ``after`` saturates at, here or later.
        """
        # Python's integers: bounds of untrained networks may be beyond 64 bits
        parts = np.broadcast_arrays(*(np.asarray(each).astype(object) for each in (bound, factor, offset)))
        most = int((parts[0] * abs(parts[1]) + abs(parts[2])).max())
        product = self.multiply(x, self.constant(np.asarray(factor), np.int64, "multiplier"), np.int64)
        return self.shift_right(product, shift, most, np.asarray(offset, dtype=np.int64), after)

    def affine_rounded(
        self, x: Value, bound: int, factor: Any, offset: Any, shift: int, after: int = 0, name: str = "multiplier"
    ) -> Value:
        """Return :meth:`affine` rounded half up.

        Args:
            x, factor, offset, shift, after: see there.
            bound: of ``x factor + offset``, at most ``2**63 - 2``.
            name: of the factors.
        """
        product = self.multiply(x, self.constant(np.asarray(factor), np.int64, name), np.int64)
        return self.round_shift(product, shift, bound, offset, after)

    def known(self, x: Value, low: int, high: int) -> Value:
        """Return x, of which the caller knows its ends; :class:`.onnx_narrow.NarrowGraph` needs them."""
        return x

    def total(self, x: Value, axis: int, count: int, keep: bool = True) -> Value:
        """Return the sum over an axis.

        Args:
            x: whose sums fit its type.
            axis: which.
            count: of its elements.
            keep: whether it stays, with size 1.
        """
        return self.node("ReduceSum", x, self.constant([axis], np.int64), keepdims=int(keep))

    def bit_length(self, x: Value, most: int) -> Value:
        """Return the bit length of ``0 <= x < 2**most`` as int32: how many powers of two are not above it.

        Args:
            x: (..., 1), int32 or int64.
            most: bits.
        """
        powers = self.table(np.left_shift(np.int64(1), np.arange(most, dtype=np.int64)), x.dtype, "powers_of_two")
        return self.reduce("ReduceSum", self.cast(self.node("GreaterOrEqual", x, powers, dtype=np.bool_), np.int32), -1)

    def gather(self, table: Value, index: Value, axis: int = 0) -> Value:
        """Look up entries of a table, or take elements along an axis."""
        return self.node("Gather", table, index, axis=axis)

    def reduce(self, operator: str, x: Value, axis: int) -> Value:
        """Reduce an axis, which stays with size 1."""
        return self.node(operator, x, self.constant([axis], np.int64), keepdims=1)

    def row_maximum(self, x: Value) -> Value:
        """Return the maximum over the last axis, which stays with size 1."""
        # not ReduceMax: onnxruntime's symbolic_shape_infer does not know it since its axes are an input
        outputs = [Value(self._name("TopK"), x.dtype), Value(self._name("TopK"), np.dtype(np.int64))]
        names = [y.name for y in outputs]
        inputs = [x.name, self.constant([1], np.int64).name]
        self._nodes.append(helper.make_node("TopK", inputs, names, name=names[0], axis=-1, sorted=0))
        return outputs[0]

    def reshape(self, x: Value, *shape: int) -> Value:
        """Change the shape; 0 is the batch, the first axis, which stays. Shapes can be inferred with that, and not with -1."""
        return self.node("Reshape", x, self.constant(shape, np.int64))

    def transpose(self, x: Value, *order: int) -> Value:
        """Permute the axes."""
        return self.node("Transpose", x, perm=list(order))

    def split(self, x: Value, parts: int) -> list[Value]:
        """Cut the last axis into equal parts."""
        out = [Value(self._name("Split"), x.dtype) for _ in range(parts)]
        names = [y.name for y in out]
        self._nodes.append(helper.make_node("Split", [x.name], names, name=names[0], axis=-1, num_outputs=parts))
        return out

    def cut(self, x: Value, first: int, last: int, axis: int) -> Value:
        """Take a stretch of an axis."""
        return self.node("Slice", x, *(self.constant([number], np.int64) for number in (first, last, axis)))

    def cut_patches(self, images: Value, image: Sequence[int], high: int, wide: int) -> Value:
        """Leave out the pixels of images, (channels, height, width) each, behind the last whole patch."""
        for axis, size in ((1, high), (2, wide)):
            if image[axis] % size:
                images = self.cut(images, 0, image[axis] // size * size, 1 + axis)
        return images

    def take(self, x: Value, order: torch.Tensor) -> Value:
        """Take tokens, axis 1, by their numbers."""
        return self.gather(x, self.constant(order.flatten(), np.int64, "order"), axis=1)

    def split_heads(
        self, parts: Sequence[Value], shapes: Sequence[tuple[int, ...]], heads: int, width: int, tokens: int
    ) -> tuple[list[Value], int]:
        """Return query, key and value, or those that are given, each (batch, tokens, heads, channels).

        Args:
            parts: each one of them, or several side by side.
            shapes: theirs, for one image.
            heads, width: how many, and channels of one.
            tokens: of a window, which comes behind the batch as an axis of its own; 0 where there are none.

        Returns:
            them, and how many axes come before the tokens.
        """
        lead = (0, shapes[0][1] // tokens) if tokens else (0,)
        found: list[Value] = []
        for part, shape in zip(parts, shapes, strict=True):
            count = math.prod(shape[2:]) // (heads * width)
            size = (*lead, tokens or shape[1], heads, width)
            found += [self.reshape(x, *size) for x in (self.split(part, count) if count > 1 else [part])]
        return found, len(lead)

    def weight(self, x: torch.Tensor, name: str) -> Value:
        """Return an int8 constant as uint8 with its zero point, for :meth:`matmul`; the file holds the int8."""
        unsigned = self.cast(self.constant(x, np.int8, name), np.uint8)
        return self.node("BitwiseXor", unsigned, self.constant(ZERO_POINT, np.uint8))

    def matmul(
        self, x: Value, y: Value, x_zero: int = ZERO_POINT, y_zero: int = ZERO_POINT, *, inner: int,
        weight: np.ndarray | None = None,
    ) -> Value:  # fmt: skip
        """Multiply matrices less their zero points: int32, exact.

        Args:
            x, y: uint8. Not one uint8 and one int8: on x86 processors without VNNI onnxruntime adds pairs of such products in
                16 bits, which saturate. uint8 by uint8 was exact wherever it was run (docs/onnx.md).
            x_zero, y_zero: their zero points.
            inner: how many products are added up.
            weight: int8, what y is where it is constant.
        """
        zeros = (self.constant(zero, np.uint8) for zero in (x_zero, y_zero))
        return self.node("MatMulInteger", x, y, *zeros, dtype=np.int32)

    def model(
        self, inputs: Sequence[tuple[Value, Sequence[int | str]]], outputs: Sequence[tuple[Value, str, Sequence[int | str]]],
        name: str, version: str, metadata: dict[str, str],
    ) -> onnx.ModelProto:  # fmt: skip
        """Return the whole model.

        Args:
            inputs: each with its shape.
            outputs: each with the name and shape that it gets.
            name: of the graph.
            version: of what made it.
            metadata: to store.
        """
        renamed = {value.name: public for value, public, _ in outputs}
        for node in self._nodes:
            node.output[:] = [renamed.get(x, x) for x in node.output]

        def info(name: str, dtype: np.dtype[Any], shape: Sequence[int | str]) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), shape)

        graph = helper.make_graph(
            self._nodes,
            name,
            [info(value.name, value.dtype, shape) for value, shape in inputs],
            [info(public, value.dtype, shape) for value, public, shape in outputs],
            self._initializers,
        )
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="qflash",
            producer_version=version,
        )  # fmt: skip
        helper.set_model_props(model, metadata)
        return model
