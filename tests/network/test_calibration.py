"""Ranges are a function of the images alone: of no batch size, of no other thread, and of rows that no grid chooses."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qflash
from helpers import few, slow
from qflash.network.calibration import EXPECTED, METHODS, Observer, _marks
from small_networks import build, decibels, draw, normalise

SPLITS = (1, 5, 16)


def observed(parts: Any, percentile: float = 99.0) -> dict[str, tuple[torch.Tensor, ...]]:
    """Return the ranges that every method finds on a stream of tensors."""
    observer = Observer(keep=True)
    for part in parts:
        observer.add(part)
    found = {method: observer.range(method, percentile) for method in METHODS}
    return {method: (each.low, each.high, each.mean) for method, each in found.items()}


def same(a: dict[str, tuple[torch.Tensor, ...]], b: dict[str, tuple[torch.Tensor, ...]]) -> bool:
    return all(torch.equal(x, y) for method in METHODS for x, y in zip(a[method], b[method], strict=True))


@pytest.mark.parametrize("tokens", [1, 17, 64, 256])
@pytest.mark.parametrize("images", [24, 90])
def test_where_batches_end_changes_no_bit(tokens: int, images: int) -> None:
    torch.manual_seed(tokens)
    # of every magnitude, so that sums in another order are others
    x = torch.randn(images, tokens, 5) * torch.randn(images, tokens, 1).exp() ** 4 + 3
    whole = observed([x])
    for size in (1, 2, 7, 16, images):
        assert same(observed(x.split(size)), whole), size
    assert same(observed([x[:0], *x.split(11), x[:0]]), whole)
    assert same(observed([x.mT.contiguous().mT]), whole)
    rows = x.flatten(0, 1).double()
    torch.testing.assert_close(whole["minmax"][2], rows.mean(dim=0), rtol=1e-13, atol=1e-13)
    if len(rows) <= 4096:
        torch.testing.assert_close(whole["percentile"][1], rows.quantile(0.99, dim=0), rtol=1e-13, atol=0)
        torch.testing.assert_close(whole["percentile"][0], rows.quantile(0.01, dim=0), rtol=1e-13, atol=0)


@pytest.mark.parametrize("period", [2, 3, 7, 8, 14, 16, 24, 32, 37, 49, 64, 196, 197, 256])
def test_the_sample_has_all_tokens_of_an_image_alike(period: int) -> None:
    """Of every place of a grid as many rows as of the others, but for chance."""
    observer, count = Observer(keep=True), 1 << 16
    for rows in (torch.arange(count) % period).float()[:, None].split(1000):
        observer.add(rows)
    _, sample = observer._least_marks()
    assert sample.shape == (4096, 1)
    found, mean = torch.bincount(sample.flatten().long(), minlength=period).double(), 4096 / period
    # chi squared; a strided sample has 4096 and more
    assert float(((found - mean) ** 2 / mean).sum()) < period + 6 * (2 * period) ** 0.5
    # a percentile is that of all rows, but for the sample's error
    ends = observer.range("percentile", 90.0)
    assert abs(float(ends.high) / (period - 1) - 0.9) < 0.05 + 1 / period
    assert abs(float(ends.low) / (period - 1) - 0.1) < 0.05 + 1 / period


def test_marks_are_those_of_splitmix64() -> None:
    """The generator's published outputs for seed 0, which belong to places 1, 2 and 3."""
    found = [mark % (1 << 64) for mark in (*_marks(1, 2).tolist(), *_marks(3, 1).tolist())]
    assert found == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_what_is_kept_has_a_limit() -> None:
    observer, sizes = Observer(keep=True), []
    for step in range(40):
        observer.add(torch.randn(2000, 8, generator=torch.Generator().manual_seed(step)))
        sizes.append(len(pickle.dumps(observer)))
    assert max(sizes) < 5200 * 8 * 4 + 100_000
    assert observer.count == 80_000


def test_no_row_is_kept_for_minima_and_maxima() -> None:
    observer = Observer(keep=False)
    for _ in range(20):
        observer.add(torch.randn(2000, 8))
    assert len(pickle.dumps(observer)) < 300 * 8 * 4 + 5000


