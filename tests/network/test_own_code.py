"""Encoders as people write them: einsum, activations that are spelled out, functions under their other names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qflash
from helpers import few
from qflash.network.capture import UnsupportedError, capture
from qflash.network.capture.operations import BATCH
from qflash.network.quality import sqnr_db
from small_networks import draw_images

SCALE = 16**-0.5
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Map = Callable[[torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """A block whose attention and activation are functions."""

    def __init__(self, attend: Attend, activation: Map) -> None:
        super().__init__()
        self.attend, self.activation = attend, activation
        self.norm1, self.qkv, self.proj = nn.LayerNorm(48), nn.Linear(48, 144), nn.Linear(48, 48)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(48), nn.Linear(48, 96), nn.Linear(96, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 3, 16)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(self.activation(self.fc1(self.norm2(x))))


class Encoder(nn.Module):
    """An encoder of one block; ``tokens`` makes tokens of the map of patches, ``pool`` one row of them."""

    def __init__(
        self, attend: Attend = F.scaled_dot_product_attention, activation: Map = F.gelu,
        tokens: Map = lambda x: x.flatten(2).transpose(1, 2), pool: Map = lambda x: x.mean(1),
    ) -> None:  # fmt: skip
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.block, self.norm = nn.Conv2d(3, 48, 8, 8), Block(attend, activation), nn.LayerNorm(48)
        self.head = nn.Linear(48, 10)
        self.places = nn.Parameter(torch.randn(1, 16, 48))
        self.tokens, self.pool = tokens, pool
        self.eval()

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.pool(self.norm(self.block(self.tokens(self.patches(x)) + self.places))))


def spelt(scores: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Attend:
    return lambda q, k, v: scores(q, k).softmax(-1) @ v


def einsum_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = (torch.einsum("nlhd,nshd->nhls", q, k) * SCALE).softmax(-1)
    return torch.einsum("nhls,nshd->nlhd", weights, v).transpose(1, 2)


def einsum_swapped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bhjd,bhij->bhid", v, (torch.einsum("bhjd,bhid->bhij", k, q) * SCALE).softmax(-1))


def einsum_dots(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.einsum("...ij,...jd->...id", torch.einsum("...id,...jd->...ij", q * SCALE, k).softmax(-1), v)


def with_mean(function: Map) -> Map:
    return lambda x: function(x.mean(1))


SEEN = torch.ones(16, 16).tril().bool()
TAKEN: dict[str, dict[str, Any]] = {
    "einsum of attention": {"attend": einsum_all},
    "einsum, operands swapped": {"attend": einsum_swapped},
    "einsum with dots": {"attend": einsum_dots},
    "scores where a mask is": {"attend": spelt(lambda q, k: torch.where(SEEN, q @ k.mT * SCALE, -1e9))},
    "scores where it is not": {"attend": spelt(lambda q, k: torch.where(~SEEN, -math.inf, q @ k.mT * SCALE))},
    "keys behind an empty cache": {
        "attend": lambda q, k, v: F.scaled_dot_product_attention(q, torch.cat([q.new_ones(0), k], 2), v)
    },
    "gelu by erf": {"activation": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))},
    "gelu by tanh": {
        "activation": lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
    },
    "gelu by tanh, factored": {
        "activation": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))
    },
    "silu in another type": {"activation": lambda x: x * torch.sigmoid(x).to(x.dtype)},
    "relu by clamp": {"activation": lambda x: x.clamp(min=0)},
    "relu by clamp_min": {"activation": lambda x: x.clamp_min(0.0)},
    "other names": {
        "tokens": lambda x: torch.true_divide(torch.multiply(torch.negative(1 - x.flatten(2).swapdims(1, 2)), 2.0), 3.0)
    },
    "pieces joined": {"tokens": lambda x: torch.concat(x.flatten(2).mT.tensor_split(2, 1), 1)},
    "the shape of another": {"tokens": lambda x: x.flatten(2).mT.reshape_as(x.flatten(2).mT)},
    "einsum that permutes": {"tokens": lambda x: torch.einsum("bchw->bhwc", x).flatten(1, 2)},
    "a mean by einsum": {"pool": lambda x: torch.einsum("btc,bt->bc", x, x.new_full(x.shape[:2], 1 / 16))},
    "one token by einsum": {"pool": lambda x: torch.einsum("bqt,btc->bqc", x.new_ones(x.shape[0], 1, 1), x[:, :1])[:, 0]},
    "a sum of tokens": {"pool": lambda x: x.sum(1) / 16},
    "a norm and a small number": {"pool": with_mean(lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-8))},
    "a norm times a number": {"pool": with_mean(lambda x: x / (x.norm(dim=-1, keepdim=True) * 48**-0.5))},
    "the inverse times a number": {"pool": with_mean(lambda x: x * (3 * x.square().sum(-1, keepdim=True).rsqrt()))},
    "dropout of whole channels": {"tokens": lambda x: F.dropout2d(x, 0.1, False).flatten(2).mT},
}  # fmt: skip


def check(model: nn.Module) -> None:
    """Require captured operations that compute what the model does."""
    model = model.double()
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    captured = capture(model, x[:BATCH])
    with torch.inference_mode():
        (wanted,), (got,) = captured.pick(model(x)).values(), captured(x).values()
    assert got.shape == wanted.shape and float((got - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())


@pytest.mark.parametrize("name", few(TAKEN, 9))
def test_what_is_spelt_otherwise_is_captured(name: str) -> None:
    check(Encoder(**TAKEN[name]))


class ByEinsum(nn.Module):
    """A linear layer whose weights have a dimension for heads, or come first."""

    def __init__(self, layer: nn.Linear, equation: str) -> None:
        super().__init__()
        weight = layer.weight.data
        self.weight = nn.Parameter(weight.unflatten(1, (3, 16)) if "h" in equation else weight)
        self.bias, self.equation = layer.bias, equation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "h" in self.equation:
            return torch.einsum(self.equation, x.unflatten(-1, (3, 16)).transpose(1, 2), self.weight) + self.bias
        return torch.einsum(self.equation, self.weight, x) + self.bias


@pytest.mark.parametrize("equation", ["bhtd,chd->btc", "dc,btc->btd", "d...,bt...->btd"])
def test_a_linear_layer_by_einsum(equation: str) -> None:
    model = Encoder()
    model.block.proj = ByEinsum(model.block.proj, equation)
    check(model)


def test_a_linear_layer_by_a_convolution_in_one_dimension() -> None:
    class Pointwise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv1d(48, 96, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.mT).mT

    model = Encoder()
    model.block.fc1 = Pointwise()  # type: ignore[assignment]
    check(model.eval())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["einsum of attention", "gelu by tanh, factored", "gelu by erf", "relu by clamp", "pieces joined", "a mean by einsum"],
)
def test_what_is_spelt_otherwise_becomes_integers(name: str) -> None:
    options: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.3] * 3, "progress": False}
    assert qflash.quantize_model(Encoder(**TAKEN[name]), [draw_images(24, 3, 32)], **options).quality.sqnr_db > 25


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another curve": (
        {"activation": lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x**3)))}, r"power 3 in block ",
    ),
    "tanh alone": ({"activation": torch.tanh}, r"aten\.tanh in block "),
    "tanh of a bias": ({"activation": lambda x: x * torch.tanh(x + torch.arange(96.0))}, r"aten\.tanh in block "),
    "a sigmoid": ({"activation": lambda x: torch.sigmoid(x)}, r"aten\.sigmoid in block "),
    "a product of channels": ({"pool": lambda x: torch.einsum("btc,btd->bcd", x, x).mean(1)}, "mean of everything"),
    "means of heads": (
        {"pool": lambda x: torch.einsum("ht,bthd->bhd", x.new_full((3, 16), 1 / 16), x.unflatten(2, (3, 16))).flatten(1)},
        r"^means of tokens whose channels are of several images \(the batch must be before the tokens\) in the model",
    ),
    "a sum over channels": ({"pool": lambda x: torch.einsum("btc->bt", x) @ torch.ones(16, 48)}, "einsum btc->bt"),
    "a diagonal": ({"pool": lambda x: torch.einsum("bcc->bc", x[:, :, :16]) @ torch.ones(16, 48)}, "einsum bcc->bc"),
    "scores in another order": (
        {"attend": lambda q, k, v: torch.einsum("bhid,bhjd->bijh", q, k).softmax(2).permute(0, 3, 1, 2) @ v}, "bijh of scores",
    ),
    "heads that mix": (
        {"attend": lambda q, k, v: torch.einsum("bhij,hg->bgij", q @ k.mT, torch.ones(3, 3)).softmax(-1) @ v},
        "^einsum bhij,hg->bgij of scores",
    ),
    "a norm and a large number": (
        {"pool": lambda x: (x / (x.norm(dim=-1, keepdim=True) + 1)).mean(1)}, "^sum of norms of rows",
    ),
    "a norm times less than nothing": (
        {"pool": lambda x: (x / (x.norm(dim=-1, keepdim=True) * -1)).mean(1)}, "^product of norms of rows",
    ),
    "a small norm and a small number": (
        {"pool": with_mean(lambda x: x / (x.norm(dim=-1, keepdim=True) * 1e-3 + 1e-4))}, "^sum of norms of rows in",
    ),
    "a norm and more dimensions": (
        {"pool": with_mean(lambda x: (x / (x.norm(dim=-1, keepdim=True) + torch.full((1, 1, 1), 1e-8)))[0])},
        "^sum of norms of rows and more than one number",
    ),
    "a norm times more dimensions": (
        {"pool": with_mean(lambda x: (x / (x.norm(dim=-1, keepdim=True) * torch.full((1, 1, 1), 2.0)))[0])},
        "^product with norms of rows of another tensor",
    ),
    "a norm to the power of 0": (
        {"pool": with_mean(lambda x: x / (x.norm(dim=-1, keepdim=True).pow(0) * 2))},
        r"^product of 2\.0 and a power 0\.0 of sums of squares",
    ),
    "a root of a norm": (
        {"pool": with_mean(lambda x: x / (x.norm(dim=-1, keepdim=True) ** 1e-3 * 2.5))}, "^product of 2.5 and a power 0.0005",
    ),
    "a layer of squares": ({"activation": lambda x: F.relu(x) ** 2}, "^linear layer of squares in block.fc2"),
    "where scores are not": ({"pool": lambda x: torch.where(SEEN[:, :1], x, 0.0).mean(1)}, "masked_fill in the model"),
}  # fmt: skip


@pytest.mark.parametrize("name", few(REFUSED, 8))
def test_what_is_no_operator_is_named(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(UnsupportedError) as refusal:
        capture(Encoder(**options), torch.randn(BATCH, 3, 32, 32))
    assert re.search(message, str(refusal.value)) and "line" in str(refusal.value), str(refusal.value)


def test_a_mean_of_the_stream_with_channels_first() -> None:
    model = Encoder(pool=lambda x: F.adaptive_avg_pool1d(x.mT, 1).flatten(1))
    model.norm = model.head = nn.Identity()  # type: ignore[assignment]
    options: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.3] * 3, "progress": False}
    network = qflash.quantize_model(model, [draw_images(16, 3, 32)], **options)
    assert network.quality is not None and network.quality.sqnr_db > 25


class Apart(nn.Module):
    """A linear layer as a product with a matrix, and a sum with a bias of so many dimensions."""

    def __init__(self, layer: nn.Linear, dimensions: int) -> None:
        super().__init__()
        bias = layer.bias.detach().view(*[1] * (dimensions - 1), -1)
        self.weight, self.bias = nn.Parameter(layer.weight.detach().T.contiguous()), nn.Parameter(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


@pytest.mark.parametrize("dimensions", few([1, 2, 3], 2))
def test_biases_that_are_added_behind_become_the_layers(dimensions: int) -> None:
    """Also before attention and an activation, which take no constant."""
    model, same = Encoder(), Encoder()
    for name in ("qkv", "proj", "fc1", "fc2"):
        setattr(model.block, name, Apart(getattr(model.block, name), dimensions))
    options: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.3] * 3, "progress": False}
    found, wanted = (qflash.quantize_model(x, [draw_images(16, 3, 32)], **options) for x in (model, same))
    some = draw_images(2, 3, 32, seed=3)
    assert torch.equal(found(some), wanted(some))


CONSTANTS: dict[str, Map] = {
    "a factor": lambda x: (7 * x).mean(1), "a negative one": lambda x: (x / -3).mean(1),
    "a term": lambda x: (x + torch.linspace(-30, 30, 48)).mean(1),
}  # fmt: skip


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("name", few(CONSTANTS, 2))
def test_ranges_of_means_hold_what_stands_behind_a_normalisation(name: str, has_head: bool) -> None:
    model = Encoder(pool=CONSTANTS[name])
    if not has_head:
        model.head = nn.Identity()  # type: ignore[assignment]
    options: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.3] * 3, "progress": False}
    network, images = qflash.quantize_model(model, [draw_images(24, 3, 32)], **options), draw_images(8, 3, 32, seed=3)
    with torch.inference_mode():
        want, got = model((images / 255 - 0.5) / 0.3), network.dequantize(network(images))
    # what is the same for all images says nothing
    assert sqnr_db(want - want.mean(0), got - want.mean(0)) > 18


BEHIND_MEANS: dict[str, tuple[Map, bool, str]] = {
    "a factor": (lambda x: 1.1 * x.mean(1), False, "constants are added to it or multiplied with it$"),
    "another order": (lambda x: x.mean(1).flip(1), False, "the output is a part of it"),
    "a factor before a head": (lambda x: x.sum(1), True, "multiplied with, what mean of the model computes before it$"),
}


@pytest.mark.parametrize("name", BEHIND_MEANS)
def test_constants_behind_a_mean_are_no_output(name: str) -> None:
    pool, has_head, message = BEHIND_MEANS[name]
    model = Encoder(pool=pool)
    if not has_head:
        model.head = nn.Identity()  # type: ignore[assignment]
    options: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.3] * 3, "progress": False}
    with pytest.raises(UnsupportedError, match=message):
        qflash.quantize_model(model, [draw_images(16, 3, 32)], **options)


SHAPES: dict[str, tuple[Map, str]] = {
    "tokens first": (lambda x: x.transpose(0, 1), r"^output 'output' must have the batch first, has shape \(16, batch, 48\)"),
    "rows of all images": (lambda x: x.flatten(0, 1), r"must have the batch first, has shape \(16\*batch, 48\)"),
    "one row": (
        lambda x: x.mean(1, keepdim=True),
        r"^output 'output' must have shape \(batch, channels\), has \(batch, 1, 48\) of one row$",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_outputs_of_other_shapes_are_named(name: str) -> None:
    pool, message = SHAPES[name]
    model = Encoder(pool=pool)
    model.head = nn.Identity()  # type: ignore[assignment]
    options: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.3] * 3, "progress": False}
    with pytest.raises(UnsupportedError, match=message):
        qflash.quantize_model(model, [draw_images(16, 3, 32)], **options)


def test_an_output_without_channels_is_named() -> None:
    class Number(Encoder):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x).squeeze(-1)

    model = Number()
    model.head = nn.Linear(48, 1)
    options: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.3] * 3, "progress": False}
    with pytest.raises(UnsupportedError, match=r"^output 'output' must have shape \(batch, channels\), has \(batch\)$"):
        qflash.quantize_model(model.eval(), [draw_images(16, 3, 32)], **options)


def test_stacked_outputs_are_told_how() -> None:
    class Stacked(Encoder):
        def forward(self, x: torch.Tensor) -> Any:
            rows = self.patches(x).flatten(2).mT + self.places
            return torch.stack([self.head(self.norm(each)[:, 0]) for each in (rows, self.block(rows))], 1)

    options: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.3] * 3, "progress": False}
    with pytest.raises(UnsupportedError, match=r"^output 'output' is several tensors, stacked; outputs can return them one by"):
        qflash.quantize_model(Stacked(), [draw_images(16, 3, 32)], **options)


class Flips(Encoder):
    """Takes images and what they are in a mirror as one batch, and the mean of both outputs."""

    def forward(self, x: torch.Tensor) -> Any:
        both = super().forward(torch.cat([x, x.flip(3)]))
        return (both[: x.shape[0]] + both[x.shape[0] :]) / 2


OF_OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "images in a mirror": (Flips, "attention of block"),
    "another order of images": (lambda: Encoder(pool=lambda x: x.flip(0).mean(1)), "mean of the model"),
    "queries of the first": (
        lambda: Encoder(lambda q, k, v: F.scaled_dot_product_attention(q[:1].expand_as(q), k, v)), "attention of block",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_OTHERS)
def test_what_takes_of_an_image_another_one_is_named(name: str) -> None:
    make, what = OF_OTHERS[name]
    options: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.3] * 3, "progress": False}
    with pytest.raises(UnsupportedError, match=f"^{what} has no integer form: it takes of an image what is of another one$"):
        qflash.quantize_model(make(), [draw_images(16, 3, 32)], **options)


ROWS_OF_MEANS: dict[str, Map] = {
    "to length one": lambda x: F.normalize(x, dim=-1),
    "to length one, spelt out": lambda x: x / x.norm(dim=-1, keepdim=True),
    "layer normalisation": lambda x: F.layer_norm(x, x.shape[-1:]),
}


@pytest.mark.parametrize("name", few(ROWS_OF_MEANS, 1))
def test_what_a_head_makes_of_a_mean_is_normalised(name: str) -> None:
    """A stream of 12 channels is rotated, one of 10 is not."""

    class Normalised(Encoder):
        def forward(self, x: torch.Tensor) -> Any:
            return ROWS_OF_MEANS[name](super().forward(x))

    options: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.3] * 3, "progress": False}
    for channels in (10, 12):
        model = Normalised()
        model.head = nn.Linear(48, channels)
        network = qflash.quantize_model(model.eval(), [draw_images(24, 3, 32)], **options)
        assert network.quality is not None and network.quality.sqnr_db > 25


def test_a_part_of_a_layer_is_told_the_whole() -> None:
    class Ends(Encoder):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x).split(5, dim=1)

    options: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.3] * 3, "progress": False}
    with pytest.raises(UnsupportedError, match=r"the output is a part of it; outputs=\['head'\] gives all of it$"):
        qflash.quantize_model(Ends(), [draw_images(4, 3, 32)], **options)
    network = qflash.quantize_model(Ends(), [draw_images(16, 3, 32)], outputs=["head"], **options)
    assert network(draw_images(2, 3, 32)).shape == (2, 10)


class ClassToken(nn.Module):
    """PyTorch's own encoder behind patches and a class token; its attention has tokens before the batch."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.batch_first = nn.Conv2d(3, 48, 8, 8), batch_first
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 48)), nn.Parameter(torch.randn(1, 17, 48))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(48, 4, 96, batch_first=batch_first), 1)

    def forward(self, x: torch.Tensor) -> Any:
        patches = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), patches], 1) + self.places
        return self.encoder(x)[:, 0] if self.batch_first else self.encoder(x.transpose(0, 1))[0]


