"""patch() and unpatch() on small timm models: same module, same state, integer attention."""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import io
import itertools
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import qflash
from qflash.integrations import adapter, patching
from qflash.integrations import timm as timm_adapters
from qflash_lab.bench.metrics import sqnr

timm = pytest.importorskip("timm")
from timm.models.swin_transformer import SwinTransformer, WindowAttention  # noqa: E402
from timm.models.swin_transformer_v2 import SwinTransformerV2  # noqa: E402
from timm.models.swin_transformer_v2 import WindowAttention as CosineWindowAttention  # noqa: E402
from timm.models.vision_transformer import Attention, VisionTransformer  # noqa: E402


def build_vit(**options: object) -> nn.Module:
    torch.manual_seed(0)
    settings: dict = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 10}
    return VisionTransformer(**{**settings, **options}).eval()


def build_swin(**options: object) -> nn.Module:
    torch.manual_seed(0)
    settings: dict = {"img_size": 28, "patch_size": 2, "embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4)}
    model = SwinTransformer(**{**settings, "window_size": 7, "num_classes": 10, **options}).eval()
    for name, parameter in model.named_parameters():
        # The initial bias is too small to tell whether it is applied at all.
        if name.endswith("relative_position_bias_table"):
            nn.init.normal_(parameter, std=1.0)
    return model


def build_swin_v2(**options: object) -> nn.Module:
    torch.manual_seed(0)
    settings: dict = {"img_size": 28, "patch_size": 2, "embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4)}
    model = SwinTransformerV2(**{**settings, "window_size": 7, "num_classes": 10, **options}).eval()
    for name, parameter in model.named_parameters():
        # otherwise all biases would be alike, and so would the scales of the heads; blocks would add nothing
        if name.endswith(("cpb_mlp.2.weight", "logit_scale", "q_bias", "v_bias", "norm1.weight", "norm2.weight")):
            nn.init.normal_(parameter, mean=0.0 if name.endswith(("bias", "mlp.2.weight")) else 1.0, std=0.3)
    return model


def bias_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights of each layer's relative position bias."""
    found = dict(model.named_parameters())
    return [found[name] for name in found if name.endswith(("relative_position_bias_table", "cpb_mlp.2.weight"))]


KINDS = (Attention, WindowAttention, CosineWindowAttention)
BUILDERS = {"vit": (build_vit, 32), "swin": (build_swin, 28), "swin v2": (build_swin_v2, 28)}


@pytest.fixture(params=sorted(BUILDERS))
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, torch.Tensor]:
    build, size = BUILDERS[request.param]
    model = build()
    return model, torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_patched_logits_are_close(case: tuple[nn.Module, torch.Tensor]) -> None:
    model, x = case
    exact = model(x)
    for recipe, least in (("default", 25.0), ("accurate", 30.0)):
        got = qflash.patch(model, recipe)(x)
        assert sqnr(exact, got) > least
        assert not torch.equal(exact, got)


@torch.no_grad()
def test_every_attention_module_is_replaced(case: tuple[nn.Module, torch.Tensor]) -> None:
    model, _ = case
    before = [m for m in model.modules() if isinstance(m, KINDS)]
    modules = list(model.modules())
    assert qflash.patch(model) is model
    after = [m for m in model.modules() if isinstance(m, KINDS)]
    assert before == after
    assert before
    assert all(isinstance(m, patching._Patched) for m in after)
    assert modules == list(model.modules())


@torch.no_grad()
def test_state_is_untouched_and_unpatch_restores(case: tuple[nn.Module, torch.Tensor]) -> None:
    model, x = case
    exact = model(x)
    state = model.state_dict()
    kept = {name: value.clone() for name, value in state.items()}
    classes = [type(m) for m in model.modules()]
    attributes = [set(m.__dict__) for m in model.modules()]
    qflash.patch(model)
    assert list(model.state_dict()) == list(state)
    model.load_state_dict(kept)
    assert qflash.unpatch(model) is model
    assert [type(m) for m in model.modules()] == classes
    assert [set(m.__dict__) for m in model.modules()] == attributes
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(x), exact)
    assert torch.equal(qflash.unpatch(model)(x), exact)


