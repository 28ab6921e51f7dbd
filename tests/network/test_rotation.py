"""The residual stream in rotated channels: which streams are, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import STATISTICS, TwoOutputs, of_transformers, published, vit
from torch import nn

import qflash
from helpers import few
from qflash.network.calibration import Calibration
from qflash.network.capture import capture
from qflash.network.capture.captured import Captured
from qflash.network.capture.unread import drop_unread_rows
from qflash.network.modules import LayerNorm, Linear, WideLinear
from qflash.network.quality import sqnr_db
from qflash.network.rotation import Rotation, rotate_streams
from small_networks import build, decibels, draw, draw_images, normalise

SIDE = 32


@pytest.mark.parametrize(("channels", "mixed"), [(4, 4), (8, 4), (48, 16), (96, 16), (192, 64), (384, 64), (768, 64), (100, 4)])
def test_a_rotation_is_orthogonal_and_keeps_ones(channels: int, mixed: int) -> None:
    rotation = Rotation.of(channels)
    assert rotation is not None
    matrix = rotation(torch.eye(channels, dtype=torch.float64))
    assert torch.equal(matrix, matrix.T)
    assert torch.allclose(matrix @ matrix, torch.eye(channels, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(matrix.sum(dim=1), torch.ones(channels, dtype=torch.float64), atol=1e-12)
    assert matrix.abs().unique().tolist() == ([0.0] if mixed < channels else []) + [mixed**-0.5]
    x = torch.randn(3, channels, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) ** 3
    norms = [nn.functional.layer_norm(y, (channels,)) for y in (rotation(x), x)]
    assert torch.allclose(norms[0], rotation(norms[1]), atol=1e-10)


@pytest.mark.parametrize("channels", [1, 2, 3, 6, 37, 49])
def test_channels_that_are_no_multiple_of_four_stay(channels: int) -> None:
    assert Rotation.of(channels) is None


class HiddenStates(nn.Module):
    """Returns the stream behind every block, one token of it, and the features."""

    def __init__(self) -> None:
        super().__init__()
        self.model = vit(num_classes=0)

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        states = [self.model.patch_embed(images)]
        for block in self.model.blocks:
            states.append(block(states[-1]))
        return {"first": states[1], "token": states[2][:, 3], "features": self.model.norm(states[2])}


class StreamInAGelu(nn.Module):
    """A reader that mixes channels by no matrix: GELU of the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.model = vit(num_classes=0)
        self.more = nn.Linear(48, 48)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.model.blocks(self.model.patch_embed(images))
        return self.model.norm(x) + self.more(nn.functional.gelu(x))


class StreamInAttention(nn.Module):
    """A reader that has no matrix: attention of one head on the stream itself."""

    def __init__(self) -> None:
        super().__init__()
        self.model = vit(num_classes=0)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.model.blocks(self.model.patch_embed(images))
        return self.model.norm(x) + nn.functional.scaled_dot_product_attention(x, x, x)


# model, rotated streams, normalisations that keep their weights
MODELS: dict[str, tuple[Any, int, int]] = {
    "class token": (lambda: vit(), 1, 0),
    "no head": (lambda: vit(num_classes=0), 1, 0),
    "all tokens": (lambda: vit(num_classes=0, global_pool=""), 1, 0),
    "mean then norm": (lambda: vit(global_pool="avg"), 1, 0),
    "norm then mean": (lambda: vit(global_pool="avg", fc_norm=False), 1, 0),
    "mean of features": (lambda: vit(num_classes=0, global_pool="avg", fc_norm=False), 1, 0),
    "registers and layer scale": (lambda: vit(reg_tokens=3, no_embed_class=True, init_values=0.2), 1, 0),
    "query and key norms": (lambda: vit(qk_norm=True), 1, 4),
    "attention pooling": (lambda: vit(class_token=False, global_pool="map"), 2, 0),
    "two heads": (lambda: published("deit_tiny_distilled_patch16_224", depth=2), 1, 0),
    "bias of positions": (lambda: published("beit_base_patch16_224", depth=1, embed_dim=32, num_heads=2), 1, 0),
    "logits and features": (TwoOutputs, 1, 0),
    "hidden states": (HiddenStates, 1, 0),
    "Swin": (lambda: build("swin", num_classes=6), 1, 6),
    "Swin without a head": (lambda: build("swin", num_classes=0), 1, 6),
    "class and patch tokens": (lambda: of_transformers("Dinov2", "Model"), 1, 0),
    "norm before the blocks": (lambda: vit(pre_norm=True), 0, 6),
    "GELU of the stream": (StreamInAGelu, 0, 5),
    "attention of the stream": (StreamInAttention, 0, 5),
    "odd channels": (lambda: vit(embed_dim=18, num_heads=2), 0, 5),
}


