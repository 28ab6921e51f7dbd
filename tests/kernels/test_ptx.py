"""The instructions that :mod:`ptx` carries out do what the PTX ISA says."""

from __future__ import annotations

import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ptx


def run(statements: str, **registers: Any) -> dict[str, Any]:
    """Run statements on the registers ``%r_name`` and return all registers."""
    kernel = ptx.Kernel(f".visible .entry k()\n.reqntid 32\n{{\n{statements}\nret;\n}}\n")
    warp = ptx.Warp(SimpleNamespace(kernel=kernel, parameters={}), 0)  # type: ignore[arg-type]
    warp.registers.update({f"%{name}": np.resize(np.asarray(x), ptx.LANES) for name, x in registers.items()})
    assert list(warp.run()) == []
    return warp.registers


def nearest(x: Fraction) -> np.float32:
    """The float32 next to a rational number, by comparison with its neighbours; of two the even one."""
    near = np.float32(float(x))
    candidates = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(candidates, key=lambda c: (abs(Fraction(float(c)) - x), int(c.view(np.uint32)) & 1))


ordinary = st.floats(-(2.0**40), 2.0**40, width=32).filter(lambda x: x == 0 or abs(x) > 2.0**-40)


@given(ordinary, ordinary, ordinary)
def test_fma_rounds_once(a: float, b: float, c: float) -> None:
    x = [np.float32(v).view(np.uint32) for v in (a, b, c)]
    got = run("fma.rn.f32 %d, %a, %b, %c;", a=x[0], b=x[1], c=x[2])["%d"].view(np.float32)[0]
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if abs(exact) > 2.0**-100:
        assert got == nearest(exact)


def test_fma_where_two_roundings_differ() -> None:
    # the exact sum lies a hair above the middle between two float32, by less than float64 shows beside it
    a, b, c = (np.float32(v).view(np.uint32) for v in (1 + 2.0**-23, 1 + 2.0**-23, 2.0**24))
    got = run("fma.rn.f32 %d, %a, %b, %c;", a=a, b=b, c=c)["%d"].view(np.float32)[0]
    assert got == 2.0**24 + 2


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 0xFFFF))
def test_prmt(a: int, b: int, selector: int) -> None:
    octets = (a | b << 32).to_bytes(8, "little")
    wanted = []
    for i in range(4):
        which = selector >> 4 * i & 15
        octet = octets[which & 7]
        wanted.append((255 if octet > 127 else 0) if which > 7 else octet)
    got = run(f"prmt.b32 %d, %a, %b, {selector:#x};", a=np.uint32(a), b=np.uint32(b))["%d"][0]
    assert int(got) == int.from_bytes(bytes(wanted), "little")


@given(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1), st.integers(0, 40))
def test_integers(a: int, b: int, n: int) -> None:
    text = """mul.hi.s32 %high, %a, %b; mul.wide.s32 %wide, %a, %b; shr.s32 %right, %a, %n; shr.u32 %plain, %a, %n;
    shl.b32 %left, %a, %n; cvt.pack.sat.s8.s32.b32 %pack, %a, %b, 0; clz.b32 %zeros, %a; bfe.s32 %field, %a, 5, 3;
    bfe.s64 %long, %wide, 18, 45; rem.s32 %rest, %a, 7;"""
    x, y = (np.int32(v).view(np.uint32) for v in (a, b))
    found = {name: int(v[0]) for name, v in run(text, a=x, b=y, n=np.uint32(n)).items()}
    plain, clamped = a % 2**32, [max(-128, min(127, v)) & 255 for v in (a, b)]
    assert found["%high"] == (a * b >> 32) % 2**32
    assert found["%wide"] == a * b % 2**64
    assert found["%right"] == (a >> n) % 2**32
    assert found["%plain"] == plain >> n
    assert found["%left"] == (plain << n) % 2**32
    assert found["%pack"] == clamped[0] << 8 | clamped[1]
    assert found["%zeros"] == 32 - plain.bit_length()
    field = plain >> 5 & 7
    assert found["%field"] == (field - 8 if field > 3 else field) % 2**32
    assert found["%rest"] == int(math.fmod(a, 7)) % 2**32
    field = a * b >> 18 & (2**45 - 1)
    assert found["%long"] == (field - 2**45 if field >> 44 else field) % 2**64


def test_comparisons_beside_nan() -> None:
    """Only those that end in u hold there."""
    text = "".join(f"setp.{c}.{kind} %{c}_{kind}, %{kind}, %{kind};" for c in ("eq", "ne", "equ", "neu") for kind in NAN)
    found = run(text + "setp.ne.bf16x2 %p|%q, %pair, %pair;", **NAN, pair=np.uint32(0x7FC03F80))
    for kind in NAN:
        assert [bool(found[f"%{c}_{kind}"][0]) for c in ("eq", "ne", "equ", "neu")] == [False, False, True, True], kind
    assert not found["%p"].any() and not found["%q"].any()