@torch.no_grad()
def test_patching_again_replaces_the_recipe(case: tuple[nn.Module, torch.Tensor]) -> None:
    model, x = case
    default = qflash.patch(model)(x)
    classes = [type(m) for m in model.modules()]
    assert torch.equal(qflash.patch(model)(x), default)
    assert [type(m) for m in model.modules()] == classes
    paper = qflash.patch(model, qflash.PAPER)(x)
    assert not torch.equal(paper, default)
    assert torch.equal(qflash.patch(model, "default", backend="reference")(x), default)


@torch.no_grad()
def test_copies_and_pickles_stay_patched(case: tuple[nn.Module, torch.Tensor]) -> None:
    model, x = case
    exact = model(x)
    patched = qflash.patch(model, "accurate")(x)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), patched)
    assert torch.equal(qflash.unpatch(twin)(x), exact)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), patched)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), patched)


@torch.no_grad()
def test_hooks_survive(case: tuple[nn.Module, torch.Tensor]) -> None:
    model, x = case
    seen: list[torch.Size] = []
    module = next(m for m in model.modules() if isinstance(m, KINDS))
    handle = module.register_forward_hook(lambda m, args, out: seen.append(out.shape))
    qflash.patch(model)(x)
    qflash.unpatch(model)(x)
    handle.remove()
    assert len(seen) == 2
    assert seen[0] == seen[1]


@torch.no_grad()
def test_compiles(case: tuple[nn.Module, torch.Tensor]) -> None:
    model, x = case
    qflash.patch(model)
    expected = model(x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)


@torch.no_grad()
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("options", [{"qk_norm": True}, {"qkv_bias": False}, {"scale_attn_norm": True}])
def test_vit_options(options: dict, fused: bool) -> None:
    try:
        model = build_vit(**options)
    except TypeError:
        pytest.skip(f"this timm has no {options}")
    for module in model.modules():
        if isinstance(module, Attention):
            module.fused_attn = fused
    x = torch.randn(2, 3, 32, 32)
    assert sqnr(model(x), qflash.patch(model, "accurate")(x)) > 30.0


@torch.no_grad()
def test_vit_attention_masks() -> None:
    torch.manual_seed(0)
    module = Attention(64, num_heads=2, qkv_bias=True).eval()
    x = torch.randn(2, 20, 64)
    keep = torch.rand(2, 1, 20, 20) > 0.4
    keep |= torch.eye(20, dtype=torch.bool)
    additive = torch.randn(2, 20, 20)
    try:
        exact = [module(x, attn_mask=keep), module(x, attn_mask=additive)]
    except TypeError:
        pytest.skip("this timm's Attention takes no mask")
    qflash.patch(module, "accurate")
    for mask, want in zip((keep, additive), exact, strict=True):
        assert sqnr(want, module(x, attn_mask=mask)) > 25.0
    qflash.unpatch(module)
    try:
        want = module(x, is_causal=True)
    except TypeError:
        return
    assert sqnr(want, qflash.patch(module, "accurate")(x, is_causal=True)) > 25.0


@torch.no_grad()
def test_gate_is_applied() -> None:
    torch.manual_seed(0)
    try:
        module = Attention(64, num_heads=2, gated=True).eval()
    except TypeError:
        pytest.skip("this timm has no gated attention")
    x = torch.randn(2, 20, 64)
    assert sqnr(module(x), qflash.patch(module, "accurate")(x)) > 25.0


