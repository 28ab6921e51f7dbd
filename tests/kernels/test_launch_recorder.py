"""Launches that are noted and made again: on other tensors of the same kind they give what the whole way gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from helpers import DEVICE, make_inputs, run_by_address, same_bits
from qflash import backends, execution, plan_cache
from qflash.kernels.launch_recorder import KernelLaunch, LaunchRecorder, record
from qflash.kernels.triton.quantize import launch_quantize
from qflash.specification.attention_call import float_call, int8_call
from qflash.specification.recipe import PRESETS

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/gpu repeats calls on a GPU")
Tensors = Sequence["torch.Tensor | None"]
NAMES = list(PRESETS)


@pytest.fixture(autouse=True)
def by_interpreter(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launch repeated calls in the interpreter; returns the names of the kernels that were."""
    launched: list[str] = []
    monkeypatch.setattr(KernelLaunch, "launcher", run_by_address(launched))
    return launched


def attend(recipe: str, is_causal: bool = False) -> Callable[..., torch.Tensor]:
    return lambda *tensors: execution.attend(float_call(*tensors, is_causal, 0.2, PRESETS[recipe]), "triton")


def expected(tensors: Tensors, recipe: str, is_causal: bool = False) -> torch.Tensor:
    return execution.attend(float_call(*tensors, is_causal, 0.2, PRESETS[recipe]), "reference")


def draw(
    seed: int, keys: int, mask: str, layout: str = "contiguous", dtype: torch.dtype = torch.float16, **sizes: int
) -> Tensors:
    """Return query, key, value and mask."""
    inputs = make_inputs(1, 2, 17, keys, key_heads=1, dtype=dtype, layout=layout, seed=seed, **sizes)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.rand((1, 1, 17, keys), generator=generator) > 0.3
    bias = torch.randn((1, 2, 17, keys), generator=generator).to(dtype)
    return (*inputs, {"none": None, "bool": hidden, "float": bias}[mask])


# one launch; quantised by launches of their own, and attention; keys and values quantised together, and attention
KINDS = {"fused": (40, 32), "short": (150, 128), "long": (300, 32)}


@pytest.mark.parametrize("layout", ["contiguous", "packed"])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_a_repeated_call_has_the_reference_bits(kind: str, mask: str, layout: str, by_interpreter: list[str]) -> None:
    keys, head_dim = KINDS[kind]
    for causal in (False, True) if mask == "none" else (False,):
        tensors = draw(0, keys, mask, layout, head_dim=head_dim)
        out, prepare = record(attend("default", causal), tensors)
        assert same_bits(out, expected(tensors, "default", causal))
        again = prepare()
        assert again is not None
        for seed in (1, 2):
            others = draw(seed, keys, mask, layout, head_dim=head_dim)
            before = [None if x is None else x.clone() for x in others]
            by_interpreter.clear()
            got = again(*others)
            assert got.stride() == out.stride()
            assert same_bits(got, expected(others, "default", causal))
            assert all(x is None or torch.equal(x, y) for x, y in zip(others, before, strict=True))
            # a mask is converted by a kernel of its own, unless one does everything
            launches = {"fused": 1, "short": 6, "long": 3}[kind] + (mask == "float" and kind != "fused")
            # hidden tokens are found by one or two, and copied for what does not take them from their places
            launches += 0 if mask == "none" else {"fused": 1, "short": 3, "long": 2}[kind]
            # keys behind the last query are left out, and so few are of another kind
            assert causal or len(by_interpreter) == launches


def test_recipes_that_pytorch_prepares_are_not_repeated() -> None:
    kept = {}
    for recipe in NAMES:
        tensors = draw(0, 40, "none", dtype=torch.float32)
        _, prepare = record(attend(recipe), tensors)
        again = prepare()
        kept[recipe] = again is not None
        if again is not None:
            others = draw(1, 40, "none", dtype=torch.float32)
            assert same_bits(again(*others), expected(others, recipe))
    assert kept["default"]
    # rotates
    assert not kept["accurate"]


