"""Outputs of integer networks: tokens, features, blocks and what a function of the model returns."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import STATISTICS, images, make, normalise, of_transformers
from torch import nn

import qflash
from qflash.network.capture import UnsupportedError
from qflash.network.operators.tokens import Tokens, arrange
from qflash.network.outputs import select_outputs
from qflash.network.quality import sqnr_db
from qflash_lab.evaluation.random_weights import randomise


def from_timm(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    tokens = model.forward_features(x)
    found = {"tokens": tokens, "features": model.forward_head(tokens, pre_logits=True), "logits": model.forward_head(tokens)}
    blocks = model.forward_intermediates(x, [0], output_fmt="NLC", return_prefix_tokens=True, intermediates_only=True)
    return {**found, "blocks.0": torch.cat([blocks[0][1], blocks[0][0]], 1)}


def from_swin(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    tokens = model.forward_features(x)
    (stage,) = model.forward_intermediates(x, [0], intermediates_only=True)
    features = model.forward_head(tokens, pre_logits=True)
    return {"tokens": tokens, "features": features, "layers.0": stage.movedim(1, -1)}


def from_dinov2(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    inner = model.dinov2(x, output_hidden_states=True)
    found = {"tokens": inner.last_hidden_state, "features": inner.pooler_output, "pooler_output": inner.pooler_output}
    return {**found, "hidden_states.1": inner.hidden_states[1], "logits": model(x).logits}


def maps(model: Any, x: torch.Tensor) -> Any:
    return model.forward_intermediates(x, [0, 1], norm=True, intermediates_only=True)


def patches(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    tokens = model.forward_features(x)
    found = {"class": tokens[:, 0], "registers": tokens[:, 1:3], "patches": tokens[:, 3:]}
    return {**found, "map": tokens[:, 3:].unflatten(1, (4, 4))}


def joined(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tokens in twos, four by four as a map has them, and the first two alone; and blocks' and logits' tokens in a row."""
    tokens, block = model.forward_features(x), model.forward_intermediates(x, [1], intermediates_only=True, output_fmt="NLC")[0]
    twos, patches = tokens[:, 1:].unflatten(1, (-1, 2)).flatten(2), tokens[:, 3:].unflatten(1, (2, 2, 2, 2))
    fours = patches.permute(0, 1, 3, 2, 4, 5).flatten(3).flatten(1, 2)
    one = torch.cat((tokens[:, 0], tokens[:, 1]), -1)
    return {"twos": twos, "fours": fours, "one": one, "block": block.flatten(1), "logits": model.head(tokens).flatten(1)}


def layers(model: Any, x: torch.Tensor) -> Any:
    return model.get_intermediate_layers(x, n=2, norm=True)


CASES: dict[str, tuple[str, Any, Any, dict[str, tuple[int, ...]]]] = {
    "timm": ("timm: class token", ["logits", "tokens", "features", "blocks.0"], from_timm,
             {"logits": (6,), "tokens": (17, 48), "features": (48,), "blocks.0": (17, 48)}),
    "timm, mean": ("timm: mean", ["features", "logits"], from_timm, {"features": (48,), "logits": (6,)}),
    "timm, one": ("timm: class token", ["blocks.0"], from_timm, {"blocks.0": (17, 48)}),
    "swin": ("timm: Swin", ["tokens", "features", "layers.0"], from_swin,
             {"tokens": (8, 8, 32), "features": (32,), "layers.0": (16, 16, 16)}),
    "dinov2": ("transformers: DINOv2", ["tokens", "features", "logits", "hidden_states.1"], from_dinov2,
               {"tokens": (17, 32), "features": (32,), "logits": (6,), "hidden_states.1": (17, 32)}),
    "maps": ("timm: registers", maps, maps, {"output0": (48, 4, 4), "output1": (48, 4, 4)}),
    "layers": ("timm: registers", layers, layers, {"output0": (16, 48), "output1": (16, 48)}),
    "tokens": ("timm: registers", patches, patches,
               {"class": (48,), "registers": (2, 48), "patches": (16, 48), "map": (4, 4, 48)}),
    "joined": ("timm: registers", joined, joined,
               {"twos": (9, 96), "fours": (4, 192), "one": (96,), "block": (768,), "logits": (114,)}),
}  # fmt: skip
_made: dict[str, tuple[nn.Module, Any]] = {}


def quantised(name: str) -> tuple[nn.Module, Any]:
    if name not in _made:
        model = make(CASES[name][0])
        _made[name] = model, qflash.quantize_model(
            model, [images(24)], outputs=CASES[name][1], progress=False, **STATISTICS
        )  # fmt: skip
    return _made[name]


