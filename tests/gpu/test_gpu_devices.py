"""A GPU that is not the current one: every public operator, first and repeated calls, graphs, compiled code, replicas."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import qflash
from helpers import make_inputs, same_bits
from qflash import plan_cache
from small_networks import build, draw, made  # noqa: F401 - a fixture

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
HERE, THERE = "cuda:0", "cuda:1"
MODES: dict[str, Callable[[], Any]] = {"grad": torch.enable_grad, "no grad": torch.no_grad, "inference": torch.inference_mode}


def moved(x: Any, device: str) -> Any:
    if isinstance(x, (tuple, list)):
        return tuple(moved(each, device) for each in x)
    return x.to(device) if hasattr(x, "to") else x


def heads(queries: int, keys: int, head_dim: int = 64, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, ...]:
    return make_inputs(2, 4, queries, keys, head_dim=head_dim, dtype=dtype)


def int8(queries: int, keys: int) -> tuple[Any, ...]:
    return tuple(qflash.quantize(x, each) for x, each in zip(heads(queries, keys), ("token", "head", "channel"), strict=True))


def packed() -> tuple[torch.Tensor, ...]:
    tensors = tuple(torch.randn(700, 4, 64, generator=torch.Generator().manual_seed(n)).half() for n in range(3))
    return (*tensors, torch.tensor([0, 120, 700], dtype=torch.int32))


def attend(**options: Any) -> Callable[..., Any]:
    return lambda *tensors: qflash.attention(*tensors, **options)


X = torch.randn(2, 4, 50, 64, generator=torch.Generator().manual_seed(0))
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "rows of 197": (attend(), lambda: heads(197, 197)),
    "causal": (attend(is_causal=True), lambda: heads(197, 197)),
    "rows of 1500": (attend(), lambda: heads(1500, 1500)),
    "wide heads": (attend(), lambda: heads(300, 300, 160)),
    "float32": (attend(), lambda: heads(197, 197, dtype=torch.float32)),
    "windows with a bias": (attend(), lambda: (*heads(49, 49, 32), torch.randn(1, 4, 49, 49).half())),
    "long rows with a bias": (attend(), lambda: (*heads(600, 600), torch.randn(1, 1, 600, 600).half())),
    "hidden keys": (attend(), lambda: (*heads(197, 197), torch.rand(2, 1, 1, 197) > 0.4)),
    "accurate": (attend(recipe="accurate"), lambda: heads(197, 197)),
    "paper": (attend(recipe="paper"), lambda: heads(197, 197)),
    "int8 in and out": (lambda *x: qflash.int8_attention(*x, output_scale=0.02).values, lambda: int8(197, 197)),
    "int8, long": (lambda *x: qflash.int8_attention(*x, out_dtype=torch.float16), lambda: int8(1500, 1500)),
    "int8 with a bias": (
        lambda q, k, v, bias: qflash.int8_attention(q, k, v, bias, out_dtype=torch.float16),
        lambda: (*int8(197, 197), torch.randn(197, 197)),
    ),
    **{
        f"packed, {recipe}": (
            lambda q, k, v, lengths, recipe=recipe: qflash.varlen_attention(  # type: ignore[misc]
                q, k, v, lengths, lengths, 580, 580, recipe=recipe
            ),
            packed,
        )
        for recipe in ("default", "accurate", "paper")
    },
    **{
        f"quantised by {each}": (lambda x, each=each: qflash.quantize(x, each).values, lambda: (X,))  # type: ignore[misc]
        for each in ("tensor", "head", "token", "channel")
    },
    "centred": (lambda x: qflash.quantize(x, "channel", center=True).values, lambda: (X,)),
    "given scale": (lambda x: qflash.quantize(x, scale=0.1).values, lambda: (X,)),
    "bias to fixed point": (qflash.quantize_bias, lambda: (X,)),
    "aligned bias": (qflash.align_bias, lambda: (X[..., :49],)),
}


@pytest.fixture(autouse=True)
def _first_is_current() -> Any:
    torch.cuda.set_device(0)
    yield
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CALLS)
def test_operators_on_a_gpu_that_is_not_the_current_one(name: str, mode: str, plans: dict[object, object]) -> None:
    """First and repeated calls, with either GPU the current one, in any order."""
    call, make = CALLS[name]
    torch.manual_seed(0)
    given = make()
    with MODES[mode]():
        want = call(*moved(given, "cpu"))
        for current in (0, 1, 0):
            with torch.cuda.device(current):
                for device in (THERE, HERE, THERE):
                    tensors = moved(given, device)
                    for _ in range(2):
                        got = call(*tensors)
                        assert str(got.device) == device and torch.cuda.current_device() == current
                        assert same_bits(got.cpu(), want)


def test_a_call_on_the_other_gpu_is_kept(plans: dict[object, object]) -> None:
    tensors = moved(heads(197, 197), THERE)
    qflash.attention(*tensors)
    assert plans and plan_cache.place_of(tensors) == 1
    count = len(plans)
    with torch.cuda.device(1):
        qflash.attention(*tensors)
    assert len(plans) == count


def test_launches_go_to_the_other_gpus_stream() -> None:
    """A call waits for what its own GPU's stream has to do, and not for the other's."""
    tensors = moved(heads(197, 197), THERE)
    want = qflash.attention(*tensors).cpu()
    stream = torch.cuda.Stream(device=THERE)
    for _ in range(3):
        with torch.cuda.stream(stream):
            late = [torch.zeros_like(x) for x in tensors]
            torch.cuda._sleep(20_000_000)
            for x, y in zip(late, tensors, strict=True):
                x.copy_(y)
            with torch.cuda.device(0):
                # the other GPU's stream stays the one that was chosen
                got = qflash.attention(*late)
        stream.synchronize()
        assert same_bits(got.cpu(), want)


@pytest.mark.parametrize("name", ["rows of 197", "rows of 1500", "windows with a bias", "packed, default"])
def test_operators_in_a_graph_of_the_other_gpu(name: str) -> None:
    call, make = CALLS[name]
    given = moved(make(), THERE)
    want = call(*given).cpu()
    with torch.cuda.device(1):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream), torch.cuda.device(0):
            out = call(*given)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize(THERE)
    assert same_bits(out.cpu(), want)


@pytest.mark.parametrize("name", ["rows of 197", "rows of 1500", "windows with a bias", "packed, default"])
def test_operators_compiled_for_the_other_gpu(name: str) -> None:
    call, make = CALLS[name]
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager")
    given = moved(make(), THERE)
    want = call(*moved(given, "cpu"))
    for _ in range(2):
        assert same_bits(compiled(*given).cpu(), want)


@pytest.mark.parametrize("kind", ["class token", "registers", "swin"])
def test_networks_on_the_other_gpu(kind: str, made: Any) -> None:  # noqa: F811
    model, network = made(kind)
    images = draw(model, 3, seed=3)
    want = network(images)
    runs = {}
    for device in (HERE, THERE):
        there = copy.deepcopy(network).to(device)
        assert torch.equal(there(images.to(device)).cpu(), want)
        runs[device] = there.graph(3), there
    for device in (THERE, HERE):
        for _ in range(2):
            assert torch.equal(runs[device][0](images).cpu(), want)
            assert torch.equal(runs[device][1](images.to(device)).cpu(), want)


@pytest.mark.parametrize("kind", ["class token", "registers", "swin"])
def test_data_parallel(kind: str, made: Any) -> None:  # noqa: F811
    model, network = made(kind)
    whole = torch.nn.DataParallel(copy.deepcopy(network).to(HERE), [0, 1])
    for count in (1, 2, 7):
        images = draw(model, count, seed=count)
        for mode in MODES.values():
            with mode():
                assert torch.equal(whole(images.to(HERE)).cpu(), network(images))


@pytest.mark.parametrize("keep_bias", [False, True])
@pytest.mark.parametrize("family", ["vit", "swin"])
def test_patched_models_on_the_other_gpu(family: str, keep_bias: bool) -> None:
    model = build(family, num_classes=5)
    qflash.patch(model, keep_bias=keep_bias)
    images = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        want = copy.deepcopy(model).to(HERE)(images.to(HERE)).cpu()
        there = copy.deepcopy(model).to(THERE)
        for _ in range(3):
            assert torch.allclose(there(images.to(THERE)).cpu(), want, atol=1e-5)
        whole = torch.nn.DataParallel(copy.deepcopy(model).to(HERE), [0, 1])
        assert torch.allclose(whole(images.to(HERE)).cpu(), want, atol=1e-5)


def test_warmup_on_the_other_gpu() -> None:
    model = build("vit", num_classes=5).to(THERE)
    qflash.patch(model)
    images = torch.randn(2, 3, 32, 32, device=THERE)
    assert qflash.warmup(model, images, processes=2, progress=False) > 0
    with torch.no_grad():
        assert str(model(images).device) == THERE


def test_tensors_on_two_gpus_are_refused() -> None:
    query, key, value = heads(20, 20)
    with pytest.raises(ValueError, match="key is on cuda:1, query is on cuda:0"):
        qflash.attention(query.to(HERE), key.to(THERE), value.to(HERE))


def test_two_processes_with_a_gpu_each_give_the_bits_of_one() -> None:
    """DTensors whose parts travel through NCCL."""
    from test_sharding import check_two_processes

    check_two_processes("cuda")
