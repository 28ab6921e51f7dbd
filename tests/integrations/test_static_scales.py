"""calibrate(): static scales of a patched model's attention, kept in its state_dict."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import qflash
from helpers import slow
from qflash.integrations import static_scales
from qflash_lab.bench.metrics import sqnr
from small_networks import build, draw, normalise

ALL = qflash.Recipe(smooth_value=True, balance=True, rotate=True, query_granularity="head")
RECIPES: dict[str, qflash.Recipe] = {"default": qflash.DEFAULT, "accurate": qflash.ACCURATE, "paper": qflash.PAPER, "all": ALL}


def inputs(model: Any, count: int, seed: int) -> torch.Tensor:
    return normalise(model, draw(model, count, seed))


def calibrated(family: str = "vit", recipe: Any = None, **options: Any) -> Any:
    key = family, recipe, *options.items()
    if key not in _calibrated:
        model = qflash.patch(build(family, num_classes=10, **options), recipe)
        _calibrated[key] = qflash.calibrate(model, [inputs(model, 4, 1), inputs(model, 4, 2)], progress=False)
    return copy.deepcopy(_calibrated[key])


_calibrated: dict[Any, Any] = {}


@torch.inference_mode()
def run(model: Any, x: torch.Tensor, backend: str | None = None) -> torch.Tensor:
    for module in model.modules():
        if backend is not None and hasattr(module, "_qflash_backend"):
            module._qflash_backend = backend
    return model(x)


class Operators(TorchDispatchMode):
    """Notes the operators of QFlash that run, and everything that takes a maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("qflash.") or "max" in name or "min" in name:
            self.seen.add(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("family", "name"), [*(("vit", name) for name in RECIPES), ("swin", "default")])
def test_no_maximum_is_taken(family: str, name: str) -> None:
    model = calibrated(family, RECIPES[name])
    x = inputs(model, 3, 9)
    want = run(qflash.unpatch(copy.deepcopy(model)), x)
    with Operators() as operators:
        got = run(model, x)
    assert operators.seen == {"qflash.quantize_with_scale.default", "qflash.int8_attention.default"}
    assert sqnr(want, got) > (18 if name == "paper" else 32)
    for backend in ("reference", "cpu"):
        assert torch.equal(run(model, x, backend), got), backend
    assert "with static scales" in str(qflash.coverage(model))
    assert all(layer.is_static for layer in qflash.coverage(model))


@pytest.mark.parametrize("method", ["percentile", "mse"])
def test_other_methods_give_narrower_ranges(method: str) -> None:
    model, other = calibrated(), build("vit", num_classes=10)
    qflash.patch(other)
    qflash.calibrate(other, [inputs(model, 4, 1), inputs(model, 4, 2)], method=method, percentile=99.0, progress=False)
    wide, narrow = (m.blocks[0].attn.qflash_scales.query_scale for m in (model, other))
    assert (narrow <= wide).all() and (method == "mse" or (narrow < wide).any())