@pytest.mark.parametrize("batch_first", few([True, False], 1))
def test_a_class_token_in_pytorchs_encoder(batch_first: bool) -> None:
    check(ClassToken(batch_first).eval())


@pytest.mark.parametrize("place", [3, 15, -1])
def test_one_row_of_a_head_is_the_one_asked_for(place: int) -> None:
    class Row(Encoder):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x)[:, place]

    options: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.3] * 3, "progress": False}
    every = Encoder(pool=lambda x: x)
    some = draw_images(4, 3, 32, seed=3)
    network = qflash.quantize_model(Row(pool=lambda x: x), [draw_images(16, 3, 32)], min_sqnr=None, **options)
    with torch.inference_mode():
        wanted = every(((some / 255) - 0.5) / 0.3)[:, place]
    assert sqnr_db(wanted, network.dequantize(network(some))) > 20


JOINED: dict[str, Map] = {
    "a factor": lambda x: 1.3 * x, "a term": lambda x: x + 0.2,
    "statistics": lambda x: (x - torch.linspace(-1, 1, 96)) / torch.linspace(0.5, 2, 96),
}  # fmt: skip


@pytest.mark.parametrize("name", JOINED)
def test_constants_behind_joined_tensors_become_the_layers(name: str) -> None:
    """One token and the mean of the others, side by side, before a head."""
    model = Encoder(pool=lambda x: JOINED[name](torch.cat([x[:, 0], x[:, 1:].mean(1)], -1)))
    model.head = nn.Linear(96, 10)
    options: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.3] * 3, "progress": False}
    network, images = qflash.quantize_model(model, [draw_images(24, 3, 32)], **options), draw_images(8, 3, 32, seed=3)
    with torch.inference_mode():
        assert sqnr_db(model((images / 255 - 0.5) / 0.3), network.dequantize(network(images))) > 35


