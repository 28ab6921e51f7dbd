"""patch() on modules that have no adapter: their own forward, whose attention is answered; coverage()."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qflash
from qflash.bench.metrics import sqnr
from qflash.integrations import patching
from qflash.integrations.deferred_scores import Deferred


class Spelled(nn.Module):
    """Attention that is spelled out, in the way that ``style`` says."""

    def __init__(self, style: str, heads: int = 2, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.style, self.heads = style, heads
        self.qkv = nn.Linear(width, 3 * width)
        self.bias = nn.Parameter(torch.randn(heads, 12, 12))
        self.factor = nn.Parameter(torch.rand(heads, 1, 1) + 0.5)
        self.register_buffer("windows", torch.where(torch.rand(2, 12, 12) < 0.3, -100.0, 0.0))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = getattr(self, self.style)(q, k, v)
        return out.transpose(1, 2).reshape(batch, tokens, width)

    def plain(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.dropout((q @ k.transpose(-2, -1) / 4.0).softmax(dim=-1)) @ v

    def biased(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.matmul(q * 0.25, k.mT)
        scores += self.bias
        return torch.matmul(F.softmax(scores, -1, dtype=torch.float32).to(q.dtype), v)

    def cosine(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)) * (10 * self.factor) + self.bias
        return nn.Softmax(dim=-1)(scores) @ v

    def windowed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(-2, -1) + self.bias.unsqueeze(0)
        scores = scores.view(-1, 2, self.heads, 12, 12) + self.windows.unsqueeze(1).unsqueeze(0)
        return scores.view(-1, self.heads, 12, 12).softmax(-1) @ v

    def grid(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows, columns = self.bias[:, :, :3, None], self.bias[:, :, None, 3:7]
        scores = (q @ k.mT).view(-1, self.heads, 12, 3, 4) + rows + columns
        return scores.view(-1, self.heads, 12, 12).softmax(-1) @ v

    def part(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (q * 0.25) @ k.mT
        scores[:, :, 1:, 1:] = scores[:, :, 1:, 1:] + self.bias[:, 1:, 1:]
        return scores.softmax(-1) @ v

    def einsum(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = torch.einsum("bhid,bhjd->bhij", q, k).mul(0.25).softmax(-1)
        return torch.einsum("bhij,bhjd->bhid", weights, v)

    def flat(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        weights = torch.baddbmm(torch.zeros(len(q), 12, 12), q, k.mT, beta=0, alpha=0.25).softmax(-1)
        return torch.bmm(weights, v).unflatten(0, (-1, self.heads))

    def turned(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = (q.mT.transpose(-2, -1) @ k.mT * 0.25).softmax(-1)
        return (v.mT @ weights.transpose(-2, -1)).mT

    def keys_first(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (k @ q.mT * 0.25 + self.bias.mT).transpose(-2, -1).softmax(-1) @ v

    def hidden(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        lower = torch.ones(12, 12, dtype=torch.bool).tril()
        return (0.25 * (q @ k.mT)).masked_fill(~lower, -torch.inf).softmax(-1) @ v


STYLES = [
    "plain", "biased", "cosine", "windowed", "grid", "part", "einsum", "flat", "turned", "keys_first", "hidden",
]  # fmt: skip


def x() -> torch.Tensor:
    return torch.randn(4, 12, 32, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.slow
def test_attention_that_is_spelled_out(style: str) -> None:
    module = Spelled(style).eval()
    exact = module(x())
    qflash.patch(module, "accurate", strict=True)
    got = module(x())
    assert 30.0 < sqnr(exact, got) < 90.0
    (layer,) = qflash.coverage(module)
    assert (layer.route, layer.integer_calls, layer.float_calls, layer.is_integer) == ("softmax", 1, 0, True)
    assert torch.equal(module(x()), got)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(compiled(x()), got)
    exported = torch.export.export(module, (x(),)).module()
    assert torch.equal(exported(x()), got)
    assert torch.equal(qflash.unpatch(module)(x()), exact)


class InPlace(nn.Module):
    """Has one product in a statement of its own."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = (q * 0.25 @ k.mT).softmax(-1)
        out @= v
        return out


@torch.no_grad()
def test_products_in_place_count() -> None:
    inputs = x().view(3, 4, 2, 4, 16).unbind()
    module = InPlace().eval()
    exact = module(*inputs)
    got = qflash.patch(module, "accurate", strict=True)(*inputs)
    (layer,) = qflash.coverage(module)
    assert layer.is_integer and layer.integer_calls == 1
    assert sqnr(exact, got) > 30.0


