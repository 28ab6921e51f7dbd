"""What quantize_model looks at before and behind conversion, and what it says of images and models that do not do."""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qflash
from helpers import few
from qflash.network import checks, conversion
from qflash.network.capture import capture
from qflash.network.float_parts import FloatTwin
from qflash.network.quality import MOST_DB, Quality, sqnr_db
from qflash.network.storage import network_header, network_tensors
from qflash.specification import layers as op
from small_networks import build, draw, in_ours, normalise, rewrite, timm


def quantise(model: Any, batches: Any, **options: Any) -> Any:
    return qflash.quantize_model(model, batches, progress=False, **options)


def equal(a: Any, b: Any) -> bool:
    """Tell whether two networks are the same but for their quality."""
    first, second = network_tensors(a), network_tensors(b)
    headers = [{**network_header(each), "quality": None} for each in (a, b)]
    return all(torch.equal(x, second[name]) for name, x in first.items()) and headers[0] == headers[1]


@pytest.fixture
def model() -> Any:
    return build("vit", num_classes=10)


def test_the_network_says_how_close_it_is(model: Any) -> None:
    images = draw(model, 24)
    network = quantise(model, [images])
    with torch.inference_mode():
        want = model(normalise(model, images[:8]))
    got = network.dequantize(network(images[:8]))
    quality = network.quality
    assert (quality.images, quality.held_out, quality.float_parts) == (8, True, ())
    assert quality.sqnr_db == pytest.approx(sqnr_db(want, got), abs=1e-3)
    assert quality.worst_image_db == pytest.approx(min(map(sqnr_db, want, got)), abs=1e-3)
    assert 0 < quality.saturated_share < 0.01
    assert f"{quality.sqnr_db:.1f} dB on 8 images that the ranges did not see" in repr(network)
    with pytest.raises(dataclasses.FrozenInstanceError):
        quality.images = 3


def test_the_first_eight_of_sixteen_are_held_out(model: Any) -> None:
    images = draw(model, 16)
    loud = images.clone()
    loud[:8] = 255 * (loud[:8] > 127).to(torch.uint8)
    network = quantise(model, [loud])
    # what is kept out changes no integer
    assert equal(network, quantise(model, [images])) and network.quality.held_out
    assert network.quality.saturated_share > quantise(model, [images]).quality.saturated_share
    fewer = quantise(model, [images[:15]])
    assert (fewer.quality.images, fewer.quality.held_out) == (15, False)
    assert quantise(model, [images[:3]]).quality.images == 3


@pytest.mark.parametrize("sizes", few([[40], [1] * 40, [5, 0, 7, 2, 1, 25], [16, 24], [15, 1, 24]]))
def test_batches_do_not_matter(model: Any, sizes: list[int]) -> None:
    images = draw(model, 40)
    buffer = torch.empty_like(images)

    def stream() -> Iterator[torch.Tensor]:
        # one buffer for all, as some loaders have
        for part in images.split(sizes):
            buffer[: len(part)] = part
            yield buffer[: len(part)]

    network = quantise(model, stream())
    assert network.quality.images == 8 and network.quality.held_out
    # ranges of another batch size may differ in float32's last bit
    want = quantise(model, [images])
    assert sqnr_db(want.dequantize(want(images)), network.dequantize(network(images))) > 60