@pytest.mark.parametrize(
    ("recipe", "mask", "kept"), [("default", "none", True), ("default", "float", True), ("accurate", "none", False)]
)
def test_an_operator_notes_a_call_once(
    recipe: str, mask: str, kept: bool, monkeypatch: pytest.MonkeyPatch, plans: dict[object, object]
) -> None:
    """Whether it can be repeated or not; as on a GPU, which there need not be."""
    monkeypatch.setattr(plan_cache, "place_of", lambda tensors: 0)
    monkeypatch.setattr(
        backends, "resolve_backend", lambda backend, device: "reference" if backend == "reference" else "triton"
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    gpu = backends.find_backend("triton", torch.device("cpu"))
    with (
        mock.patch("qflash.kernels.backend.record", wraps=record) as recorded,
        mock.patch.object(gpu, "attend", wraps=gpu.attend) as noted,
    ):
        for seed in range(3):
            tensors = draw(seed, 300, mask)
            got = execution.attention(*tensors, False, 0.2, PRESETS[recipe].key, "triton")
            assert same_bits(got, execution.attend(float_call(*tensors, False, 0.2, PRESETS[recipe]), "reference"))
    assert recorded.call_count == 1
    assert noted.call_count == (1 if kept else 3)
    assert [len(plans), len(plan_cache._unrepeatable)] == [kept, not kept]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_tensors_that_lie_in_one_place_are_told_apart(kind: str) -> None:
    keys, head_dim = KINDS[kind]
    query = torch.randn(1, 2, keys, head_dim).half()
    # misaligned by as much as the first ones
    query = torch.cat([query.new_zeros(4), query.flatten()])[4:].view(query.shape)
    out, prepare = record(attend("default"), (query, query, query, None))
    assert same_bits(out, expected((query, query, query, None), "default"))
    with mock.patch.object(LaunchRecorder, "launch", autospec=True, side_effect=LaunchRecorder.launch) as noted:
        again = prepare()
    assert again is not None
    # tensors that stand in for these hold nothing that a kernel may read
    assert noted.called and not any(call.args[0].launching for call in noted.call_args_list)
    others = (*(torch.randn(query.shape).half() for _ in range(3)), None)
    assert same_bits(again(*others), expected(others, "default"))
    twice = others[0], others[1], others[1], None
    assert same_bits(again(*twice), expected(twice, "default"))


def test_what_is_more_than_launches_is_not_done_again_on_tensors_that_lie_in_one_place() -> None:
    """PyTorch would compute with tensors that nothing was written to."""
    query = torch.randn(1, 2, 40, 32).half()
    go = mock.Mock(side_effect=attend("accurate"))
    _, prepare = record(go, (query, query, query, None))
    assert prepare() is None and go.call_count == 1


@pytest.mark.parametrize("keys", [40, 300])
@pytest.mark.parametrize("out_dtype", [torch.int8, torch.float16])
def test_int8(keys: int, out_dtype: torch.dtype) -> None:
    def quantised(seed: int) -> Tensors:
        query, key, value, _ = draw(seed, keys, "none")
        parts: list[torch.Tensor | None] = []
        for x, granularity in ((query, "token"), (key, "head"), (value, "channel")):
            parts += execution.quantize(x, granularity, "reference")
        bias = execution.quantize_bias(torch.randn(1, 1, 17, keys, generator=torch.Generator().manual_seed(seed)))
        given = torch.full((1, 1, 1, 1), 0.01 * (1 + seed)) if out_dtype == torch.int8 else None
        return (*parts, bias, given)

    def go(backend: str) -> Callable[..., torch.Tensor]:
        def run(*tensors: torch.Tensor | None) -> torch.Tensor:
            *given, output_scale = tensors
            call = int8_call(*given, False, 0.2, output_scale, out_dtype, PRESETS["default"])  # type: ignore[arg-type]
            return execution.attend(call, backend)

        return run

    _, prepare = record(go("triton"), quantised(0))
    again = prepare()
    assert again is not None
    for seed in (1, 2):
        assert same_bits(again(*quantised(seed)), go("reference")(*quantised(seed)))


@pytest.mark.parametrize("granularity", ["token", "head", "channel", "tensor"])
def test_quantisation(granularity: str) -> None:
    """Scales in all but one are found by kernels; the one of a whole tensor is put together in PyTorch."""
    x = torch.randn(2, 3, 600, 40)
    with LaunchRecorder() as recording:
        values, _ = launch_quantize(x, granularity)
    again = recording.repeat((x,), values)
    assert (again is None) == (granularity == "tensor")
    if again is not None:
        y = torch.randn(2, 3, 600, 40)
        assert same_bits(again(y), launch_quantize(y, granularity)[0])


@pytest.mark.parametrize(
    ("step", "pure"),
    [
        (lambda x: x.view(2, 8)[:, 2:].mT, True),
        (lambda x: torch.empty_like(x), True),
        (lambda x: torch.empty(2, 3, 4).unbind(), True),
        (lambda x: x.new_empty(3).view(torch.uint8), True),
        (lambda x: x.contiguous().to(x.dtype), True),
        (lambda x: torch.promote_types(x.dtype, torch.float16), True),
        (lambda x: x + 1, False),
        (lambda x: x.new_zeros(3), False),
        (lambda x: x.clone(), False),
        (lambda x: x.half(), False),
        (lambda x: x.fill_(2.0), False),
        (lambda x: float(x[0]), False),
    ],
)
def test_what_is_more_than_launches_is_noticed(step: Callable[[torch.Tensor], Any], pure: bool) -> None:
    x = torch.ones(16)
    with LaunchRecorder() as recording:
        step(x)
    assert recording.is_pure == pure
    assert recording.launches == []


def test_launches_behind_a_failure_are_nobodys() -> None:
    with pytest.raises(ZeroDivisionError), LaunchRecorder() as recording:
        _ = 1 // 0
    launch_quantize(torch.randn(1, 1, 4, 16), "token")
    assert recording.launches == []


def test_what_was_there_before_is_not_repeated() -> None:
    """A table that launches read is neither the caller's nor made anew."""
    from qflash.kernels.triton.swin_bias import launch_window_bias

    table, index = torch.randn(5, 2), torch.randint(0, 5, (4, 4))
    for mask in (None, torch.zeros(3, 4, 4)):
        with LaunchRecorder() as recording:
            out = launch_window_bias(table, index, mask)
        assert recording.repeat((table,), out) is None
        again = recording.repeat((table, index, mask), out)
        assert again is not None
        assert same_bits(again(-table, index, mask)[..., :4], -out[..., :4])