@pytest.mark.parametrize(("rows", "together"), [(300, 1), (128, 1), (50, 3), (7, 19)])
def test_a_further_image_is_expected_near_the_others(rows: int, together: int) -> None:
    """Images of few rows are taken together until there are 128; what is left over at the end does not count."""
    few = 8 * together - 1
    observer, generator = Observer(keep=False), torch.Generator().manual_seed(3)
    images = torch.randn(310, rows, 6, generator=generator) * torch.tensor([1, 2, 3, 1e-3, 1e3, 0.0]) + 5
    for image in images[:few]:
        observer.add(image)
    found, seen = observer.range(EXPECTED, 99.99), images[:few].double().flatten(0, 1)
    # seven groups say too little
    assert torch.equal(found.low, seen.amin(dim=0)) and torch.equal(found.high, seen.amax(dim=0))
    for image in images[few:]:
        observer.add(image[None])
    groups = images[: 310 // together * together].double().view(-1, together * rows, 6)
    found, low, high = observer.range(EXPECTED, 99.99), groups.amin(dim=1), groups.amax(dim=1)
    torch.testing.assert_close(found.low, low.mean(dim=0) - 2.5 * low.std(dim=0), rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(found.high, high.mean(dim=0) + 2.5 * high.std(dim=0), rtol=1e-12, atol=1e-9)
    assert torch.equal(found.mean, observer.range("minmax", 99.99).mean)


def test_expected_ranges_do_not_grow_with_the_number_of_images() -> None:
    """Of Gaussian rows minima and maxima do, from 10 to 400 images by a sixth."""
    generator = torch.Generator().manual_seed(4)
    widths: dict[tuple[str, int], float] = {}
    observer = Observer(keep=False)
    for count in range(1, 401):
        observer.add(torch.randn(256, 200, generator=generator))
        for method in (EXPECTED, "minmax"):
            if count in (10, 400):
                widths[method, count] = float(observer.range(method, 99.99).half.mean())
    assert abs(widths[EXPECTED, 400] / widths[EXPECTED, 10] - 1) < 0.03
    assert widths["minmax", 400] / widths["minmax", 10] > 1.15


@pytest.mark.parametrize("method", few([EXPECTED, *METHODS], 2))
@pytest.mark.parametrize("family", ["vit", slow("swin")])
def test_networks_do_not_depend_on_batches(family: str, method: str, tmp_path: Path) -> None:
    model = build(family, num_classes=10)
    images = draw(model, 16)
    files = []
    for size in SPLITS:
        batches = [images[:0], *images.split(size)]
        qflash.quantize_model(model, batches, method=method, progress=False).save(tmp_path / "network.safetensors")
        files.append((tmp_path / "network.safetensors").read_bytes())
    assert all(each == files[0] for each in files)


def test_percentiles_of_a_grid_of_tokens() -> None:
    """More tokens than are kept, with a left column unlike the rest, which a strided sample takes for all of them."""
    model = build("vit", img_size=128, embed_dim=24, depth=1, num_classes=10)
    with torch.no_grad():
        model.pos_embed[:, 1::16] *= 0.01
    images = draw(model, 24)
    with torch.inference_mode():
        want = model(normalise(model, images))
    found = []
    for size in (1, 16, 24):
        network = qflash.quantize_model(model, images.split(size), method="percentile", progress=False)
        found.append(network.dequantize(network(images)))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert decibels(want, found[0]) > 24


class Attends(nn.Module):
    """Attention of what it is given, so that no float product comes before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = x.unbind(1)
        return F.scaled_dot_product_attention(query, key, value)


def scales_of(model: nn.Module) -> list[torch.Tensor]:
    return [x for name, x in model.state_dict().items() if "qflash_scales" in name]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_static_scales_do_not_depend_on_batches(method: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(24, 3, 2, 196, 8) * torch.randn(24, 3, 2, 196, 1).exp()
    recipe = qflash.ACCURATE.replace(smooth_key=True)
    found = []
    for size in (1, 7, 24):
        model = qflash.patch(Attends().eval(), recipe)
        found.append(scales_of(qflash.calibrate(model, x.split(size), method=method, percentile=99.0, progress=False)))
    assert equal(found[0], found[1]) and equal(found[0], found[2])
    # a whole network, whose float products may round otherwise in another batch
    floating = build("vit", num_classes=10)
    images = normalise(floating, draw(floating, 24))
    with torch.inference_mode():
        want = floating(images)
        for size in (1, 24):
            model = qflash.patch(copy.deepcopy(floating))
            qflash.calibrate(model, images.split(size), method=method, progress=False)
            found.append(model(images))
    assert decibels(found[3], found[4]) > 45
    assert decibels(want, found[3]) > 25


def together(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Return what functions return in threads that begin at the same time and change often."""
    barrier, results, interval = threading.Barrier(len(jobs)), [None] * len(jobs), sys.getswitchinterval()

    def run(place: int) -> None:
        barrier.wait()
        try:
            results[place] = jobs[place]()
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(jobs))]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize("family", ["vit", slow("swin")])
def test_threads_that_share_a_model_do_not_mix(family: str) -> None:
    model = build(family, num_classes=10)
    images = [draw(model, 8, seed) // (seed + 1) for seed in range(4)]

    def quantize(seed: int) -> list[torch.Tensor]:
        network = qflash.quantize_model(model, images[seed].split(3), progress=False)
        return [network(images[0]), *network.state_dict().values()]

    alone = [quantize(seed) for seed in range(4)]
    for got, want in zip(together([lambda seed=seed: quantize(seed) for seed in range(4)]), alone, strict=True):
        assert equal(got, want)
    assert not equal(alone[0], alone[1])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_other_threads_compute_meanwhile_is_not_looked_at() -> None:
    model = build("vit", num_classes=10)
    images, loud = draw(model, 12), 30 * normalise(model, draw(model, 2))
    want = qflash.quantize_model(model, [images], progress=False)
    stop = threading.Event()

    def serve() -> None:
        with torch.inference_mode():
            while not stop.is_set():
                model(loud)

    def look() -> Any:
        try:
            return qflash.quantize_model(model, [images], progress=False)
        finally:
            stop.set()

    network = together([look, serve])[0]
    assert equal(list(network.state_dict().values()), list(want.state_dict().values()))


def test_threads_that_calibrate_a_model_do_not_mix() -> None:
    model = qflash.patch(build("vit", num_classes=10))
    batches = [normalise(model, draw(model, 8, seed)) * 0.5**seed for seed in range(4)]
    alone = [scales_of(qflash.calibrate(copy.deepcopy(model), batches[seed].split(3), progress=False)) for seed in range(4)]
    jobs = [lambda seed=seed: qflash.calibrate(model, batches[seed].split(3), progress=False) for seed in range(4)]
    for _ in range(3):
        assert all(each is model for each in together(jobs))
        # those of whoever came last, in all layers
        assert sum(equal(scales_of(model), each) for each in alone) == 1


def test_a_calibrated_model_serves_others_while_it_is_calibrated_again() -> None:
    model = qflash.patch(build("vit", num_classes=10))
    batch, loud = normalise(model, draw(model, 8, 1)), 30 * normalise(model, draw(model, 8, 2))
    qflash.calibrate(model, [batch], progress=False)
    scales = scales_of(model)
    with torch.inference_mode():
        want = model(loud)
    seen = []

    def infer() -> torch.Tensor:
        with torch.inference_mode():
            return model(loud)

    def forward(model: Any, batch: torch.Tensor) -> None:
        seen.append(together([infer])[0])
        model(batch)
        seen.append(together([infer])[0])

    qflash.calibrate(model, [batch], forward=forward, progress=False)
    assert len(seen) == 2 and all(torch.equal(each, want) for each in seen)
    assert equal(scales_of(model), scales)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("first", [0, 1])
def test_calibrations_that_overlap_leave_compiling_as_it_was(first: int) -> None:
    import torch._dynamo.eval_frame as frame

    models = [qflash.patch(build("vit", num_classes=10)) for _ in range(2)]
    batch = normalise(models[0], draw(models[0], 2))
    inside, done = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]

    def calibrate(number: int) -> None:
        def forward(model: Any, batch: torch.Tensor) -> None:
            model(batch)
            inside[number].set()
            # both are inside at once, and `first` is the first to leave
            (inside[1 - number] if number == first else done[first]).wait(60)

        if number != 0:
            inside[0].wait(60)
        qflash.calibrate(models[number], [batch], forward=forward, progress=False)
        done[number].set()

    before = frame._stance
    together([lambda: calibrate(0), lambda: calibrate(1)])
    assert all(event.is_set() for event in (*inside, *done))
    assert frame._stance == before


