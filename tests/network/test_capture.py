"""Encoders of timm, transformers and torchvision: what is captured of them is what they compute, and so are their integers."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, SIDE, STATISTICS, images, make, normalise, vit
from torch import nn

import qflash
from helpers import DEVICE, few
from qflash.network import quantize
from qflash.network.capture import capture
from qflash.network.capture.operations import BATCH
from qflash.network.capture.unread import drop_unread_rows
from qflash.network.float_parts import KEPT, kept_nodes, with_float_parts
from qflash.network.modules import LayerNorm
from qflash.network.onnx_check import check_onnx
from qflash.network.operators.gated import Gated
from qflash.network.patterns import Lowering
from qflash.network.quality import sqnr_db
from qflash.specification.recipe import resolve_recipe
from small_networks import timm

Kept = dict[str, tuple[nn.Module, Any]]
_kept: Kept = {}


def quantised(name: str) -> tuple[nn.Module, Any]:
    """Return a float model and its integer network, made once."""
    if name not in _kept:
        model = make(name)
        _kept[name] = model, qflash.quantize_model(model, [images(40)], progress=False, **STATISTICS)
    return _kept[name]


def outputs_of(model: nn.Module, network: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the float model's outputs by the names that the network gives them."""
    with torch.inference_mode():
        found = model(x)
    if isinstance(found, torch.Tensor):
        return dict.fromkeys(network.outputs, found)
    return {name: found[name] for name in network.outputs}


@pytest.mark.parametrize("name", few(FAMILIES, 6))
def test_captured_operations_compute_what_the_model_does(name: str) -> None:
    model = make(name).double()
    captured = capture(model, normalise(images(BATCH)).double())
    with torch.inference_mode():
        for reduced in (False, True):
            if reduced:
                drop_unread_rows(captured)
            for count in (1, 2, 5):
                x = normalise(images(count, count)).double()
                wanted, got = captured.pick(model(x)), captured(x)
                assert wanted.keys() == got.keys()
                for label, want in wanted.items():
                    assert got[label].shape == want.shape
                    assert float((got[label] - want).abs().max()) < 1e-5 * float(want.abs().max())


class ViewedHeads(nn.Module):
    """Attention whose heads are joined by a view, which the strides of PyTorch's attention allow."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads = attention.qkv, attention.proj, attention.num_heads

    def forward(self, x: torch.Tensor, **ignored: Any) -> torch.Tensor:
        images, tokens, width = x.shape
        places = self.qkv(x.transpose(0, 1)).reshape(tokens, images, 3, self.heads, -1)
        query, key, value = (each.permute(1, 2, 0, 3) for each in places.unbind(2))
        made = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.proj(made.permute(2, 0, 1, 3).view(tokens * images, width)).view(tokens, images, width).transpose(0, 1)


def test_a_view_that_strides_allowed_is_captured() -> None:
    model, like = vit(), vit()
    model.load_state_dict(like.state_dict())
    for block in model.blocks:
        block.attn = ViewedHeads(block.attn)
    x = normalise(images(BATCH))
    with torch.inference_mode():
        (got,), (want,) = (capture(each, x)(x).values() for each in (model, like))
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", few(FAMILIES, 7))
def test_integers_stay_close_to_the_model(name: str) -> None:
    model, network = quantised(name)
    x = images(6, 5)
    got = {each: out.float() * network.scales[each] for each, out in network.run(x).items()}
    for label, want in outputs_of(model, network, normalise(x)).items():
        assert got[label].shape == want.shape
        assert sqnr_db(want, got[label]) > 22
        # and each image's own, not their mean
        centred = sqnr_db(want - want.mean(0), got[label] - got[label].mean(0))
        assert centred > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_back_ends_files_and_batches_have_the_same_bits(name: str, tmp_path: Path) -> None:
    network = quantised(name)[1]
    network.save(tmp_path / "network")
    loaded = qflash.load_model(tmp_path / "network")
    assert (loaded.nodes, loaded.scales, loaded.units) == (network.nodes, network.scales, network.units)
    reference = copy.deepcopy(network)
    reference.backend, loaded.backend = "reference", "cpu"
    x = images(5, 7)
    wanted = reference.run(x)
    for label, want in wanted.items():
        assert want.dtype == torch.int32 and int(want.unique().numel()) > 5
        assert torch.equal(loaded.run(x)[label], want)
        assert torch.equal(torch.cat([loaded.run(part)[label] for part in x.split([1, 4])]), want)
        assert torch.equal(reference.run(x[:2])[label], want[:2])
        assert torch.equal(loaded.run(x.repeat(13, 1, 1, 1)[:64])[label], want.repeat(13, *[1] * (want.dim() - 1))[:64])
        assert loaded.run(x[:0])[label].shape == (0, *want.shape[1:])


@pytest.mark.parametrize(
    "name", ["timm: class token", "timm: distilled", "timm: Swin", "transformers: BEiT", "transformers: SigLIP", "two outputs"]
)
@pytest.mark.slow
def test_kernels_have_the_same_bits(name: str) -> None:
    """In Triton's interpreter, or on a GPU."""
    network = copy.deepcopy(quantised(name)[1])
    x = images(2, 10)
    network.backend = "reference"
    wanted = network.run(x)
    network.backend = "triton"
    for label, got in network.to(DEVICE).run(x.to(DEVICE)).items():
        assert torch.equal(got.cpu(), wanted[label])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["timm: SwiGLU", "timm: SwiGLU with a norm"])
