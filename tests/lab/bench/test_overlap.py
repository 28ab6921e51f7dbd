"""``benchmarks/archive/overlap.py``: its kernels are CUDA C that compiles for Hopper, and do what their cases say."""

from __future__ import annotations

import pytest

from helpers import load_benchmark

overlap = load_benchmark("archive/overlap")


def test_cases_are_different_and_name_what_there_is() -> None:
    cases = overlap.cases()
    assert len(set(cases)) == len(cases) > 100
    for case in cases:
        assert case.products in (None, *overlap.PRODUCTS) and case.mix in (None, *overlap.MIXES)
        # a processor has room for its warpgroups, and those in turns are two at least
        assert 1 <= sum(case.apart) <= 4 and (not case.count or (case.apart[0] >= 2 and case.apart[1] == 0))
        assert case.count or not case.ordered


def test_kernels_have_as_many_products_and_instructions_as_their_cases() -> None:
    turns = overlap.source("k", overlap.Case("int8", "both pipes, few registers", (2, 0), 512, 6, True))
    assert turns.count("wgmma.mma_async") == 6 and turns.count("mad.lo.s32") == turns.count("shf.l.wrap") == 256
    assert turns.count("bar.sync") == 2 and turns.count("bar.arrive") == 2
    apart = overlap.source("k", overlap.Case("int8", "lop3, three registers", (1, 2)))
    assert apart.count("wgmma.mma_async") == 32 and apart.count("lop3.b32") == 64 and "__launch_bounds__(384, 1)" in apart


@pytest.mark.skipif(not any(overlap.LIBRARIES.rglob("libnvrtc.so*")), reason="PyTorch was built without CUDA")
def test_kernels_compile_for_hopper() -> None:
    cases = [overlap.cases()[index] for index in (0, 20, 30, -1)]
    cubin = overlap.compile_cubin("".join(overlap.source(f"k{index}", case) for index, case in enumerate(cases)))
    assert cubin[:4] == b"\x7fELF" and all(f"k{index}".encode() in cubin for index in range(len(cases)))
    with pytest.raises(RuntimeError, match="NVRTC"):
        overlap.compile_cubin("nothing of the kind")
