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
    def count(launches: int) -> list[bool]:
        return [settled.count_launch() for _ in range(launches)]

    assert count(2) == [False, False]
    with settled.weights_stay():
        assert count(3) == [False, True, True]
        settled.weights_were_written()
        settled.weights_were_written()
        assert count(3) == [False, True, True]
        with settled.weights_may_change():
            assert count(2) == [False, False]
            with settled.weights_stay():
                assert count(2) == [False, True]
        assert count(3) == [False, True, True]
        found: list[bool] = []
        thread = threading.Thread(target=lambda: found.extend(count(2)))
        thread.start()
        thread.join()
        assert found == [False, False]
    assert count(2) == [False, False]
    settled.weights_were_written()
    with settled.weights_may_change():
        pass
    with pytest.raises(RuntimeError), settled.weights_stay():
        raise RuntimeError
    assert count(2) == [False, False]


def test_a_forward_pass_promises_it_but_to_users_code(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with a hook waits, as does the next one: the hook may have written its weights."""
    asked: list[bool] = []
    forward = modules.Linear.forward

    def ask(self: modules.Linear, *args: Any, **kwargs: Any) -> torch.Tensor:
        asked.append(settled.count_launch())
        return forward(self, *args, **kwargs)

    network = made("class token")[1]
    images = torch.zeros((1, *network.image), dtype=torch.uint8)
    want = network(images)
    network.backend, backend = "reference", network.backend
    monkeypatch.setattr(modules.Linear, "forward", ask)
    try:
        assert torch.equal(network(images), want)
        count = len(asked)
        assert count > 4 and asked == [False] + [True] * (count - 1)
        linear = [part for part in network.modules() if type(part) is modules.Linear]
        asked.clear()
        waiting = [False, True, False, False] + [True] * (count - 4)
        asked.clear()
        for register in (linear[2].register_forward_pre_hook, linear[2].register_forward_hook):
            with register(lambda *_: None):
                network(images)
            assert asked == waiting
            asked.clear()
        # as accelerate wraps it, which may bring weights to the device just then
        linear[2].forward = linear[2].forward
        network(images)
        del linear[2].forward
        assert asked == waiting
        asked.clear()
        with torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: None):
            network(images)
        assert asked and not any(asked)
        asked.clear()
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        network(images)
        assert asked and not any(asked)
        monkeypatch.undo()
        monkeypatch.setattr(modules.Linear, "forward", ask)
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
