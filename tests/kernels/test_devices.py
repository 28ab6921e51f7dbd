"""Every launch is made while the GPU of its tensors is the current one; the interpreter stands for two GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import qflash
from helpers import DEVICE, make_inputs, run_by_address, same_bits
from qflash import execution, precompile
from qflash.kernels import device, launch_recorder
from qflash.kernels.launch_recorder import KernelLaunch, record
from qflash.kernels.triton.swin_bias import launch_window_bias
from qflash.specification.attention_call import float_call
from qflash.specification.recipe import PRESETS

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/gpu has two GPUs")


class TwoGPUs:
    """Stands for PyTorch's choice of a GPU: 0 is the current one, and tensors are on 1.

    Attributes:
        current: which is the current one.
        events: what was done, in order.
    """

    def __init__(self) -> None:
        self.current = 0
        self.events: list[str] = []

    @contextlib.contextmanager
    def enter(self, where: Any) -> Iterator[None]:
        index = getattr(where, "index", where)
        before, self.current = self.current, index
        self.events.append(f"enter {index}")
        try:
            yield
        finally:
            self.current = before
            self.events.append("leave")

    def launched(self, name: str) -> None:
        self.events.append(f"launch {name} on {self.current}")

    @property
    def launches(self) -> list[str]:
        return [event for event in self.events if event.startswith("launch")]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> TwoGPUs:
    """Tensors count as GPU 1's wherever a launch asks; the interpreter notes which GPU is the current one."""
    from triton.runtime.interpreter import InterpretedFunction

    found = TwoGPUs()
    monkeypatch.setattr(launch_recorder, "entered", lambda _: found.enter(1))
    run = InterpretedFunction.run

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.launched(self.fn.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    return found


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> TwoGPUs:
    """PyTorch's own functions about the current GPU, for two that are not there."""
    found = TwoGPUs()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.current)
    monkeypatch.setattr(torch.cuda, "device", found.enter)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.current == 1)
    return found


def test_the_current_gpu_is_not_entered_again(two: TwoGPUs) -> None:
    for where, entered in ((torch.device("cuda", 1), True), (torch.device("cuda", 0), False), (torch.device("cpu"), False)):
        two.events.clear()
        with device.entered(where):
            assert two.current == (1 if entered else 0)
        assert two.events == (["enter 1", "leave"] if entered else [])
        assert two.current == 0


def test_a_gpu_is_left_after_an_error(two: TwoGPUs) -> None:
    with pytest.raises(ZeroDivisionError), device.entered(torch.device("cuda", 1)):
        raise ZeroDivisionError
    assert two.current == 0 and two.events == ["enter 1", "leave"]


def test_a_capture_is_looked_for_on_the_gpu_of_the_tensors(two: TwoGPUs) -> None:
    assert device.is_capturing(torch.device("cuda", 1)) and not device.is_capturing(torch.device("cuda", 0))


class FakeKernel:
    """Notes where it is launched, compiled and loaded."""

    __name__ = "kernel"
    arg_names = ("count", "x")

    def __init__(self, gpus: TwoGPUs) -> None:
        self.gpus = gpus

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        self.gpus.events.append(f"load on {self.gpus.current}")
        return lambda *args, **kwargs: self.gpus.launched("kernel")

    def warmup(self, **options: Any) -> FakeKernel:
        self.gpus.events.append(f"compile on {self.gpus.current}")
        return self


class Description:
    """A matrix for the copy engine."""

    def __init__(self, base: torch.Tensor) -> None:
        self.base = base


@pytest.mark.parametrize("described", [False, True])
def test_a_launch_is_compiled_loaded_and_made_where_its_tensors_are(described: bool, two: TwoGPUs) -> None:
    for index in (1, 0):
        with FakeTensorMode():
            x: Any = torch.empty(3, device=f"cuda:{index}")
        launch = KernelLaunch(FakeKernel(two), (1,), {"count": 3, "x": Description(x) if described else x}, {})
        around = (["enter 1"], ["leave"]) if index else ([], [])
        two.events.clear()
        launch.run()
        launch.launcher()
        made = [*around[0], f"load on {index}", f"launch kernel on {index}", *around[1]]
        assert two.events == [*made, *around[0], f"compile on {index}", f"load on {index}", *around[1]]


def test_a_launch_without_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="a launch of kernel must have a tensor"):
        KernelLaunch(FakeKernel(TwoGPUs()), (1,), {"count": 3}, {}).run()


def drawn(keys: int, head_dim: int = 16) -> tuple[torch.Tensor, ...]:
    return make_inputs(1, 2, 5, keys, head_dim=head_dim, dtype=torch.float16)


def attend(keys: int, recipe: str = "default", mask: torch.Tensor | None = None, **options: Any) -> Any:
    return qflash.attention(*drawn(keys, **options), mask, recipe=recipe, backend="triton")


def attend_int8(out_dtype: torch.dtype | None) -> Any:
    tensors = [qflash.quantize(x, "head") for x in drawn(20)]
    return qflash.int8_attention(*tensors, torch.randn(5, 20), out_dtype=out_dtype, backend="triton")


def attend_packed(recipe: str) -> Any:
    tensors = [torch.randn(9, 2, 16) for _ in range(3)]
    lengths = torch.tensor([0, 4, 9], dtype=torch.int32)
    return qflash.varlen_attention(*tensors, lengths, lengths, 5, 5, recipe=recipe, backend="triton")