@torch.no_grad()
def test_autocast_with_a_float32_norm() -> None:
    model = build_vit(qk_norm=True)
    x = torch.randn(2, 3, 32, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        exact = model(x)
        got = qflash.patch(model)(x)
    assert got.dtype == exact.dtype
    assert sqnr(exact, got) > 20.0


@torch.no_grad()
def test_swin_mask_is_never_expanded_over_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: set[tuple[int, ...]] = set()

    def spy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, **options: object) -> torch.Tensor:
        shapes.add(tuple(mask.shape))
        return qflash.attention(query, key, value, mask, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(adapter, "attention", spy)
    model = qflash.patch(build_swin())
    model(torch.randn(5, 3, 28, 28))
    assert shapes == {(1, 2, 49, 49), (4, 2, 49, 49), (1, 4, 49, 49)}


@pytest.mark.parametrize("gradients", [False, True])
def test_swin_bias_has_aligned_rows(monkeypatch: pytest.MonkeyPatch, gradients: bool) -> None:
    steps: set[int] = set()

    def spy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, **options: object) -> torch.Tensor:
        steps.add(mask.stride(-2))
        return qflash.attention(query, key, value, mask, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(adapter, "attention", spy)
    model, x = qflash.patch(build_swin()), torch.randn(2, 3, 28, 28)
    with torch.set_grad_enabled(gradients):
        out = model(x)
    # where a gradient is wanted bias and sum are PyTorch's own
    assert steps == {49 if gradients else 56}
    with torch.no_grad():
        assert torch.equal(model(x), out)


class Counted:
    """Counts the biases that are worked out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        real = timm_adapters.window_bias

        def counting(*arguments: torch.Tensor | None) -> torch.Tensor:
            self.calls += 1
            return real(*arguments)

        monkeypatch.setattr(timm_adapters, "window_bias", counting)

    def during(self, call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, int]:
        """Return what ``call`` returns, and how many biases were worked out meanwhile."""
        before = self.calls
        return call(), self.calls - before


def count_windows(model: nn.Module) -> tuple[int, int]:
    """Return how many window attentions a Swin has, and of how many the windows are shifted."""
    shifted = sum(getattr(module, "attn_mask", None) is not None for module in model.modules())
    return sum(isinstance(module, WindowAttention) for module in model.modules()), shifted


@pytest.mark.parametrize("inference", [False, True])
def test_a_kept_bias_is_worked_out_once(monkeypatch: pytest.MonkeyPatch, inference: bool) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        model, x = build_swin(), torch.randn(2, 3, 28, 28)
        layers, shifted = count_windows(model)
        assert layers > shifted > 0
        counted = Counted(monkeypatch)
        wanted, count = counted.during(lambda: qflash.patch(model)(x))
        assert count == layers
        assert counted.during(lambda: model(x))[1] == layers
        qflash.patch(model, keep_bias=True)
        assert "keep_bias=True" in repr(model)
        # a mask is not known to stay before it has come twice
        for expected in (layers, shifted, 0):
            out, count = counted.during(lambda: model(x))
            assert torch.equal(out, wanted)
            assert count == expected
        # of other functions than ours, too
        qflash.patch(model, attention=qflash.attention, keep_bias=True)
        assert [counted.during(lambda: model(x))[1] for _ in range(3)] == [layers, shifted, 0]


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("build", [build_swin, build_swin_v2])
def test_a_kept_bias_follows_the_weights(build: Callable[[], nn.Module]) -> None:
    model, x = qflash.patch(build(), keep_bias=True), torch.randn(2, 3, 28, 28)
    other = build()
    for table in bias_weights(other):
        table.normal_()
    tables = bias_weights(model)

    def check(x: torch.Tensor) -> torch.Tensor:
        fresh = qflash.patch(copy.deepcopy(model))
        assert not any(module._qflash_keep_bias for module in fresh.modules() if hasattr(module, "_qflash_keep_bias"))
        wanted = fresh(x)
        for _ in range(3):
            assert torch.equal(model(x), wanted)
        return wanted

    seen = [check(x)]
    model.load_state_dict(other.state_dict())
    seen.append(check(x))
    for table in tables:
        table.mul_(-1.0)
    seen.append(check(x))
    for table in tables:
        table.data = table.data + 1.5 * torch.randn(table.shape)
    seen.append(check(x))
    for module in model.modules():
        if getattr(module, "attn_mask", None) is not None:
            module.attn_mask.neg_()
    seen.append(check(x))
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(seen, 2))
    check(torch.randn(1, 3, 28, 28))
    model.to(torch.bfloat16)
    check(x.bfloat16())
    assert check(x.bfloat16()).dtype == torch.bfloat16
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(x.bfloat16()), model(x.bfloat16()))
    assert "_qflash" not in " ".join(key for module in qflash.unpatch(model).modules() for key in module.__dict__)


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("build", [build_swin, build_swin_v2])
def test_compiled_code_takes_a_kept_bias(build: Callable[[], nn.Module]) -> None:
    """Nothing is looked up or added in the graph, but for masks that are others in every call."""
    model, x = qflash.patch(build(), keep_bias=True), torch.randn(2, 3, 28, 28)
    wanted, _ = (model(x) for _ in range(2))
    lookups: list[int] = []

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        lookups.append(sum("index_select" in str(node.target) for node in graph.graph.nodes))
        return graph

    def compiled() -> Callable[[torch.Tensor], torch.Tensor]:
        torch.compiler.reset()
        return torch.compile(model, backend=count, fullgraph=True)

    run = compiled()
    assert torch.equal(run(x), wanted) and lookups == [0]
    for table in bias_weights(model):
        table.normal_()
    # noticed once the model was called by itself, which keeps what it finds
    changed, _ = (model(x) for _ in range(2))
    assert torch.equal(run(x), changed) and not torch.equal(changed, wanted)
    # other weights, of which nothing is kept yet
    model.to(torch.bfloat16)
    run = compiled()
    assert torch.equal(run(x.bfloat16()), model(x.bfloat16())) and lookups[-1] > 0


@torch.no_grad()
def test_a_kept_bias_is_that_of_autocast() -> None:
    """Swin V2's comes from products, which autocast computes in another type."""
    model, fresh = qflash.patch(build_swin_v2(), keep_bias=True), qflash.patch(build_swin_v2())
    attention, plain = (next(m for m in x.modules() if isinstance(m, CosineWindowAttention)) for x in (model, fresh))
    x = torch.randn(8, 49, 32)
    for enabled in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            for _ in range(2):
                assert torch.equal(attention(x), plain(x)), enabled


@torch.no_grad()
def test_a_mask_of_each_call_is_added_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = WindowAttention(64, 2, window_size=7).eval()
    x = torch.randn(8, 49, 64)
    masks = [torch.where(torch.rand(4, 49, 49) < 0.3, -100.0, 0.0) for _ in range(3)]
    wanted = [qflash.patch(attention)(x, mask) for mask in masks]
    counted = Counted(monkeypatch)
    qflash.patch(attention, keep_bias=True)
    for number, mask in enumerate(masks):
        out, count = counted.during(lambda mask=mask: attention(x, mask.clone()))
        assert torch.equal(out, wanted[number])
        assert count == 1


def test_a_bias_that_needs_a_gradient_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = qflash.patch(build_swin(), keep_bias=True), torch.randn(1, 3, 28, 28)
    layers, _ = count_windows(model)
    counted = Counted(monkeypatch)
    for _ in range(3):
        out, count = counted.during(lambda: model(x))
        assert count == layers
    with pytest.raises(NotImplementedError, match="inference"):
        out.sum().backward()
    model.requires_grad_(False)
    # the masks have come before
    assert [counted.during(lambda: model(x))[1] for _ in range(2)] == [layers, 0]


@torch.no_grad()
def test_any_attention_function(case: tuple[nn.Module, torch.Tensor]) -> None:
    model, x = case
    exact, keys = model(x), list(model.state_dict())
    default = qflash.patch(model)(x)
    ranks: set[int] = set()

    def exchanged(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: object) -> torch.Tensor:
        ranks.add(query.dim())
        return nn.functional.scaled_dot_product_attention(query, key, value, **options)  # type: ignore[arg-type]

    assert sqnr(exact, qflash.patch(model, attention=exchanged)(x)) > 100.0
    assert ranks == {4}
    assert "exchanged" in repr(model)
    # the same attention, whether the mask repeats over the images or has been expanded over them
    assert torch.equal(qflash.patch(model, attention=qflash.attention)(x), default)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), default)
    qflash.patch(model, attention=nn.Identity())
    assert list(model.state_dict()) == keys
    assert torch.equal(qflash.patch(model)(x), default)
    assert torch.equal(qflash.unpatch(model)(x), exact)