def random_weights(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def captured_of(name: str) -> tuple[nn.Module, Captured, torch.Tensor]:
    model = random_weights(MODELS[name][0]())
    images = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(2))
    return model, capture(model, images), images


@pytest.mark.parametrize("name", few(MODELS, 6))
def test_outputs_stay_when_streams_are_rotated(name: str) -> None:
    model, captured, images = captured_of(name)
    drop_unread_rows(captured)
    _, streams, norms = MODELS[name]
    assert rotate_streams(captured) == streams
    kept = [each for each in captured.operations if each.kind == "norm" and each.weight is not None]
    assert len(kept) == norms
    with torch.no_grad():
        wanted, found = captured.pick(model(images)), captured(images)
    assert wanted.keys() == found.keys()
    for key, want in wanted.items():
        assert sqnr_db(want, found[key]) > 90


@pytest.mark.parametrize("name", few(MODELS, 6))
def test_calibration_sees_the_rotated_values(name: str) -> None:
    _, captured, images = captured_of(name)
    rotate_streams(captured)
    # those that ranges are asked for: what layers, normalisations, means and joins take, and sums
    kinds = "linear", "norm", "mean", "join", "unrotate"
    taken = [(node, view) for each in captured.operations if each.kind in kinds
             for node, view in zip(each.seen, each.inputs, strict=True) if view.source.kind != "images"]  # fmt: skip
    made = [each for each in captured.operations if each.kind in ("add", "norm")]
    calibration = Calibration(
        captured.module, dict.fromkeys([node for node, _ in taken] + [each.node for each in made], False), False
    )
    with torch.no_grad():
        calibration.run(images)
        computed = captured.compute(images)
    ranges = calibration.ranges("minmax", 99.99)
    wanted = [(node, view.evaluate(computed[view.source]), view.shape[-1]) for node, view in taken]
    wanted += [(each.node, computed[each], each.channels) for each in made]
    assert wanted
    for node, want, channels in wanted:
        rows = want.reshape(-1, channels).double()
        for end, expected in ((ranges[node].low, rows.amin(dim=0)), (ranges[node].high, rows.amax(dim=0))):
            assert torch.allclose(end, expected, atol=1e-4)


@pytest.mark.parametrize("name", ["class token", "Swin", "two heads"])
def test_a_classifier_has_no_node_for_it(name: str) -> None:
    model = random_weights(MODELS[name][0]())
    network = quantized(model)
    assert not any(isinstance(network.part(node.name), WideLinear) for node in network.nodes)


def quantized(model: nn.Module, **options: Any) -> Any:
    images = draw_images(24, 3, SIDE)
    return qflash.quantize_model(model, [images], **STATISTICS, progress=False, min_sqnr=None, **options)


@pytest.mark.parametrize("name", ["all tokens", "mean of features", "hidden states", "class and patch tokens"])
def test_outputs_leave_the_rotation(name: str) -> None:
    model = random_weights(MODELS[name][0]())
    network = quantized(model)
    assert network.quality.sqnr_db > 24
    last = [network.part(node) for node in network.outputs.values()]
    assert all(isinstance(part, WideLinear) for part in last)
    for part in last:
        assert part.weight.abs().unique().tolist() == [0, 1]
    parts = network.run(draw_images(3, 3, SIDE, seed=4))
    for backend in ("reference", "cpu"):
        network.backend = backend
        for key, out in network.run(draw_images(3, 3, SIDE, seed=4)).items():
            assert out.dtype == torch.int32
            assert torch.equal(out, parts[key])


