"""Attention that a module spells out (product, softmax, product) as one call: tensors that are worked out later.

A product of two batched matrices may be a query times keys. While :class:`qflash.integrations.function_mode.IntegerAttention`
is on, it becomes a :class:`Deferred`: factors, biases, masks and reshapes are noted, the softmax too, and at the product with
the values query, key, value, bias and scale go to the attention function. Whatever else is done with it works it out as the
module wrote it, so that a result never depends on whether attention was recognised.
"""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .adapter import refuse_dropout
from .sdpa import call_alone, with_strides

LEAST_MASK = -1e4
"""A number that is written in place of scores hides a key if it is this low or lower."""


class Deferred:
    """Scores, or the probabilities they become, that are not worked out.

    The scores are ``(left @ right) * scale + bias`` in the shape (lead, rows, columns); ``shape`` may be another view of it.

    Args:
        call: function, arguments and keywords that give the tensor where it is wanted after all.
        left: (lead, rows, channels).
        right: (lead, channels, columns).
        shape: of the tensor this stands for.
        dtype: likewise.
        owner: the mode that deferred it.

    Attributes:
        core: the shape of ``(left @ right) * scale + bias``.
        is_softmax: this stands for probabilities.
        is_turned: probabilities whose last two dimensions have been exchanged.
        is_answered: probabilities that have been multiplied by a value.
        is_noted: the report has these probabilities.
        root: whose memory this is a view of; None if it has its own.
        is_shared: there is a view of it, or a tensor that may be one.
        is_written: its memory was written to while shared, or by a function that has no part in attention. From then on values
            count, of it and of its views.
        part: scores, rows and columns of them that this is, and its ``left`` as it was taken; None if it is no part.
        changed_part: a part of this that was written to and is to be put back.
        value: the tensor, once it has been worked out.
    """

    def __init__(
        self, call: Any, left: torch.Tensor, right: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, owner: Any
    ) -> None:
        self.call, self.left, self.right, self.owner = call, left, right, owner
        self.shape = torch.Size(shape)
        self.dtype, self.device = dtype, left.device
        self.core = self.shape
        self.scale: float = 1.0
        self.bias: torch.Tensor | None = None
        self.is_softmax = False
        self.is_turned = False
        self.is_answered = False
        self.is_noted = False
        self.is_shared = False
        self.is_written = False
        self.root: Deferred | None = None
        self.part: tuple[Deferred, slice, slice, torch.Tensor] | None = None
        self.changed_part: Deferred | None = None
        self.value: torch.Tensor | None = None
        self._is_snapshot = False
        self._snapshot: Deferred | None = None
        self._snapshots: list[Deferred] = []

    @property
    def home(self) -> Deferred:
        """The deferred tensor whose memory this lies in."""
        return self if self.root is None else self.root

    def snapshot(self) -> Deferred:
        """Return what stays as this is now, whatever is written to it."""
        if self._is_snapshot:
            return self
        if self._snapshot is None:
            function, args, kwargs = self.call
            kept = Deferred((function, _snapshots(args), kwargs), self.left, self.right, self.shape, self.dtype, self.owner)
            kept.value, kept._is_snapshot = self.value, True
            self._snapshot = kept
            self.home._snapshots.append(kept)
        return self._snapshot

    def write(self, func: Any, args: Any, kwargs: Any) -> Deferred:
        """Work this out, call a function that writes to it, and let values count from now on."""
        value = self.work_out()
        for kept in self.home._snapshots:
            kept.value = kept.work_out().clone()
        self.home._snapshots = []
        func(value, *work_out(args[1:]), **work_out(kwargs))
        self.shape, self.home.is_written = value.shape, True
        return self

    def after(self, call: Any, is_view: bool = False) -> Deferred:
        """Return the same scores as the result of a further call, which may be a view of this."""
        function, args, kwargs = call
        call = call if is_view else (function, _snapshots(args), kwargs)
        new = Deferred(call, self.left, self.right, self.shape, self.dtype, self.owner)
        new.root = self.home if is_view else None
        new.core, new.scale, new.bias = self.core, self.scale, self.bias
        new.is_softmax, new.is_turned, new.is_answered = self.is_softmax, self.is_turned, self.is_answered
        new.part = self.part
        return new

    def become(self, other: Deferred) -> Deferred:
        """Take another's place, as the result of a call that works in place."""
        function, args, kwargs = other.call
        self.call = function, _snapshots(args), kwargs
        self._snapshot, self._snapshots = None, []
        self.left, self.right, self.shape, self.dtype = other.left, other.right, other.shape, other.dtype
        self.core, self.scale, self.bias = other.core, other.scale, other.bias
        self.is_softmax, self.is_turned, self.value = other.is_softmax, other.is_turned, None
        if self.part is not None:
            source = self.part[0]
            source.changed_part = self
            if source.home.is_shared:
                source.put_back()
        return self

    def put_back(self) -> None:
        """Write a part that was written to where it was taken from."""
        changed, self.changed_part = self.changed_part, None
        if changed is not None and changed.part is not None:
            _, rows, columns, _ = changed.part
            call(torch.Tensor.__setitem__, (self, (slice(None),) * (self.ndim - 2) + (rows, columns), changed), {})

    def work_out(self) -> torch.Tensor:
        """Return the tensor, by the calls that the module made."""
        self.put_back()
        if self.value is None and self._snapshot is not None and self.root is None:
            self.value = self._snapshot.work_out()
        if self.value is None:
            function, args, kwargs = self.call
            first, *others = work_out(args)
            if function in _IN_PLACE or function is _assigned:
                first = first.clone()
            self.value = call_alone(function, (first, *others), work_out(kwargs))
        return self.value

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        function = getattr(torch.Tensor, name)
        if callable(function):
            return Method(function, self)
        self.home.is_shared = True
        return getattr(self.work_out(), name)

    def __add__(self, other: Any) -> Any:
        return call(torch.add, (self, other), {})

    def __sub__(self, other: Any) -> Any:
        return call(torch.sub, (self, other), {})

    def __mul__(self, other: Any) -> Any:
        return call(torch.mul, (self, other), {})

    def __truediv__(self, other: Any) -> Any:
        return call(torch.div, (self, other), {})

    def __matmul__(self, other: Any) -> Any:
        return call(torch.matmul, (self, other), {})

    def __rmatmul__(self, other: Any) -> Any:
        return call(torch.matmul, (other, self), {})

    def __iadd__(self, other: Any) -> Any:
        return call(torch.Tensor.add_, (self, other), {})

    def __isub__(self, other: Any) -> Any:
        return call(torch.Tensor.sub_, (self, other), {})

    def __imul__(self, other: Any) -> Any:
        return call(torch.Tensor.mul_, (self, other), {})

    def __itruediv__(self, other: Any) -> Any:
        return call(torch.Tensor.div_, (self, other), {})

    def __rsub__(self, other: Any) -> Any:
        return call(torch.sub, (other, self), {})

    def __rtruediv__(self, other: Any) -> Any:
        return call(torch.Tensor.__rtruediv__, (self, other), {})

    __radd__ = __add__
    __rmul__ = __mul__

    def __pow__(self, other: Any) -> Any:
        return call(torch.pow, (self, other), {})

    def __rpow__(self, other: Any) -> Any:
        return call(torch.Tensor.__rpow__, (self, other), {})

    def __abs__(self) -> Any:
        return call(torch.abs, (self,), {})

    def __len__(self) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        return bool(self.work_out())

    def __lt__(self, other: Any) -> Any:
        return call(torch.lt, (self, other), {})

    def __le__(self, other: Any) -> Any:
        return call(torch.le, (self, other), {})

    def __gt__(self, other: Any) -> Any:
        return call(torch.gt, (self, other), {})

    def __ge__(self, other: Any) -> Any:
        return call(torch.ge, (self, other), {})

    def __eq__(self, other: object) -> Any:
        return call(torch.Tensor.__eq__, (self, other), {})

    def __ne__(self, other: object) -> Any:
        return call(torch.Tensor.__ne__, (self, other), {})

    __hash__ = object.__hash__

    def __neg__(self) -> Any:
        return call(torch.mul, (self, -1.0), {})

    def __getitem__(self, index: Any) -> Any:
        return call(torch.Tensor.__getitem__, (self, index), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        call(torch.Tensor.__setitem__, (self, index, value), {})


class Method:
    """A method of a deferred tensor."""

    def __init__(self, function: Any, tensor: Deferred) -> None:
        self.function, self.tensor = function, tensor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call(self.function, (self.tensor, *args), kwargs)


def _snapshots(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([each.snapshot() if isinstance(each, Deferred) else each for each in args])


def work_out(x: Any) -> Any:
    """Return arguments or results with all deferred tensors in them worked out."""
    if isinstance(x, Deferred):
        return x.work_out()
    if type(x) in (tuple, list):
        return type(x)([work_out(each) for each in x])
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*[work_out(each) for each in x])
    if isinstance(x, dict) and any(isinstance(each, Deferred) for each in x.values()):
        # an output class of transformers stays one
        new = x.copy()
        for key, each in x.items():
            new[key] = work_out(each)
        return new
    return x


def product(func: Any, args: Any, kwargs: Any, owner: Any) -> Any:
    """Return the deferred result of a call, or None if it is no product of batched matrices."""
    name = name_of(func)
    if name == "einsum":
        sides = _einsum_sides(args)
        if sides is None:
            return None
        left, right = sides
        shape = (*torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1])
        return Deferred((func, args, kwargs), left, right, shape, left.dtype, owner)
    added = None
    if name == "baddbmm":
        if len(args) != 3:
            return None
        added, left, right = args
    elif len(args) == 2 and not kwargs:
        left, right = args if name != "rmatmul" else args[::-1]
    else:
        return None
    if not (_is_batched(left) and _is_batched(right) and left.dim() == right.dim() and left.dtype == right.dtype):
        return None
    shape = (*torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1])
    result = Deferred((func, args, kwargs), left, right, shape, left.dtype, owner)
    if added is not None:
        result.scale = float(kwargs.get("alpha", 1.0))
        beta = kwargs.get("beta", 1.0)
        result.bias = None if beta == 0 else added if beta == 1 else added * beta
    return result