@torch.no_grad()
def test_attention_function_sees_causal_and_masks() -> None:
    torch.manual_seed(0)
    module = Attention(64, num_heads=2).eval()
    x = torch.randn(2, 20, 64)
    keep = torch.rand(20, 20) > 0.4
    keep |= torch.eye(20, dtype=torch.bool)
    want = qflash.patch(module)(x, is_causal=True), module(x, attn_mask=keep)
    qflash.patch(module, attention=qflash.attention)
    assert torch.equal(module(x, is_causal=True), want[0])
    assert torch.equal(module(x, attn_mask=keep), want[1])
    with pytest.raises(ValueError, match="exclude"):
        module(x, attn_mask=keep, is_causal=True)


def test_attention_dropout_raises_in_training() -> None:
    model = qflash.patch(build_vit(attn_drop_rate=0.1))
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        model(x)
        with pytest.raises(RuntimeError, match="eval"):
            model.train()(x)
        qflash.patch(build_vit()).train()(x)


def test_backward_is_refused() -> None:
    model = qflash.patch(build_vit())
    with pytest.raises(NotImplementedError):
        model(torch.randn(1, 3, 32, 32)).sum().backward()


class Hook:
    """Notes its calls, as a hook of accelerate."""

    no_grad = False

    def __init__(self) -> None:
        self.seen = 0

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module

    detach_hook = init_hook

    def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> tuple[tuple, dict]:
        self.seen += 1
        return args, kwargs

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return output