def wanted_of(name: str, model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        found = CASES[name][2](model, normalise(x))
    return found if isinstance(found, dict) else {f"output{number}": each for number, each in enumerate(found)}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    model, network = quantised(name)
    hooks = [module for module in model.modules() if module._forward_hooks or module._forward_pre_hooks]
    assert not hooks
    x = images(5, 3)
    wanted, made = wanted_of(name, model, x), network.run(x)
    shapes = CASES[name][3]
    assert list(made) == list(shapes) == list(network.scales)
    found = network.dequantize(network(x))
    found = found if len(shapes) > 1 else {next(iter(shapes)): found}
    for label, shape in shapes.items():
        assert made[label].dtype == torch.int32 and made[label].shape == (5, *shape)
        assert torch.equal(found[label], made[label].float() * network.scales[label])
        assert sqnr_db(wanted[label], found[label]) > 25
    network.save(tmp_path / "network")
    loaded = qflash.load_model(tmp_path / "network")
    assert loaded.scales == network.scales
    assert all(torch.equal(out, made[label]) for label, out in loaded.run(x).items())
    compared = qflash.compare(network, model, x, contributions=False, progress=False, **STATISTICS)
    assert compared.sqnr_db.keys() == shapes.keys() and min(compared.sqnr_db.values()) > 25


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_exports_have_the_same_bits(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    network = quantised(name)[1]
    x = images(3, 4)
    wanted = network.run(x)
    network.export_onnx(tmp_path / "network.onnx")
    session = runtime.InferenceSession(str(tmp_path / "network.onnx"), providers=["CPUExecutionProvider"])
    for want, got in zip(wanted.values(), session.run(None, {"images": x.numpy()}), strict=True):
        assert np.array_equal(got, want.numpy())


@pytest.mark.parametrize("name", ["maps", "tokens", "swin", "joined"])
def test_tosa_has_the_same_bits(name: str, tmp_path: Path) -> None:
    pytest.importorskip("tosa_serializer")
    from test_tosa import check_profile, evaluate

    network = copy.deepcopy(quantised(name)[1])
    network.backend = "reference"
    x, path = images(1, 4), tmp_path / "network.tosa"
    wanted = network.run(x)
    counts = network.export_tosa(path)
    found = evaluate(path.read_bytes(), [x.view(torch.int8)], [want.shape for want in wanted.values()])
    assert all(torch.equal(got, want) for got, want in zip(found, wanted.values(), strict=True))
    check_profile(path, counts)


def test_tokens_keep_their_numbers() -> None:
    x = torch.arange(2 * 9 * 3, dtype=torch.int32).view(2, 9, 3)
    assert torch.equal(Tokens(1, 6)(x), x[:, 1:7])
    assert torch.equal(Tokens(1, 6, (2, 3))(x), x[:, 1:7].reshape(2, 2, 3, 3))
    first = Tokens(1, 6, (2, 3), True)(x)
    assert torch.equal(first, x[:, 1:7].reshape(2, 2, 3, 3).permute(0, 3, 1, 2)) and first.is_contiguous()
    assert torch.equal(first, arrange(x, 1, 6, (2, 3), True))
    assert torch.equal(Tokens(1, 6, joined=(3, 6))(x), x[:, 1:7].reshape(2, 3, 6))
    assert torch.equal(Tokens(1, 6, joined=[18])(x), x[:, 1:7].reshape(2, 18))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 3), "first must be whole and from 0"), ((0, 0), "count must be whole and from 1"),
        ((0, 6, (2, 2)), "shape must be .height, width. of 6 tokens"), ((0, 6, (2,)), "shape must be None or have 2"),
        ((0, 6, (2, 3), 1), "channels_first must be True or False"), ((0, 6, None, False, 3), "joined must be None or have 2"),
        ((0, 6, (2, 3), False, (3, 6)), "joined must be .* and no shape"), ((0, 6, None, False, (5, 3)), "of 6 tokens"),
    ],
)  # fmt: skip
def test_tokens_refuse_other_sizes(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tokens(*arguments)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda model, x: 2 * model.forward_features(x).flatten(1), "tokens are merged behind a normalisation"),
        (lambda model, x: 2 * model.blocks(model._pos_embed(model.patch_embed(x))).flatten(1), "constants are added to, or"),
        (lambda model, x: torch.cat(((y := model.forward_features(x))[:, 0], y.mean(1)), -1), "side by side"),
    ],
)  # fmt: skip
def test_outputs_of_several_tensors_or_with_constants_are_refused_by_name(returned: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        qflash.quantize_model(make("timm: registers"), [images(4)], outputs=returned, progress=False, **STATISTICS)


def test_a_file_with_tokens_that_are_not_there_is_refused() -> None:
    network = quantised("tokens")[1]
    network.check_values()
    part = next(network.part(node.name) for node in network.nodes if isinstance(network.part(node.name), Tokens))
    part.sizes["first"] = 18
    try:
        with pytest.raises(ValueError, match="do not fit each other"):
            network.check_values()
    finally:
        part.sizes["first"] = part.first


class Twice(nn.Module):
    """Calls a submodule twice, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.unused, self.pair = nn.LayerNorm(4), nn.Identity(), Pair()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.norm(x)) + self.pair(x)["a"]


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": x}


@pytest.mark.parametrize(
    ("outputs", "error", "message"),
    [
        ("tokens", TypeError, "outputs must be None, a list of names, or a function"), ([1], TypeError, "outputs must be None"),
        ([], ValueError, "outputs must be names, each of them once"), (["a", "a"], ValueError, "each of them once"),
        (["norm"], ValueError, "submodule 'norm' must be called once, is called 2 times"),
        (["unused"], ValueError, "submodule 'unused' must be called once, is called 0 times"),
        (["pair"], ValueError, "submodule 'pair' must compute a tensor, gives dict"),
    ],
)  # fmt: skip
def test_what_is_no_output_is_refused(outputs: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        select_outputs(Twice().eval(), outputs)(torch.zeros(1, 4))


class Masked(nn.Module):
    """Takes a mask of patches, as NaFlex models do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make("timm: class token")

    def forward(self, x: torch.Tensor, pixel_attention_mask: torch.Tensor) -> Any:
        return self.body(x) + pixel_attention_mask.sum()


def test_a_model_that_takes_more_than_images_is_told_how() -> None:
    with pytest.raises(
        UnsupportedError, match=r"'pixel_attention_mask'; .* outputs can be a function that gives the model the"
    ):
        qflash.quantize_model(Masked().eval(), [images(4)], progress=False, **STATISTICS)
    network = qflash.quantize_model(
        Masked().eval(), [images(24)], outputs=lambda model, x: model(x, torch.ones(3)), progress=False, **STATISTICS
    )
    assert network.quality.sqnr_db > 25


@pytest.mark.parametrize("further", [[], ["blocks.0"]])
def test_an_unknown_name_is_told_the_others(further: list[str]) -> None:
    known = ", ".join(map(repr, ["output", "logits", "tokens", "features", *further]))
    with pytest.raises(ValueError, match=f"outputs must be of {known}, or a sub"):
        qflash.quantize_model(make("timm: class token"), [images(4)], outputs=[*further, "nose"], progress=False, **STATISTICS)


@pytest.mark.slow
def test_a_layer_behind_a_pooling_by_attention_gives_a_row_an_image(tmp_path: Path) -> None:
    """AIMv2 takes the mean over its one query."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Aimv2VisionModel"):
        pytest.skip("this transformers has no AIMv2")
    torch.manual_seed(0)
    config = transformers.Aimv2VisionConfig(
        hidden_size=48, num_hidden_layers=1, num_attention_heads=3, intermediate_size=96, image_size=32, patch_size=8
    )
    model = transformers.Aimv2VisionModel(config).eval()
    with torch.no_grad():
        for x in model.parameters():
            if x.dim() > 1:
                x.copy_(torch.randn_like(x) / x[0].numel() ** 0.5)
    network = qflash.quantize_model(model, [images(24)], progress=False, **STATISTICS)
    assert network(images(3))["pooler_output"].shape == (3, 48) and network.quality.sqnr_db > 20
    network.save(tmp_path / "network")
    assert torch.equal(qflash.load_model(tmp_path / "network")(images(3))["pooler_output"], network(images(3))["pooler_output"])


def test_a_stage_that_a_rotated_stream_begins_with_is_an_output() -> None:
    """Behind a patch merging, of which the next stage's first normalisation and sum take the rotated channels."""
    torch.manual_seed(0)
    model = of_transformers("Swin", "Model").eval()
    randomise(model)
    names = ["last_hidden_state", "hidden_states.1"]
    network = qflash.quantize_model(model, [images(16)], outputs=names, progress=False, **STATISTICS)
    some = images(3, 5)
    with torch.inference_mode():
        wanted = model(normalise(some), output_hidden_states=True)
    made = network.dequantize(network(some))
    assert sqnr_db(wanted.hidden_states[1], made["hidden_states.1"]) > 20
    assert sqnr_db(wanted.last_hidden_state, made["last_hidden_state"]) > 20