NAN = {"f32": np.uint32(0x7FC00000), "f16": np.uint16(0x7E00), "bf16": np.uint16(0x7FC0)}


def test_a_block_has_names_and_labels_of_its_own() -> None:
    text = """
    { .reg .b32 a; .reg .pred p; mov.b32 a, 1; setp.eq.s32 p, a, 1; @p bra.uni DONE; mov.b32 a, 2; DONE: add.s32 %x, a, 0; }
    { .reg .b32 a; mov.b32 a, 5; bra.uni DONE; mov.b32 a, 7; DONE: add.s32 %y, a, %x; }
    """
    found = run(text)
    assert (found["%x"] == 1).all()
    assert (found["%y"] == 6).all()


def test_a_trap_is_reached_or_branched_around() -> None:
    text = "{.reg .pred p; setp.ne.s32 p, %m, 7; @p bra.uni DONE; trap; DONE: mov.b32 %d, %m;}"
    assert (run(text, m=np.uint32(8))["%d"] == 8).all()
    with pytest.raises(RuntimeError, match="a trap was reached"):
        run(text, m=np.uint32(7))


def test_a_predicate_keeps_lanes_as_they_are() -> None:
    text = "mov.u32 %lane, %tid.x; mov.b32 %d, 9; setp.lt.u32 %p, %lane, 4; @%p mov.b32 %d, 1; @!%p add.s32 %d, %d, %lane;"
    lane = np.arange(32)
    assert (run(text)["%d"] == np.where(lane < 4, 1, 9 + lane)).all()


def test_a_barrier_that_nobody_else_comes_to_is_noticed() -> None:
    text = "mov.u32 %t, %tid.x; shr.u32 %w, %t, 5; setp.eq.s32 %p, %w, 0; @%p bra OVER; bar.sync 0; OVER: ret;"
    kernel = ptx.Kernel(f".visible .entry k()\n.reqntid 64\n{{\n{text}\n}}\n")
    with pytest.raises(RuntimeError, match="nobody is going to do"):
        ptx.run_together([ptx.Program(kernel, (1, 1, 1), (0, 0, 0), 0, {}, ptx.Memory([]), 16, False)])


def cluster(text: str, memory: ptx.Memory) -> list[ptx.Program]:
    """Return two blocks, of two warps each, of a cluster that runs ``text``."""
    kernel = ptx.Kernel(f".visible .entry k()\n.reqntid 64\n.reqnctapercluster 2\n{{\n{text}\n}}\n")
    return [ptx.Program(kernel, (1, 1, 1), (0, 0, 0), rank, {}, memory, 16, False) for rank in range(2)]


@pytest.mark.parametrize("backwards", [False, True])
def test_blocks_of_a_cluster_see_what_the_others_wrote_before_a_barrier(backwards: bool) -> None:
    source, found = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    text = """
    mov.u32 %r1, %cluster_ctarank; add.s32 %r2, %r1, 5; xor.b32 %r3, %r1, 1;
    mul.wide.u32 %rd1, %r1, 4; add.s64 %rd2, %rd1, SOURCE; st.global.b32 [ %rd2 + 0 ], { %r2 };
    barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
    mul.wide.u32 %rd3, %r3, 4; add.s64 %rd4, %rd3, SOURCE; ld.global.b32 { %r4 }, [ %rd4 + 0 ];
    add.s64 %rd5, %rd1, FOUND; st.global.b32 [ %rd5 + 0 ], { %r4 }; ret;
    """.replace("SOURCE", str(source.data_ptr())).replace("FOUND", str(found.data_ptr()))
    ptx.run_together(cluster(text, ptx.Memory([source, found])), backwards)
    assert found.tolist() == [6, 5]


def test_a_block_that_ends_before_a_barrier_of_its_cluster_is_noticed() -> None:
    text = "mov.u32 %r, %cluster_ctarank; setp.eq.s32 %p, %r, 0; @%p bra OVER; ARRIVE barrier.cluster.wait.aligned; OVER: ret;"
    with pytest.raises(RuntimeError, match="wait for others that have ended"):
        ptx.run_together(cluster(text.replace("ARRIVE", "barrier.cluster.arrive.aligned;"), ptx.Memory([])))
    with pytest.raises(RuntimeError, match="without having arrived"):
        ptx.run_together(cluster(text.replace("ARRIVE", ""), ptx.Memory([])))
    with pytest.raises(RuntimeError, match=r"ctaid\.x in a cluster"):
        ptx.run_together(cluster("mov.u32 %r, %ctaid.x; ret;", ptx.Memory([])))


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"sin\.approx"):
        run("sin.approx.f32 %a, %b;")
    with pytest.raises(NotImplementedError, match=r"add\.sat"):
        run("add.sat.s32 %a, %b, %c;")
    with pytest.raises(RuntimeError, match="part at a branch"):
        run("mov.u32 %l, %tid.x; setp.lt.u32 %p, %l, 4; @%p bra HERE; HERE: ret;")