class Different(nn.Module):
    """A block without an MLP whose query, key and value take what a function makes of the normalised tokens."""

    def __init__(self, before: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self.before, self.norm, self.proj = before, nn.LayerNorm(48), nn.Linear(48, 48)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taken = zip(self.layers, self.before(self.norm(x)), strict=True)
        heads = [layer(y).unflatten(-1, (3, 16)).transpose(1, 2) for layer, y in taken]
        return x + self.proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


VECTOR, PLACES = torch.linspace(-1, 1, 48), torch.linspace(-1, 1, 16 * 48).view(16, 48)
DIFFERENT: dict[str, tuple[Callable[[torch.Tensor], tuple[torch.Tensor, ...]], str]] = {
    "a factor of queries": (lambda y: (1.2 * y, y, y), ""),
    "a term of values": (lambda y: (y, y, y + VECTOR), ""),
    "all": (lambda y: (1.2 * y, y * (2 + VECTOR), y + VECTOR), ""),
    "positions of keys": (lambda y: (y, y + PLACES, y), "is added before query, key and value differs from token to token"),
    "another order": (lambda y: (y, y, y.flip(2)), "query, key and value take the same channels in different orders$"),
    "no channel": (lambda y: (0 * VECTOR * y, 2 * y, 3 * y), "different constants, some of which are 0$"),
}


@pytest.mark.parametrize("name", few(DIFFERENT, 5))
def test_query_key_and_value_have_constants_of_their_own(name: str) -> None:
    before, message = DIFFERENT[name]
    model = Encoder()
    model.block = Different(before)  # type: ignore[assignment]
    options: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.3] * 3, "progress": False}
    if message:
        with pytest.raises(UnsupportedError, match=message):
            qflash.quantize_model(model.eval(), [draw_images(16, 3, 32)], **options)
        return
    network, images = qflash.quantize_model(model.eval(), [draw_images(24, 3, 32)], **options), draw_images(8, 3, 32, seed=3)
    with torch.inference_mode():
        assert sqnr_db(model((images / 255 - 0.5) / 0.3), network.dequantize(network(images))) > 32


