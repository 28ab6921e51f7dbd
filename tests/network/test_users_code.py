"""Models as people wrap them: compiled, cut by torchvision, with heads of their own, of two towers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import STATISTICS, images, make, normalise
from torch import nn

import qflash
from qflash.network.capture import UnsupportedError
from qflash.network.quality import sqnr_db

OPTIONS: dict[str, Any] = {"progress": False, **STATISTICS}


class Segmentation(nn.Module):
    """A convolution over the map of patch tokens; the batch's size by ``len``, or as torch.export wants it."""

    def __init__(self, by_len: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.by_len = make("timm: class token"), by_len
        self.head = nn.Conv2d(self.body.embed_dim, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.body.forward_features(x)[:, 1:]
        side = int(tokens.shape[1] ** 0.5)
        batch = len(x) if self.by_len else x.shape[0]
        return self.head(tokens.transpose(1, 2).reshape(batch, -1, side, side))


@pytest.mark.slow
def test_a_head_over_the_map_of_tokens() -> None:
    model = Segmentation(False).eval()
    network = qflash.quantize_model(model, [images(24)], **OPTIONS)
    some = images(3, seed=7)
    with torch.inference_mode():
        wanted = model(normalise(some))
    assert sqnr_db(wanted, network.dequantize(network(some))) > 20 and network(some).shape == wanted.shape


def test_what_fixes_the_batch_is_told_how_not_to() -> None:
    with pytest.raises(UnsupportedError, match=r"any batch: x\.shape\[0\] or -1 in place of len\(x\) or a number$"):
        qflash.quantize_model(Segmentation(True).eval(), [images(4)], **OPTIONS)


@pytest.mark.slow
def test_a_compiled_model_is_the_model() -> None:
    model = make("timm: class token")
    networks = [qflash.quantize_model(each, [images(24)], **OPTIONS) for each in (model, torch.compile(model))]
    assert torch.equal(*(network(images(2)) for network in networks))


@pytest.mark.slow
def test_what_torchvision_cuts_out_of_a_swin() -> None:
    """Its module is in eval mode, a copy of it is not."""
    pytest.importorskip("torchvision")
    from torchvision.models.feature_extraction import create_feature_extractor
    from torchvision.models.swin_transformer import SwinTransformer

    torch.manual_seed(0)
    model = SwinTransformer([2, 2], 24, [2, 2], [2, 4], [4, 4], num_classes=5).eval()
    cut = create_feature_extractor(model, {"features.1": "stage", "flatten": "pooled"}).eval()
    network = qflash.quantize_model(cut, [images(24)], **OPTIONS)
    assert list(network.outputs) == ["stage", "pooled"] and network.quality.sqnr_db > 25


def test_a_model_of_two_towers_is_told_how() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 60,
        "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    model = transformers.CLIPModel(transformers.CLIPConfig(vision_config=sizes, text_config=sizes)).eval()
    with pytest.raises(
        UnsupportedError, match=r"outputs=lambda model, x: model\.get_image_features\(x\), or get_text_features$"
    ):
        qflash.quantize_model(model, [images(4)], **OPTIONS)


def test_an_output_that_is_constant_is_told_the_others() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale = make("timm: class token"), nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> Any:
            return self.body(x), self.scale.exp()

    with pytest.raises(UnsupportedError, match=r"'output1' does not depend on the images; outputs=\['output0'\] leaves it out"):
        qflash.quantize_model(Scaled().eval(), [images(4)], **OPTIONS)


class AnyNumber(nn.Module):
    """Hands on whatever it is given, as ``torch.optim.swa_utils.AveragedModel`` does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.module(*args, **options)


def test_wrappers_hand_on_what_they_hold() -> None:
    model = make("timm: class token")
    networks = [
        qflash.quantize_model(each.eval(), [images(16)], **OPTIONS)
        for each in (model, nn.DataParallel(model), AnyNumber(model))
    ]
    assert [network.nodes[1].name.removeprefix("module.") for network in networks] == [networks[0].nodes[1].name] * 3
    some = images(2)
    assert all(torch.equal(network(some), networks[0](some)) for network in networks)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = make("timm: class token")


class Noisy(Classifier):
    """Adds noise to its tokens in eval mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.body.blocks[0].register_forward_hook(lambda _, __, out: out + torch.rand(out.shape[1:]))

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x)


class Looking(Noisy):
    """Looks at the values of a tensor."""

    def forward(self, x: torch.Tensor) -> Any:
        out = self.body(x)
        return out if float(out.mean()) > 0 else -out


class Cached(Noisy):
    """Returns something besides tensors."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"last_hidden_state": self.body(x), "cache": object()}


class CachedLogits(Classifier):
    def forward(self, x: torch.Tensor) -> Any:
        return {"cache": object(), "logits": self.body(x)}


def test_a_list_of_names_leaves_out_what_is_no_tensor() -> None:
    model, some = CachedLogits().eval(), images(2)
    network = qflash.quantize_model(model, [images(16)], outputs=["logits"], **OPTIONS)
    assert torch.equal(network(some), qflash.quantize_model(model.body, [images(16)], **OPTIONS)(some))
    with pytest.raises(UnsupportedError, match=r"known type; outputs=\['logit'\] must name tensors that the model returns$"):
        qflash.quantize_model(model, [images(4)], outputs=["logit"], **OPTIONS)


class ImagesAndTexts(Noisy):
    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> Any:
        return self.body(pixel_values) + input_ids


class WithConstant(Classifier):
    """Returns a tensor that needs no image, which is no advice."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x).tanh(), torch.ones(x.shape[0], 2)


class Written(Classifier):
    """Writes to a tensor, which may be in any output."""

    def forward(self, x: torch.Tensor) -> Any:
        out = self.body(x)
        out[:, 0] = out[:, 1]
        return out, self.body(x)


ADVICE: dict[type[nn.Module], str] = {
    Noisy: r"aten\.rand, which draws random numbers, in body\.blocks\.0 ",
    Looking: r"data-dependent [^.]*; the model, or a hook, looks at a tensor's values: float\(x\), x\.item\(\), if x > 0$",
    Cached: r"not a known type; outputs=\['last_hidden_state'\], or another list of names, leaves it out$",
    ImagesAndTexts: "; a network takes images or texts alone, and outputs can be a function that gives the model the rest$",
    WithConstant: r"aten\.tanh in the model .* has no integer form$",
    Written: r"aten\.copy_ in the model .* has no integer form$",
}
"""The end of what is said of models that are refused: advice, or none."""


@pytest.mark.parametrize("kind", ADVICE)
def test_a_refusal_ends_with_the_advice_that_helps(kind: type[nn.Module]) -> None:
    with pytest.raises(UnsupportedError, match=ADVICE[kind]):
        qflash.quantize_model(kind().eval(), [images(4)], **OPTIONS)


class Photos(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __getitem__(self, number: int) -> torch.Tensor:
        return images(1)[0]


INPUTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "channels last": (lambda: [images(2).permute(0, 2, 3, 1)], {}, r"channels come last: images\.permute\(0, 3, 1, 2\)$"),
    "single images": (lambda: list(images(2)), {}, r"got \(3, 32, 32\); of single images .*DataLoader\(images, 32\)"),
    "two dimensions": (lambda: [images(2)[0, 0]], {}, r"\(batch, channels, height, width\), got \(32, 32\)$"),
    "a data set": (Photos, {}, r"got Photos; DataLoader\(dataset, 32\) makes batches$"),
    "one mean for all": (lambda: [images(2)], {"mean": 0.5}, "mean must be a list of a number for each .* channels, got 0.5$"),
    "no output": (lambda: [images(2)], {"outputs": lambda model, x: None}, "outputs must return a tensor, .* got none$"),
}  # fmt: skip


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_another_kind_are_named(name: str) -> None:
    batches, options, message = INPUTS[name]
    with pytest.raises((TypeError, ValueError), match=message):
        qflash.quantize_model(make("timm: class token"), batches(), **{**OPTIONS, **options})


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_torchscript_is_told_what_to_give() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2)).eval()
    with pytest.raises(TypeError, match=r"model must be the torch\.nn\.Module that TorchScript was made of"):
        qflash.quantize_model(scripted, [images(2)], **OPTIONS)


def test_one_name_of_a_part_is_no_list() -> None:
    with pytest.raises(TypeError, match="keep_float must be a list of names, got 'head'"):
        qflash.quantize_model(make("timm: class token"), [images(4)], keep_float="head", **OPTIONS)
