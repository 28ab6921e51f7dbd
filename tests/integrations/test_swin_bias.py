"""The bias of Swin's windows: the formula, in PyTorch and as a kernel, whatever lies where and of which type."""

from __future__ import annotations

import pytest
import torch

from helpers import DEVICE
from qflash.integrations.swin_bias import window_bias
from qflash.kernels.triton.swin_bias import launch_window_bias

HALF, SINGLE = torch.float16, torch.float32


def make_bias(
    heads: int, tokens: int, windows: int, dtype: torch.dtype = HALF, mask_dtype: torch.dtype = HALF, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return table, index and mask; no mask for no windows."""
    generator = torch.Generator().manual_seed(1000 * heads + 10 * tokens + windows)
    table = torch.randn((2 * tokens + 3, heads), generator=generator).to(device, dtype)
    index = torch.randint(0, len(table), (tokens, tokens), generator=generator).to(device)
    mask = torch.where(torch.rand((windows, tokens, tokens), generator=generator) < 0.3, -100.0, 0.3).to(device, mask_dtype)
    return table, index, mask if windows else None


def formula(table: torch.Tensor, index: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    bias = table.t()[:, index].unsqueeze(0)
    return bias if mask is None else bias + mask.unsqueeze(1)


SIZES = [(3, 49, 0), (2, 49, 4), (5, 16, 3), (1, 7, 1), (4, 1, 2), (2, 64, 0)]


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_in_pytorch(sizes: tuple[int, int, int], gradient: bool) -> None:
    table, index, mask = make_bias(*sizes)
    table.requires_grad_(gradient)
    got, wanted = window_bias(table, index, mask), formula(table, index, mask)
    assert got.dtype == wanted.dtype
    assert torch.equal(got, wanted)
    assert got.requires_grad == gradient
    if not gradient:
        assert all(step % 8 == 0 for step in got.stride()[:-1])
    with torch.no_grad():
        assert window_bias(table, index, mask).stride(-2) % 8 == 0


@pytest.mark.parametrize("windows", [0, 4])
def test_compiled_without_a_graph_break(windows: int) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(window_bias, fullgraph=True, backend="aot_eager")
    table, index, mask = make_bias(2, 49, windows)
    got = compiled(table, index, mask)
    assert torch.equal(got, formula(table, index, mask))
    assert got.stride(-2) == 56
    table.requires_grad_()
    assert torch.equal(compiled(table, index, mask), formula(table, index, mask))


def test_a_distance_that_the_table_has_not() -> None:
    table, index, _ = make_bias(2, 9, 0)
    index[3, 4] = len(table)
    with pytest.raises(IndexError):
        window_bias(table, index)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/gpu has the same, compiled")
@pytest.mark.parametrize("dtypes", [(HALF, HALF), (HALF, SINGLE), (SINGLE, HALF), (SINGLE, SINGLE)])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.slow
def test_kernel(sizes: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    table, index, mask = make_bias(*sizes, *dtypes)
    wanted = formula(table, index, mask)
    for where in (table, table.t().contiguous().t(), torch.cat((table, table), 1)[:, : table.shape[1]]):
        out = launch_window_bias(where, index, mask)
        assert out.dtype == wanted.dtype
        assert out.shape[-1] % 8 == 0
        assert torch.equal(out[..., : index.shape[1]], wanted)
        assert not out[..., index.shape[1] :].any()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/gpu has the same, compiled")
def test_kernel_reads_nothing_that_is_not_the_table() -> None:
    table, index, mask = make_bias(2, 9, 3)
    wanted = formula(table, index, mask)
    index[3, 4], index[5, 6], index[8, 8] = len(table), -1, 1 << 40
    got = launch_window_bias(table, index, mask)[..., :9]
    wrong = torch.zeros(9, 9, dtype=torch.bool)
    wrong[3, 4] = wrong[5, 6] = wrong[8, 8] = True
    assert got[..., wrong].isnan().all()
    assert torch.equal(got[..., ~wrong], wanted[..., ~wrong])
