"""``with qflash.sdpa()`` and ``qflash.sdpa.enable()``: what reaches integers, what falls back, and what is put back."""

from __future__ import annotations

import contextlib
import copy
import io
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qflash
from helpers import make_inputs, same_bits
from qflash.integrations import sdpa as module
from qflash.integrations.sdpa import attend_or_fall_back

SDPA, MULTI_HEAD = F.scaled_dot_product_attention, F.multi_head_attention_forward


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        yield
    assert F.scaled_dot_product_attention is SDPA and F.multi_head_attention_forward is MULTI_HEAD
    assert torch.backends.mha.get_fastpath_enabled() is before
    assert torch.overrides._get_current_function_mode_stack() == []
    assert not module._thread.decided and module._innermost.get() is None


@pytest.fixture
def _enabled() -> Iterator[None]:
    yield
    qflash.sdpa.disable()


def multi_head() -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(32, 4, batch_first=True).eval()


def encoder(**options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2).eval()


TOKENS = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
PADDING = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]).bool()


def by_parts(model: nn.MultiheadAttention, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """nn.MultiheadAttention of its parts, with qflash.attention."""
    packed = F.linear(x, model.in_proj_weight, model.in_proj_bias).unflatten(-1, (3, model.num_heads, -1))
    query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
    return model.out_proj(qflash.attention(query, key, value, mask).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("how", ["positional", "keyword", "kept name"])
@pytest.mark.parametrize("recipe", [None, "paper", qflash.DEFAULT.replace(smooth_key=False)])
def test_a_call_runs_in_integers(how: str, recipe: Any) -> None:
    query, key, value = make_inputs(2, 4, 9, 7, 16, key_heads=2)
    mask = torch.ones(9, 7, dtype=torch.bool).tril()
    want = qflash.attention(query, key, value, mask, scale=0.3, enable_gqa=True, recipe=recipe)
    with qflash.sdpa(recipe, fallback="error") as report:
        if how == "positional":
            out = F.scaled_dot_product_attention(query, key, value, mask, 0.0, False, scale=0.3, enable_gqa=True)
        else:
            function = SDPA if how == "kept name" else F.scaled_dot_product_attention
            out = function(query=query, key=key, value=value, attn_mask=mask, scale=0.3, enable_gqa=True)
    assert same_bits(out, want)
    assert report.integer == 1 and not report.fallbacks
    assert not same_bits(SDPA(query, key, value, mask, scale=0.3, enable_gqa=True), want)


def needing_gradient(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return SDPA(x.clone().requires_grad_(), x, x)


def as_jagged(x: torch.Tensor) -> torch.Tensor:
    """Return a batch as a nested tensor."""
    return torch.nested.nested_tensor(list(x.transpose(1, 2)), layout=torch.jagged).transpose(1, 2)


def as_nested(x: torch.Tensor) -> torch.Tensor:
    """Return a batch (batch, heads, tokens, channels) as a nested tensor of strided layout."""
    return torch.nested.nested_tensor([x[0], x[1, :, :-1]])


REFUSED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "float64": (lambda x: SDPA(x.double(), x.double(), x.double()), "query must be float16, bfloat16, float32, got float64"),
    "dropout": (lambda x: SDPA(x, x, x, dropout_p=1.0), "dropout_p must be 0, "),
    "scale": (lambda x: SDPA(x, x, x, scale=-1.0), "scale must be positive and finite, got -1.0"),
    "gradient": (needing_gradient, "it needs a gradient"),
    "jagged": (
        lambda x: SDPA(*[as_jagged(x.double())] * 3),
        "query must be float16, bfloat16, float32, got float64",
    ),
    "strided": (lambda x: SDPA(*[as_nested(x)] * 3), module.NESTED),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("process", [False, True])
@pytest.mark.usefixtures("_enabled")
def test_what_does_not_qualify_falls_back_with_its_reason(case: str, process: bool) -> None:
    function, wanted = REFUSED[case]
    query, _, _ = make_inputs(2, 4, 5, 5, 16, dtype=torch.float32)
    float_result = function(query)
    options = {"recipe": "accurate", "backend": "reference"}

    def on(fallback: str) -> Any:
        return contextlib.nullcontext(qflash.sdpa.enable(fallback=fallback, **options)) if process else qflash.sdpa(
            fallback=fallback, **options
        )  # fmt: skip

    def again(query: torch.Tensor) -> torch.Tensor:
        # the functions above hold PyTorch's own by another name, which only a context reaches
        found = types.FunctionType(function.__code__, {**function.__globals__, "SDPA": F.scaled_dot_product_attention})
        return found(query)

    with on("warn") as report, pytest.warns(UserWarning, match=f"stays in floating point: {wanted}"):
        out = again(query)
    if not out.is_nested:
        assert same_bits(out.detach(), float_result.detach())
    with on("warn") as report, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        again(query), again(query)
    assert len([each for each in seen if "floating point" in str(each.message)]) == 1
    (reason,) = report.fallbacks
    assert reason.startswith(wanted) and report.fallbacks[reason] == 2 and report.integer == 0
    assert str(report) == f"0 attention calls in integers, 2 in floating point\n  2 x {reason}"
    with on("quiet") as report, warnings.catch_warnings():
        warnings.simplefilter("error")
        again(query)
    assert sum(report.fallbacks.values()) == 1
    with on("error") as report, pytest.raises(RuntimeError, match=f"fallback='error': {wanted}"):
        again(query)


def nested() -> torch.Tensor:
    """Return sequences of two lengths as PyTorch's fused layers take them."""
    return torch.nested.nested_tensor([TOKENS[0], TOKENS[1, :3]])


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any], int]] = {
    "attention": (multi_head, lambda model: model(x := nested(), x, x, need_weights=False)[0], 1),
    "attention with weights": (multi_head, lambda model: model(x := nested(), x, x)[0], 1),
    "layer": (lambda: encoder().layers[0], lambda model: model(nested()), 1),
    "norm first": (lambda: encoder(norm_first=True), lambda model: model(nested()), 2),
    "encoder": (encoder, lambda model: model(nested()), 2),
}
"""Modules, calls with nested tensors, and how many times these attend."""