class Unusual(Spelled):
    """Uses scores or probabilities for something besides."""

    def clamped(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT).clamp(max=0.5).softmax(-1) @ v

    def mixed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = (q @ k.mT).softmax(-1)
        return (weights + weights.flip(1)) @ v

    def written(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.mT
        scores[:, 0] = 0.25
        return scores.softmax(-1) @ v

    def wide(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q.double() @ k.double().mT).softmax(-1) @ v.double()


@torch.no_grad()
@pytest.mark.parametrize(
    ("style", "reason"),
    [
        ("clamped", "its scores go into clamp before the softmax"),
        ("mixed", "its probabilities go into flip"),
        ("written", "its scores go into setitem before the softmax"),
        ("wide", "query must be .*float64"),
    ],
)
def test_what_does_not_qualify_is_computed_as_it_was_and_named(style: str, reason: str) -> None:
    module = Unusual(style).eval()
    exact = module(x())
    qflash.patch(module)
    with pytest.warns(UserWarning, match=f"Unusual: attention stays in floating point: {reason}"):
        assert torch.equal(module(x()), exact)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(module(x()), exact)
    (layer,) = qflash.coverage(module)
    assert not layer.is_integer
    assert layer.float_calls == 2
    assert qflash.float_attention(module) == {"": "Unusual"}
    assert "0 of 1 attention layers in integers" in str(qflash.coverage(module))
    qflash.patch(module, strict=True)
    with pytest.raises(RuntimeError, match=f"strict=True: {reason}"):
        module(x())


@torch.no_grad()
def test_weights_that_are_wanted_are_the_modules_own() -> None:
    module = nn.MultiheadAttention(32, 2, batch_first=True).eval()
    exact, wanted = module(x(), x(), x())
    qflash.patch(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, weights = module(x(), x(), x())
        assert module(x(), x(), x(), need_weights=False)[1] is None
    assert 25.0 < sqnr(exact, out) < 90.0
    assert sqnr(wanted, weights) > 100.0
    assert not isinstance(weights, Deferred)
    (layer,) = qflash.coverage(module)
    assert layer.is_integer and layer.forms_weights and layer.integer_calls == 2
    assert "worked out in floating point besides" in str(qflash.coverage(module))


@torch.no_grad()
def test_an_encoder_of_pytorch_with_padding() -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.zeros(4, 12, dtype=torch.bool)
    padding[1, 8:] = True
    exact = model(x(), src_key_padding_mask=padding)
    qflash.patch(model, "accurate", strict=True)
    got = model(x(), src_key_padding_mask=padding)
    assert sqnr(exact[~padding], got[~padding]) > 30.0
    layers = qflash.coverage(model)
    assert [layer.kind for layer in layers.integer] == ["MultiheadAttention"] * 2
    assert all(each.integer_calls == 1 for each in layers)


@torch.no_grad()
def test_a_module_traced_by_fx_is_a_node() -> None:
    model = nn.Sequential(nn.Linear(32, 32), Spelled("biased")).eval()
    qflash.patch(model)
    graph = torch.fx.symbolic_trace(model)
    assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
    assert torch.equal(graph(x()), model(x()))


@torch.no_grad()
def test_copies_pickles_and_dropout() -> None:
    module = Spelled("plain").eval()
    exact, got = module(x()), qflash.patch(module)(x())
    assert torch.equal(pickle.loads(pickle.dumps(module))(x()), got)
    twin = copy.deepcopy(module)
    assert torch.equal(twin(x()), got)
    assert qflash.coverage(twin).layers[0].integer_calls == 1
    assert torch.equal(qflash.unpatch(twin)(x()), exact)
    with pytest.raises(RuntimeError, match=r"dropout 0\.1 is active.*eval"):
        module.train()(x())


@torch.no_grad()
def test_any_attention_function_of_the_caller() -> None:
    module = Spelled("cosine").eval()
    exact = module(x())
    seen: list[Any] = []

    def spy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append((tuple(query.shape), tuple(options["attn_mask"].shape)))
        return F.scaled_dot_product_attention(query, key, value, **options)

    qflash.patch(module, attention=spy)
    assert sqnr(exact, module(x())) > 90.0
    assert seen == [((4, 2, 12, 16), (1, 2, 12, 12))] or seen == [((4, 2, 12, 16), (2, 12, 12))]


@torch.no_grad()
def test_one_graph_for_every_batch() -> None:
    module = qflash.patch(Spelled("windowed").eval())
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(module, backend="eager", fullgraph=True, dynamic=True)
        for batch in (4, 6, 8, 10, 12):
            images = torch.randn(batch, 12, 32)
            assert torch.equal(compiled(images), module(images))


def test_a_backward_pass_is_refused() -> None:
    module = qflash.patch(Spelled("plain").eval())
    with pytest.raises(NotImplementedError):
        module(x()).sum().backward()


def test_coverage_of_what_is_no_model() -> None:
    assert str(qflash.coverage(nn.Linear(2, 2))) == "no attention found"
    with pytest.raises(TypeError, match="model must be"):
        qflash.coverage("vit")  # type: ignore[arg-type]
    module = Spelled("plain")
    assert [layer.reason for layer in qflash.coverage(module)] == ["qflash.patch has not been called"]
    scripted = nn.Sequential(torch.jit.trace(Spelled("plain").eval(), x()), Spelled("plain"))
    assert not isinstance(scripted[0], patching._Patched)
