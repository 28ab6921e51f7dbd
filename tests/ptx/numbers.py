"""Instructions on integers and floats, conversions, comparisons."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .bits import LANES, SIGNED, UNSIGNED, WIDTH, Bits, Step
from .machine import Warp, _is_register, _register_width, constant
from .parser import _listed


def _type(modifiers: Sequence[str]) -> str:
    return modifiers[-1]


def _signed(x: Bits) -> Bits:
    return x.view(SIGNED[x.itemsize * 8])


def _of(kind: str, x: Bits) -> Bits:
    """Bits as the numbers of a type, of which a pair has twice as many."""
    if kind in ("s16x2", "u16x2"):
        return np.ascontiguousarray(x).view(np.int16 if kind[0] == "s" else np.uint16)
    if kind[0] == "s":
        return _signed(x)
    if kind in ("f32", "f32x2"):
        return np.ascontiguousarray(x).view(np.float32)
    if kind == "f16":
        return x.view(np.float16)
    if kind == "bf16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x


def _bits(x: Bits, kind: str = "") -> Bits:
    """Numbers as bits; a bfloat16 is a float32 of which the upper half counts."""
    if x.dtype == bool:
        return x
    if kind == "bf16":
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    return x.view(UNSIGNED[WIDTH.get(kind, x.itemsize * 8)])


def _plain(function: Callable[..., Bits], kind: str, operands: Sequence[str]) -> Step:
    """An instruction whose operands and result are all of one type."""
    target, *sources = operands
    width = WIDTH[kind]
    if kind.endswith("f16x2"):
        function = _pairs(kind, function)
    fixed = [None if _is_register(name) else _of(kind, constant(name, width)) for name in sources]

    def step(warp: Warp) -> None:
        x = [_of(kind, warp.read(n, width)) if f is None else f for n, f in zip(sources, fixed, strict=True)]
        warp.write(target, _bits(function(*x), kind))

    return step


def _pairs(kind: str, function: Callable[..., Bits]) -> Callable[..., Bits]:
    """A function of 16-bit floats on both halves of words."""
    half = kind.removesuffix("x2")

    def both(*x: Bits) -> Bits:
        halves = [_of(half, np.ascontiguousarray(word).view(np.uint16)) for word in x]
        return _bits(function(*halves), half).view(np.uint32)

    return both


def _sum(modifiers: Sequence[str], operands: Sequence[str], function: Callable[[Bits, Bits], Bits]) -> Step:
    if list(modifiers[-2:-1]) != ["f32"]:
        return _plain(function, _type(modifiers), operands)
    # a 16-bit float and a float32
    target, a, b = operands

    def step(warp: Warp) -> None:
        narrow = _of(modifiers[-1], warp.read(a, 16)).astype(np.float32)
        warp.write(target, _bits(function(narrow, warp.read(b).view(np.float32))))

    return step


def _make_add(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _sum(modifiers, operands, lambda a, b: a + b)


def _make_sub(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _sum(modifiers, operands, lambda a, b: a - b)


def _high(a: Bits, b: Bits) -> Bits:
    wide = np.int64 if a.dtype.kind == "i" else np.uint64
    return ((a.astype(wide) * b.astype(wide)) >> wide(8 * a.dtype.itemsize)).astype(a.dtype)


def _wide(kind: str, operands: Sequence[str], add: bool) -> Step:
    """A product of twice the width, which may be added to something."""
    target, a, b, *c = operands
    width = WIDTH[kind]
    both = SIGNED if kind[0] == "s" else UNSIGNED

    def step(warp: Warp) -> None:
        x, y = (_of(kind, warp.read(name, width)).astype(both[2 * width]) for name in (a, b))
        product = x * y
        if add:
            product = product + _of(kind[0] + str(2 * width), warp.read(c[0], 2 * width))
        warp.write(target, _bits(product))

    return step


def _make_mul(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    if modifiers[0] == "wide":
        return _wide(_type(modifiers), operands, False)
    if modifiers[0] == "hi":
        return _plain(_high, _type(modifiers), operands)
    return _plain(lambda a, b: a * b, _type(modifiers), operands)


def _quotient(a: Bits, b: Bits) -> Bits:
    """``a / b`` without its fraction; what is made of a divisor of 0, in lanes that are masked, counts for nothing."""
    safe = np.where(b == 0, np.ones_like(b), b)
    floor = a // safe
    return (floor + ((floor < 0) & (floor * safe != a))).astype(a.dtype)


def _make_div(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    if _type(modifiers)[0] not in "su":
        raise NotImplementedError(f"div.{'.'.join(modifiers)}")
    return _plain(_quotient, _type(modifiers), operands)


def _make_mad(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    if modifiers[0] == "wide":
        return _wide(_type(modifiers), operands, True)
    return _plain(lambda a, b, c: a * b + c, _type(modifiers), operands)


def _fused(a: Bits, b: Bits, c: Bits) -> Bits:
    """``a * b + c`` rounded once: the sum in float64 rounded to odd, which keeps what the second rounding needs."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    rest = total - product
    error = (product - (total - rest)) + (c - rest)
    even = (total.view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & even & np.isfinite(total), odd, total).astype(np.float32)