class Heads(nn.Module):
    """Two heads on one row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 10), nn.Linear(48, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.first(x), self.second(x)


@pytest.mark.parametrize("has_norm", [True, False])
def test_two_heads_take_one_mean(has_norm: bool) -> None:
    model = Encoder()
    model.head = Heads()  # type: ignore[assignment]
    if not has_norm:
        model.norm = nn.Identity()  # type: ignore[assignment]
    check_outputs(model)


def check_outputs(model: nn.Module) -> None:
    """Require a network whose outputs have the shape of the model's, and are close."""
    options: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.3] * 3, "progress": False}
    network, images = qflash.quantize_model(model.eval(), [draw_images(24, 3, 32)], **options), draw_images(8, 3, 32, seed=3)
    made: Any = network.dequantize(network(images))
    with torch.inference_mode():
        wanted = model((images / 255 - 0.5) / 0.3)
    for want, got in zip(wanted, made.values() if isinstance(made, dict) else [made], strict=True):
        assert want.shape == got.shape and sqnr_db(want, got) > 32


def test_joined_tensors_that_two_heads_take_are_refused() -> None:
    class Both(Encoder):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            both = torch.cat([y[:, 0], y[:, 1:].mean(1)], -1)
            return F.linear(both, torch.eye(3, 96)), F.linear(both, torch.eye(4, 96))

    model = Both(pool=lambda x: x)
    model.head = nn.Identity()  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match=r"several linear layers take it, and not all of them take it alone$"):
        qflash.quantize_model(model, [draw_images(4, 3, 32)], mean=[0.5] * 3, std=[0.3] * 3, progress=False)