def call_hooked(module: Any, *args: object, **kwargs: object) -> torch.Tensor:
    args, kwargs = module._hf_hook.pre_forward(module, *args, **kwargs)
    return module._hf_hook.post_forward(module, module._old_forward(*args, **kwargs))


def add_hook(module: Any) -> None:
    """Do what accelerate's add_hook_to_module does, with accelerate where it is installed."""
    if importlib.util.find_spec("accelerate") is not None:
        importlib.import_module("accelerate.hooks").add_hook_to_module(module, Hook())
        return
    old = module._old_forward if hasattr(module, "_hf_hook") else module.forward
    module._old_forward, module._hf_hook = old, Hook()
    module.forward = functools.update_wrapper(functools.partial(call_hooked, module), old)


def remove_hook(module: Any) -> None:
    if importlib.util.find_spec("accelerate") is not None:
        importlib.import_module("accelerate.hooks").remove_hook_from_module(module)
        return
    module.forward = module._old_forward
    del module._hf_hook, module._old_forward


def find_attention(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, KINDS)]


@torch.no_grad()
@pytest.mark.parametrize("hooked", ["before", "after", "removed", "removed after"])
@pytest.mark.slow
def test_hooks_of_accelerate_stay(case: tuple[nn.Module, torch.Tensor], hooked: str) -> None:
    model, x = case
    exact, wanted = model(x), qflash.patch(copy.deepcopy(model))(x)
    found = find_attention(model)
    if hooked != "after":
        for module in found:
            add_hook(module)
            if hooked == "removed":
                remove_hook(module)
    kept = [dict(module.__dict__) for module in found]
    for _ in range(2):
        assert torch.equal(qflash.patch(model)(x), wanted)
    for module in found:
        if hooked == "after":
            add_hook(module)
        if hooked == "removed after":
            remove_hook(module)
    assert torch.equal(qflash.patch(model)(x), wanted)
    twin = copy.deepcopy(model)
    for module in found:
        module.qkv.weight.mul_(2.0)
    assert torch.equal(twin(x), wanted)
    assert torch.equal(qflash.unpatch(twin)(x), exact)
    assert torch.equal(qflash.patch(twin)(x), wanted)
    if "removed" in hooked:
        assert torch.equal(pickle.loads(pickle.dumps(twin))(x), wanted)
    elif hooked == "before":
        assert all(module._hf_hook.seen == 3 for module in found)
    qflash.unpatch(model)
    for module, before in zip(found, kept, strict=True):
        own = type(module).forward.__get__(module)
        assert module.__dict__.get("_old_forward", own) == own
        if hooked in ("before", "removed"):
            assert {name: module.__dict__.get(name) for name in ("forward", "_old_forward")} == {
                name: before.get(name) for name in ("forward", "_old_forward")
            }
        assert inspect.signature(module.forward) == inspect.signature(own)
        assert not isinstance(module, patching._Patched)