def linear(*gelu: Any) -> Any:
    x, weight = (torch.randint(-9, 9, shape, dtype=torch.int8) for shape in ((3, 4, 8), (6, 8)))
    bias, multiplier = (torch.ones(6, dtype=torch.int32) for _ in range(2))
    if gelu:
        return torch.ops.qflash.int8_linear_gelu(x, weight, bias, multiplier, 3, multiplier, bias, 5, "triton")
    scatter = torch.arange(4, dtype=torch.int32)
    return torch.ops.qflash.int8_linear(x, weight, bias, multiplier, 3, None, scatter, torch.int16, "triton")


def layer_norm() -> Any:
    h = torch.randint(-99, 99, (2, 3, 8), dtype=torch.int16)
    gain, offset = (torch.ones(8, dtype=torch.int32) for _ in range(2))
    gather = torch.zeros(2, 1, dtype=torch.int32)
    return torch.ops.qflash.integer_layer_norm(h, 5, gain, offset, 9, gather, torch.int8, "triton")


def mean() -> Any:
    x, ones = torch.randint(-99, 99, (2, 3, 8), dtype=torch.int16), torch.ones(8, dtype=torch.int32)
    return torch.ops.qflash.integer_mean(x, ones, 3, ones, torch.int8, "triton")


def embed() -> Any:
    images = torch.randint(0, 255, (2, 3, 4, 4), dtype=torch.uint8)
    weight, ones = torch.ones(8, 12, dtype=torch.int8), torch.ones(8, dtype=torch.int32)
    position, prefix = (torch.ones(1, tokens, 8, dtype=torch.int16) for tokens in (4, 1))
    return torch.ops.qflash.patch_embedding(images, (2, 2), weight, ones, ones, 3, position, prefix, "triton")


CALLS: dict[str, Callable[[], Any]] = {
    "one launch": lambda: attend(20),
    "one launch, bias": lambda: attend(20, mask=torch.randn(5, 20).half()),
    "quantised apart": lambda: attend(150, head_dim=128),
    "long rows": lambda: attend(300),
    "long rows, bias": lambda: attend(300, mask=torch.randn(5, 300).half()),
    "balanced and rotated": lambda: attend(20, "accurate"),
    "a scale a tensor": lambda: attend(20, "paper"),
    "int8 in and out": lambda: attend_int8(None),
    "int8 in": lambda: attend_int8(torch.float32),
    "packed": lambda: attend_packed("default"),
    "packed, quantised by PyTorch": lambda: attend_packed("paper"),
    **{
        f"quantised by {each}": lambda each=each: qflash.quantize(torch.randn(2, 3, 8), each, backend="triton")  # type: ignore[misc]
        for each in ("tensor", "head", "token", "channel")
    },
    "centred": lambda: qflash.quantize(torch.randn(2, 3, 8), "channel", center=True, backend="triton"),
    "given scale": lambda: qflash.quantize(torch.randn(2, 3, 8), scale=0.1, backend="triton"),
    "window bias": lambda: launch_window_bias(torch.randn(5, 2), torch.randint(0, 5, (4, 4)), None),
    "linear": linear,
    "linear and GELU": lambda: linear(True),
    "layer norm": layer_norm,
    "mean": mean,
    "embedding": embed,
}


@pytest.mark.parametrize("name", CALLS)
def test_every_operator_launches_where_its_tensors_are(name: str, gpus: TwoGPUs) -> None:
    CALLS[name]()
    assert gpus.launches and all(event.endswith(" on 1") for event in gpus.launches)
    assert gpus.current == 0


# one launch; quantised by launches of their own; keys and values quantised together; a bias
@pytest.mark.parametrize(("keys", "head_dim", "bias"), [(20, 16, False), (150, 128, False), (300, 16, False), (20, 16, True)])
def test_repeated_calls_launch_where_their_tensors_are(
    keys: int, head_dim: int, bias: bool, gpus: TwoGPUs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KernelLaunch, "launcher", run_by_address([]))
    tensors = (*drawn(keys, head_dim), torch.randn(1, 1, 5, keys).half() if bias else None)

    def go(*tensors: torch.Tensor | None) -> torch.Tensor:
        return execution.attend(float_call(*tensors, False, 0.2, PRESETS["default"]), "triton")  # type: ignore[arg-type]

    out, prepare = record(go, tensors)
    again = prepare()
    assert again is not None
    first = len(gpus.launches)
    gpus.events.clear()
    # what is repeated has to enter the GPU itself
    monkeypatch.setattr(KernelLaunch, "make", lambda self: self.kernel[self.grid](**self.arguments, **self.options))
    assert same_bits(again(*tensors), out)
    assert gpus.events[0] == "enter 1" and gpus.events[-1] == "leave" and gpus.current == 0
    assert len(gpus.launches) == first and all(event.endswith(" on 1") for event in gpus.launches)


def test_what_warmup_compiles_is_compiled_where_its_tensors_are(gpus: TwoGPUs, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def warmup(self: Any, **options: Any) -> Any:
        seen.append(gpus.current)
        return {options["grid"]: None}

    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setattr(InterpretedFunction, "warmup", warmup, raising=False)
    calls = precompile.note_calls(lambda *x: qflash.attention(*x, backend="triton"), (drawn(300),))
    launches = sum(precompile.compile_call(call, torch.device("cpu")) for call in calls)
    assert launches >= 3 and seen == [1] * launches
    assert gpus.launches == []