def _make_fma(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _plain(_fused, _type(modifiers), operands)


def _make_rcp(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    # of the approximation a kernel may expect no more than that a Newton step makes it right
    return _plain(lambda a: (1.0 / a.astype(np.float64)).astype(np.float32), "f32", operands)


def _make_rem(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _plain(np.fmod, _type(modifiers), operands)


def _make_neg(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _plain(lambda a: -a, _type(modifiers), operands)


def _make_abs(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _plain(np.abs, _type(modifiers), operands)


def _extreme(modifiers: Sequence[str], operands: Sequence[str], nan: Any, number: Any) -> Step:
    kind = _type(modifiers)
    function = nan if "NaN" in modifiers or kind[0] in "su" else number
    if "relu" in modifiers:
        return _plain(lambda a, b: np.maximum(function(a, b), 0), kind, operands)
    # of two numbers or, on newer targets, three
    return _plain(lambda *x: functools.reduce(function, x), kind, operands)


def _make_min(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _extreme(modifiers, operands, np.minimum, np.fmin)


def _make_max(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _extreme(modifiers, operands, np.maximum, np.fmax)


def _make_and(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _plain(lambda a, b: a & b, _type(modifiers), operands)


def _make_or(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _plain(lambda a, b: a | b, _type(modifiers), operands)


def _make_xor(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _plain(lambda a, b: a ^ b, _type(modifiers), operands)


def _make_not(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _plain(lambda a: ~a, _type(modifiers), operands)


def _shift(kind: str, operands: Sequence[str], left: bool) -> Step:
    """A shift, by at most as many bits as there are: amounts above clamp."""
    target, source, amount = operands
    width = WIDTH[kind]

    def step(warp: Warp) -> None:
        x, n = _of(kind, warp.read(source, width)), warp.read(amount, 32)
        inside = np.minimum(n, width - 1).astype(x.dtype)
        result = x << inside if left else x >> inside
        if left or kind[0] != "s":
            result = np.where(n >= width, x.dtype.type(0), result)
        warp.write(target, _bits(result))

    return step


def _make_shl(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _shift(_type(modifiers), operands, True)


def _make_shr(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _shift(_type(modifiers), operands, False)


def _make_bfe(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    kind = _type(modifiers)
    start, length = int(operands[2]), int(operands[3])

    def field(a: Bits) -> Bits:
        up = a << a.dtype.type(WIDTH[kind] - start - length)
        return up >> a.dtype.type(WIDTH[kind] - length)

    return _plain(field, kind, operands[:2])


def _make_bfi(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    assert _type(modifiers) == "b32"
    start, length = int(operands[3]), int(operands[4])
    mask = np.uint32((2**length - 1) << start)
    return _plain(lambda a, b: (b & ~mask) | ((a << np.uint32(start)) & mask), "b32", operands[:3])


def _make_clz(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    assert _type(modifiers) == "b32"
    return _plain(lambda a: (32 - np.frexp(a.astype(np.float64))[1]).astype(np.uint32), "b32", operands)


def _make_popc(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    assert _type(modifiers) == "b32"
    return _plain(lambda a: np.unpackbits(a.copy()[:, None].view(np.uint8), axis=1).sum(1, dtype=np.uint32), "b32", operands)


def _make_prmt(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    def permute(a: Bits, b: Bits, selector: Bits) -> Bits:
        source = np.stack((a, b), axis=1).view(np.uint8)
        which = (selector[:, None] >> (4 * np.arange(4, dtype=np.uint32))) & 15
        found = np.take_along_axis(source, (which & 7).astype(np.int64), axis=1)
        signs = np.where(found & 128, np.uint8(255), np.uint8(0))
        return np.ascontiguousarray(np.where(which & 8, signs, found)).view(np.uint32)[:, 0]

    return _plain(permute, "b32", operands)


def _four(x: Bits) -> Bits:
    """The four signed bytes of each word."""
    return np.ascontiguousarray(x).view(np.int8).reshape(-1, 4).astype(np.int32)


def _make_dp4a(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return _plain(lambda a, b, c: (_four(a) * _four(b)).sum(1, dtype=np.int32).view(np.uint32) + c, "b32", operands)


def _make_dp2a(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    assert list(modifiers) == ["lo", "u32", "u32"]

    def add(a: Bits, b: Bits, c: Bits) -> Bits:
        """Two halves of a word times the lower two bytes of another."""
        halves = np.ascontiguousarray(a).view(np.uint16).reshape(-1, 2).astype(np.uint32)
        two = np.ascontiguousarray(b).view(np.uint8).reshape(-1, 4)[:, :2].astype(np.uint32)
        return (halves * two).sum(1, dtype=np.uint32) + c

    return _plain(add, "b32", operands)


def _make_vabsdiff4(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    def add(a: Bits, b: Bits, c: Bits) -> Bits:
        x, y = (np.ascontiguousarray(v).view(np.uint8).reshape(-1, 4).astype(np.int32) for v in (a, b))
        return np.abs(x - y).sum(1).astype(np.uint32) + c

    return _plain(add, "b32", operands)


def _round(x: Bits, low: int, high: int) -> Bits:
    return np.where(np.isnan(x), 0.0, np.clip(np.rint(x.astype(np.float64)), low, high)).astype(np.int64)


def _make_cvt(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    if modifiers[0] == "pack" and modifiers[2] == "s16":

        def pair(a: Bits, b: Bits) -> Bits:
            x, y = (np.clip(_signed(v), -32768, 32767).astype(np.int64) & 0xFFFF for v in (a, b))
            return ((x << 16) | y).astype(np.uint32)

        return _plain(pair, "b32", operands)
    if modifiers[0] == "pack":

        def pack(a: Bits, b: Bits, c: Bits) -> Bits:
            x, y = (np.clip(_signed(v), -128, 127).astype(np.int64) & 255 for v in (a, b))
            return (((c.astype(np.int64) & 0xFFFF) << 16) | (x << 8) | y).astype(np.uint32)

        return _plain(pack, "b32", operands)
    to, source = modifiers[-2:]
    target = operands[0]
    if to in ("f16x2", "bf16x2"):

        def both(warp: Warp) -> None:
            high, low = (warp.read(name).view(np.float32) for name in operands[1:])
            halves = [_narrow(x, to.removesuffix("x2")).astype(np.uint32) for x in (high, low)]
            warp.write(target, (halves[0] << 16) | halves[1])

        return both

    def step(warp: Warp) -> None:
        width = WIDTH[source]
        # of a register that is wider the lower bits count
        stored = warp.registers.get(operands[1])
        raw = warp.read(operands[1], max(width, 16) if stored is None else stored.itemsize * 8)
        x = _of(source, raw.astype(UNSIGNED[width]))
        if to == "f32":
            x = x.astype(np.float32)
        elif to in ("f16", "bf16"):
            x = _narrow(x, to)
        elif source[0] == "f":
            assert modifiers[0] == "rni" and to == "s32"
            x = _round(x, -(2**31), 2**31 - 1).astype(np.int32)
        else:
            both = SIGNED if to[0] == "s" else UNSIGNED
            x = x.astype(both[WIDTH[to]])
            if WIDTH[to] == 8:
                # no register is so narrow: the sign goes on
                x = x.astype(both[_register_width(target)])
        warp.write(target, _bits(x))

    return step


def _narrow(x: Bits, kind: str) -> Bits:
    """float32 as the bits of a 16-bit float, to nearest even."""
    return _bits(
        torch.from_numpy(np.ascontiguousarray(x))
        .to(torch.float16 if kind == "f16" else torch.bfloat16)
        .view(torch.int16)
        .numpy()
    )


def _make_selp(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    target, a, b, p = operands
    width = WIDTH[_type(modifiers)]
    return lambda warp: warp.write(target, np.where(warp.read(p, 1), warp.read(a, width), warp.read(b, width)))


_COMPARE: dict[str, Callable[[Bits, Bits], Bits]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "equ": lambda a, b: ~((a < b) | (a > b)), "neu": lambda a, b: ~(a == b),
    "num": lambda a, b: (a == a) & (b == b), "nan": lambda a, b: (a != a) | (b != b),
}  # fmt: skip


def _compared(compare: str, kind: str, x: Bits, y: Bits) -> Bits:
    if compare == "ne" and kind[0] not in "su" and "f" in kind:
        # ordered: false beside NaN
        return (x < y) | (x > y)
    return _COMPARE[compare](x, y)


def _make_setp(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    compare, *joined, kind = modifiers
    target, a, b, *rest = operands
    width = WIDTH[kind]
    if kind in ("f16x2", "bf16x2"):
        first, second = target.split("|")

        def both(warp: Warp) -> None:
            words = (np.ascontiguousarray(warp.read(name)).view(np.uint16) for name in (a, b))
            found = _compared(compare, kind, *(_of(kind.removesuffix("x2"), x) for x in words)).reshape(LANES, 2)
            warp.write(first, found[:, 0])
            warp.write(second, found[:, 1])

        return both
    assert "|" not in target

    def step(warp: Warp) -> None:
        x, y = (_of(kind, warp.read(name, width)) for name in (a, b))
        result = _compared(compare, kind, x, y)
        if joined:
            other = warp.read(rest[0], 1)
            result = result | other if joined[0] == "or" else result & other
        warp.write(target, result)

    return step


def _make_mov(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    target, source = operands
    width = WIDTH[_type(modifiers)]
    if source[0] == "{":
        parts = _listed(source)

        def join(warp: Warp) -> None:
            x = np.stack([warp.read(name, width // len(parts)) for name in parts], axis=1)
            warp.write(target, np.ascontiguousarray(x).view(UNSIGNED[width])[:, 0])

        return join
    if target[0] == "{":
        names = _listed(target)

        def split(warp: Warp) -> None:
            x = np.ascontiguousarray(warp.read(source, width)).view(UNSIGNED[width // len(names)]).reshape(LANES, -1)
            for name, part in zip(names, x.T, strict=True):
                warp.write(name, np.ascontiguousarray(part))

        return split
    return lambda warp: warp.write(target, warp.read(source, width))


def _make_cvta(modifiers: Sequence[str], operands: Sequence[str]) -> Step:
    return lambda warp: warp.write(operands[0], warp.read(operands[1], 64))