@torch.no_grad()
def test_a_forward_of_somebody_else_is_refused() -> None:
    model = build_vit()
    first, second = find_attention(model)
    own = second.forward
    add_hook(first)
    for other in (
        functools.partial(own),
        functools.wraps(own)(lambda *args, **options: own(*args, **options)),
        types.MethodType(lambda self, *args, **options: own(*args, **options), second),
        Attention(64).forward,
    ):
        second.forward = other
        with pytest.raises(ValueError, match=r"forward was replaced on blocks\.1\.attn,"):
            qflash.patch(model)
        with pytest.raises(ValueError, match="forward was replaced on the model itself,"):
            qflash.patch(second)
        add_hook(second)
        with pytest.raises(ValueError, match=r"blocks\.1\.attn,"):
            qflash.patch(model)
        remove_hook(second)
        assert second.forward is other
        del second.forward
    add_hook(second)
    around = functools.wraps(second.forward)(lambda *args: own(*args))
    second.forward = around
    with pytest.raises(ValueError, match=r"blocks\.1\.attn,"):
        qflash.patch(model)
    assert second.forward is around
    assert not any(isinstance(module, patching._Patched) for module in (first, second))
    remove_hook(second)
    qflash.patch(model)
    second.forward = around = functools.partial(second.forward)
    for change in (qflash.patch, qflash.unpatch):
        with pytest.raises(ValueError, match=r"blocks\.1\.attn,"):
            change(model)
    assert second.forward is around
    assert all(isinstance(module, patching._Patched) for module in (first, second))
    many = build_vit(depth=7)
    for module in find_attention(many):
        module.forward = functools.partial(module.forward)
    with pytest.raises(ValueError, match=r"blocks\.3\.attn and 3 more,"):
        qflash.patch(many)


@torch.no_grad()
def test_copies_of_compiled_modules_call_themselves() -> None:
    model, x = build_vit(), torch.randn(1, 3, 32, 32)
    exact, wanted = model(x), qflash.patch(build_vit())(x)
    torch._dynamo.reset()
    for module in find_attention(model):
        module.compile(backend="eager")
    model(x)
    qflash.patch(model)
    assert torch.equal(model(x), wanted)
    twin = copy.deepcopy(model)
    for module in find_attention(model):
        module.qkv.weight.mul_(2.0)
    assert torch.equal(twin(x), wanted)
    assert torch.equal(pickle.loads(pickle.dumps(twin))(x), wanted)
    assert torch.equal(qflash.unpatch(twin)(x), exact)


def test_a_class_that_was_changed_after_patching_is_not_lost() -> None:
    model = qflash.patch(build_swin())
    found = find_attention(model)
    nn.utils.parametrize.register_parametrization(found[2], "relative_position_bias_table", nn.Identity())
    kinds = [type(module) for module in found]
    with pytest.raises(ValueError, match=r"layers\.1\.blocks\.0\.attn: the class was changed after patching"):
        qflash.unpatch(model)
    assert [type(module) for module in found] == kinds
    nn.utils.parametrize.remove_parametrizations(found[2], "relative_position_bias_table")
    assert not any(isinstance(module, patching._Patched) for module in qflash.unpatch(model).modules())


