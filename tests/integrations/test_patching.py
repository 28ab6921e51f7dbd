"""patch() on modules that have no adapter: their own forward, whose attention is answered; coverage()."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qflash
from qflash.integrations import patching
from qflash.integrations.deferred_scores import Deferred
from qflash_lab.bench.metrics import sqnr


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
def test_attention_that_is_spelled_out(style: str) -> None:
    module = Spelled(style).eval()
    exact = module(x())
    qflash.patch(module, "accurate", strict=True)
    got = module(x())
    assert 30.0 < sqnr(exact, got) < 90.0
    (layer,) = qflash.coverage(module)
    assert (layer.route, layer.integer_calls, layer.float_calls, layer.is_integer) == ("softmax", 1, 0, True)
    assert torch.equal(module(x()), got)
    assert torch.equal(qflash.unpatch(module)(x()), exact)


@torch.no_grad()
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.slow
def test_attention_that_is_spelled_out_is_compiled_and_exported(style: str) -> None:
    module = qflash.patch(Spelled(style).eval(), "accurate", strict=True)
    got = module(x())
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(compiled(x()), got)
    exported = torch.export.export(module, (x(),)).module()
    assert torch.equal(exported(x()), got)


Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
LOWER, TABLE = torch.ones(12, 12, dtype=torch.bool).tril(), torch.randn(2, 12, 12, generator=torch.Generator().manual_seed(5))
SLOPE, EACH = torch.linspace(0.1, 1, 12), torch.tensor([2.0, 3.0]).view(2, 1, 1)


def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.flatten(0, 1) for x in tensors]


class Written(Spelled):
    """Attention as a function writes it."""

    def __init__(self, function: Function) -> None:
        super().__init__("function")
        self.function = function


SPELLINGS: dict[str, Function] = {
    "added in place": lambda q, k, v: (q @ k.mT).add_(TABLE).softmax(-1) @ v,
    "subtracted in place": lambda q, k, v: (q @ k.mT).sub_(TABLE).softmax(-1) @ v,
    "scaled in place": lambda q, k, v: (q @ k.mT).mul_(0.25).div_(0.5).softmax(-1) @ v,
    "a negative scale": lambda q, k, v: (q @ k.mT * -0.5).softmax(-1) @ v,
    "negated": lambda q, k, v: (-(q @ k.mT) - TABLE).softmax(-1) @ v,
    "a number added": lambda q, k, v: (3 + (q @ k.mT + TABLE) * 0.5 - 1).softmax(-1) @ v,
    "a factor of each row": lambda q, k, v: ((q @ k.mT + TABLE) * SLOPE[:, None]).softmax(-1) @ v,
    "a factor of each column": lambda q, k, v: (q @ k.mT * SLOPE).softmax(-1) @ v,
    "a divisor of each head": lambda q, k, v: (q @ k.mT / EACH.half()).softmax(-1) @ v,
    "a bias in baddbmm": lambda q, k, v: (
        torch.baddbmm(TABLE.repeat(4, 1, 1), *flat(q, k.mT), beta=0.5, alpha=0.25).softmax(-1) @ flat(v)[0]
    ).unflatten(0, (4, 2)),
    "hidden in place": lambda q, k, v: (q @ k.mT).masked_fill_(~LOWER, -1e9).softmax(-1) @ v,
    "seen flat": lambda q, k, v: (q @ k.mT).view(8, 12, 12).softmax(-1).view(4, 2, 12, 12) @ v,
    "flattened": lambda q, k, v: ((q @ k.mT + TABLE).flatten(0, 1).softmax(-1) @ flat(v)[0]).unflatten(0, (4, 2)),
    "unflattened": lambda q, k, v: torch.bmm(*flat(q, k.mT)).unflatten(0, (-1, 2)).softmax(-1) @ v,
    "a bias behind flattening": lambda q, k, v: (
        ((q @ k.mT + TABLE).flatten(0, 1) + TABLE.repeat(4, 1, 1)).softmax(-1) @ flat(v)[0]
    ).unflatten(0, (4, 2)),
    "unsqueezed": lambda q, k, v: (q @ k.mT).unsqueeze(1).softmax(-1).squeeze(1).squeeze(0) @ v,
    "expanded as it is": lambda q, k, v: (q @ k.mT).expand(4, -1, 12, 12).softmax(-1) @ v,
    "heads first": lambda q, k, v: ((q @ k.mT + TABLE).permute(1, 0, 2, 3).softmax(-1) @ v.transpose(0, 1)).transpose(0, 1),
    "other types": lambda q, k, v: ((q @ k.mT).float().type_as(q).to(torch.float32).softmax(-1).half() @ v.half()).float(),
    "copies": lambda q, k, v: (q @ k.mT).clone().contiguous().detach().softmax(-1) @ v,
    "an einsum the other way round": lambda q, k, v: torch.einsum(
        "bhjd,bhij->bhid", v, torch.einsum("bhjd,bhid->bhij", k, q).softmax(-1)
    ),
    "an einsum that moves heads": lambda q, k, v: torch.einsum("bhij,bhjd->bihd", (q @ k.mT).softmax(-1), v).transpose(1, 2),
    "the last rows and columns": lambda q, k, v: F.pad(
        ((q @ k.mT) + TABLE)[:, :, 2:, 3:].softmax(-1) @ v[:, :, 3:], (0, 0, 2, 0)
    ),
    "values of fewer dimensions": lambda q, k, v: (q @ k.mT).softmax(-1) @ v[0],
    "dropout that is off": lambda q, k, v: F.dropout(F.dropout((q @ k.mT).softmax(-1), 0.0), 0.5, False) @ v,
    "sizes that are asked for": lambda q, k, v: (s := q @ k.mT).softmax(s.dim() - 1) @ v * (s.size(-1) / s.size()[3]) * s.ndim,
    "a method of a tensor": lambda q, k, v: torch.Tensor.__rmatmul__(k.mT, q).softmax(-1) @ v,
    "heads first without a bias": lambda q, k, v: ((q @ k.mT).transpose(0, 1).softmax(-1) @ v.transpose(0, 1)).transpose(0, 1),
    "a property": lambda q, k, v: (s := q @ k.mT).softmax(-1) @ (v.double() if s.is_cuda else v),
    "an item": lambda q, k, v: (q @ k.mT * SLOPE[5].item()).softmax(-1) @ v,
}


@torch.no_grad()
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_spellings_are_recognised(spelling: str) -> None:
    module = Written(SPELLINGS[spelling]).eval()
    exact = module(x())
    got = qflash.patch(module, "accurate", strict=True)(x())
    assert 30.0 < sqnr(exact, got) < 90.0
    (layer,) = qflash.coverage(module)
    assert (layer.route, layer.integer_calls, layer.float_calls) == ("softmax", 1, 0)


NO_ATTENTION: dict[str, tuple[Function, str]] = {
    "a factor that repeats": (lambda q, k, v: (q[:1] @ k[:1].mT * SLOPE[:4].view(4, 1, 1, 1)).softmax(-1) @ v, "go into mul"),
    "a bias that repeats": (lambda q, k, v: (q[:1] @ k[:1].mT + SLOPE[:4].view(4, 1, 1, 1)).softmax(-1) @ v, "go into add"),
    "a factor of each score": (lambda q, k, v: (q @ k.mT * TABLE).softmax(-1) @ v, "go into mul"),
    "a factor of 0": (lambda q, k, v: (q @ k.mT * 0).softmax(-1) @ v, "go into mul"),
    "taken from a number": (lambda q, k, v: (1.0 - q @ k.mT).softmax(-1) @ v, "go into sub"),
    "a number divided": (lambda q, k, v: (1.0 / (40 + q @ k.mT)).softmax(-1) @ v, "go into rtruediv"),
    "a multiple added": (lambda q, k, v: torch.add(q @ k.mT, TABLE, alpha=2).softmax(-1) @ v, "go into add"),
    "squared": (lambda q, k, v: ((q @ k.mT) ** 2).softmax(-1) @ v, "go into pow"),
    "an exponent": (lambda q, k, v: (1.1 ** (q @ k.mT)).softmax(-1) @ v, "go into __rpow__"),
    "magnitudes": (lambda q, k, v: abs(q @ k.mT).softmax(-1) @ v, "go into abs"),
    "a small mask": (lambda q, k, v: (q @ k.mT).masked_fill(~LOWER, -5.0).softmax(-1) @ v, "go into masked_fill"),
    "along the queries": (lambda q, k, v: (q @ k.mT).softmax(-2) @ v, "go into softmax"),
    "twice": (lambda q, k, v: (q @ k.mT).softmax(-1).softmax(-1) @ v, "probabilities go into softmax"),
    "over rows joined": (
        lambda q, k, v: (q @ k.mT).flatten(2).softmax(-1).view(4, 2, 12, 12) @ v, "scores go into softmax",
    ),
    "more added to probabilities": (lambda q, k, v: ((q @ k.mT).softmax(-1) + TABLE) @ v, "probabilities go into add"),
    "a share of probabilities": (lambda q, k, v: ((q @ k.mT).softmax(-1) * 0.5) @ v, "probabilities go into mul"),
    "expanded": (lambda q, k, v: (q[:1] @ k[:1].mT).expand(4, -1, -1, -1).softmax(-1) @ v, "go into expand"),
    "doubles": (lambda q, k, v: (q @ k.mT).double().softmax(-1).float() @ v, "go into double"),
    "integers": (lambda q, k, v: (q @ k.mT).to(torch.int32).float().softmax(-1) @ v, "go into to"),
    "values of more dimensions": (lambda q, k, v: (q[0] @ k[0].mT).softmax(-1) @ v, "probabilities go into matmul"),
    "values from the left": (lambda q, k, v: (v.mT @ (q @ k.mT).softmax(-1)).mT, "probabilities go into matmul"),
    "an einsum over queries": (
        lambda q, k, v: torch.einsum("bhij,bhid->bhjd", (q @ k.mT).softmax(-1), v), "probabilities go into einsum",
    ),
    "an einsum with dots": (
        lambda q, k, v: torch.einsum("...id,...jd->...ij", q, k).softmax(-1) @ v, "not one of a product of query and key",
    ),
    "an einsum that adds up heads": (
        lambda q, k, v: torch.einsum("bhid,bhjd->bij", q, k)[:, None].softmax(-1) @ v, "not one of a product",
    ),
    "keys of the first image": (lambda q, k, v: (q @ k[0].mT).softmax(-1) @ v, "not one of a product of query and key"),
    "baddbmm by name": (
        lambda q, k, v: (
            torch.baddbmm(TABLE.repeat(4, 1, 1), batch1=flat(q)[0], batch2=flat(k.mT)[0]).softmax(-1) @ flat(v)[0]
        ).unflatten(0, (4, 2)),
        "not one of a product of query and key",
    ),
    "whole factors": (lambda q, k, v: (q @ k.mT * LOWER.int()[5]).softmax(-1) @ v, "go into mul"),
    "whole numbers added": (lambda q, k, v: (q @ k.mT + LOWER.int()).softmax(-1) @ v, "go into add"),
    "a multiple subtracted": (lambda q, k, v: torch.sub(q @ k.mT, TABLE, alpha=2).softmax(-1) @ v, "go into sub"),
    "flattened by name": (
        lambda q, k, v: ((q @ k.mT).flatten(start_dim=0, end_dim=1).softmax(-1) @ flat(v)[0]).unflatten(0, (4, 2)),
        "go into flatten",
    ),
    "seen as another type": (lambda q, k, v: (q @ k.mT).view(torch.float32).softmax(-1) @ v, "go into view"),
    "turned by name": (lambda q, k, v: (k @ q.mT).transpose(dim0=2, dim1=3).softmax(-1) @ v, "go into transpose"),
    "queries before heads": (
        lambda q, k, v: (q @ k.mT).permute(0, 2, 1, 3).softmax(-1).permute(0, 2, 1, 3) @ v, "go into permute",
    ),
    "some probabilities": (
        lambda q, k, v: F.pad((q @ k.mT).softmax(-1)[:, :, 1:, :] @ v, (0, 0, 1, 0)), "probabilities go into getitem",
    ),
    "some heads": (lambda q, k, v: (q @ k.mT)[:, :1].softmax(-1) @ v, "go into getitem"),
    "a join": (lambda q, k, v: torch.cat([q @ k.mT, v.sum(-1, True)], -1).softmax(-1)[..., :-1] @ v, "go into cat"),
    "large scores alone": (lambda q, k, v: (s := q @ k.mT).where(s > 0, 0).softmax(-1) @ v, "go into where"),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("spelling", NO_ATTENTION)
def test_other_uses_of_scores_are_computed_as_written(spelling: str) -> None:
    function, reason = NO_ATTENTION[spelling]
    module = Written(function).eval()
    exact = module(x())
    qflash.patch(module)
    with pytest.warns(UserWarning, match=f"attention stays in floating point: .*{reason}"):
        assert torch.equal(module(x()), exact)
    assert not qflash.coverage(module).layers[0].is_integer


def written(change: Callable[[Any], Any]) -> Function:
    """Return attention whose scores are written to by a function, which returns what it has kept."""

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.mT
        kept = change(scores)
        out = scores.softmax(-1) @ v
        return out if kept is None else out + kept.softmax(-1) @ v

    return function


def in_place(scores: torch.Tensor) -> torch.Tensor:
    scores += TABLE
    return scores


def by_operators(scores: torch.Tensor) -> None:
    scores *= 0.5
    scores /= EACH
    scores -= TABLE


def copied(scores: torch.Tensor) -> torch.Tensor:
    kept = scores.clone()
    scores += TABLE
    return kept


def scaled(scores: torch.Tensor) -> torch.Tensor:
    kept = scores * 0.5
    scores.mul_(0.25).add_(TABLE)
    kept -= TABLE
    return kept


def part_in_place(scores: torch.Tensor) -> None:
    scores[:, :, 1:, 1:] += TABLE[:, 1:, 1:]


def part_kept(scores: torch.Tensor) -> None:
    part = scores[:, :, 1:, 1:]
    part += TABLE[:, 1:, 1:]


def turned_in_place(scores: torch.Tensor) -> None:
    scores.transpose_(2, 3).unsqueeze_(0).squeeze_(0).add_(TABLE)


def part_beside_a_view(scores: torch.Tensor) -> torch.Tensor:
    kept = scores.view(4, 2, 12, 12)
    scores[:, :, 1:, 1:] += TABLE[:, 1:, 1:]
    return kept


def part_as_it_was(scores: torch.Tensor) -> None:
    part = scores[:, :, 1:, 1:]
    scores[:, :, 1:, 1:] = part


def part_doubled(scores: torch.Tensor) -> None:
    scores[:, :, 1:, 1:] = scores[:, :, 1:, 1:] * 2


def part_of_what_is_clamped(scores: torch.Tensor) -> torch.Tensor:
    scores[:, :, 1:, 1:] = scores[:, :, 1:, 1:] + TABLE[:, 1:, 1:]
    return scores.clamp(max=0.5)


def through_a_view(scores: torch.Tensor) -> None:
    scores.view(8, 12, 12).add_(TABLE.repeat(4, 1, 1))


def below_a_view(scores: torch.Tensor) -> torch.Tensor:
    kept = scores.view(4, 2, 12, 12)
    scores += TABLE
    return kept


def below_views_of_views(scores: torch.Tensor) -> torch.Tensor:
    kept, flat = scores.transpose(-2, -1), scores.flatten(0, 1)
    flat.unflatten(0, (4, 2)).sub_(TABLE)
    return kept


def clamped_below_a_view(scores: torch.Tensor) -> torch.Tensor:
    kept = scores.detach()
    scores.clamp_(max=0.5)
    return kept


def copied_and_clamped(scores: torch.Tensor) -> torch.Tensor:
    kept = scores * 2 - TABLE
    scores.clamp_(max=0.5)
    return kept


def a_row_beside(scores: torch.Tensor) -> torch.Tensor:
    kept = scores.narrow(2, 0, 12)
    scores += TABLE
    return kept


@torch.no_grad()
@pytest.mark.parametrize(
    "change", [in_place, by_operators, copied, scaled, part_in_place, part_kept, turned_in_place], ids=lambda x: x.__name__
)
def test_scores_that_are_written_to_are_recognised(change: Any) -> None:
    module = Written(written(change)).eval()
    exact = module(x())
    got = qflash.patch(module, "accurate", strict=True)(x())
    assert 30.0 < sqnr(exact, got) < 90.0


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        part_as_it_was, part_doubled, part_of_what_is_clamped, part_beside_a_view, through_a_view, below_a_view,
        below_views_of_views, clamped_below_a_view, copied_and_clamped, a_row_beside,
    ],
    ids=lambda x: x.__name__,
)  # fmt: skip
def test_what_is_written_reaches_views_and_no_copies(change: Any) -> None:
    module = Written(written(change)).eval()
    exact = module(x())
    with pytest.warns(UserWarning, match="attention stays in floating point: its scores go into"):
        got = qflash.patch(module, "accurate")(x())
    # one of two may be recognised
    one_of_two = (copied_and_clamped, part_of_what_is_clamped)
    assert sqnr(exact, got) > 30.0 if change in one_of_two else torch.equal(got, exact)


class Answer(NamedTuple):
    out: torch.Tensor
    weights: torch.Tensor


class Telling(nn.Module):
    """Attention that returns its weights as well, in a container."""

    def __init__(self, container: Callable[..., Any]) -> None:
        super().__init__()
        self.container = container

    def forward(self, x: torch.Tensor) -> Any:
        weights = (x @ x.mT).softmax(-1)
        return self.container(out=weights @ x, weights=weights)


@torch.no_grad()
@pytest.mark.parametrize("container", [dict, Answer])
def test_containers_hold_no_deferred_tensors(container: Any) -> None:
    module = Telling(container).eval()
    exact, got = module(x()), qflash.patch(module, "accurate")(x())
    assert type(got) is type(exact)
    tensors = [list(each.values()) if isinstance(each, dict) else list(each) for each in (exact, got)]
    assert all(type(each) is torch.Tensor for each in tensors[1])
    assert torch.equal(tensors[0][1], tensors[1][1])
    assert 30.0 < sqnr(tensors[0][0], tensors[1][0]) < 100.0


@torch.no_grad()
def test_scores_compare_like_tensors() -> None:
    seen: list[Any] = []

    def compare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        s, zero = q @ k.mT, torch.zeros(())
        seen.append([s < 0, s <= zero, s > 0, s >= zero, s == s.clone(), s != 0, len(s), s[0, 0, 0, 0] == s[0, 0, 0, 0]])
        seen[-1].append([bool(s[:1, :1, :1, :1]), [len(each) for each in s], s == None, {s: 1}[s]])  # noqa: E711
        return s.softmax(-1) @ v

    module = Written(compare).eval()
    module(x())
    qflash.patch(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        module(x())
    torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=0)


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


@torch.no_grad()
def test_a_call_of_sdpa_with_one_head_of_keys() -> None:
    module = Written(lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1])).eval()
    exact = module(x())
    got = qflash.patch(module, "accurate", strict=True)(x())
    assert 30.0 < sqnr(exact, got) < 90.0


@torch.no_grad()
def test_a_call_of_sdpa_that_stays_in_floating_point() -> None:
    wide = Written(lambda q, k, v: F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=0.5).float())
    exact = wide.eval()(x())
    with pytest.warns(UserWarning, match=r"attention stays in floating point: query must be .*float64"):
        assert torch.equal(qflash.patch(wide)(x()), exact)
    dropping = qflash.patch(Written(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)))
    with pytest.raises(RuntimeError, match=r"dropout 0\.1 is active"):
        dropping(x())


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


class Nested(nn.Module):
    """Attention that takes nested tensors of strided layout, by SDPA or spelled out."""

    def __init__(self, spelled: bool) -> None:
        super().__init__()
        self.spelled = spelled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.spelled:
            return (x @ x.transpose(-2, -1)).softmax(-1) @ x
        return F.scaled_dot_product_attention(x, x, x)


@torch.no_grad()
@pytest.mark.parametrize("spelled", [False, True])
def test_nested_tensors_of_strided_layout_stay_in_floating_point(spelled: bool) -> None:
    model = Nested(spelled)
    x = torch.nested.nested_tensor([torch.randn(2, 5, 8), torch.randn(2, 3, 8)])
    want = model(x).to_padded_tensor(0.0)
    qflash.patch(model)
    with pytest.warns(UserWarning, match="Nested: attention stays in floating point"):
        got = model(x)
    assert torch.equal(got.to_padded_tensor(0.0), want)
    assert not qflash.coverage(model).integer
    qflash.patch(model, strict=True)
    with pytest.raises(RuntimeError, match="strict=True"):
        model(x)


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