def test_what_leaves_the_rotation_is_off_by_little() -> None:
    model = build("vit", num_classes=0, global_pool="")
    network = qflash.quantize_model(model, [draw(model, 24)], progress=False)
    (node,) = network.outputs.values()
    values: dict[str, torch.Tensor] = {}
    network.run(draw(model, 2, seed=3), lambda name, x: values.update({name: x}))
    (source,) = next(each.inputs for each in network.nodes if each.name == node)
    assert isinstance(network.part(source), LayerNorm)
    rotation = Rotation.of(48)
    assert rotation is not None
    normalised = values[source].double() * network.lowering.scales[source]
    with torch.no_grad():
        want = rotation(normalised) * model.norm.weight + model.norm.bias
    error = (values[node].double() - want / network.output_scale).abs()
    # half a unit of the outputs, and half one of the sums, to which the bias is rounded
    layer = network.part(node)
    assert bool((error < 1 + layer.multiplier.double() * 2.0 ** (layer.left - 33)).all())


def test_a_massive_channel_costs_little() -> None:
    # one channel of the stream a thousand times as large as the others, as pretrained encoders have them
    model = build("vit", num_classes=0, global_pool="")
    with torch.no_grad():
        model.blocks[0].mlp.fc2.bias[5] = 3000.0
        for norm in (model.blocks[1].norm1, model.blocks[1].norm2, model.norm):
            norm.weight[5] *= 0.01
    network = qflash.quantize_model(model, [draw(model, 24)], progress=False, min_sqnr=None)
    images = draw(model, 4, seed=3)
    with torch.inference_mode():
        want = model(normalise(model, images))
    assert decibels(want, network.dequantize(network(images))) > 20


def test_a_wrong_rotation_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rotation, "of_outputs", lambda self, matrix: matrix)
    with pytest.raises(ValueError, match=r"rotating the residual stream changes output 'output' of the model"):
        quantized(random_weights(vit()))


@pytest.mark.parametrize(("kind", "dtype"), [(Linear, torch.int16), (WideLinear, torch.int8)])
def test_a_layer_takes_the_inputs_that_its_sums_have_room_for(kind: Any, dtype: torch.dtype) -> None:
    module = Linear(8, 4, "int32") if kind is Linear else WideLinear(8, 4)
    with pytest.raises(TypeError, match=f"x must be {'int8' if kind is Linear else 'int16'}, got"):
        module(torch.ones(3, 8, dtype=dtype))


def test_the_sums_of_int16_inputs_have_a_bound() -> None:
    module = WideLinear(64, 4)
    module.weight.fill_(1)
    module.left = 9
    module.check_values()
    module.left = 10
    with pytest.raises(ValueError, match="the largest sum of an output must be from 0 to"):
        module.check_values()


class Merges(nn.Module):
    """Joins tokens two by two behind the last normalisation, one after the other or channel by channel."""

    def __init__(self, by_channels: bool) -> None:
        super().__init__()
        self.body, self.merge = vit(num_classes=0, global_pool="", class_token=False), nn.Linear(96, 5)
        self.by_channels = by_channels

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        pairs = self.body(images).unflatten(1, (-1, 2))
        return self.merge((pairs.mT if self.by_channels else pairs).flatten(2))


@pytest.mark.parametrize("by_channels", [False, True])
def test_tokens_that_are_joined_behind_a_normalisation_come_from_a_stream(by_channels: bool) -> None:
    model, images = random_weights(Merges(by_channels).eval()), draw_images(16, 3, 32)
    network = qflash.quantize_model(model, [images[:12]], mean=[0.5] * 3, std=[0.5] * 3, progress=False)
    with torch.inference_mode():
        wanted = model((images[12:].float() / 255 - 0.5) / 0.5)
    assert sqnr_db(wanted, network.dequantize(network(images[12:]))) > 25
