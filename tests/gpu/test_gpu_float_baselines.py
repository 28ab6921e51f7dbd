"""The baselines with a float softmax on a GPU: compiled kernel against formula on A1-A7, CUDA graphs, masks, bench."""

from __future__ import annotations

import pytest
import torch

from helpers import exact_attention, make_inputs
from qflash.specification.quantization import QuantizedTensor
from qflash_lab.baselines import get_method, int_flash, qattn
from qflash_lab.bench import latency, problems
from qflash_lab.bench import methods as bench_methods
from qflash_lab.bench.metrics import sqnr
from qflash_lab.bench.workloads import WORKLOADS, get_workload, paper_inputs

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
NAMES = ("int-flash-full", "int-flash-half", "qattn")
PAPER = {
    ("int-flash-full", "A2"): 36.92, ("int-flash-full", "A7"): 37.80,
    ("int-flash-half", "A2"): 38.19, ("int-flash-half", "A7"): 39.07,
}  # fmt: skip


def launch(name: str, inputs: tuple[torch.Tensor, ...], tiles: tuple[int, ...] | None = None) -> tuple[torch.Tensor, ...]:
    """Return kernel and formula on the same quantised operands."""
    query, key, value = inputs
    module = qattn if name == "qattn" else int_flash
    if name == "qattn":
        operands = tuple(qattn.quantize(x) for x in inputs)
    else:
        operands = int_flash.quantize_operands(query, key, value, full=name == "int-flash-full")
    scale = query.shape[-1] ** -0.5
    out = torch.full((*query.shape[:3], value.shape[3]), float("nan"), device=CUDA)
    call = module.kernel_call(operands, scale, out, tiles=tiles)  # type: ignore[arg-type]
    call.run()
    # weights are rounded by the tile, and a card's table may have another one
    return out, module.formula(operands, None, scale, block=call.arguments["BLOCK_N"])  # type: ignore[arg-type]


@pytest.mark.parametrize("workload", [w.name for w in WORKLOADS])
@pytest.mark.parametrize("name", NAMES)
def test_kernel_is_the_formula(name: str, workload: str) -> None:
    got, expected = launch(name, paper_inputs(get_workload(workload), 2, device=CUDA))
    # exp2 is approximate there, so some weights round the other way: a step of 1/127 for Full, far less for the others
    assert sqnr(expected, got) > (55 if name == "int-flash-full" else 65)


@pytest.mark.parametrize(
    "shape", [(1, 2, 1, 1, 64, 64), (2, 3, 17, 300, 16, 16), (1, 2, 130, 257, 128, 128), (1, 1, 1000, 1024, 64, 40)], ids=str
)
@pytest.mark.parametrize("name", NAMES)
def test_other_shapes(name: str, shape: tuple[int, ...]) -> None:
    inputs = tuple(x.to(CUDA) for x in make_inputs(*shape, seed=shape[3], dtype=torch.float16))
    got, expected = launch(name, inputs)
    assert sqnr(expected, got) > (50 if name == "int-flash-full" else 60)


@pytest.mark.parametrize("tiles", [(16, 64, 4, 2), (64, 32, 4, 3), (128, 64, 8, 2), (128, 128, 8, 2)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_tiles(name: str, tiles: tuple[int, ...]) -> None:
    inputs = tuple(x.to(CUDA) for x in make_inputs(2, 2, 197, 500, 64, dtype=torch.float16))
    got, expected = launch(name, inputs, tiles)
    assert sqnr(expected, got) > (50 if name == "int-flash-full" else 60)


@pytest.mark.parametrize("name", NAMES)
def test_attention_is_the_cpus(name: str) -> None:
    method = get_method(name)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        inputs = make_inputs(2, 3, 49, 60, 32, dtype=dtype)
        for mask in (None, torch.randn(1, 3, 49, 60), torch.rand(2, 1, 49, 60) < 0.7):
            got = method.attention(*(x.to(CUDA) for x in inputs), attn_mask=None if mask is None else mask.to(CUDA))
            assert got.dtype == dtype
            assert sqnr(method.attention(*inputs, attn_mask=mask), got.cpu()) > 48


@pytest.mark.parametrize(("name", "workload"), PAPER)
def test_sqnr_is_the_papers(name: str, workload: str) -> None:
    inputs = paper_inputs(get_workload(workload), 8)
    out = get_method(name).prepare(*(x.to(CUDA) for x in inputs))()  # type: ignore[misc]
    assert sqnr(exact_attention(*inputs), out.cpu()) == pytest.approx(PAPER[name, workload], abs=1.0)


def numbers_of(x: torch.Tensor | QuantizedTensor) -> torch.Tensor:
    """The tensor that a kernel has written: QAttn's is int8, with a scale beside it."""
    return x.values if isinstance(x, QuantizedTensor) else x


@pytest.mark.parametrize("name", NAMES)
def test_prepared_call_is_captured_and_does_not_wait(name: str) -> None:
    inputs = paper_inputs(get_workload("A2"), 1, device=CUDA)
    call = get_method(name).prepare(*inputs)  # type: ignore[misc]
    expected = numbers_of(call()).clone()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = numbers_of(call())
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
    expected = get_method(name).attention(*inputs)
    whole = torch.cuda.CUDAGraph()
    with torch.cuda.graph(whole):
        out = get_method(name).attention(*inputs)
    whole.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_bench_times_them_and_refuses_masks() -> None:
    methods = bench_methods.make_methods(CUDA)
    baselines = [method.name for method in methods if method.is_baseline]
    options = {"kind": "uniform", "dtype": torch.float16, "device": CUDA, "rounds": 3}
    problem = problems.make_problems(("A7",), (), (1,))[0]
    rows = latency.measure(problem, methods, ("kernel", "end-to-end"), **options)  # type: ignore[arg-type]
    found = {row["method"]: row for row in rows}
    assert all(found[name]["error"] is None and found[name]["sqnr_db"] > 20 for name in baselines), found
    assert all(found[f"{name} kernel"]["mode"] == "kernel" for name in NAMES)
    biased = problems.make_problems(("A7",), (), (1,), bias=True)[1]
    for row in latency.measure(biased, methods, ("kernel", "end-to-end"), **options):  # type: ignore[arg-type]
        assert row["method"] not in baselines or "take no mask" in row["error"]