class Rows(Encoder):
    """What a function makes of the encoder, the tokens of its block and those behind its normalisation."""

    def __init__(self, made: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.made, self.layer, self.last = made, nn.Linear(48, 48), nn.LayerNorm(48)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 48)), nn.Parameter(torch.randn(1, 17, 48))
        self.eval()

    def forward(self, x: torch.Tensor) -> Any:
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), self.patches(x).flatten(2).mT], 1)
        x = self.block(tokens + self.places)
        return self.made(self, x, self.norm(x))


def two_users(self: Any, x: torch.Tensor, normalised: torch.Tensor) -> Any:
    y = self.layer(normalised.mean(1))
    return self.last(y), self.head(y)


ROWS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "a mean's layer and a head": two_users,
    "a head of one token": lambda self, x, y: (self.head(y[:, :1]),),
    "a head of one token of the stream": lambda self, x, y: (self.head(x[:, :1]),),
    "a head as a map": lambda self, x, y: (self.head(y[:, 0])[..., None, None],),
    "a sum of layers of one row": lambda self, x, y: (self.head(self.last(self.layer(y.mean(1))) + self.layer(y.mean(1))),),
}  # fmt: skip


@pytest.mark.parametrize("name", few(ROWS, 4))
def test_heads_of_one_row_have_the_shape_of_the_models(name: str) -> None:
    check_outputs(Rows(ROWS[name]))