def test_attention_that_stays_in_floating_point_is_named() -> None:
    model = timm.create_model("xcit_nano_12_p8_224", img_size=32).eval()
    before = [type(module) for module in model.modules()]
    text = r"XCA \(it attends over channels, not tokens\): blocks\.0\.attn, blocks\.1\.attn, blocks\.2\.attn and 9 more"
    with pytest.raises(ValueError, match=rf"^strict=True, and Xcit has attention that stays in floating point: {text}"):
        qflash.patch(model, strict=True)
    assert [type(module) for module in model.modules()] == before
    with pytest.warns(UserWarning, match=rf"^Xcit keeps attention in floating point: {text}$") as told:
        qflash.patch(model)
    assert len(told) == 1
    assert set(qflash.float_attention(model).values()) == {"XCA"}
    assert {layer.kind for layer in qflash.coverage(model).integer} == {"ClassAttn"}


class Gated(nn.Module):
    """A model with softmaxes that are no attention: of a gate, by a matrix product, and a classifier's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.gate = nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.model(x)
        gate = nn.functional.softmax(self.gate(logits), dim=-1)
        return (logits @ gate.mT).softmax(-1)


class Pooled(Gated):
    """Attention without saying so."""

    def pool(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x @ x.mT, x).softmax(-1)


@pytest.mark.filterwarnings("error")
def test_no_warning_where_all_attention_is_patched(case: tuple[nn.Module, torch.Tensor]) -> None:
    model, _ = case
    assert set(qflash.float_attention(model).values()) == {type(find_attention(model)[0]).__name__}
    qflash.patch(Gated(model))
    assert qflash.float_attention(model) == {}
    both = nn.ModuleList([Pooled(model), nn.MultiheadAttention(8, 2)])
    assert {layer.kind for layer in qflash.coverage(both).floating} == {"Pooled", "MultiheadAttention"}
    assert {layer.route for layer in qflash.coverage(qflash.patch(both)).integer} == {"adapter", "softmax", "sdpa"}


class Overridden(Attention):
    """Computes something else than its base."""

    def forward(self, x: torch.Tensor, **_: object) -> torch.Tensor:
        return x


class Inherited(Attention):
    """Computes what its base does."""


def test_subclasses_only_when_forward_is_inherited() -> None:
    with pytest.raises(ValueError, match="Sequential holds no attention that QFlash can replace, neither"):
        qflash.patch(nn.Sequential(Overridden(64)))
    module = qflash.patch(Inherited(64))
    assert isinstance(module, Inherited)
    assert isinstance(pickle.loads(pickle.dumps(module)), patching._Patched)


def test_refusals() -> None:
    with pytest.raises(TypeError, match="model"):
        qflash.patch("vit")  # type: ignore[type-var]
    with pytest.raises(TypeError, match="model"):
        qflash.unpatch(None)  # type: ignore[type-var]
    plain = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="Linear holds no attention that QFlash can replace, neither"):
        qflash.patch(plain)
    assert qflash.unpatch(plain) is plain
    model = build_vit()
    with pytest.raises(ValueError, match="recipe"):
        qflash.patch(model, "best")
    with pytest.raises(ValueError, match="backend"):
        qflash.patch(model, backend="cuda")
    with pytest.raises(TypeError, match="keep_bias must be True or False"):
        qflash.patch(model, keep_bias="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="attention must be a function"):
        qflash.patch(model, attention="sdpa")  # type: ignore[arg-type]
    for given in ({"recipe": "paper"}, {"backend": "reference"}):
        with pytest.raises(ValueError, match="leave them out"):
            qflash.patch(model, attention=qflash.attention, **given)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="strict must be True or False"):
        qflash.patch(model, strict=1)  # type: ignore[arg-type]
    assert not any(isinstance(m, patching._Patched) for m in model.modules())