def test_batches_that_use_the_model_are_not_looked_at() -> None:
    """The iterator of the batches runs in the same thread, between the calls that count."""
    model = build("vit", num_classes=10)
    images, loud = draw(model, 12), 30 * normalise(model, draw(model, 2))

    def batches(batch: Any, model: Any) -> Iterator[Any]:
        for part in batch.split(4):
            model(loud)
            yield part

    networks = [qflash.quantize_model(model, each, progress=False) for each in (images.split(4), batches(images, model))]
    assert equal(*(list(network.state_dict().values()) for network in networks))
    patched = [qflash.patch(copy.deepcopy(model)) for _ in range(2)]
    x = normalise(model, images)
    for each, given in zip(patched, (x.split(4), batches(x, patched[1])), strict=True):
        qflash.calibrate(each, given, progress=False)
    assert equal(*(scales_of(each) for each in patched))


@pytest.mark.parametrize(("rows", "channels"), [(7, 5), (256, 12), (1000, 12), (600, 1025)])
def test_a_covariance_is_that_of_the_stream(rows: int, channels: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, channels, generator=generator) @ torch.randn(channels, channels, generator=generator)
    # a channel that is a large constant, nearly: float32 has to hold what little it moves
    x[:, 2] = 3000 + 0.01 * x[:, 2]
    found = []
    for cuts in ([], [1, 5], list(range(3, rows, 100))):
        observer = Observer(keep=False, products=True)
        for part in x.tensor_split(cuts):
            observer.add(part)
        found.append(observer.range("minmax", 99.99).covariance)
    sizes = [len(part) for part in found[0]]
    assert sum(sizes) == channels and max(sizes) <= 1024 and max(sizes) - min(sizes) <= 1
    wanted = torch.cov(x.double().T, correction=0)
    deviation = wanted.diagonal().sqrt()
    first = 0
    for part in found[0]:
        here = slice(first, first + len(part))
        error = (part - wanted[here, here]).abs() / (deviation[here, None] * deviation[here])
        assert float(error.max()) < 0.02
        first += len(part)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize(("rows", "products", "parts"), [(8, False, 0), (8, True, 1), (7, True, 0)])
def test_a_covariance_is_kept_where_it_is_asked_for_and_rows_are_enough(rows: int, products: bool, parts: int) -> None:
    observer = Observer(keep=False, products=products)
    observer.add(torch.randn(rows, 8))
    assert len(observer.range("minmax", 99.99).covariance) == parts