def test_scales_follow_their_definition() -> None:
    """ALL but the rotation, on numbers small enough to work out here."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    query[..., 3] *= 40
    module = Grouped(ALL.replace(rotate=False))
    qflash.calibrate(module, [(query, key, value)], forward=lambda m, batch: m(*batch), progress=False)
    s = dict(module.qflash_scales.named_buffers())
    middle = (key.amax((0, 2)) + key.amin((0, 2))) / 2
    torch.testing.assert_close(s["key_middle"][:, 0], middle)
    torch.testing.assert_close(s["value_middle"][:, 0], (value.amax((0, 2)) + value.amin((0, 2))) / 2)
    torch.testing.assert_close(s["value_scale"][:, 0], (value.amax((0, 2)) - value.amin((0, 2))) / 254)
    factor = (s["query_step"] / s["query_scale"])[::2]
    assert torch.equal(factor[:, 0], (s["key_scale"] / s["key_step"])[:, 0]) and (factor[..., 3] >= 4).all()
    assert torch.equal(torch.frexp(factor).mantissa, torch.full_like(factor, 0.5))
    balanced = (query / factor.repeat_interleave(2, 0)).abs().amax((0, 2, 3)) / 127
    torch.testing.assert_close(s["query_scale"].flatten(), balanced)


class Grouped(nn.Module):
    """Attention of four heads with two of keys."""

    def __init__(self, recipe: Any = None) -> None:
        super().__init__()
        qflash.patch(self.eval(), recipe)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)


@pytest.mark.parametrize("name", RECIPES)
def test_what_else_is_in_the_batch_does_not_matter(name: str) -> None:
    torch.manual_seed(1)
    tensors = torch.randn(4, 4, 9, 8), torch.randn(4, 2, 9, 8), torch.randn(4, 2, 9, 8)
    module = qflash.calibrate(Grouped(RECIPES[name]), [tensors], forward=lambda m, batch: m(*batch), progress=False)
    with torch.inference_mode():
        want = module(*tensors)
        assert torch.equal(torch.cat([module(*(x[i : i + 1] for x in tensors)) for i in range(4)]), want)
        # first come beyond what was seen, later ones are as they were
        loud = [torch.cat((100 * x[:1], x[1:])) for x in tensors]
        assert torch.equal(module(*loud)[1:], want[1:])


def test_masked_tokens_do_not_reach_the_scales() -> None:
    torch.manual_seed(1)
    query, key, value = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    mask = torch.arange(9).expand(2, 1, 1, 9) < 6
    loud = [x.masked_fill(~mask.mT, 1e4) for x in (key, value)]
    found = []
    for batch in ((query, key[:, :, :6], value[:, :, :6]), (query, *loud, mask)):
        module = qflash.calibrate(Grouped(), [batch], forward=lambda m, batch: m(*batch), progress=False)
        found.append(module.state_dict())
        assert qflash.coverage(module).layers[0].is_static
    assert all(torch.equal(x, found[1][name]) for name, x in found[0].items())
    with torch.inference_mode():
        exact = F.scaled_dot_product_attention(query, *loud, mask, enable_gqa=True)
        assert sqnr(exact, module(query, *loud, mask)) > 30


@pytest.mark.parametrize("kind", ["torch.save", "safetensors", "deepcopy", "pickle", "half and back"])
def test_scales_travel_with_the_model(kind: str, tmp_path: Path) -> None:
    model = calibrated(recipe=qflash.ACCURATE)
    x = inputs(model, 2, 3)
    want = run(model, x)
    other = qflash.patch(build("vit", num_classes=10), "accurate")
    if kind == "torch.save":
        torch.save(model.state_dict(), tmp_path / "model.pt")
        other.load_state_dict(torch.load(tmp_path / "model.pt"))
    elif kind == "safetensors":
        from safetensors.torch import load_model, save_model

        save_model(model, str(tmp_path / "model.safetensors"))
        assert load_model(other, str(tmp_path / "model.safetensors")) == (set(), [])
    elif kind == "half and back":
        other = copy.deepcopy(model).half()
        assert other.blocks[0].attn.qflash_scales.query_step.dtype == torch.float32
        assert sqnr(want, run(other, x.half()).float()) > 30
        other = other.float()
        other.load_state_dict(model.state_dict())
    else:
        other = copy.deepcopy(model) if kind == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert torch.equal(run(other, x), want)
    assert str(qflash.coverage(other)) == str(qflash.coverage(model))
    assert other.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("strict", [True, False])
def test_what_does_not_fit_is_refused_when_it_is_loaded(strict: bool) -> None:
    model = calibrated()
    state = model.state_dict()
    plain = qflash.unpatch(copy.deepcopy(model)).state_dict()
    assert not any("qflash" in name for name in plain)
    with pytest.raises(RuntimeError, match=r"blocks.0.attn has static scales, and the state_dict holds weights for it without"):
        model.load_state_dict(plain, strict=strict)
    part = {name: x for name, x in state.items() if not name.endswith("value_scale")}
    for target in (model, qflash.patch(build("vit", num_classes=10))):
        with pytest.raises(RuntimeError, match=r"all static scales for blocks.1.attn or none: \['value_scale'\]"):
            target.load_state_dict(part, strict=strict)
    other = qflash.patch(build("vit", num_classes=10), "accurate")
    with pytest.raises(RuntimeError, match=r'calibrated for a recipe with .*"balance": false.* patched with .*"balance": true'):
        other.load_state_dict(state, strict=strict)
    qflash.patch(other, attention=lambda q, k, v, attn_mask, scale: v)
    with pytest.raises(RuntimeError, match=r"patched with attention= and takes none"):
        other.load_state_dict(state, strict=strict)
    wrong = {name: x.half() if name.endswith("key_step") else x for name, x in state.items()}
    with pytest.raises(RuntimeError, match="must be float32"):
        model.load_state_dict(wrong, strict=strict)
    # a part of the model that holds no attention
    model.load_state_dict({name: x for name, x in state.items() if name.startswith("head.")}, strict=False)
    assert torch.equal(run(model, inputs(model, 2, 3)), run(calibrated(), inputs(model, 2, 3)))


def test_scales_of_another_shape_are_refused_when_it_runs() -> None:
    model, other = calibrated(), qflash.patch(build("vit", num_classes=10, num_heads=4))
    other.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match=r"static scales of the query are for 2 heads of 1 channels .* has 4 of 12"):
        run(other, inputs(other, 1, 3))


@pytest.mark.parametrize("shape", [(3, 1, 1), (2, 1, 7)])
@pytest.mark.parametrize("part", ["query_step", "key_step", "key_middle", "value_scale", "value_middle"])
def test_every_scale_has_to_fit(part: str, shape: tuple[int, ...]) -> None:
    module = qflash.calibrate(Grouped(ALL.replace(rotate=False)), [grouped()], forward=lambda m, x: m(*x), progress=False)
    setattr(module.qflash_scales, part, torch.ones(shape))
    with pytest.raises(RuntimeError, match=f"static scales of the {part.split('_')[0]} are for {shape[0]} heads of {shape[2]}"):
        run_grouped(module)
    # one for all heads and channels will do
    setattr(module.qflash_scales, part, torch.ones(1, 1, 1))
    assert run_grouped(module).isfinite().all()


def grouped() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, heads, 9, 8, generator=generator) for heads in (4, 2, 2))


@torch.inference_mode()
def run_grouped(module: nn.Module) -> torch.Tensor:
    out: torch.Tensor = module(*grouped())
    return out


def test_patching_again_goes_back_to_dynamic_scales() -> None:
    model = calibrated()
    x = inputs(model, 2, 3)
    static = run(model, x)
    dynamic = run(qflash.patch(copy.deepcopy(model)), x)
    assert not torch.equal(static, dynamic)
    again = qflash.calibrate(copy.deepcopy(model), [inputs(model, 16, 4)], progress=False)
    assert not torch.equal(run(again, x), static)
    # calibrated with the same batches, the same again: the model has dynamic scales while it is watched
    again = qflash.calibrate(again, [inputs(model, 4, 1), inputs(model, 4, 2)], progress=False)
    assert torch.equal(run(again, x), static)
    assert not qflash.coverage(qflash.patch(model)).static
    assert model.state_dict().keys() == build("vit", num_classes=10).state_dict().keys()


@pytest.mark.filterwarnings("ignore")
def test_traced_and_under_autocast() -> None:
    model = calibrated(recipe=ALL)
    x = inputs(model, 3, 3)
    want = run(model, x)
    graph = torch.fx.symbolic_trace(model)
    assert torch.equal(run(graph, x), want)
    nodes = [node for node in graph.graph.nodes if node.target is static_scales.static_attention]
    assert len(nodes) == 2
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert sqnr(want, model(x).float()) > 25
    with torch.no_grad():
        assert torch.equal(torch.jit.trace(model, (x,), check_trace=False)(x), want)
        parameters, buffers = torch.func.stack_module_state([model, calibrated(recipe=ALL)])
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            stacked = torch.vmap(lambda p, b: torch.func.functional_call(model, (p, b), (x,)))(parameters, buffers)
    assert stacked.shape == (2, *want.shape) and sqnr(want.expand(2, -1, -1), stacked) > 100
    with pytest.raises(NotImplementedError, match="has no gradient"):
        model(x).sum().backward()


class Layers(nn.Module):
    """Attention of every kind that has no adapter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.TransformerEncoderLayer(32, 2, 32, dropout=0.0, batch_first=True)
        self.spelled = Spelled()
        self.twice = Twice()
        self.flat = Flat()
        self.idle = nn.MultiheadAttention(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.flat(self.twice(self.spelled(self.encoder(x))))


class Spelled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return ((q @ q.mT * 0.25).softmax(-1) @ q).transpose(1, 2).flatten(2)


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.unsqueeze(1)
        return (F.scaled_dot_product_attention(q, q, q) + F.scaled_dot_product_attention(q, q, -q)).squeeze(1) + x


class Flat(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def test_layers_that_stay_dynamic_are_named_once() -> None:
    model = qflash.patch(Layers().eval())
    torch.manual_seed(2)
    x = torch.randn(4, 9, 32)
    with pytest.warns(UserWarning, match="Layers keeps dynamic scales") as caught:
        qflash.calibrate(model, [{"x": x}], progress=False)
    text = str(caught[0].message)
    assert len(caught) == 1
    for part in ("twice (it attends more than once", "flat (its query has no dimension for heads", "idle (no batch reached"):
        assert part in text
    covered = {layer.name: layer for layer in qflash.coverage(model)}
    assert [name for name, layer in covered.items() if layer.is_static] == ["encoder.self_attn", "spelled"]
    table = str(qflash.coverage(model))
    assert "5 of 5 attention layers in integers, 2 with static scales" in table
    assert "softmax, static" in table and "its scores" not in table
    assert "its scales stay dynamic: it attends more than once in a forward" in table
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("error")
        got = model(x)
    assert sqnr(run(qflash.unpatch(copy.deepcopy(model)), x), got) > 30
    other = qflash.patch(Layers().eval())
    other.load_state_dict(model.state_dict())
    assert torch.equal(run(other, x), got)


def refused(error: type[Exception], message: str, model: Any, batches: Any, **options: Any) -> None:
    with pytest.raises(error, match=message):
        qflash.calibrate(model, batches, progress=False, **options)


def test_bad_arguments_are_named_and_leave_the_model_alone() -> None:
    model = calibrated()
    x = inputs(model, 2, 3)
    want, keys = run(model, x), model.state_dict().keys()
    refused(TypeError, "model must be a torch.nn.Module, got int", 1, [x])
    refused(TypeError, "forward must be a function", model, [x], forward=3)
    refused(ValueError, "method must be one of", model, [x], method="best")
    refused(ValueError, "method must be one of", model, [x], method="expected")
    refused(ValueError, "percentile must be above 50", model, [x], percentile=3)
    refused(ValueError, "eval mode", build("vit").train(), [x])
    refused(ValueError, "qflash.patch has changed no attention of this VisionTransformer", build("vit"), [x])
    refused(ValueError, "at least one batch", model, [])
    refused(ValueError, "batches must lead to finite numbers, blocks.0.attn", model, [x, x * float("nan")])
    refused(ValueError, "no attention that can have static scales: the model itself", qflash.patch(Flat().eval()), [x[0]])
    own = qflash.patch(build("vit"), attention=lambda q, k, v, attn_mask, scale: v)
    refused(ValueError, "patched without attention=.*blocks.0.attn", own, [x])
    assert torch.equal(run(model, x), want) and model.state_dict().keys() == keys
    assert not any(module._forward_pre_hooks for module in model.modules())
    # a loader's tuples and a bar
    qflash.calibrate(model, [(x, torch.zeros(2))])


BAD = [float("nan"), float("inf"), -float("inf"), -1.0, 0.0, -0.0, 1e-40]


def entries(recipe: Any) -> dict[str, torch.Tensor]:
    state = calibrated(recipe=recipe).state_dict()
    return {name: x for name, x in state.items() if name.startswith("blocks.1.attn.qflash_scales.") and x.is_floating_point()}


def targets(recipe: Any) -> list[Any]:
    """Return models that load scales: one that has some, one that has none."""
    return [calibrated(recipe=recipe), qflash.patch(build("vit", num_classes=10), recipe)]


@pytest.mark.parametrize("name", [slow("default"), "all", slow("paper")])
def test_numbers_that_are_no_scales_are_refused_by_name(name: str) -> None:
    recipe = RECIPES[name]
    for entry, x in entries(recipe).items():
        for number in BAD:
            middle = entry.endswith("_middle")
            if middle and abs(number) < float("inf"):
                continue
            wrong = x.clone()
            wrong.flatten()[-1] = number
            for target in targets(recipe):
                before = copy.deepcopy(target.blocks[1].attn.state_dict())
                state = calibrated(recipe=recipe).state_dict() | {entry: wrong}
                with pytest.raises(ValueError, match=rf"{entry} in the state_dict must be finite"):
                    target.load_state_dict(state)
                after = target.blocks[1].attn.state_dict()
                assert after.keys() == before.keys()


@pytest.mark.parametrize("name", [slow("default"), "all", slow("paper")])
def test_other_shapes_of_scales_are_refused_by_name(name: str) -> None:
    recipe = RECIPES[name]
    for entry, x in entries(recipe).items():
        shapes = [x.flatten(), x[0], x[None], x[:0], x[..., :0], x.repeat(1, 2, 1), x.repeat(1, 1, 2), x.repeat(3, 1, 1), x.mT]
        for wrong in shapes:
            if wrong.shape == x.shape:
                continue
            state = calibrated(recipe=recipe).state_dict() | {entry: wrong.contiguous()}
            with_scales, without = targets(recipe)
            # where shapes contradict each other either can be the one that is named
            with pytest.raises(ValueError, match=r"blocks\.1\.attn\.qflash_scales\.\w+ in the state_dict"):
                with_scales.load_state_dict(state)
            try:
                without.load_state_dict(state)
            except ValueError:
                continue
            # only its channels are others, of which a module without scales knows nothing before it runs
            with pytest.raises(RuntimeError, match=r"static scales of the \w+ are for 2 heads of"):
                run(without, inputs(without, 1, 3))
        state = calibrated(recipe=recipe).state_dict() | {entry: [1.0]}
        for target in targets(recipe):
            with pytest.raises(RuntimeError, match=r"must be float32.*list"):
                target.load_state_dict(state)


def test_scales_are_checked_when_they_are_loaded_by_themselves() -> None:
    model, other = calibrated(), calibrated(recipe=qflash.ACCURATE)
    scales = model.blocks[0].attn.qflash_scales
    state = scales.state_dict()
    scales.load_state_dict(state)
    with pytest.raises(ValueError, match="key_scale in the state_dict must be finite and at least"):
        scales.load_state_dict(state | {"key_scale": state["key_scale"] * float("nan")})
    with pytest.raises(RuntimeError, match="calibrated for a recipe with"):
        scales.load_state_dict(other.blocks[0].attn.qflash_scales.state_dict())
    wider = {name: x if name == "recipe" else x.repeat(2, 1, 1) for name, x in state.items()}
    with pytest.raises(ValueError, match=r"query_step in the state_dict must be of shape \(2, 1, 1\), as it is here"):
        scales.load_state_dict(wider)


def test_scales_on_the_meta_device_are_loaded_by_assignment() -> None:
    model = calibrated()
    with torch.device("meta"):
        other = qflash.patch(build("vit", num_classes=10).to("meta"))
    other.load_state_dict(model.state_dict(), assign=True)
    x = inputs(model, 2, 3)
    assert torch.equal(run(other, x), run(model, x))