MIXED: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "a stream and a mean": lambda self, x, y: self.last(x[:, :1] + self.layer(y.mean(1))[:, None])[:, 0],
    "two layers": lambda self, x, y: self.last(x[:, 0] + (self.layer(y[:, 0]) + self.layer(y[:, 1:].mean(1)))),
    "joined": lambda self, x, y: torch.cat([y[:, :1], y[:, 1:].mean(1, keepdim=True)], -1) @ torch.eye(96, 7),
}


@pytest.mark.parametrize("name", few(MIXED, 2))
def test_one_row_and_tokens_are_not_added(name: str) -> None:
    message = r"one is \(batch, channels\) of one row, the other \(batch, tokens, channels\)$"
    with pytest.raises(UnsupportedError, match=message):
        qflash.quantize_model(Rows(MIXED[name]), [draw_images(8, 3, 32)], mean=[0.5] * 3, std=[0.3] * 3, progress=False)


def without_first(x: torch.Tensor, *before: torch.Tensor) -> torch.Tensor:
    """Return tokens with zeros in the place of the first one, or before them all."""
    return torch.cat([torch.zeros_like(x[:, :1]), *before, x[:, 1:]], 1)


ELSEWHERE: dict[str, tuple[Callable[[Any, torch.Tensor, torch.Tensor], Any], str]] = {
    "an output turned round": (lambda self, x, y: self.head(y).flip(1), "the output is some of its tokens"),
    "every second token of an output": (lambda self, x, y: self.head(y)[:, ::2], "the output is some of its tokens"),
    "zeros in an output": (lambda self, x, y: without_first(self.head(y)), "the output is some of its tokens"),
    "tokens as a row, times 2": (lambda self, x, y: 2 * self.head(y).flatten(1), "several tokens are a row of an output"),
    "zeros in a residual stream": (lambda self, x, y: self.last(without_first(x) + self.layer(y)), "takes are constants"),
    "zeros before a normalisation": (lambda self, x, y: self.head(self.last(without_first(x))), "takes are constants"),
    "zeros behind a normalisation": (lambda self, x, y: self.head(without_first(y)), "takes are constants"),
    "zeros in a mean": (lambda self, x, y: self.head(without_first(y, y[:, :1]).mean(1)), "takes are constants"),
    "a layer of one token, added to all": (
        lambda self, x, y: self.last(x + self.layer(y[:, :1]).expand(-1, 17, -1)), "does not add each token",
    ),
    "a layer of all but one": (lambda self, x, y: self.last(x + without_first(self.layer(y))), "does not add each token"),
    "a layer of some tokens": (lambda self, x, y: self.last(x[:, :9] + self.layer(y)[:, :9]), "does not add each token"),
}  # fmt: skip