def _is_batched(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() >= 3 and x.dtype.is_floating_point and not x.is_nested


def _einsum_letters(args: Any) -> list[str] | None:
    """Return the letters of both operands and of the result, or None if there are not two or not all are spelled out."""
    if len(args) != 3 or not isinstance(args[0], str) or "->" not in args[0] or "." in args[0]:
        return None
    inputs, out = args[0].replace(" ", "").split("->")
    letters = [*inputs.split(","), out]
    if len(letters) != 3 or any(len(set(each)) != len(each) for each in letters):
        return None
    return letters


def _einsum_sides(args: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the batched matrices whose product an einsum is, or None if it is something else."""
    letters = _einsum_letters(args)
    if letters is None or not (_is_batched(args[1]) and _is_batched(args[2])) or args[1].dtype != args[2].dtype:
        return None
    (first, second, out), (a, b) = letters, args[1:]
    if len(out) < 3:
        return None
    row, column, lead = out[-2], out[-1], out[:-2]
    if row in second:
        first, second, a, b = second, first, b, a
    summed = [each for each in first if each in second and each not in out]
    if len(summed) != 1 or {*first} != {*lead, row, *summed} or {*second} != {*lead, column, *summed}:
        return None
    left = a.permute([first.index(each) for each in (*lead, row, *summed)])
    return left, b.permute([second.index(each) for each in (*lead, *summed, column)])


def call(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function some of whose arguments are deferred: note what it does, or work them out."""
    name = name_of(func)
    if name == "matmul" and torch.compiler.is_dynamo_compiling() and _is_swapped(func, args):
        args = args[::-1]
    deferred = [each for each in args if isinstance(each, Deferred)]
    for each in deferred:
        if name == "setitem" and each is args[0] and each.changed_part is args[2]:
            each.changed_part = None
        each.put_back()
    handler = None if any(each.home.is_written for each in deferred) else _HANDLERS.get(name)
    first = _first_deferred((args, tuple(kwargs.values())))
    writes = func in _IN_PLACE and isinstance(args[0], Deferred)
    if writes and (args[0].root is not None or args[0].is_shared):
        handler = None
    if handler is not None and is_deferred(args):
        result = handler(func, args, kwargs)
        if result is not None:
            if writes:
                return args[0].become(result)
            if isinstance(result, Deferred) and result.root is not None:
                result.root.is_shared = True
            return result
    if first is not None and not first.home.is_written:
        first.owner.worked_out(first, name or getattr(func, "__name__", str(func)))
    if writes:
        return args[0].write(func, args, kwargs)
    for each in deferred:
        each.home.is_shared = True
    return func(*work_out(args), **work_out(kwargs))


def _is_swapped(func: Any, args: Any) -> bool:
    """Tell whether Dynamo has exchanged the operands of ``@``, as it does where the first is no tensor."""
    other, x = args
    if func is torch.matmul or not isinstance(x, Deferred) or isinstance(other, Deferred):
        return False
    return other.shape[-2] == x.shape[-1] and not (x.is_turned and other.shape[-1] == x.shape[-2])


def is_deferred(args: Any) -> bool:
    """Tell whether a deferred tensor is among arguments, or in their lists."""
    return _first_deferred(args) is not None


def _first_deferred(args: Any) -> Deferred | None:
    for x in args:
        each = x
        if isinstance(each, Deferred):
            return each
        if isinstance(each, dict):
            each = tuple(each.values())
        if isinstance(each, (tuple, list)):
            inner = _first_deferred(each)
            if inner is not None:
                return inner
    return None


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(x, bool)


def _sides(args: Any) -> tuple[Deferred, Any, bool]:
    """Return the deferred one of two operands, the other one, and whether the deferred one stands first."""
    if isinstance(args[0], Deferred):
        return args[0], args[1] if len(args) > 1 else None, True
    return args[1], args[0], False


def _scaled(x: Deferred, factor: Any, call: Any, divide: bool) -> Deferred | None:
    if x.is_softmax:
        return None
    new = x.after(call)
    if _is_number(factor):
        if not math.isfinite(factor) or factor == 0:
            return None
        factor = 1.0 / factor if divide else factor
        new.scale = x.scale * factor
        new.bias = None if x.bias is None else x.bias * factor
        return new
    if not isinstance(factor, torch.Tensor) or not factor.dtype.is_floating_point or factor.dim() > x.ndim:
        return None
    if x.shape != x.core or x.is_turned or _enlarges(factor, x):
        return None
    factor = factor.reciprocal() if divide else factor
    if factor.dim() == 0 or factor.shape[-1] == 1:
        new.left = x.left * factor
    elif factor.dim() == 1 or factor.shape[-2] == 1:
        new.right = x.right * factor
    else:
        return None
    if factor.dtype != x.left.dtype:
        new.left, new.right = new.left.to(x.left.dtype), new.right.to(x.right.dtype)
    new.bias = None if x.bias is None else x.bias * factor
    new.dtype = _promoted(x, factor)
    return new


def _promoted(x: Deferred, other: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, other.dtype) if other.dim() else x.dtype


def _enlarges(other: torch.Tensor, x: Deferred) -> bool:
    """Tell whether the result of the two is larger than the deferred one: the other repeats it."""
    return any(size != 1 and have == 1 for size, have in zip(reversed(other.shape), reversed(x.shape), strict=False))


def _mul(func: Any, args: Any, kwargs: Any) -> Deferred | None:
    x, factor, _ = _sides(args)
    return None if kwargs else _scaled(x, work_out(factor), (func, args, kwargs), divide=False)


def _div(func: Any, args: Any, kwargs: Any) -> Deferred | None:
    x, factor, first = _sides(args if name_of(func) not in ("rdiv", "rtruediv") else args[::-1])
    return None if kwargs or not first else _scaled(x, factor, (func, args, kwargs), divide=True)


def _biased(x: Deferred, bias: torch.Tensor, call: Any) -> Deferred | None:
    """Add a tensor to scores, in whatever view of them it comes."""
    if x.is_softmax or bias.dim() > x.ndim or not bias.dtype.is_floating_point or _enlarges(bias, x):
        return None
    new = x.after(call)
    if x.shape != x.core:
        if x.shape[-2:] == x.core[-2:]:
            new = _rebased(new)
        else:
            # a view of rows or columns as a grid
            bias = bias.expand(x.shape).reshape(x.core)
    new.dtype = _promoted(x, bias)
    new.bias = bias if new.bias is None else new.bias + bias
    return new


def _rebased(x: Deferred) -> Deferred:
    """Split or join the leading dimensions of the parts as those of the shape are."""
    lead, now = x.core[:-2], x.shape[:-2]
    x.left = x.left.expand(*lead, -1, -1).reshape(*now, *x.left.shape[-2:])
    x.right = x.right.expand(*lead, -1, -1).reshape(*now, *x.right.shape[-2:])
    if x.bias is not None and any(size != 1 for size in x.bias.shape[:-2]):
        kept = x.bias.reshape((1,) * (len(x.core) - x.bias.dim()) + tuple(x.bias.shape))
        last = 0
        while last < min(len(lead), len(now)) and lead[-1 - last] == now[-1 - last]:
            last += 1
        if all(size == 1 for size in kept.shape[: len(lead) - last]):
            x.bias = kept.reshape((1,) * (len(now) - last) + tuple(kept.shape[len(lead) - last :]))
        else:
            x.bias = kept.expand(*lead, -1, -1).reshape(*now, *kept.shape[-2:])
    x.core = x.shape
    return x


def _add(func: Any, args: Any, kwargs: Any) -> Deferred | None:
    x, other, _ = _sides(args)
    if kwargs:
        return None
    other = work_out(other)
    if _is_number(other):
        # the same for all keys
        return None if x.is_softmax else x.after((func, args, kwargs))
    return _biased(x, other, (func, args, kwargs)) if isinstance(other, torch.Tensor) else None


def _sub(func: Any, args: Any, kwargs: Any) -> Deferred | None:
    x, other, first = _sides(args if name_of(func) != "rsub" else args[::-1])
    if kwargs or not first:
        return None
    other = work_out(other)
    if _is_number(other):
        return None if x.is_softmax else x.after((func, args, kwargs))
    return _biased(x, -other, (func, args, kwargs)) if isinstance(other, torch.Tensor) else None


def _masked_fill(func: Any, args: Any, kwargs: Any) -> Deferred | None:
    if len(args) != 3 or kwargs or not isinstance(args[0], Deferred) or not _is_number(args[2]) or args[2] > LEAST_MASK:
        return None
    x, mask, value = args
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        return None
    bias = torch.zeros(mask.shape, dtype=x.left.dtype, device=x.device).masked_fill(mask, value)
    return _biased(x, bias, (func, args, kwargs))


def _softmax(func: Any, args: Any, kwargs: Any) -> Deferred | None:
    x = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    dtype = kwargs.get("dtype")
    if not isinstance(x, Deferred) or x.is_softmax or dim not in (-1, x.ndim - 1) or x.shape[-2:] != x.core[-2:]:
        return None
    new = x.after((func, args, kwargs))
    new.is_softmax = True
    new.dtype = dtype or x.dtype
    return new


def _same(func: Any, args: Any, kwargs: Any) -> Deferred | None:
    is_view = name_of(func) != "clone"
    return args[0].after((func, args, kwargs), is_view) if isinstance(args[0], Deferred) else None


def _dropout(func: Any, args: Any, kwargs: Any) -> Deferred | None:
    x = args[0]
    rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", args[2] if len(args) > 2 else True)
    if not isinstance(x, Deferred):
        return None
    if training and rate > 0.0:
        if not x.is_softmax:
            return None
        refuse_dropout(rate)
    return x


_DTYPES = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}


def _convert(func: Any, args: Any, kwargs: Any) -> Deferred | None:
    if not isinstance(args[0], Deferred):
        return None
    name = name_of(func)
    target: Any = _DTYPES.get(name) or kwargs.get("dtype", args[1] if len(args) > 1 else None)
    if isinstance(target, (torch.Tensor, Deferred)):
        target = target.dtype
    if not isinstance(target, torch.dtype) or not target.is_floating_point or set(kwargs) - {"dtype"} or len(args) > 2:
        return None
    if target == args[0].dtype:
        return args[0]
    new = args[0].after((func, args, kwargs))
    new.dtype = target
    return new


def _new_shape(x: Deferred, name: str, args: Any, kwargs: Any) -> list[Any] | None:
    """Return the shape that a view gives, or None if it cannot be told from the arguments."""
    old = list(x.shape)
    if kwargs:
        return None
    if name in ("view", "reshape"):
        new = list(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else list(args)
        if not all(_is_number(size) for size in new):
            return None
        known = [size for size in new if not (isinstance(size, int) and size == -1)]
        if len(known) < len(new):
            rest = math.prod(old) // math.prod(known)
            new = [rest if isinstance(size, int) and size == -1 else size for size in new]
        return new
    if name == "unsqueeze":
        place = args[0] if args[0] >= 0 else args[0] + len(old) + 1
        return [*old[:place], 1, *old[place:]]
    if name == "squeeze" and len(args) == 1 and isinstance(args[0], int):
        place = args[0] % len(old)
        return [*old[:place], *old[place + 1 :]] if old[place] == 1 else old
    if name == "unflatten" and len(args) == 2:
        place, sizes = args[0] % len(old), list(args[1])
        known_size = -math.prod(sizes) if -1 in sizes else 1
        sizes = [old[place] // known_size if size == -1 else size for size in sizes]
        return [*old[:place], *sizes, *old[place + 1 :]]
    if name == "flatten":
        first = (args[0] if args else 0) % len(old)
        last = (args[1] if len(args) > 1 else -1) % len(old)
        return [*old[:first], math.prod(old[first : last + 1]), *old[last + 1 :]]
    return None


def _view(func: Any, args: Any, kwargs: Any) -> Deferred | None:
    x = args[0]
    if not isinstance(x, Deferred) or x.is_turned:
        return None
    new_shape = _new_shape(x, name_of(func), args[1:], kwargs)
    if new_shape is None or len(new_shape) < 2:
        return None
    if x.is_softmax and tuple(new_shape[-2:]) != tuple(x.core[-2:]):
        return None
    new = x.after((func, args, kwargs), is_view=True)
    new.shape = torch.Size(new_shape)
    return new


def _expand_as_is(func: Any, args: Any, kwargs: Any) -> Deferred | None:
    x, sizes = args[0], args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    if not isinstance(x, Deferred) or kwargs or len(sizes) != x.ndim:
        return None
    same = all(size == -1 or size == have for size, have in zip(sizes, x.shape, strict=True))
    return x.after((func, args, kwargs), is_view=True) if same else None


def _moved(func: Any, args: Any, kwargs: Any) -> Deferred | None:
    """Permute dimensions, the last two by themselves."""
    x = args[0]
    if not isinstance(x, Deferred) or kwargs or x.is_turned:
        return None
    order, name = list(range(x.ndim)), name_of(func)
    if name in ("transpose", "swapaxes", "swapdims") and len(args) == 3:
        first, second = args[1] % x.ndim, args[2] % x.ndim
        order[first], order[second] = second, first
    elif name == "permute":
        order = [each % x.ndim for each in (args[1] if isinstance(args[1], (tuple, list)) else args[1:])]
    elif name == "mT":
        order[-2:] = [order[-1], order[-2]]
    else:
        return None
    if {*order[-2:]} != {x.ndim - 2, x.ndim - 1}:
        return None
    new = x.after((func, args, kwargs), is_view=True)
    if x.shape != x.core:
        if x.shape[-2:] != x.core[-2:]:
            return None
        new = _rebased(new)
    lead, turned = order[:-2], order[-1] != x.ndim - 1
    keep = [*lead, x.ndim - 2, x.ndim - 1]
    if lead != list(range(x.ndim - 2)):
        new.left, new.right = new.left.permute(keep), new.right.permute(keep)
        if new.bias is not None:
            bias = new.bias.reshape((1,) * (x.ndim - new.bias.dim()) + tuple(new.bias.shape))
            new.bias = bias.permute(keep)
    new.core = torch.Size([new.core[each] for each in keep])
    if turned and not x.is_softmax:
        new.left, new.right = new.right.transpose(-2, -1), new.left.transpose(-2, -1)
        if new.bias is not None:
            bias = new.bias if new.bias.dim() > 1 else new.bias.unsqueeze(0)
            new.bias = bias.transpose(-2, -1)
        new.core = torch.Size([*new.core[:-2], new.core[-1], new.core[-2]])
    new.is_turned = turned and x.is_softmax
    new.shape = torch.Size([x.shape[each] for each in order])
    return new


def _getitem(func: Any, args: Any, kwargs: Any) -> Deferred | None:
    """Take a range of rows and columns of scores."""
    x, index = args
    if not isinstance(x, Deferred) or x.is_softmax or x.shape != x.core or x.ndim < 3:
        return None
    if not isinstance(index, tuple) or len(index) != x.ndim or not all(isinstance(each, slice) for each in index):
        return None
    whole = slice(None)
    if any(each != whole for each in index[:-2]) or any(each.stop is not None or each.step is not None for each in index):
        return None
    rows, columns = index[-2:]
    new = x.after((func, args, kwargs))
    new.left, new.right = x.left[..., rows, :], x.right[..., columns]
    if x.bias is not None:
        new.bias = x.bias.expand(*x.bias.shape[:-2], *x.shape[-2:])[..., rows, columns]
    new.shape = torch.Size([*x.shape[:-2], new.left.shape[-2], new.right.shape[-1]])
    new.core = new.shape
    new.part = x, rows, columns, new.left
    return new


def _setitem(func: Any, args: Any, kwargs: Any) -> Deferred | None:
    """Put a range of rows and columns of scores back after a bias was added to it."""
    x, index, value = args
    if not isinstance(x, Deferred) or not isinstance(value, Deferred) or value.part is None or value.is_softmax:
        return None
    source, rows, columns, left = value.part
    if source is not x or index[-2:] != (rows, columns) or value.left is not left or value.shape != value.core:
        return None
    if value.scale != x.scale or value.bias is None or x.bias is not None:
        return None
    bias = value.bias.expand(*value.bias.shape[:-2], *value.core[-2:])
    new = x.after((_assigned, (x, index, value), {}))
    new.bias = torch.nn.functional.pad(bias, (columns.start or 0, 0, rows.start or 0, 0))
    return new


def _assigned(x: torch.Tensor, index: Any, value: torch.Tensor) -> torch.Tensor:
    x[index] = value
    return x


def _attend(x: Deferred, value: torch.Tensor) -> torch.Tensor | None:
    """Return the product of probabilities and a value, by the attention function of the mode; None if it takes them not.

    Its memory layout is the attention function's: :func:`_contiguous` makes it a product's.
    """
    lead = x.core[:-2]
    outer = x.shape[:-2]
    if value.dim() - 2 > len(outer) and any(size != 1 for size in value.shape[: value.dim() - 2 - len(outer)]):
        return None
    value = value.expand(*outer, -1, -1)
    if outer != lead:
        value = value.reshape(*lead, *value.shape[-2:])
    query = x.left.expand(*lead, -1, -1)
    key = x.right.transpose(-2, -1).expand(*lead, -1, -1)
    scale = x.scale
    if not scale > 0:
        query, scale = query * scale, 1.0
    out = x.owner.attend(query, key, value, x.bias, scale)
    x.is_answered = True
    return None if out is None else out.reshape(*outer, *out.shape[-2:])


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a product of batched matrices lies in memory, dimensions of one element included."""
    return x.flatten().view(x.shape)


def _matmul(func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """Multiply probabilities by values, or their transposes from the other side."""
    if kwargs or len(args) != 2:
        return None
    x, other, first = _sides(args if name_of(func) != "rmatmul" else args[::-1])
    if not x.is_softmax or not isinstance(other, torch.Tensor) or other.dim() < 3 or other.dim() > x.ndim:
        return None
    if first and not x.is_turned:
        out = _attend(x, other)
        return None if out is None else _contiguous(out)
    if not first and x.is_turned:
        turned = x.after(x.call)
        turned.shape = torch.Size([*x.shape[:-2], x.shape[-1], x.shape[-2]])
        out = _attend(turned, other.transpose(-2, -1))
        x.is_answered = True
        return None if out is None else _contiguous(out.transpose(-2, -1))
    return None


def _einsum(func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """Multiply probabilities by values as an einsum says."""
    letters = _einsum_letters(args)
    if letters is None or kwargs:
        return None
    (first, second, out), (a, b) = letters, args[1:]
    if isinstance(b, Deferred):
        first, second, a, b = second, first, b, a
    if not isinstance(a, Deferred) or not isinstance(b, torch.Tensor) or not a.is_softmax or a.is_turned or len(first) < 3:
        return None
    lead, row, column = first[:-2], first[-2], first[-1]
    free = [each for each in second if each not in first]
    if len(free) != 1 or {*second} != {*lead, column, *free} or {*out} != {*lead, row, *free}:
        return None
    result = _attend(a, b.permute([second.index(each) for each in (*lead, column, *free)]))
    if result is None:
        return None
    order = [*lead, row, *free]
    result = result.permute([order.index(each) for each in out])
    # which operand's dimensions come first in memory is PyTorch's choice
    empty = [
        torch.empty(x.shape, dtype=x.dtype, device="meta") if x is a else torch.empty_like(x, device="meta") for x in args[1:]
    ]
    strides = call_alone(torch.einsum, (args[0], *empty), {}).stride()
    return with_strides(result, strides)


_HANDLERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("mul", "multiply", "rmul"), _mul),
    **dict.fromkeys(("div", "divide", "true_divide", "truediv", "rdiv", "rtruediv"), _div),
    **dict.fromkeys(("add", "radd"), _add),
    **dict.fromkeys(("sub", "subtract", "rsub"), _sub),
    "masked_fill": _masked_fill,
    "softmax": _softmax,
    **dict.fromkeys(("contiguous", "clone", "detach"), _same),
    "dropout": _dropout,
    **dict.fromkeys(("to", "type", "type_as", "float", "half", "bfloat16"), _convert),
    **dict.fromkeys(("view", "reshape", "unsqueeze", "squeeze", "unflatten", "flatten"), _view),
    "expand": _expand_as_is,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "permute"), _moved),
    **dict.fromkeys(("matmul", "rmatmul", "bmm"), _matmul),
    "einsum": _einsum,
    "getitem": _getitem,
    "setitem": _setitem,
}


def _named(name: str) -> dict[Any, str]:
    """Return the functions of PyTorch that go by a name, and the methods, in place and as operators too."""
    spelled = (name, f"{name}_", f"__{name}__", f"__i{name}__")
    places = (torch, torch.Tensor, torch.Tensor.__base__, torch.nn.functional, operator)
    return {getattr(place, each): name for place in places for each in spelled if callable(getattr(place, each, None))}


_NAMES: dict[Any, str] = {function: name for each in (*_HANDLERS, "baddbmm") for function, name in _named(each).items()}
"""Names of the functions that have a part in attention."""
_NAMES_IN_TRACES = {
    function: name
    for function, name in _NAMES.items()
    if not (isinstance(function, types.FunctionType) and function.__module__ == "torch._tensor")
}
"""Those that Dynamo finds in a dictionary: it reads no names of functions, and goes into methods written in Python."""
_IN_PLACE = frozenset(
    getattr(torch.Tensor, name)
    for name in dir(torch.Tensor)
    if (name.endswith("_") and not name.startswith("_"))
    or name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__")
)
"""Methods that write to their tensor."""


def name_of(func: Any) -> str:
    """Return the name of a function that has a part in attention, "" for any other."""
    return (_NAMES_IN_TRACES if torch.compiler.is_dynamo_compiling() else _NAMES).get(func, "")


def is_product(func: Any) -> bool:
    """Tell whether the result of a function may be scores."""
    return name_of(func) in ("matmul", "rmatmul", "bmm", "einsum", "baddbmm")
