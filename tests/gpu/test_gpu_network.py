"""The compiled kernels of integer networks have the bits of :mod:`qflash.specification.layers`."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch

import qflash
from helpers import same_bits
from network_cases import KINDS, MOVING, Layer, draw_layer_norm, draw_linear, extremes, integers, linear
from qflash.kernels.settled import weights_stay
from qflash.network import execution as layers
from qflash.network.modules import Linear
from small_networks import KINDS as SMALL_NETWORKS
from small_networks import build, draw, draw_images, made  # noqa: F401 - a fixture

pytestmark = pytest.mark.gpu


def check(layer: Layer) -> None:
    expected = layer.run("reference")
    for backend in ("triton", "auto", "reference"):
        assert same_bits(layer.run(backend, "cuda"), expected), (backend, layer)


def test_linear_layers_have_the_reference_bits() -> None:
    for number in range(200):
        check(draw_linear(number))


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_real_sizes(kind: str) -> None:
    """Small blocks and large ones; inputs that fill blocks and such that do not."""
    chance = random.Random(kind)
    for rows, inputs, outputs in (
        (197, 384, 1152),
        (8 * 197, 1536, 384),
        (64 * 197, 384, 1536),
        (12_000, 588, 1000),
        (64, 27, 9),
    ):
        x = integers(-128, 128, (rows, inputs), torch.int8, chance)
        check(linear(x, integers(-128, 128, (outputs, inputs), torch.int8, chance), kind, chance))


def test_layer_norms_have_the_reference_bits() -> None:
    for number in range(100):
        check(draw_layer_norm(number))
    for channels in (192, 384, 768, 1024, 1536, 3072, 4096):
        # so few that a program has two, and so many that it has eight
        for rows in (700, 5000):
            check(draw_layer_norm(channels + rows, channels, rows))


@pytest.mark.parametrize("draw", MOVING)
def test_tokens_from_and_to_other_places(draw: Callable[[int], Layer]) -> None:
    for number in range(120):
        check(draw(number))


def test_layers_at_the_ends_of_their_ranges() -> None:
    for layer in extremes():
        check(layer)


@pytest.mark.parametrize("kind", SMALL_NETWORKS)
def test_whole_networks_have_the_cpus_bits(made: Any, kind: str) -> None:  # noqa: F811
    """Launches one behind the other, each begun before the one ahead has ended, alone and in a CUDA graph."""
    model, network = made(kind)
    network = copy.deepcopy(network).cuda()
    for batch in (1, 2, 7, 64):
        images = draw(model, batch, seed=batch)
        want = made(kind)[1](images)
        images = images.cuda()
        for _ in range(3):
            assert torch.equal(network(images).cpu(), want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [network(images) for _ in range(4)]
        for _ in range(5):
            for out in outputs:
                out.zero_()
            graph.replay()
            assert all(torch.equal(out.cpu(), want) for out in outputs)


@pytest.mark.parametrize("promised", [False, True])
def test_weights_written_by_the_kernel_ahead(promised: bool) -> None:
    """A layer reads weights early only where a launch was counted since they were written."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-128, 128, (197, 768), generator=generator, dtype=torch.int8)
    both = torch.randint(-128, 128, (2, 768, 768), generator=generator, dtype=torch.int8)
    numbers = torch.full((768,), 1 << 28, dtype=torch.int32)

    def layer(x: torch.Tensor, weight: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return layers.int8_linear(x, weight, numbers, numbers, 0, None, None, torch.int16, "auto")

    want = [layer(x, weight, numbers) for weight in both]
    x, both, numbers = x.cuda(), both.cuda(), numbers.cuda()
    weight, none = both[0].clone(), torch.zeros_like(both[0])
    for number in range(200):
        with weights_stay() if promised else contextlib.nullcontext():
            # by a kernel, no copy
            torch.bitwise_xor(both[number % 2], none, out=weight)
            found = [layer(x, weight, numbers) for _ in range(3)]
        assert all(torch.equal(each.cpu(), want[number % 2]) for each in found)


def test_hooks_that_write_weights(made: Any) -> None:  # noqa: F811
    model, network = made("class token")
    moved = copy.deepcopy(network).cuda()
    images = draw(model, 1, seed=3)
    want, given = network(images), images.cuda()
    linear = [part for part in moved.modules() if type(part) is Linear]
    kept = [part.weight.clone() for part in linear]
    none = torch.zeros((), dtype=torch.int8, device="cuda")
    for before, (part, weight) in zip(linear, list(zip(linear, kept, strict=True))[1:], strict=False):

        def write(*_: Any, part: Any = part, weight: torch.Tensor = weight) -> None:
            torch.bitwise_xor(weight, none, out=part.weight)

        for _ in range(20):
            part.weight.zero_()
            with before.register_forward_hook(write):
                assert torch.equal(moved(given).cpu(), want)


def test_a_captured_network(made: Any) -> None:  # noqa: F811
    model, network = made("swin")
    moved = copy.deepcopy(network).cuda()
    run = moved.graph(3)
    results = []
    for seed in range(4):
        images = draw(model, 3, seed=seed)
        results.append((run(images.cuda() if seed % 2 else images), network(images)))
    assert all(torch.equal(out.cpu(), want) for out, want in results)
    with pytest.raises(ValueError, match="images must be a batch of 3, for which the graph was captured, got 2"):
        run(images[:2])
    with pytest.raises(TypeError, match="images must be uint8"):
        run(images.float())


def test_a_network_of_several_sizes() -> None:
    """Moved as a whole; alone, in a CUDA graph of a size, and in batches of mixed sizes."""
    sizes = [(32, 32), (48, 32), (32, 64)]

    def images(size: tuple[int, int], count: int, seed: int) -> torch.Tensor:
        return draw_images(count, 3, max(size), seed)[:, :, : size[0], : size[1]].contiguous()

    for family in ("vit", "eva"):
        model = build(family, num_classes=10)
        network = qflash.quantize_model(model, [images(sizes[0], 16, 1)], sizes=sizes, progress=False)
        moved = copy.deepcopy(network).cuda()
        assert all(x.is_cuda for x in moved.buffers())
        for size in sizes:
            given = images(size, 3, 2)
            want = network(given)
            assert torch.equal(moved(given.cuda()).cpu(), want)
            assert torch.equal(moved.graph(3, size)(given).cpu(), want)
        mixed = [images(sizes[number % 3], 1, number)[0] for number in range(7)]
        assert torch.equal(moved([each.cuda() for each in mixed]).cpu(), network(mixed))
        with pytest.raises(ValueError, match="32 x 32, 48 x 32, 32 x 64"):
            moved(images((48, 48), 1, 3).cuda())


@pytest.mark.parametrize(
    ("name", "batches"), [("deit_small_patch16_224", (1, 8, 64)), ("swin_tiny_patch4_window7_224", (1, 8))]
)
def test_real_sizes_have_the_cpus_bits(name: str, batches: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    network = qflash.quantize_model(model, [draw(model, 4, seed=1)], progress=False)
    images = draw(model, max(batches), seed=2)
    first = network(images[:4])
    network = network.cuda()
    whole = network(images.cuda()).cpu()
    assert torch.equal(whole[:4], first[: len(whole)])
    for batch in batches:
        assert torch.equal(network(images[:batch].cuda()).cpu(), whole[:batch])


MODES: dict[str, Callable[[], Any]] = {
    "outside": contextlib.nullcontext,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("made_in", MODES)
@pytest.mark.parametrize("called_in", MODES)
def test_a_captured_network_of_another_mode(made_in: str, called_in: str, made: Any) -> None:  # noqa: F811
    model, network = made("class token")
    with MODES[made_in]():
        run = copy.deepcopy(network).cuda().graph(3)
    for drawn_in in MODES:
        with MODES[drawn_in]():
            images = draw(model, 3, seed=5)
        with MODES[called_in]():
            assert torch.equal(run(images).cpu(), network(images))
            assert torch.equal(run(images.cuda()).cpu(), network(images))


@pytest.mark.parametrize("kind", ["vit", "swin"])
def test_a_model_on_a_gpu_is_quantised_there(kind: str) -> None:
    """TF32 is no reason to take a model for another one, and a hook is a part of it."""
    model = build(kind, num_classes=10)
    images = draw(model, 24)
    on_cpu = qflash.quantize_model(model, [images], progress=False)
    model = model.cuda()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        network = qflash.quantize_model(model, [images], progress=False)
        assert torch.get_float32_matmul_precision() == "high"
        assert network.output_scale == pytest.approx(on_cpu.output_scale, rel=1e-2)
        assert network.quality is not None and on_cpu.quality is not None
        assert network.quality.sqnr_db > 30 and network.quality.held_out
        assert network.quality.saturated_share == pytest.approx(on_cpu.quality.saturated_share, abs=2e-3)
        model.head.register_forward_hook(lambda _, __, out: out + 1)
        hooked = qflash.quantize_model(model, [images], progress=False)
        assert hooked.quality is not None and hooked.quality.sqnr_db > 30
        assert not torch.equal(hooked(images.cuda()), network(images.cuda()))
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("kind", ["class token", "swin"])
def test_logits_are_those_of_files_without_64_bits(
    kind: str,
    made: Callable[[str], tuple[Any, Any]],  # noqa: F811 - a fixture
    tmp_path: Any,
) -> None:
    """The GPU, the reference back end and onnxruntime: tests/network/test_runtimes.py has the others, and the same images."""
    runtime = pytest.importorskip("onnxruntime")
    model, network = made(kind)
    images = draw(model, 2, seed=31)
    reference = copy.deepcopy(network)
    reference.backend = "reference"
    wanted = reference(images)
    here = copy.deepcopy(network).to("cuda")
    assert torch.equal(here(images.cuda()).cpu(), wanted)
    for int64 in (True, False):
        network.export_onnx(tmp_path / "network.onnx", int64=int64)
        session = runtime.InferenceSession(str(tmp_path / "network.onnx"), providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {"images": images.numpy()})
        assert torch.equal(torch.from_numpy(found), wanted)