@pytest.mark.parametrize("name", few(ELSEWHERE, 4))
def test_tokens_that_come_elsewhere_are_refused_by_name(name: str) -> None:
    made, message = ELSEWHERE[name]
    options: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.3] * 3, "progress": False, "min_sqnr": None}
    with pytest.raises(UnsupportedError, match=rf"has no integer form: .*{message}"):
        qflash.quantize_model(Rows(made), [draw_images(8, 3, 32)], **options)


def test_the_first_patches_alone_are_refused() -> None:
    model = Encoder(tokens=lambda x: x.flatten(2).mT[:, :9])
    model.places = nn.Parameter(torch.randn(1, 9, 48))
    with pytest.raises(UnsupportedError, match=r"it takes some of the image's patches$"):
        qflash.quantize_model(model, [draw_images(8, 3, 32)], mean=[0.5] * 3, std=[0.3] * 3, progress=False)


def test_positions_behind_a_normalisation_of_a_class_token_are_refused() -> None:
    class Late(Encoder):
        def forward(self, x: torch.Tensor) -> Any:
            tokens = torch.cat([self.places[:, :1].expand(x.shape[0], -1, -1), self.patches(x).flatten(2).mT], 1)
            places = torch.linspace(-1, 1, 17 * 48).view(17, 48)
            return self.head(self.block(self.norm(tokens) + places).mean(1))

    with pytest.raises(UnsupportedError, match=r"norm of norm has no .*, and it takes class tokens beside patches$"):
        qflash.quantize_model(Late(), [draw_images(8, 3, 32)], mean=[0.5] * 3, std=[0.3] * 3, progress=False)


