"""What a launch is repeated by."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from qflash.kernels.launch_recorder import KernelLaunch


@pytest.mark.parametrize("grid", [(7,), (7, 2), (7, 2, 3)])
def test_a_repeated_launch_has_three_dimensions(grid: tuple[int, ...]) -> None:
    asked = []

    class Compiled:
        def __getitem__(self, found: tuple[int, ...]) -> None:
            asked.append(found)

    kernel = SimpleNamespace(__name__="kernel", warmup=lambda **_: Compiled())
    KernelLaunch(kernel, grid, {"x": torch.ones(1, device="cpu")}, {}).launcher()
    assert asked == [(*grid, 1, 1)[:3]]
