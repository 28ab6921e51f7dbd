"""Integer networks as a whole: close to the float model, integers throughout, the same in a file and in a program."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import qflash
from qflash.network import conversion, execution, storage
from qflash.network.float_parts import FloatTwin
from qflash.network.modules import LayerNorm, Linear, LinearGelu, Mean
from qflash.network.operators import gated, narrow, norms, rotary
from qflash.network.storage import load_model, save_model
from qflash.specification import layers as op
from qflash.specification import reference
from qflash_lab.bench.metrics import sqnr
from small_networks import KINDS, build, draw, in_ours, normalise, rewrite


@pytest.mark.parametrize("kind", KINDS)
def test_logits_stay_close_to_the_float_model(made: Any, kind: str) -> None:
    model, network = made(kind)
    images = draw(model, 12, seed=5)
    with torch.inference_mode():
        want = model(normalise(model, images))
    out = network(images)
    assert out.dtype == torch.int32
    assert sqnr(want, network.dequantize(out)) > 24
    assert all(not x.is_floating_point() for x in network.state_dict().values())
    assert not list(network.parameters())


@pytest.mark.parametrize("kind", ["class token", "long rows", "query and key norms", "swin"])
def test_back_ends_and_batches_give_the_same_integers(made: Any, kind: str) -> None:
    model, network = made(kind)
    images = draw(model, 7, seed=6)
    network = copy.deepcopy(network)
    network.backend = "reference"
    want = network(images)
    for backend in ("auto", "cpu"):
        network.backend = backend
        assert torch.equal(network(images), want)
        assert torch.equal(torch.cat([network(part) for part in images.split([1, 2, 4])]), want)
    assert network(images[:0]).shape == (0, want.shape[1])


class OnlyIntegers(TorchDispatchMode):
    """Refuses every operation on floats; scales may be looked at as bits and moved."""

    MOVES = ("view.dtype", "view.default", "expand.default", "slice.Tensor", "select.int", "alias.default", "detach.default")

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        self.seen.add(name)
        flat = torch.utils._pytree.tree_leaves((args, kwargs, out))
        if any(isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()) for x in flat):
            assert name in self.MOVES, f"{name} on floats"
        return out


def integer_product(a: torch.Tensor, b: torch.Tensor, most: int, out: torch.dtype) -> torch.Tensor:
    return torch.matmul(a.to(torch.int64), b.to(torch.int64)).to(out)


@pytest.mark.parametrize(
    "kind",
    ["class token", "long rows", "norm then mean", "query and key norms", "SiLU", "SwiGLU", "rotary", "swin", "swin v2"],
)
def test_reference_computes_no_float(made: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, network = made(kind)
    images = draw(model, 2, seed=7)
    network = copy.deepcopy(network)
    network.backend = "reference"
    want = network(images)
    # what runs inside of an operator, without the operator, which would hide it
    for name in (
        "int8_linear",
        "int8_linear_gelu",
        "int8_linear_silu",
        "integer_layer_norm",
        "integer_mean",
        "patch_embedding",
    ):
        monkeypatch.setattr(torch.ops.qflash, name, getattr(execution, name))
    monkeypatch.setattr(torch.ops.qflash, "gated", gated.gated)
    monkeypatch.setattr(torch.ops.qflash, "int8_linear_gated", gated.int8_linear_gated)
    monkeypatch.setattr(torch.ops.qflash, "rotary", rotary.rotary)
    monkeypatch.setattr(torch.ops.qflash, "integer_norm", norms.integer_norm)
    monkeypatch.setattr(torch.ops.qflash, "integer_narrow", narrow.integer_narrow)
    monkeypatch.setattr(torch.ops.qflash, "int8_attention", qflash.execution.int8_attention)
    # the reference forms integer products with float GEMMs that cannot round; here with integers
    monkeypatch.setattr(reference, "_exact_matmul", integer_product)
    with OnlyIntegers() as mode:
        out = network(images)
    assert torch.equal(out, want)
    assert {"mm.default", "bmm.default"} & mode.seen and len(mode.seen) > 20


@pytest.mark.parametrize("kind", ["registers", "query and key norms", "swin", "features", "swin v2"])
def test_a_file_gives_the_same_network(made: Any, kind: str, tmp_path: Path) -> None:
    model, network = made(kind)
    images = draw(model, 3, seed=8)
    path = tmp_path / "network.safetensors"
    network.save(path)
    loaded = qflash.load_model(path)
    assert torch.equal(loaded(images), network(images))
    for name in ("output_scale", "units", "image", "recipe", "nodes", "outputs", "quality"):
        assert getattr(loaded, name) == getattr(network, name)
    other = tmp_path / "again.safetensors"
    save_model(loaded, other)
    assert other.read_bytes() == path.read_bytes()


def change_ours(**changes: Any) -> Any:
    return in_ours(lambda ours: ours.update(changes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header["__metadata__"].clear(), "no integer network of QFlash"),
        (lambda header: header["__metadata__"].update({storage.KEY: "{"}), "no whole integer network"),
        (lambda header: header["__metadata__"].update({storage.KEY: "[1]"}), "no whole integer network"),
        (change_ours(version=99), "version 99, this QFlash reads 2"),
        (change_ours(arithmetic_version=99), "arithmetic version 99, this QFlash computes version 3"),
        (in_ours(lambda ours: ours["nodes"][0].update(operator="Other")), "one of the operators"),
        (change_ours(nodes=[]), "nodes must be a list of 1 to"),
        (change_ours(constants={}), "constants must fit the network"),
        (lambda header: header.pop("head.bias"), "no readable safetensors|missing or not known"),
        (lambda header: header.update({"heads.bias": header.pop("head.bias")}), r"\['head.bias', 'heads.bias'\] are missing"),
        (in_ours(lambda ours: change_constant(ours)), r"left must be an integer, is 1\.5"),
        (lambda header: change_type(header), r"head\.bias must be torch\.int32 \(10,\), is torch\.float32 \(10,\)"),
    ],
)
def test_a_damaged_header_is_refused(made: Any, tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "network.safetensors"
    made("class token")[1].save(path)
    path.write_bytes(rewrite(path.read_bytes(), change))
    with pytest.raises(ValueError, match=message):
        load_model(path, verify=False)
    with pytest.raises(ValueError, match=r"no whole integer network|no readable safetensors"):
        load_model(path)


def change_constant(ours: dict[str, Any]) -> None:
    next(each for each in ours["constants"].values() if "left" in each)["left"] = 1.5


def change_type(header: dict[str, Any]) -> None:
    header["head.bias"]["dtype"] = "F32"


@pytest.fixture(scope="module")
def partly_float() -> Any:
    model = build("vit", num_classes=2, depth=1)
    return qflash.quantize_model(model, [draw(model, 4)], keep_float=["blocks.0.mlp"], progress=False, min_sqnr=None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"operator": "FloatNode"}, "operator must be one of PatchEmbedding"),
        ({"operator": "Join"}, "operator must be one of PatchEmbedding"),
        ({"sizes": 1}, "operator must be one of PatchEmbedding"),
        ({"sizes": {"inputs": 1 << 40, "outputs": 2, "dtype": "int16"}}, "inputs must be whole"),
        ({"given": []}, "given must be a list of 1 to 4 shapes"),
        ({"given": 3}, "given must be a list of 1 to 4 shapes"),
        ({"given": [3]}, "do not fit FloatNode"),
        ({"given": [[1 << 40]]}, "grids must be whole"),
        ({"given": [[2, 3]]}, "grids must be a number or one of each channel"),
        ({"made": "x"}, "grids must be whole"),
        ({"has_bias": 1}, "has_bias and head_scale True or False"),
        ({"mask": [1]}, "mask must be None or have 4 numbers"),
        ({"epsilon": -1.0}, "epsilon must be at least 0"),
        ({"other": 1}, "do not fit FloatNode"),
    ],
)
def test_a_damaged_float_node_is_refused(partly_float: Any, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "network.safetensors"
    partly_float.save(path)

    def damage(ours: dict[str, Any]) -> None:
        next(each for each in ours["nodes"] if each["name"] == "blocks.0.mlp.fc2")["sizes"].update(change)

    content = path.read_bytes()
    path.write_bytes(rewrite(content, in_ours(damage)))
    with pytest.raises(ValueError, match=message):
        load_model(path, verify=False)


def test_a_float_node_without_numbers_is_refused(partly_float: Any, tmp_path: Path) -> None:
    network, path = copy.deepcopy(partly_float), tmp_path / "network.safetensors"
    network.part("blocks.0.mlp.fc2").weight.data[0, 0] = float("nan")
    network.save(path)
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp\.fc2: weight must be finite"):
        load_model(path)


def test_a_damaged_file_is_refused(made: Any, tmp_path: Path) -> None:
    path = tmp_path / "network.safetensors"
    made("class token")[1].save(path)
    content = path.read_bytes()
    for part in (b"", content[:4], content[:200], content[:-1], b"\0" * 100):
        path.write_bytes(part)
        with pytest.raises(ValueError, match="no readable safetensors file"):
            load_model(path)
    with pytest.raises(FileNotFoundError, match="no integer network at"):
        load_model(tmp_path / "absent")
    with pytest.raises(TypeError, match="network must be what quantize_model returns"):
        save_model(torch.nn.Linear(2, 2), path)  # type: ignore[arg-type]


def test_a_network_is_small(made: Any, tmp_path: Path) -> None:
    model = build("vit", img_size=64, embed_dim=192, depth=2, num_heads=3, num_classes=10)
    network = qflash.quantize_model(model, [draw(model, 2)], progress=False)
    path = tmp_path / "network.safetensors"
    network.save(path)
    assert path.stat().st_size < 1.1 * sum(x.numel() for x in model.parameters())


def test_parts_can_stay_float(made: Any, tmp_path: Path) -> None:
    for kind, parts in (
        ("class token", ["blocks.0.attn", "blocks.1.mlp"]),
        ("swin", ["layers.0.blocks.1.attn", "layers.1.blocks.0.mlp"]),
    ):
        model, network = made(kind)
        images = draw(model, 6, seed=9)
        mixed = qflash.quantize_model(model, [draw(model, 24)], keep_float=parts, progress=False)
        kept = mixed.float_parts()
        assert all(any(name.startswith(f"{part}.") for name in kept) for part in parts)
        # and the normalisations before them
        assert all(name.startswith(tuple(parts)) or ".norm" in name for name in kept)
        with torch.inference_mode():
            want = model(normalise(model, images))
            assert not torch.equal(mixed(images), network(images))
            assert sqnr(want, mixed.dequantize(mixed(images))) > 24
        assert f"in floating point: {', '.join(kept)}" in repr(mixed)
        mixed.save(tmp_path / "mixed.safetensors")
        loaded = qflash.load_model(tmp_path / "mixed.safetensors")
        assert torch.equal(loaded(images), mixed(images)) and loaded.quality == mixed.quality
    with pytest.raises(ValueError, match=r"keep_float must name submodules such as 'blocks.0'.*'blocks.7.mlp'"):
        qflash.quantize_model(build("vit"), [draw(model, 2)], keep_float=["blocks.7.mlp"], progress=False)


@pytest.mark.parametrize("kind", ["class token", "swin"])
def test_layers_are_compared(made: Any, kind: str) -> None:
    model, network = made(kind)
    images = draw(model, 6, seed=10)
    found = qflash.compare(network, model, images, progress=False)
    blocks = sum(type(network.part(node.name)).__name__ == "Attention" for node in network.nodes)
    assert len(found.contributions) == 2 * blocks
    assert all(row.sqnr_db > 28 and row.saturated_share < 0.02 for row in found.nodes)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in (*model.modules(), *network.modules()))


@pytest.mark.parametrize("method", ["percentile", "mse"])
def test_other_calibrations_clip(method: str) -> None:
    model = build("vit", num_classes=10)
    images = draw(model, 6, seed=11)
    network = qflash.quantize_model(model, [draw(model, 16)], method=method, percentile=99.9, progress=False)
    with torch.inference_mode():
        assert sqnr(model(normalise(model, images)), network.dequantize(network(images))) > 15


def test_a_network_is_exported_and_compiled(made: Any) -> None:
    model, network = made("class token")
    images = draw(model, 3, seed=12)
    program = torch.export.export(network, (images,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))
    assert torch.equal(program.module()(images), network(images))
    assert torch.equal(program.module()(images[:2]), network(images[:2]))
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(images), network(images))


def refused(error: type[Exception], message: str, model: Any, batches: Any, **options: Any) -> None:
    with pytest.raises(error, match=message):
        qflash.quantize_model(model, batches, progress=False, **options)


def test_bad_arguments_are_named(made: Any) -> None:
    model = build("vit", num_classes=10)
    images = draw(model, 2)
    refused(
        ValueError,
        "torch.export cannot trace the model",
        torch.nn.Linear(2, 2).eval(),
        [images],
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
    )
    for wrong in (None, "model", torch.nn.GELU(), model.forward):
        refused(TypeError, r"model must be a torch\.nn\.Module with parameters, got", wrong, [images])
    refused(TypeError, "must be uint8 pixels.*got torch.float32", model, [images.float()])
    refused(TypeError, "images must be a uint8 tensor, got ndarray", model, [images.numpy()])
    refused(ValueError, r"cannot trace the model: .*height \(16\) doesn't match model \(32\)", model, [images[:, :, :16]])
    refused(ValueError, r"shape \(batch, 3, 32, 32\), got \(2, 3, 16, 32\)", model, [images, images[:, :, :16]])
    refused(ValueError, "at least one image, got none", model, [])
    refused(ValueError, "eval mode", build("vit").train(), [images])
    refused(ValueError, "method must be one of", model, [images], method="best")
    refused(ValueError, "percentile must be above 50", model, [images], percentile=10)
    refused(
        ValueError, r"std must be 3 numbers above 0, one for each of .* got \[1.0, 0.0, 1.0\]", model, [images], std=(1, 0, 1)
    )
    refused(ValueError, "recipe must be a Recipe or one of", model, [images], recipe="best")
    del model.pretrained_cfg
    refused(ValueError, "mean must be given", model, [images])
    qflash.quantize_model(model, [(images, torch.zeros(2))], mean=(0.5,) * 3, std=(0.5,) * 3, progress=False)
    broken = build("vit", num_classes=10)
    with torch.no_grad():
        broken.blocks[1].mlp.fc1.weight[0, 0] = float("nan")
    refused(ValueError, r"NaN or infinity is in blocks\.1\.mlp\.fc1\.weight", broken, [images])
    with torch.no_grad():
        broken.blocks[1].mlp.fc1.weight.fill_(3e38)
    refused(ValueError, "NaN or infinity in the output of the float network", broken, [images])

    network = made("class token")[1]
    with pytest.raises(TypeError, match=r"must be uint8 pixels.*not normalised"):
        network(images.float())
    with pytest.raises(ValueError, match=r"shape \(batch, 3, 32, 32\)"):
        network(images[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"act_layer": torch.nn.Hardswish}, r"hardswish in blocks\.0\.mlp\.act "),
    ],
)
def test_layers_without_an_integer_form_are_named(options: dict[str, Any], message: str) -> None:
    model = build("vit", **options)
    refused(ValueError, message, model, [draw(model, 1)])


def put(path: str, part: Any) -> Any:
    """Return what replaces an attribute of a model's submodule."""
    *parents, name = path.split(".")
    return lambda model: setattr(model.get_submodule(".".join(parents)), name, part)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("vit", put("blocks.0.mlp", torch.nn.Identity()), r"blocks\.0\S* has no integer form"),
        ("vit", put("blocks.0.mlp", timm.layers.GluMlp(48, 96)), r"aten\.sigmoid in blocks\.0\.mlp\.act"),
        ("vit", put("blocks.0.mlp.act", torch.nn.Sigmoid()), r"aten\.sigmoid in blocks\.0\.mlp\.act"),
        ("vit", put("blocks.0.mlp.act", torch.nn.Tanh()), r"tanh in blocks\.0\.mlp\.act"),
        (
            "swin",
            put("head.global_pool", timm.layers.SelectAdaptivePool2d(pool_type="max", flatten=True, input_fmt="NHWC")),
            "in head",
        ),
    ],
)
def test_parts_without_an_integer_form_are_named(family: str, change: Any, message: str) -> None:
    model = build(family)
    change(model)
    refused(ValueError, message, model.eval(), [draw(model, 16)])


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (torch.nn.GELU, r"an activation of GELU is .*; integer networks take up to 105"),
        (torch.nn.SiLU, r"^node 'blocks\.0\.mlp\.fc1': an activation of SiLU is .*; integer networks take up to 256"),
        (timm.layers.activations.QuickGELU, r"an activation of SiLU is .*; integer networks take up to 150"),
    ],
)
def test_activations_beyond_their_range_are_refused(act: Any, message: str) -> None:
    model = build("vit")
    model.blocks[0].mlp.act = act()
    with torch.no_grad():
        model.blocks[0].mlp.fc1.weight.mul_(1e4)
    refused(ValueError, message, model, [draw(model, 2)])