SCALES: dict[str, Attend] = {
    "less than nothing": lambda q, k, v: (q @ k.mT * -0.3).softmax(-1) @ v,
    "nothing": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.0),
    "keys times less than nothing": lambda q, k, v: F.scaled_dot_product_attention(q, -k, v),
    "a head's below nothing": lambda q, k, v: (q @ k.mT * torch.tensor([0.3, -0.3, 0.2])[:, None, None]).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", few(SCALES, 2))
def test_scores_times_no_number_above_0_are_refused(name: str) -> None:
    options: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.3] * 3, "progress": False, "min_sqnr": None}
    with pytest.raises(UnsupportedError, match=r"attention of block has no .*, and not by a number above 0$"):
        qflash.quantize_model(Encoder(SCALES[name]), [draw_images(8, 3, 32)], **options)


def masked(number: float) -> Attend:
    """Return attention where one query has a number added to all its scores, and another one to some."""
    mask = torch.zeros(16, 16)
    mask[3] = mask[5, 4:] = number
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("number", [-math.inf, -1e9])
def test_queries_without_a_key_are_refused(number: float) -> None:
    """What they give is 0, or a mean over all keys since float32 loses the scores."""
    options: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.3] * 3, "progress": False, "min_sqnr": None}
    with pytest.raises(
        UnsupportedError, match=r"attention of block has no integer form: its mask hides all keys from a query$"
    ):
        qflash.quantize_model(Encoder(masked(number)), [draw_images(8, 3, 32)], **options)


@pytest.mark.parametrize("number", [-1e4, torch.finfo(torch.float32).min])
def test_queries_to_whose_scores_a_number_is_added(number: float) -> None:
    """Beside -10000 float32 shows the scores, and the least number makes means of integers, too."""
    model = Encoder(masked(number), pool=lambda x: x[:, 3])
    model.head = nn.Identity()  # type: ignore[assignment]
    options: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.3] * 3, "progress": False}
    network = qflash.quantize_model(model, [draw_images(16, 3, 32)], **options)
    assert network.quality is not None and network.quality.sqnr_db > 25


def test_scores_of_batches_times_heads_and_weights_of_both() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT) * SCALE
        return scores.view(-1, 3, 16, 16).softmax(-1) @ v

    check(Encoder(attend))


def test_heads_that_share_a_key_and_a_value() -> None:
    check(Encoder(lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)))


def test_pairs_of_heads_that_share_a_key_and_a_value() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2).reshape(-1, 16, 6, 8).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k[:, ::2], v[:, ::2], enable_gqa=True)
        return out.transpose(1, 2).reshape(-1, 16, 3, 16).transpose(1, 2)

    check(Encoder(attend))


def test_outputs_whose_normalisation_has_weights_of_0() -> None:
    model = Rows(lambda self, x, y: (y,))
    with torch.no_grad():
        model.norm.weight.copy_(torch.linspace(0.5, 1.5, 48))
        model.norm.weight[::5] = 0
        model.norm.bias.copy_(torch.linspace(-0.3, 0.3, 48))
    check_outputs(model)


class OneQuery(nn.Module):
    """Pools by PyTorch's attention, which has the one query before the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(48, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.attention(x[:, 3:4], x, x, need_weights=False)[0][:, 0]


def test_one_query_that_stands_before_the_batch() -> None:
    check(Encoder(pool=OneQuery()))