def test_linear_layers_run_with_the_products_behind_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One operator for both, but where a node's output is asked for; the same bits."""
    _, network = quantised(name)
    network, seen, called = copy.copy(network), set(), []
    joined = torch.ops.qflash.int8_linear_gated
    monkeypatch.setattr(torch.ops.qflash, "int8_linear_gated", lambda *given: (called.append(1), joined(*given))[1])
    for backend in ("reference", "cpu"):
        network.backend = backend
        apart = network.run(images(2), lambda node, x: seen.add(node))
        assert not called
        together = network.run(images(2))
        assert len(called) == 2 and all(torch.equal(apart[output], together[output]) for output in apart)
        called.clear()
    assert {node.name for node in network.nodes} == seen
    product = next(name for name in seen if isinstance(network.part(name), Gated))
    hooked: list[int] = []
    hook = network.part(product).register_forward_hook(lambda *given: hooked.append(1))
    again = network.run(images(2))
    hook.remove()
    assert hooked and all(torch.equal(apart[output], again[output]) for output in apart)
    # a forward of its own, as accelerate gives one that brings weights
    part = network.part(network.nodes[[node.name for node in network.nodes].index(product) - 1].name)
    wrapped = part.forward
    part.forward = lambda *given, **named: (hooked.append(2), wrapped(*given, **named))[1]
    again = network.run(images(2))
    del part.forward
    assert 2 in hooked and all(torch.equal(apart[output], again[output]) for output in apart)
    # a layer that adds a residual is not part of the operator for both
    index = next(index for index, node in enumerate(network.nodes) if node.name == product) - 1
    parts = {node.name: network.part(node.name) for node in network.nodes}
    assert network.product_of(index, parts) == product
    with_residual = network.nodes[index]._replace(inputs=(*network.nodes[index].inputs, "residual"))
    network.nodes = (*network.nodes[:index], with_residual, *network.nodes[index + 1 :])
    assert network.product_of(index, parts) is None