def test_units_that_sums_cannot_be_brought_to_are_refused() -> None:
    one = torch.ones(4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"cannot be brought to a unit .* the network's scales are degenerate"):
        conversion.fill_linear(
            Linear(4, 4, "int8"), torch.eye(4, dtype=torch.float64), None, conversion.Grid(one, 0 * one), 0 * one, 1e-9
        )
    wide = conversion.Range(-1000 * one, 1e-5 - 1000 * one, -1000 * one)
    with pytest.raises(ValueError, match="the zero point of GELU is too large for its unit"):
        conversion.activation_steps(LinearGelu(4, 4), op.GELU_UNIT, wide, torch.eye(4, dtype=torch.float64))
    with pytest.raises(ValueError, match="gain is too large for its unit"):
        conversion.finish_norm(LayerNorm(4, "int8"), FloatTwin(torch.ones(4), torch.zeros(4), 1e-5), 1.0, 2.0**-30)
    with pytest.raises(ValueError, match="the mean of 4 tokens has no room in 32 bits"):
        conversion.finish_mean(Mean(4, 4, "int8"), one * 2.0**20, one)


def test_queries_and_keys_are_normalised(made: Any) -> None:
    """The integers of one block's attention are those of the float block, in the steps that its scales say."""
    model, network = made("query and key norms")
    ours, theirs = network.part("blocks.0.attn.core"), model.blocks[0].attn
    seen: dict[str, torch.Tensor] = {}
    handles = [
        part.register_forward_hook(lambda _, __, out, name=name: seen.__setitem__(name, out))
        for name, part in {"query": theirs.q_norm, "key": theirs.k_norm}.items()
    ]
    images = draw(model, 4, seed=14)
    with torch.inference_mode():
        model(normalise(model, images))
    for handle in handles:
        handle.remove()
    values: dict[str, torch.Tensor] = {}
    network.run(images, values.__setitem__)
    query, key = (values[f"blocks.0.attn.{label}_norm"].transpose(1, 2) for label in "qk")
    scores = (query.double() @ key.double().mT) * (ours.query_scale.view(torch.float32) * ours.key_scale.view(torch.float32))
    want = seen["query"].double() @ seen["key"].double().mT
    # a constant in a row is nothing to softmax
    assert sqnr(want - want.mean(-1, keepdim=True), scores - scores.mean(-1, keepdim=True)) > 28
    assert ours.query_scale.unique().numel() == ours.key_scale.unique().numel() == 1
    assert query.abs().amax() > 100 and key.abs().amax() > 100