def test_saturation_is_counted(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as the reference clamps to int8; attention, which clamps elsewhere, can add few."""
    images = draw(model, 16)
    images[:8] = 255 * (images[:8] > 127).to(torch.uint8)
    network = quantise(model, [images])
    network.backend = "reference"
    clipped = total = 0
    saturate = op.saturate

    def counting(x: torch.Tensor, dtype: torch.dtype, *check: Any) -> torch.Tensor:
        nonlocal clipped, total
        if dtype == torch.int8:
            clipped += int(((x < -128) | (x > 127)).sum())
            total += x.numel()
        return saturate(x, dtype, *check)

    monkeypatch.setattr(op, "saturate", counting)
    network(images[:8])
    monkeypatch.undo()
    # the last block has one query, the class token
    attention = 8 * (17 + 1) * 48
    assert clipped > 50
    counted = network.quality.saturated_share * (total + attention)
    assert counted == pytest.approx(round(counted), abs=1e-6)
    assert clipped <= round(counted) <= clipped + 0.05 * attention


def test_the_quality_is_kept_in_the_file(model: Any, tmp_path: Path) -> None:
    network = quantise(model, [draw(model, 16)])
    path = tmp_path / "network.safetensors"
    network.save(path)
    assert qflash.load_model(path).quality == network.quality
    content = path.read_bytes()
    path.write_bytes(rewrite(content, in_ours(lambda ours: ours.pop("quality"))))
    old = qflash.load_model(path, verify=False)
    assert old.quality is None and "quality unknown" in repr(old)
    for change in (
        {"sqnr_db": "good"}, {"sqnr_db": 1e300}, {"saturated_share": -0.1}, {"images": 0}, {"images": 2.0}, {"held_out": 1},
        {"float_parts": [1]}, {"float_parts": "x"}, {"more": 1},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"of quality must be|quality must have the entries"):
            Quality.from_header({**json.loads(json.dumps(dataclasses.asdict(network.quality))), **change})
    for entry in (None, [], 3):
        with pytest.raises(ValueError, match="quality must have the entries"):
            Quality.from_header(entry)


def test_ratios_have_ends() -> None:
    one = torch.ones(3)
    assert sqnr_db(one, one) == MOST_DB and sqnr_db(0 * one, one) == -MOST_DB
    assert sqnr_db(one, one * torch.nan) == -MOST_DB
    assert sqnr_db(one, 1.1 * one) == pytest.approx(20, abs=1e-3)


def test_a_network_that_is_far_off_is_refused_or_warned_of(model: Any) -> None:
    images = draw(model, 16)
    # each query attends to one token, whichever is the largest after rounding
    model.blocks[1].attn.qkv.weight.data.mul_(1e4)
    with pytest.raises(ValueError, match=r"the integer network has .* min_sqnr=10 .* Most is lost in .*blocks\.1\.attn"):
        quantise(model, [images])
    with pytest.warns(UserWarning, match=r"the integer network has .*; most is lost in .*blocks\.1\.attn"):
        network = quantise(model, [images], min_sqnr=None)
    assert network.quality.sqnr_db < 10
    with pytest.raises(ValueError, match="less than min_sqnr=60"):
        quantise(build("vit"), [images], min_sqnr=60)
    for wrong in (float("nan"), "10", 1j):
        with pytest.raises(ValueError, match="min_sqnr must be a finite number of dB or None"):
            quantise(build("vit"), [images], min_sqnr=wrong)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantise(build("vit"), [images])


def test_a_network_that_answers_the_same_is_warned_of() -> None:
    torch.manual_seed(0)
    options = {"img_size": 28, "patch_size": 14, "embed_dim": 48, "depth": 2, "num_heads": 2, "num_classes": 0}
    model = timm.models.vision_transformer.VisionTransformer(init_values=1e-6, **options).eval()
    with pytest.warns(UserWarning, match="does not tell the 8 calibration images apart: their outputs differ by less than"):
        quantise(model, [torch.randint(0, 256, (16, 3, 28, 28), dtype=torch.uint8)], mean=(0.5,) * 3, std=(0.5,) * 3)


def test_a_network_whose_error_hides_the_images_is_warned_of() -> None:
    """A bias makes an SQNR that says nothing of them: activations differ by less than GELU's unit."""
    model = build("vit")
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.fc1.weight *= 1e-3
            block.mlp.fc2.weight *= 1e3
    with pytest.warns(UserWarning, match=r"does not tell the 8 calibration images apart: .*, [3-9]\d\.\d dB$"):
        quantise(model, [draw(model, 16)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda images: images[:1], "calibration images must differ, got one"),
        (lambda images: images[:1].expand(9, -1, -1, -1), "calibration images must differ, got 9 that are equal"),
        (lambda images: 0 * images, "calibration images must show something, got 12 of one colour each"),
        (lambda images: images[:, :, :1, :1].expand(images.shape), "calibration images must show something"),
        (lambda images: images[:1] // 255 + 128, "calibration images must show something"),
    ],
)
def test_images_that_do_not_differ_are_named(model: Any, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantise(model, [change(draw(model, 12))])


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (
            lambda images: images,
            r"must be a list or another iterable of batches, got torch.uint8 \(12, 3, 32, 32\); write \[im",
        ),
        (lambda images: {"image": images}, "got dict"),
        (lambda images: None, "got NoneType"),
        (lambda images: 3, "got int"),
        (lambda images: "images", "got str"),
        (lambda images: [()], "got an empty one"),
        (lambda images: [{}], "got entries none"),
        (lambda images: [{"pixel_values": images.float()}], r"'pixel_values' of torch.float32 \(12, 3, 32, 32\)"),
        (lambda images: [{"a": images, "b": images}], "must hold one uint8 tensor"),
        (lambda images: [None], "images must be a uint8 tensor, got NoneType"),
    ],
)
def test_other_batches_are_named(model: Any, batches: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        quantise(model, batches(draw(model, 12)))


def test_batches_of_other_forms(model: Any) -> None:
    images = draw(model, 12)
    want = quantise(model, [images])
    assert equal(want, quantise(model, [{"label": torch.zeros(12, dtype=torch.int64), "image": images}]))
    assert equal(want, quantise(model, [images[:0], (images, None), images[:0]]))
    with pytest.raises(ValueError, match="at least one image, got none"):
        quantise(model, [images[:0]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": (123.7, 116.3, 103.5), "std": (58.4, 57.1, 57.4)}, r"mean must be of pixels from 0 to 1.* divide it by 255"),
        ({"std": (58.4, 57.1, 57.4)}, "std must be of pixels from 0 to 1"),
        ({"mean": (float("nan"),) * 3}, "mean must be 3 numbers"),
        ({"std": (float("inf"),) * 3}, "std must be 3 numbers"),
    ],
)
def test_statistics_of_other_pixels_are_named(model: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantise(model, [draw(model, 12)], **options)


def test_a_model_in_another_state_is_named(model: Any) -> None:
    images = draw(model, 12)
    patched = qflash.patch(copy.deepcopy(model))
    with pytest.raises(ValueError, match=r"must not be patched, call qflash\.unpatch\(model\); patched are blocks\.0\.attn"):
        quantise(patched, [images])
    quantise(qflash.unpatch(patched), [images])
    model.head = nn.Sequential(nn.Dropout(0.2), model.head)
    with pytest.raises(ValueError, match=r"eval mode as a whole.* head\.0 is in training mode"):
        quantise(model, [images])
    with pytest.raises(ValueError, match="cls_token is on the meta device"):
        quantise(build("vit").to("meta"), [images])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_of_sixteen_bits(model: Any, dtype: torch.dtype) -> None:
    images = draw(model, 16)
    model.to(dtype)
    assert quantise(model, [images]).quality.sqnr_db > 30
    assert all(x.dtype == dtype for x in model.parameters())
    # a hook is a part of what is traced
    model.blocks[0].attn.proj.register_forward_hook(lambda _, __, out: out * (1 + 2**-6))
    assert quantise(model, [images]).quality.sqnr_db > 30


def test_precision_is_as_it_was(model: Any) -> None:
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            quantise(model, [draw(model, 16)], min_sqnr=None)
        assert torch.get_float32_matmul_precision() == "high"
        with checks.exact_floats(), torch.autocast("cpu", enabled=True):
            pass
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")


def test_precision_is_as_it_was_behind_threads_that_overlap() -> None:
    def found() -> list[object]:
        return [backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()]

    backends = torch.backends
    before = found()
    first, second = checks.exact_floats(), checks.exact_floats()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert found() == before


@pytest.mark.parametrize("kind", ["class token", "mean then norm", "norm first", "query and key norms", "grey", "swin"])
def test_what_is_read_computes_what_the_model_does(made: Any, kind: str) -> None:
    model, _ = made(kind)
    images = normalise(model, draw(model, 5, seed=20)).double()
    exact = copy.deepcopy(model).double()
    with torch.inference_mode():
        assert sqnr_db(exact(images), capture(exact, images[:2])(images)["output"]) > 190


def test_the_network_and_tools(model: Any) -> None:
    images = draw(model, 16)
    network = quantise(model, [images], keep_float=["blocks.1.attn"])
    assert "blocks.1.attn.core" in network.quality.float_parts
    network = quantise(model, [images])
    assert str(qflash.coverage(network)).startswith("2 of 2 attention layers in integers, 2 with static scales")
    with pytest.raises(ValueError, match="must be patched first"):
        qflash.calibrate(network, [images])
    for take in (lambda: torch.jit.trace(network, images), lambda: torch.onnx.export(network, (images,), "x", dynamo=False)):
        with pytest.raises(RuntimeError, match=r"cannot take an integer network: for ONNX use network\.export_onnx"):
            take()
    with pytest.raises(TypeError, match=r"torch\.fx cannot trace an integer network .* forward hook"):
        torch.fx.symbolic_trace(network)
    with pytest.raises(TypeError, match=r"torch\.jit\.script cannot take an integer network"):
        torch.jit.script(network)


def test_shared_blocks_are_compared(model: Any) -> None:
    model.blocks = nn.Sequential(*[model.blocks[0]] * 3)
    images = draw(model, 16)
    network = quantise(model, [images])
    found = qflash.compare(network, model, images[:4], contributions=False, progress=False)
    streams = [row for row in found.nodes if row.is_stream]
    assert len(streams) == 7 and min(row.sqnr_db for row in streams) > 30


def test_nan_is_not_below_a_bound() -> None:
    one = torch.ones(4, dtype=torch.float64)
    grid = conversion.Grid(one, 0 * one)
    for weight, bias in ((torch.eye(4).double() * torch.nan, None), (torch.eye(4).double(), one * torch.nan)):
        with pytest.raises(ValueError, match="cannot be brought to a unit"):
            conversion.fill_linear(conversion.Linear(4, 4, "int8"), weight, bias, grid, 0 * one, one)
    norm = FloatTwin(torch.ones(4), torch.tensor([torch.nan, 0, 0, 0]), 1e-5)
    with pytest.raises(ValueError, match="a normalisation's offset is too large"):
        conversion.finish_norm(conversion.LayerNorm(4, "int8"), norm, 1.0, 1.0)
    with pytest.raises(ValueError, match="the mean of 4 tokens has no room"):
        conversion.finish_mean(conversion.Mean(4, 4, "int8"), one, one, one * torch.nan)


def test_a_model_that_computes_something_else_than_was_captured(model: Any) -> None:
    images = normalise(model, draw(model, 2))
    captured = capture(model, images)
    with torch.inference_mode():
        checks.check_captured(captured, model, images)
        model.blocks[1].register_forward_hook(lambda _, __, out: out.abs())
        with pytest.raises(
            ValueError, match=r"its output 'output' has .* the model computes something else than torch\.export"
        ):
            checks.check_captured(captured, model, images)
    # an operation that was captured wrongly is named
    next(each for each in captured.operations if each.name == "blocks.1.norm2").epsilon = 9.0
    with torch.inference_mode(), pytest.raises(ValueError, match=r"first differs at norm of blocks\.1\.norm2 "):
        checks.check_captured(captured, build("vit", num_classes=10), images)
