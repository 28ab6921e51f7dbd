"""What people look at, trace and transform models with, on patched ones: it works, or says why not."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import qflash
from helpers import make_inputs, run_compiling, same_bits
from qflash.integrations.swin_bias import window_bias

pytest.importorskip("timm")
from timm.models._features_fx import create_feature_extractor as timm_extractor
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.vision_transformer import VisionTransformer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")

MODELS = ("vit", "swin", "swin v2")
STAGE = {"vit": "blocks.1", "swin": "layers.1", "swin v2": "layers.1"}


def build(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    if kind == "vit":
        model = VisionTransformer(img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5)
    else:
        family = SwinTransformer if kind == "swin" else SwinTransformerV2
        model = family(img_size=16, patch_size=2, embed_dim=16, depths=(2, 2), num_heads=(2, 2), window_size=4, num_classes=5)
    return qflash.patch(model.eval(), **options)


def images(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_feature_extractors(kind: str, library: str) -> None:
    model, x = build(kind), images()
    if library == "timm":
        extractor = timm_extractor(model, {STAGE[kind]: "stage", "head": "head"})
    else:
        extraction = pytest.importorskip("torchvision.models.feature_extraction")
        extractor = extraction.create_feature_extractor(model, {STAGE[kind]: "stage", "head": "head"}).eval()
    seen = []
    model.get_submodule(STAGE[kind]).register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    logits = model(x)
    found = extractor(x)
    assert same_bits(found["head"], logits)
    assert same_bits(found["stage"], seen[0])


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("recipe", ["paper", qflash.DEFAULT.replace(smooth_key=False)], ids=["preset", "own recipe"])
@pytest.mark.parametrize("keep_bias", [False, True])
def test_a_graph_of_fx_attends_as_the_model_does(kind: str, recipe: Any, keep_bias: bool) -> None:
    model = build(kind, recipe=recipe, keep_bias=keep_bias)
    graph = torch.fx.symbolic_trace(model)
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert called.count(qflash.attention) == (2 if kind == "vit" else 4)
    assert called.count(window_bias) == (0 if kind == "vit" else 4)
    assert not any(getattr(module, "_qflash_kept", None) for module in model.modules())
    for count in (1, 3):
        logits = model(images(count))
        for same in (graph, copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
            assert same_bits(same(images(count)), logits)


def test_fx_says_that_it_cannot_hold_a_function_of_the_caller() -> None:
    model = build("vit", attention=torch.nn.functional.scaled_dot_product_attention)
    with pytest.raises(TypeError, match=r"torch\.fx cannot trace a model patched with attention="):
        torch.fx.symbolic_trace(model)


def integer_path(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    tensors = qflash.quantize(query, "token"), qflash.quantize(key), qflash.quantize(value, "channel")
    out = qflash.int8_attention(*tensors, qflash.quantize_bias(qflash.align_bias(bias)), out_dtype=torch.float32)
    assert not isinstance(out, qflash.QuantizedTensor)
    return out


def test_fx_traces_every_function() -> None:
    inputs = *make_inputs(1, 2, 5, 7, 16), torch.randn(5, 7)
    graph = torch.fx.symbolic_trace(integer_path)
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [
        qflash.quantize, qflash.quantize, qflash.quantize, qflash.align_bias, qflash.quantize_bias, qflash.int8_attention,
    ]  # fmt: skip
    assert same_bits(graph(*inputs), integer_path(*inputs))


class Noting(torch.Tensor):
    """Notes which functions it is given to."""

    seen: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_subclass_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noting, "seen", [])
    query, key, value = make_inputs(1, 2, 5, 7, 16)
    out = qflash.attention(query, key, value.as_subclass(Noting))
    assert Noting.seen == [qflash.attention]
    assert type(out) is Noting
    assert same_bits(out.as_subclass(torch.Tensor), qflash.attention(query, key, value))


def test_a_bias_of_a_fake_tensor_is_not_kept() -> None:
    model, plain = build("swin", keep_bias=True), build("swin")
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.empty(2, 3, 16, 16))
    assert same_bits(model(images()), plain(images()))


@pytest.mark.parametrize("kind", MODELS)
def test_vmap(kind: str) -> None:
    model, x = build(kind), images()
    assert torch.allclose(torch.vmap(lambda image: model(image[None])[0])(x), model(x), atol=1e-5)
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.mul_(1.5)
    parameters, buffers = torch.func.stack_module_state([model, other])  # type: ignore[arg-type]
    together = torch.vmap(lambda p, b: torch.func.functional_call(model, (p, b), (x,)))(parameters, buffers)
    assert torch.allclose(together, torch.stack([model(x), other(x)]), atol=1e-5)


def forward_mode(function: Any, x: torch.Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        return function(torch.autograd.forward_ad.make_dual(x, x))


DERIVATIVES = {
    "grad": lambda function, x: torch.func.grad(lambda y: function(y).sum())(x),
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (x,)),
    "jacfwd": lambda function, x: torch.func.jacfwd(function)(x),
    "jacrev": lambda function, x: torch.func.jacrev(function)(x),
    "hessian": lambda function, x: torch.func.hessian(lambda y: function(y).sum())(x),
    "vjp": lambda function, x: torch.func.vjp(function, x),
    "linearize": lambda function, x: torch.func.linearize(function, x),
    "forward mode": forward_mode,
}


@pytest.mark.parametrize("how", DERIVATIVES)
@pytest.mark.parametrize("what", ["attention", "mask", "quantize", "int8 mask", "bias", "model"])
def test_derivatives_are_refused(how: str, what: str) -> None:
    query, key, value = make_inputs(1, 2, 5, 7, 16)
    functions: dict[str, tuple[Any, torch.Tensor]] = {
        "attention": (lambda x: qflash.attention(query, x, value), key),
        "mask": (lambda x: qflash.attention(query, key, value, x), torch.randn(5, 7)),
        "quantize": (lambda x: qflash.quantize(x).scale, key),
        "int8 mask": (lambda x: integer_path(query, key, value, x), torch.randn(5, 7)),
        "bias": (lambda x: qflash.quantize_bias(x).float(), torch.randn(5, 7)),
    }
    if what == "model":
        functions["model"] = build("swin"), images(1)
    with torch.enable_grad(), pytest.raises(NotImplementedError, match="integer attention has no gradient"):
        DERIVATIVES[how](*functions[what])


def test_backward_of_an_int8_call_is_refused() -> None:
    query, key, value = (qflash.quantize(x) for x in make_inputs(1, 2, 5, 7, 16))
    with torch.enable_grad():
        mask = torch.randn(5, 7, requires_grad=True)
        out = qflash.int8_attention(query, key, value, mask, out_dtype=torch.float32)
        assert isinstance(out, torch.Tensor)
        with pytest.raises(NotImplementedError, match="integer attention has no gradient"):
            out.sum().backward()


@pytest.mark.slow
def test_a_saved_program_without_qflash_is_said_to_need_it(tmp_path: Any) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return qflash.attention(x, x, x)

    program = torch.export.export(Model(), (make_inputs(1, 2, 5, 5, 16)[0],))
    path = tmp_path / "program.pt2"
    torch.export.save(program, path)
    load = f"import torch; torch.export.load({str(path)!r})"
    done = run_compiling("-c", load)
    assert done.returncode != 0
    # PyTorch's own words, which we cannot reach before we are imported
    assert "torch.ops.qflash.attention" in done.stderr and "not registered" in done.stderr
    done = run_compiling("-c", f"import qflash; {load}")
    assert done.returncode == 0, done.stderr


def test_a_head_behind_the_attention_has_derivatives() -> None:
    model, x = build("vit"), images()
    head = model.get_submodule("head")
    features = model.forward_features(x)  # type: ignore[operator]

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, {"head.weight": weight}, (x,)).sum()

    weight = head.weight
    assert isinstance(weight, torch.Tensor)
    wanted = model.fc_norm(features[:, 0]).sum(0).expand_as(weight)  # type: ignore[operator]
    with torch.enable_grad():
        model.requires_grad_(False)
        assert torch.allclose(torch.func.grad(loss)(weight.detach()), wanted, atol=1e-4)


@pytest.mark.parametrize("kind", MODELS)
def test_script_says_what_to_use_instead(kind: str) -> None:
    with pytest.raises(TypeError, match=r"use torch\.jit\.trace, torch\.export or torch\.compile"):
        torch.jit.script(build(kind))


@pytest.mark.parametrize("kind", MODELS)
def test_hooks_that_will_not_be_called_are_named(kind: str) -> None:
    model = qflash.unpatch(build(kind))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.get_submodule(STAGE[kind]).register_forward_hook(lambda *_: None)
        qflash.patch(model)
    attention = next(module for module in model.modules() if hasattr(module, "attn_drop"))
    name = next(name for name, module in model.named_modules() if module is attention)
    attention.get_submodule("attn_drop").register_forward_hook(lambda *_: None)
    for again in (model, qflash.unpatch(model)):
        with pytest.warns(UserWarning, match=f"hooks will not be called on {name}.attn_drop: "):
            qflash.patch(again)
    with pytest.warns(UserWarning, match="hooks will not be called on attn_drop: "):
        qflash.patch(attention)
    if kind != "vit":
        attention.get_submodule("softmax").register_forward_pre_hook(lambda *_: None)
        with pytest.warns(UserWarning, match=f"hooks will not be called on {name}.attn_drop, {name}.softmax: "):
            qflash.patch(model)


@pytest.mark.parametrize("kind", MODELS)
def test_every_other_hook_is_called(kind: str) -> None:
    model = build(kind)
    called: set[nn.Module] = set()
    for module in model.modules():
        module.register_forward_hook(lambda module, _inputs, _output: called.add(module))
    model(images())
    idle = {name.rpartition(".")[2] for name, module in model.named_modules() if module not in called}
    # timm's Swin V2 takes no more than the weights of its qkv, and calls blocks one by one
    others = {"vit": set(), "swin": {"softmax"}, "swin v2": {"softmax", "qkv", "blocks"}}
    assert idle == {"attn_drop"} | others[kind]


@pytest.mark.parametrize("kind", MODELS)
def test_operations_are_counted_like_those_of_the_products(kind: str) -> None:
    model, x = build(kind), images()
    counts = []
    for each in (model, qflash.patch(copy.deepcopy(model), attention=by_products)):
        for _ in range(2):
            with FlopCounterMode(display=False) as counter:
                each(x)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


def by_products(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any, scale: float) -> torch.Tensor:
    scores = query @ key.mT * scale
    return (scores if attn_mask is None else scores + attn_mask).softmax(-1) @ value


def test_operations_of_grouped_queries_and_of_int8() -> None:
    query, key, value = make_inputs(2, 4, 5, 7, 16, 24, key_heads=2)
    tensors = qflash.quantize(query), qflash.quantize(key), qflash.quantize(value)
    for call in (
        lambda: qflash.attention(query, key, value, enable_gqa=True),
        lambda: qflash.int8_attention(*tensors, enable_gqa=True),
    ):
        with FlopCounterMode(display=False) as counter:
            call()
        assert counter.get_total_flops() == 2 * 2 * 4 * 5 * 7 * (16 + 24)


def traced(model: nn.Module, x: torch.Tensor) -> Any:
    written = io.BytesIO()
    torch.jit.save(torch.jit.trace(model, x), written)  # type: ignore[no-untyped-call]
    written.seek(0)
    return torch.jit.load(written)  # type: ignore[no-untyped-call]


def exported(model: nn.Module, x: torch.Tensor) -> Any:
    written = io.BytesIO()
    torch.export.save(torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)), written)
    written.seek(0)
    return torch.export.load(written).module()


def with_own_parameters(model: nn.Module, x: torch.Tensor) -> Any:
    return lambda x: torch.func.functional_call(model, dict(model.named_parameters()), (x,))


def checkpointed(model: nn.Module, x: torch.Tensor) -> Any:
    model.set_grad_checkpointing(True)  # type: ignore[operator]

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return model(x).detach()

    return run


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("keep_bias", [False, True])
@pytest.mark.parametrize("tool", [traced, exported, with_own_parameters, checkpointed])
@pytest.mark.slow
def test_tools_give_what_the_model_gives(tool: Any, keep_bias: bool, kind: str) -> None:
    run = tool(build(kind, keep_bias=keep_bias), images())
    for count in (2, 3):
        assert same_bits(run(images(count)), build(kind)(images(count)))