class Tokens(torch.nn.Module):
    """Returns the features of all tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.pretrained_cfg = model, model.pretrained_cfg

    def forward(self, x: torch.Tensor) -> Any:
        return self.model.forward_features(x)


def test_features_of_all_tokens(made: Any) -> None:
    model, _ = made("features")
    images = draw(model, 4, seed=13)
    every = qflash.quantize_model(Tokens(model).eval(), [draw(model, 24)], progress=False)
    with torch.inference_mode():
        want = model.forward_features(normalise(model, images))
    assert sqnr(want, every.dequantize(every(images))) > 30
    assert every(images).shape == (4, 17, 48)


@pytest.mark.slow
def test_a_file_has_little_more_than_a_byte_a_parameter(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224").eval()
    path = tmp_path / "deit.safetensors"
    qflash.quantize_model(model, [draw(model, 2)], progress=False).save(path)
    assert path.stat().st_size <= 1.1 * sum(x.numel() for x in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["class token", "swin"])
def test_a_network_compiled_ahead_of_time(made: Any, kind: str, tmp_path: Path) -> None:
    """By Inductor, and as a package of AOTInductor, with any batch size."""
    model, network = made(kind)
    images = draw(model, 4, seed=12)
    want = network(images)
    assert torch.equal(torch.compile(network, fullgraph=True)(images), want)
    program = torch.export.export(network, (images,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "network.pt2"))
    packaged = torch._inductor.aoti_load_package(path)
    assert torch.equal(packaged(images), want) and torch.equal(packaged(images[:1]), want[:1])


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        (0, ValueError, "batch must be at least 1, got 0"),
        (2.0, TypeError, "batch must be an integer, got float"),
        (True, TypeError, "batch must be an integer, got bool"),
    ],
)
def test_a_graph_needs_a_batch(made: Any, batch: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        made("class token")[1].graph(batch)