@pytest.mark.parametrize("way", ["context", "process", "patched", "patched in a context"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.usefixtures("_enabled")
@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor")
def test_nested_tensors_of_strided_layout_fall_back_in_layers(name: str, way: str) -> None:
    make, call, attentions = LAYERS[name]
    forwards = [each.forward for each in module.LAYERS]
    model = make()
    want = call(model).to_padded_tensor(0.0)
    if "patched" in way:
        qflash.patch(model)
    context: Any = qflash.sdpa() if "context" in way else contextlib.nullcontext()
    with context:
        report = qflash.sdpa.enable() if way == "process" else context
        with pytest.warns(UserWarning, match=f"stays in floating point: {module.NESTED}"):
            got = call(model)
    assert same_bits(got.to_padded_tensor(0.0), want)
    if "patched" in way:
        assert [layer.float_calls for layer in qflash.coverage(model)] == [1] * attentions
        assert all(layer.reason == module.NESTED for layer in qflash.coverage(model))
    else:
        assert report.fallbacks == {module.NESTED: attentions} and report.integer == 0
        # a call without nested tensors is in integers
        with context:
            if isinstance(model, nn.MultiheadAttention):
                model(TOKENS, TOKENS, TOKENS, need_weights=False)
            else:
                model(TOKENS)
        assert report.integer == attentions
    qflash.sdpa.disable()
    assert [each.forward for each in module.LAYERS] == forwards


def test_nested_tensors_are_an_error_where_that_is_wanted() -> None:
    with qflash.sdpa(fallback="error"), pytest.raises(RuntimeError, match=f"fallback='error': {module.NESTED}"):
        encoder()(nested())
    x = as_nested(torch.randn(2, 4, 5, 16))
    for call in (lambda: qflash.attention(x, x, x), lambda: qflash.quantize(x)):
        with pytest.raises(ValueError, match=r"must be a dense \(strided\) tensor, got a nested tensor of strided layout"):
            call()


def test_a_backend_that_cannot_run_is_a_reason() -> None:
    x = torch.empty(1, 2, 5, 16, device="meta")
    with qflash.sdpa(backend="cpu", fallback="quiet") as report:
        SDPA(x, x, x)
    assert list(report.fallbacks) == ["backend='cpu' cannot run on meta: it runs on the CPU, not on meta"]


def test_bad_calls_have_errors_of_pytorch() -> None:
    query, key, value = make_inputs(1, 2, 5, 7, 16)
    with qflash.sdpa(fallback="quiet"), pytest.raises(RuntimeError, match="size"):
        SDPA(query, key[..., :3], value)
    with qflash.sdpa(fallback="quiet"), pytest.raises(TypeError):
        SDPA(query, key)  # type: ignore[call-arg]


@pytest.mark.parametrize("wrong", [{"fallback": "loud"}, {"backend": "gpu"}, {"recipe": "best"}])
def test_bad_choices_are_refused(wrong: dict[str, Any]) -> None:
    for make in (qflash.sdpa, qflash.sdpa.enable):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be "):
            make(**wrong)


def test_multi_head_attention() -> None:
    model = multi_head()
    want = by_parts(model, TOKENS)
    # PyTorch makes an additive mask of the padding
    padded = by_parts(model, TOKENS, torch.zeros(2, 1, 1, 5).masked_fill(PADDING[:, None, None], -torch.inf))
    with qflash.sdpa(fallback="quiet") as report:
        assert torch.allclose(model(TOKENS, TOKENS, TOKENS, need_weights=False)[0], want, atol=1e-6)
        out = model(TOKENS, TOKENS, TOKENS, key_padding_mask=PADDING, need_weights=False)[0]
        assert torch.allclose(out, padded, atol=1e-6)
        assert report.integer == 2 and not report.fallbacks
        out, weights = model(TOKENS, TOKENS, TOKENS)
        assert weights.shape == (2, 5, 5)
        assert report.integer == 2 and list(report.fallbacks) == [module.WEIGHTS_WANTED]
        F.multi_head_attention_forward(
            TOKENS, TOKENS, TOKENS, 32, 4, model.in_proj_weight, model.in_proj_bias, None, None, False, 0.0,
            model.out_proj.weight, model.out_proj.bias, False, None, False,
        )  # fmt: skip
    assert report.integer == 3
    assert not torch.allclose(model(TOKENS, TOKENS, TOKENS)[0], want, atol=1e-6)
    assert torch.allclose(model(TOKENS, TOKENS, TOKENS)[0], out, atol=1e-6)
    with qflash.sdpa(), pytest.raises(AssertionError, match="key_padding_mask of shape"):
        model(TOKENS, TOKENS, TOKENS, key_padding_mask=PADDING[:1], need_weights=False)


@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu"}])
def test_transformer_encoder_with_padding(options: dict[str, Any]) -> None:
    model = encoder(**options)
    want = model(TOKENS, src_key_padding_mask=PADDING)
    with qflash.sdpa(fallback="error") as report:
        out = model(TOKENS, src_key_padding_mask=PADDING)
        assert not torch.backends.mha.get_fastpath_enabled()
    assert report.integer == 2
    error = (out - want)[~PADDING].square().mean() / want[~PADDING].square().mean()
    assert 1e-9 < error < 1e-3


def test_torchvision_vit() -> None:
    transformer = pytest.importorskip("torchvision.models.vision_transformer")
    torch.manual_seed(0)
    model = transformer.VisionTransformer(16, 4, 2, 2, 32, 64, num_classes=5).eval()
    nn.init.normal_(model.heads.head.weight)
    x = torch.randn(2, 3, 16, 16)
    with qflash.sdpa(fallback="error") as report:
        out = model(x)
    assert report.integer == 2
    want = model(x)
    assert 0 < (out - want).norm() < 0.03 * want.norm()


def test_a_context_is_a_decorator_and_counts_on() -> None:
    x = make_inputs(1, 2, 5, 5, 16)[0]
    context = qflash.sdpa()

    @context
    def run() -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    assert same_bits(run(), qflash.attention(x, x, x)) and same_bits(run(), qflash.attention(x, x, x))
    assert context.integer == 2


def test_the_inner_context_decides_alone() -> None:
    x = make_inputs(1, 2, 5, 5, 16)[0]
    with qflash.sdpa("paper", fallback="error") as outer:
        with qflash.sdpa("accurate", fallback="quiet") as inner:
            assert same_bits(SDPA(x, x, x), qflash.attention(x, x, x, recipe="accurate"))
            SDPA(x, x, x, scale=-1.0)
            with outer:
                assert same_bits(SDPA(x, x, x), qflash.attention(x, x, x, recipe="paper"))
            multi_head()(TOKENS, TOKENS, TOKENS, need_weights=False)
        assert same_bits(SDPA(x, x, x), qflash.attention(x, x, x, recipe="paper"))
    assert (inner.integer, sum(inner.fallbacks.values())) == (2, 1)
    assert (outer.integer, sum(outer.fallbacks.values())) == (2, 0)


def test_everything_is_put_back_after_an_error() -> None:
    x = make_inputs(1, 2, 5, 5, 16)[0]
    with pytest.raises(ZeroDivisionError), qflash.sdpa():
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="size"), qflash.sdpa(fallback="quiet"):
        SDPA(x, x[..., :3], x)
    with pytest.raises(RuntimeError, match="fallback='error'"), qflash.sdpa(fallback="error"):
        multi_head()(TOKENS, TOKENS, TOKENS)
    assert same_bits(SDPA(x, x, x), F.scaled_dot_product_attention(x, x, x))


def in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []

    def run() -> None:
        with torch.no_grad():
            results.append(function())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


def test_a_context_is_for_one_thread() -> None:
    x = make_inputs(1, 2, 5, 5, 16)[0]
    integer, floating = qflash.attention(x, x, x), SDPA(x, x, x)
    with qflash.sdpa() as report:
        assert same_bits(in_thread(lambda: SDPA(x, x, x)), floating)
        assert same_bits(SDPA(x, x, x), integer)

        def own_context() -> torch.Tensor:
            with report:
                return SDPA(x, x, x)

        assert same_bits(in_thread(own_context), integer)
        assert not torch.backends.mha.get_fastpath_enabled()
    assert report.integer == 2


def test_many_threads_count_every_call_and_put_the_fast_path_back() -> None:
    x = make_inputs(1, 2, 5, 5, 16)[0]
    report = qflash.sdpa()

    def run() -> None:
        for _ in range(20):
            with report, torch.no_grad():
                F.scaled_dot_product_attention(x, x, x)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert report.integer == 80


@pytest.mark.usefixtures("_enabled")
def test_enable_is_for_the_process() -> None:
    x = make_inputs(1, 2, 5, 5, 16)[0]
    other = types.ModuleType("a_module_that_holds_it_by_name")
    other.attend = SDPA  # type: ignore[attr-defined]
    sys.modules[other.__name__] = other
    try:
        report = qflash.sdpa.enable("paper", fallback="quiet")
        integer = qflash.attention(x, x, x, recipe="paper")
        kept = F.scaled_dot_product_attention
        assert same_bits(kept(x, x, x), integer)
        assert same_bits(in_thread(lambda: other.attend(x, x, x)), integer)
        assert report.integer == 2
        encoder()(TOKENS, src_key_padding_mask=PADDING)
        assert report.integer == 4
        multi_head()(TOKENS, TOKENS, TOKENS)
        assert list(report.fallbacks) == [module.WEIGHTS_WANTED]
        with qflash.sdpa("accurate") as inner:
            assert same_bits(kept(x, x, x), qflash.attention(x, x, x, recipe="accurate"))
            multi_head()(TOKENS, TOKENS, TOKENS, need_weights=False)
        assert inner.integer == 2
        with torch.device("cpu"):  # a mode of somebody else's
            assert same_bits(kept(x, x, x), integer)
            assert same_bits(kept(query=x, key=x, value=x), integer)
        assert report.integer == 6
        again = qflash.sdpa.enable()
        assert same_bits(kept(x, x, x), qflash.attention(x, x, x)) and again.integer == 1 and report.integer == 6
        qflash.sdpa.disable()
        qflash.sdpa.disable()
        assert other.attend is SDPA
        assert same_bits(kept(x, x, x), SDPA(x, x, x))
    finally:
        del sys.modules[other.__name__]


def test_a_function_of_the_caller_to_fall_back_to() -> None:
    x = make_inputs(1, 2, 5, 5, 16, dtype=torch.float32)[0]
    called = []

    def other(*args: Any, **kwargs: Any) -> torch.Tensor:
        called.append((len(args), kwargs))
        return SDPA(*args, **kwargs)

    report = module.AttentionReport()
    options = {"recipe": "paper", "backend": "reference", "fallback": "quiet", "report": report, "fall_back": other}
    out = attend_or_fall_back(x, x, x, None, 0.0, True, 0.5, False, **options)  # type: ignore[arg-type]
    assert same_bits(out, qflash.attention(x, x, x, is_causal=True, scale=0.5, recipe="paper"))
    assert not called
    out = attend_or_fall_back(x, x, x, None, 0.0, True, -0.5, False, **options)  # type: ignore[arg-type]
    assert called == [(6, {"scale": -0.5, "enable_gqa": False})]
    assert (report.integer, sum(report.fallbacks.values())) == (1, 1)


def model_of(kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    model = encoder()
    return {
        "sdpa": lambda x: SDPA(x, x, x),
        "fallback": lambda x: SDPA(x, x, x, scale=-1.0),
        "encoder": lambda x: model(x[:, 0], src_key_padding_mask=x[:, 0, :, 0] > 1.0),
    }[kind]


@pytest.mark.parametrize("kind", ["sdpa", "fallback", "encoder"])
@pytest.mark.parametrize("where", ["outside", "inside", "nested", "process"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.usefixtures("_enabled")
@pytest.mark.slow
def test_compiled(kind: str, where: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    run = model_of(kind)

    def called(x: torch.Tensor) -> torch.Tensor:
        if where == "inside":
            with qflash.sdpa(fallback="quiet"):
                return run(x)
        if where == "nested":
            with qflash.sdpa("paper", fallback="quiet"), qflash.sdpa(fallback="quiet"):
                return run(x)
        # held by PyTorch's name, which is what the process's choice replaces
        return F.scaled_dot_product_attention(x, x, x) if (kind, where) == ("sdpa", "process") else run(x)

    compiled = torch.compile(called, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    inputs = [torch.randn(batch, 2, 5, 32) for batch in ((2, 3, 4, 5, 6) if dynamic else (2, 2))]
    plain = [run(x) for x in inputs]
    with qflash.sdpa(fallback="quiet"):
        wanted = [run(x) for x in inputs]
    report: Any = None
    counts = []
    for x, want in zip(inputs, wanted, strict=True):
        # another context each time: the compiled code is the same
        context: Any = contextlib.nullcontext()
        if where == "outside":
            context = qflash.sdpa(fallback="quiet")
        elif where == "process" and report is None:
            report = qflash.sdpa.enable(fallback="quiet")
        with context as entered:
            assert torch.allclose(compiled(x), want, atol=1e-5)
            report = entered if where == "outside" else report
        if report is not None:
            counts.append((report.integer, sum(report.fallbacks.values())))
    if kind != "fallback":
        assert not torch.allclose(plain[0], wanted[0], atol=1e-5)
    if where == "outside":
        # counted when it was compiled, by the context that was on
        assert (counts[0][0] > 0) == (kind != "fallback") and (counts[0][1] > 0) == (kind == "fallback")
        assert counts[-1] == (0, 0)
    qflash.sdpa.disable()
    if where in ("outside", "process"):
        # out of the context the same function computes in floating point
        assert torch.allclose(compiled(inputs[0]), plain[0], atol=1e-5)


def test_warnings_and_errors_of_a_compiler() -> None:
    torch._dynamo.reset()
    x = torch.randn(1, 2, 5, 16)
    compiled = torch.compile(model_of("fallback"), fullgraph=True, backend="aot_eager")
    with qflash.sdpa(), pytest.warns(UserWarning, match="stays in floating point: scale must be positive"):
        compiled(x)
    torch._dynamo.reset()
    with qflash.sdpa(fallback="error"), pytest.raises(Exception, match="fallback='error'"):
        compiled(x)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.slow
def test_exported(where: str, strict: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with qflash.sdpa() if where == "inside" else contextlib.nullcontext():
                return self.encoder(SDPA(x, x, x))

    model = Model().eval()
    x = torch.randn(2, 5, 32)
    with qflash.sdpa() if where == "outside" else contextlib.nullcontext() as report:
        program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), strict=strict)
        want = model(x)
    assert report is None or report.integer >= 3
    called = [str(node.target) for node in program.graph.nodes if "attention" in str(node.target)]
    assert called == ["qflash.attention.default"] * 3
    written = io.BytesIO()
    torch.export.save(program, written)
    written.seek(0)
    loaded = torch.export.load(written).module()
    assert torch.allclose(loaded(x), want, atol=1e-6)
    assert loaded(torch.randn(4, 5, 32)).shape == (4, 5, 32)


def test_a_model_is_left_as_it_is() -> None:
    model = encoder()
    before = copy.deepcopy(model.state_dict())
    with qflash.sdpa():
        model(TOKENS)
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
