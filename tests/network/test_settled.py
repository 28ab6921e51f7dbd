"""When a launch may read weights before it waits for the one ahead of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from qflash.kernels import layers, settled
from qflash.kernels.launch_arguments import LinearCall
from qflash.kernels.launch_recorder import KernelLaunch
from qflash.network import modules


def test_all_but_the_first_launch_of_a_promise() -> None:
    assert not settled.weights_are_settled() and not settled.weights_are_settled()
    with settled.weights_stay():
        assert [settled.weights_are_settled() for _ in range(3)] == [False, True, True]
        settled.weights_may_change()
        settled.weights_may_change()
        assert [settled.weights_are_settled() for _ in range(3)] == [False, True, True]
        with settled.weights_stay():
            assert [settled.weights_are_settled() for _ in range(2)] == [False, True]
        found: list[bool] = []
        thread = threading.Thread(target=lambda: found.extend(settled.weights_are_settled() for _ in range(2)))
        thread.start()
        thread.join()
        assert found == [False, False]
    assert not settled.weights_are_settled()
    settled.weights_may_change()
    with pytest.raises(RuntimeError), settled.weights_stay():
        raise RuntimeError
    assert not settled.weights_are_settled()


def test_a_forward_pass_promises_it_up_to_hooks(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    forward = modules.Linear.forward

    def ask(self: modules.Linear, *args: Any, **kwargs: Any) -> torch.Tensor:
        asked.append(settled.weights_are_settled())
        return forward(self, *args, **kwargs)

    network = made("class token")[1]
    images = torch.zeros((1, *network.image), dtype=torch.uint8)
    want = network(images)
    network.backend, backend = "reference", network.backend
    monkeypatch.setattr(modules.Linear, "forward", ask)
    try:
        assert torch.equal(network(images), want)
        assert len(asked) > 4 and asked == [False] + [True] * (len(asked) - 1)
        linear = [part for part in network.modules() if type(part) is modules.Linear]
        asked.clear()
        with linear[2].register_forward_pre_hook(lambda *_: None):
            network(images)
        assert asked.index(False) == 0 and asked.count(False) == 2
        # as accelerate wraps it, which may bring weights to the device just then
        asked.clear()
        linear[2].forward = linear[2].forward
        network(images)
        del linear[2].forward
        assert asked.count(False) == 2
        asked.clear()
        network.run(images, lambda *_: None)
        assert not any(asked)
    finally:
        network.backend = backend


@pytest.mark.parametrize(("rows", "early"), [(197, True), (64 * 197, False)])
def test_small_layers_on_hopper_read_weights_early(rows: int, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with few rows, once a launch went ahead of it; then it has one tile a program, whose numbers come first, too."""
    monkeypatch.setattr("qflash.kernels.heuristics.capability_of", lambda _: (9, 0))
    device = torch.device("meta")
    plans = []
    monkeypatch.setattr(KernelLaunch, "run", lambda launch: plans.append(launch.arguments["PLAN"]))
    x, weight = (torch.empty(shape, dtype=torch.int8, device=device) for shape in ((rows, 384), (384, 384)))
    numbers = torch.empty(384, dtype=torch.int32, device=device)
    out = torch.empty((rows, 384), dtype=torch.int16, device=device)

    def plan(weight: torch.Tensor = weight) -> Any:
        layers._run_linear(LinearCall(x, weight, numbers, numbers, 0, None, None, out))
        return plans.pop()

    assert not plan().EARLY
    with settled.weights_stay():
        assert [plan().EARLY for _ in range(3)] == [False, early, early]
        # a copy of these is made by the launch ahead
        assert [plan(weight.T).EARLY for _ in range(2)] == [False, False] and plan().EARLY is early
    assert plan().AHEAD is early
