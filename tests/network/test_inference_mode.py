"""What is made in inference mode works outside, and the other way round."""

from __future__ import annotations

import contextlib
import copy
import itertools
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import qflash
from helpers import DEVICE, make_inputs, same_bits, slow
from qflash.network.cuda_graph import NetworkGraph
from small_networks import build, draw, made  # noqa: F401 - a fixture

MODES: dict[str, Callable[[], Any]] = {
    "outside": contextlib.nullcontext,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
}


class FakeCapture:
    """Stands for ``torch.cuda.graph``: what a replay computes is what the network makes of the input then."""

    def __init__(self, network: FakeNetwork) -> None:
        self.network, self.streams = network, []  # type: ignore[var-annotated]

    @contextlib.contextmanager
    def capture(self, graph: Any, stream: Any = None) -> Iterator[None]:
        self.streams.append(stream)
        yield

    def replay(self) -> None:
        # a replay knows no modes: kernels write to memory
        self.network.output.numpy()[...] = self.network.images.numpy().sum(axis=(1, 2, 3))[:, None]


class FakeNetwork:
    """A network that is on a GPU that is not there; it keeps what it was called with last."""

    image = 3, 4, 4

    def buffers(self) -> Iterator[Any]:
        yield types.SimpleNamespace(device=types.SimpleNamespace(type="cuda"))

    def prepared(self, images: torch.Tensor, **text: None) -> torch.Tensor:
        return images

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        self.images = images
        self.output = images.to(torch.int32).sum(dim=(1, 2, 3))[:, None]
        return self.output


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> FakeCapture:
    found = FakeCapture(FakeNetwork())
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **options: zeros(*size, **options))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: found)
    monkeypatch.setattr(torch.cuda, "graph", found.capture)
    return found


@pytest.mark.parametrize("made_in", MODES)
@pytest.mark.parametrize("called_in", MODES)
@pytest.mark.parametrize("drawn_in", MODES)
def test_a_graph_made_in_one_mode_and_called_in_another(
    made_in: str, called_in: str, drawn_in: str, capture: FakeCapture
) -> None:
    with MODES[made_in]():
        run = NetworkGraph(capture.network, 2)
    assert run.batch == 2 and len(capture.streams) == 1 and capture.streams[0] is not None
    kept = []
    for number in (1, 3):
        with MODES[drawn_in]():
            images = torch.full((2, 3, 4, 4), number, dtype=torch.uint8)
        with MODES[called_in]():
            out = run(images)
            assert out.tolist() == [[48 * number]] * 2
            assert out.is_inference() == (called_in == "inference")
            kept.append(out)
    assert kept[0].tolist() == [[48], [48]]
    # and in all others afterwards
    for mode in MODES.values():
        with mode():
            assert run(images).tolist() == [[144], [144]]


@pytest.mark.parametrize("batch", [torch.tensor(2), numpy.array(2), numpy.uint8(2)], ids=repr)
def test_batches_in_a_box(batch: Any, made: Any) -> None:  # noqa: F811
    _, network = made("class token")
    run = network.graph(batch)
    assert type(run.batch) is int and run.batch == 2
    for wrong in (numpy.float64(2), numpy.bool_(True), torch.tensor(True), torch.tensor(2.0), torch.tensor([2, 2]), "2"):
        with pytest.raises(TypeError, match="batch must be an integer, got "):
            network.graph(wrong)


def test_a_network_made_in_inference_mode_is_written_to_outside(made: Any, tmp_path: Path) -> None:  # noqa: F811
    model, network = made("class token")
    images = draw(model, 4)
    with torch.inference_mode():
        inside = qflash.quantize_model(model, [draw(model, 24)], progress=False)
        inside.save(tmp_path / "network")
        loaded = qflash.load_model(tmp_path / "network")
        want = network(images)
    for each in (inside, loaded):
        assert not any(x.is_inference() for x in each.buffers())
        for mode in MODES.values():
            with mode():
                assert torch.equal(each(images), want)
        each.load_state_dict(network.state_dict())
        assert torch.equal(each(images), want)


def test_a_model_made_in_inference_mode_is_quantised(made: Any) -> None:  # noqa: F811
    model, network = made("class token")
    images = draw(model, 24)
    with torch.inference_mode():
        own = copy.deepcopy(model)
    assert all(x.is_inference() and x.requires_grad for x in own.parameters())
    for mode in MODES.values():
        with mode():
            assert torch.equal(qflash.quantize_model(own, [images], progress=False)(images), network(images))


def test_a_model_calibrated_in_inference_mode_is_written_to_outside() -> None:
    model = build("vit", num_classes=3)
    images = torch.randn(4, 3, 32, 32)
    qflash.patch(model)
    with torch.inference_mode():
        qflash.calibrate(model, [images], progress=False)
        want = model(images)
    assert not any(x.is_inference() for x in model.buffers())
    model.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(images), want)


@pytest.mark.parametrize(("first", "then"), list(itertools.permutations(MODES, 2)))
def test_repeated_calls_of_several_modes(first: str, then: str, plans: dict[object, object]) -> None:
    def inputs(mode: str) -> tuple[torch.Tensor, ...]:
        with MODES[mode]():
            return tuple(x.to(DEVICE) + 0 for x in make_inputs(1, 2, 12, head_dim=16))

    lengths = torch.tensor([0, 5, 12], dtype=torch.int32, device=DEVICE)

    def packed(*tensors: torch.Tensor) -> torch.Tensor:
        query, key, value = (x[0].transpose(0, 1) for x in tensors)
        return qflash.varlen_attention(query, key, value, lengths, lengths, 7, 7)

    def int8(*tensors: torch.Tensor) -> torch.Tensor:
        out = qflash.int8_attention(*(qflash.quantize(x, "head") for x in tensors), output_scale=0.02)
        return out.values

    for call in (qflash.attention, int8, packed):
        want = call(*inputs("outside"))
        for mode in (first, first, then, then, first):
            for drawn in MODES:
                with MODES[mode]():
                    got = call(*inputs(drawn))
                    assert same_bits(got, want)
                    assert got.is_inference() == (mode == "inference")
                    got.zero_()
                if mode != "inference":
                    got.zero_()


def test_a_scale_belongs_to_the_mode_of_its_tensor() -> None:
    tensors = [qflash.quantize(x.to(DEVICE), "head") for x in make_inputs(1, 2, 12, head_dim=16)]
    out = qflash.int8_attention(*tensors, output_scale=0.02)
    with torch.inference_mode():
        assert out.scale.item() == pytest.approx(0.02)
    out.scale.mul_(2)
    assert out.scale.item() == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("first", "then", "compiled"),
    [
        # compiling takes seconds: every day the two modes that differ most
        slow(*modes, compiled) if compiled and "no grad" in modes else (*modes, compiled)
        for compiled in (False, True)
        for modes in itertools.permutations(MODES, 2)
    ],
)
def test_patched_models_of_several_modes(first: str, then: str, compiled: bool) -> None:
    """Swin's bias is worked out in one mode and kept for the other."""
    torch._dynamo.reset()
    model = build("swin", num_classes=3).requires_grad_(False)
    qflash.patch(model, keep_bias=True)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        want = model(images)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    for mode in (first, first, then, then, first):
        with MODES[mode]():
            if compiled:
                model(images)
            assert torch.allclose(run(images), want, atol=1e-5)
