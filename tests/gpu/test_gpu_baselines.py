"""The baselines on a GPU: their kernels' bits, in a CUDA graph, and the same accuracy as on the CPU."""

from __future__ import annotations

import pytest
import torch

from helpers import exact_attention
from qflash import QuantizedTensor
from qflash_lab.baselines import METHODS
from qflash_lab.bench.metrics import sqnr
from qflash_lab.bench.workloads import get_workload, paper_inputs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", [method.name for method in METHODS.values() if method.prepare is not None])
@pytest.mark.parametrize("workload", ["A1", "A2", "A3", "A4", "A5", "A6", "A7"])
def test_prepared_call_in_a_graph(workload: str, name: str) -> None:
    method = METHODS[name]
    assert method.prepare is not None
    inputs = paper_inputs(get_workload(workload), 2, device="cuda")
    call = method.prepare(*inputs)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    got = out.dequantize() if isinstance(out, QuantizedTensor) else out
    exact = exact_attention(*(x.cpu() for x in inputs))
    whole = method.attention(*inputs)
    # QAttn's prepared call rounds its output to int8, which its `attention` does not
    assert sqnr(exact, got.cpu()) > sqnr(exact, whole.cpu()) - (1.0 if name == "qattn" else 0.5)


@pytest.mark.parametrize("workload", ["A2", "A4", "A7"])
def test_i_vit_kernels_have_the_formulas_bits(workload: str) -> None:
    prepare = METHODS["i-vit"].prepare
    assert prepare is not None
    inputs = [x.float() for x in paper_inputs(get_workload(workload), 8, device="cuda")]
    out = prepare(*inputs)()
    assert isinstance(out, QuantizedTensor)
    formula = METHODS["i-vit"].attention(*inputs)
    assert torch.equal((formula / out.scale).round().to(torch.int8), out.values)


@pytest.mark.parametrize("name", METHODS)
def test_same_accuracy_as_on_the_cpu(name: str) -> None:
    inputs = paper_inputs(get_workload("A7"), 4)
    exact = exact_attention(*inputs)
    on_cpu = METHODS[name].attention(*inputs)
    on_gpu = METHODS[name].attention(*(x.cuda() for x in inputs)).cpu()
    assert abs(sqnr(exact, on_gpu) - sqnr(exact, on_cpu)) < 1.0