@pytest.mark.parametrize("name", few(FAMILIES, 3))
def test_every_node_can_stay_float(name: str, tmp_path: Path) -> None:
    """With all of them a network is its model; with every second one it is closer, saves, loads and exports to ONNX."""
    model, network = quantised(name)
    lowering = network.lowering
    nodes = [node.name for node in network.nodes if type(network.part(node.name)).__name__ in KEPT]
    x = images(4, 9)
    wanted = outputs_of(model, network, normalise(x))

    def judged(found: dict[str, torch.Tensor]) -> float:
        return min(sqnr_db(want, found[label].float() * network.scales[label]) for label, want in wanted.items())

    for kept, least in ((nodes, 40.0), (nodes[::2], 25.0), (nodes[1::2], 25.0)):
        mixed = with_float_parts(network, lowering.twins, lowering.grids, kept_nodes(network, lowering.twins, kept))
        assert set(kept) <= set(mixed.float_parts())
        found = mixed.run(x)
        assert judged(found) > least
        mixed.save(tmp_path / "network")
        loaded = qflash.load_model(tmp_path / "network")
        assert loaded.float_parts() == mixed.float_parts()
        assert all(torch.equal(out, found[label]) for label, out in loaded.run(x).items())
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    mixed.export_onnx(tmp_path / "network.onnx")
    session = runtime.InferenceSession(str(tmp_path / "network.onnx"), providers=["CPUExecutionProvider"])
    for want, got in zip(found.values(), session.run(None, {"images": x.numpy()}), strict=True):
        assert sqnr_db(want.double(), torch.tensor(got).double()) > 35


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_onnxruntime_has_the_same_bits(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    network = quantised(name)[1]
    network.export_onnx(tmp_path / "network.onnx")
    session = runtime.InferenceSession(str(tmp_path / "network.onnx"), providers=["CPUExecutionProvider"])
    for count in (1, 3):
        x = images(count, 8)
        wanted = list(network.run(x).values())
        for want, got in zip(wanted, session.run(None, {"images": x.numpy()}), strict=True):
            assert np.array_equal(got, want.numpy())
    # at every level of onnxruntime's optimisation
    outcomes = check_onnx(tmp_path / "network.onnx", ["onnxruntime"])
    assert len(outcomes) >= 4 and all(outcome.problem is None for outcome in outcomes)


@pytest.mark.parametrize(
    "name", ["timm: class token", "timm: distilled", "transformers: BEiT", "transformers: DINOv2 with registers", "two outputs"]
)
def test_unread_rows_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last three read all tokens: for a mean, or as an output."""
    model, network = quantised(name)
    monkeypatch.setattr(quantize, "drop_unread_rows", lambda captured: None)
    whole = qflash.quantize_model(model, [images(40)], progress=False, **STATISTICS)
    x = images(3, 9)
    wanted = whole.run(x)
    for label, got in network.run(x).items():
        assert torch.equal(got, wanted[label])
    rows = [sum(shape[1] for shape in each.shapes().values() if len(shape) == 3) for each in (network, whole)]
    assert rows[0] < rows[1] if name in ("timm: class token", "timm: distilled") else rows[0] == rows[1]


def test_a_normalisation_of_all_tokens_reads_them_in_place() -> None:
    """Also where the stream has a class token before the patches that the traced layer makes."""
    captured = capture(make("transformers: CLIP"), normalise(images(BATCH)))
    network = Lowering(captured, resolve_recipe(None), (3, SIDE, SIDE)).lower()
    first = next(node for node in network.nodes if isinstance(network.part(node.name), LayerNorm))
    assert network.part(first.name).dtype == torch.int16
    assert network.part(first.name).gather is None


def test_outputs_are_chosen_by_name() -> None:
    model, network = quantised("two outputs")
    assert list(network.outputs) == ["tokens", "classes"]
    with pytest.raises(ValueError, match="scales has: tokens, classes"):
        _ = network.output_scale
    one = qflash.quantize_model(model, [images(16)], outputs=["classes"], progress=False, **STATISTICS)
    assert list(one.outputs) == ["classes"] and one(images(2)).shape == (2, 6)
    with pytest.raises(ValueError, match="outputs must be of 'tokens', 'classes', or a submodule's name, got 'logits'"):
        qflash.quantize_model(model, [images(16)], outputs=["logits"], progress=False, **STATISTICS)


def resnet() -> nn.Module:
    return pytest.importorskip("torchvision").models.resnet18()


class RatioOfNorms(nn.Module):
    """Divides by the norm of other rows."""

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x + 1).norm(dim=-1, keepdim=True)


class Bounded(nn.Module):
    """Divides by a norm that many rows are smaller than."""

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(x, dim=-1, eps=10.0)


REFUSED = {
    "ResNet": (resnet, r"convolution with padding, dilation or groups in conv1"),
    "XCiT": (lambda: timm.create_model("xcit_nano_12_p8_224", img_size=SIDE, depth=1), r"in patch_embed\.proj\.0"),
    "GLU": (lambda: vit(mlp_layer=timm.layers.GluMlp, act_layer="sigmoid"), r"sigmoid in blocks\.0\.mlp\.act"),
    "many channels": (
        lambda: vit(mlp_ratio=90, scale_mlp_norm=True),
        r"norm of blocks\.0\.mlp\.norm .* 4320 channels, more than 4096",
    ),
    "three of each in parallel": (
        lambda: vit(block_fn=functools.partial(timm.models.vision_transformer.ParallelThingsBlock, num_parallel=3)),
        r"sum of more than two stacked tensors, or over another dimension in blocks\.0",
    ),
    "norms of other rows": (lambda: vit(norm_layer=RatioOfNorms), r"product with norms of rows of another tensor"),
    "rows bounded from below": (lambda: vit(norm_layer=Bounded), r"least number of norms of rows in blocks\.0\.norm1"),
    "images as output": (nn.PixelUnshuffle, "with parameters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_integer_form_is_named(name: str) -> None:
    build, message = REFUSED[name]
    if name == "images as output":
        with pytest.raises(TypeError, match=message):
            qflash.quantize_model(nn.PixelUnshuffle(2).eval(), [images(2)], progress=False, **STATISTICS)
        return
    torch.manual_seed(0)
    with pytest.raises(qflash.network.capture.operations.UnsupportedError) as refusal:  # type: ignore[attr-defined]
        qflash.quantize_model(build().eval(), [images(2)], progress=False, **STATISTICS)
    assert re.search(message, str(refusal.value)), str(refusal.value)
    assert "While executing" not in str(refusal.value)
