"""Swin's bias on a GPU: the kernel has PyTorch's bits, in the first call and in those that repeat it; what patch() keeps."""

from __future__ import annotations

import itertools

import pytest
import torch

import qflash
from integrations.test_swin_bias import SIZES, formula, make_bias
from qflash import plan_cache
from qflash.integrations.swin_bias import window_bias

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
TYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtypes", itertools.product(TYPES, TYPES))
@pytest.mark.parametrize("sizes", SIZES)
def test_kernel_has_pytorchs_bits(sizes: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    drawn, index, mask = make_bias(*sizes, *dtypes, device="cuda")
    for table in (drawn, torch.nn.Parameter(-drawn), drawn.t().contiguous().t()):
        with torch.no_grad():
            got, wanted = window_bias(table, index, mask), formula(table, index, mask)
            assert got.dtype == wanted.dtype
            assert torch.equal(got, wanted)
            assert all(step % 8 == 0 for step in got.stride()[:-1])
            # from what the first call left
            assert plan_cache.find((table.detach(), index, mask), ("window bias",)) is not None
            assert torch.equal(window_bias(2.0 * table, index, mask), formula(2.0 * table, index, mask))


def test_a_distance_that_the_table_has_not_is_nan() -> None:
    table, index, mask = make_bias(2, 9, 3, device="cuda")
    wanted = formula(table, index, mask)
    index[3, 4], index[5, 6] = len(table), -1
    got = window_bias(table, index, mask)
    assert got[..., 3, 4].isnan().all() and got[..., 5, 6].isnan().all()
    assert got.isnan().sum() == 2 * 2 * 3
    assert torch.equal(got[..., 7:, :], wanted[..., 7:, :])


def test_without_triton_it_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qflash.integrations.swin_bias.triton_unavailable", lambda device: "no")
    arguments = make_bias(3, 33, 2, device="cuda")
    assert torch.equal(window_bias(*arguments), formula(*arguments))


def build_swin() -> torch.nn.Module:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    settings = {"img_size": 112, "embed_dim": 64, "depths": (2, 2), "num_heads": (2, 4), "num_classes": 10}
    model = timm.models.swin_transformer.SwinTransformer(**settings).eval().to(CUDA, torch.float16)
    for name, parameter in model.named_parameters():
        if "bias_table" in name:
            torch.nn.init.normal_(parameter)
    return model


@torch.no_grad()
def test_a_kept_bias_in_eager_calls_and_in_graphs() -> None:
    model, x = build_swin(), torch.randn(3, 3, 112, 112, device=CUDA, dtype=torch.float16)
    wanted = qflash.patch(model)(x)
    qflash.patch(model, keep_bias=True)
    # captured before anything is kept: nothing of the graph's memory is
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        first = torch.cuda.CUDAGraph()
        with torch.cuda.graph(first):
            out = model(x)
    assert torch.equal(model(x), wanted)
    first.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)
    for _ in range(2):
        assert torch.equal(model(x), wanted)
    second = torch.cuda.CUDAGraph()
    with torch.cuda.graph(second):
        out = model(x)
    for _ in range(2):
        out.zero_()
        second.replay()
        assert torch.equal(out, wanted)
    # eager calls notice other weights
    for name, parameter in model.named_parameters():
        if "bias_table" in name:
            parameter.mul_(-1.0)
    changed = model(x)
    assert not torch.equal(changed, wanted)
    assert torch.equal(qflash.patch(model)(x), changed)
