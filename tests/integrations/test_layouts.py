"""What comes back in place of PyTorch's attention lies in memory as PyTorch's does: modules take views of it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qflash
from helpers import few, load_script

Function = Callable[..., torch.Tensor]
HEADS, TOKENS, CHANNELS = 3, 5, 8


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def placed(shape: tuple[int, ...], order: tuple[int, ...], padded: bool = False) -> torch.Tensor:
    """Return random numbers whose dimensions lie in memory in an order, outermost first; padded: with a gap behind each row."""
    sizes = [shape[each] for each in order]
    sizes[-1] += 3 * padded
    x = torch.randn(sizes)[..., : shape[order[-1]]]
    return x.permute([order.index(each) for each in range(len(shape))])


class Calls(nn.Module):
    """Attention of three tensors as a module."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(1, 1)

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.function(*tensors)


class Attention(Calls):
    """One that calls scaled_dot_product_attention."""

    def __init__(self, **options: Any) -> None:
        super().__init__(lambda *_: _[0])
        self.options = options

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*tensors, **self.options)


ORDERS = list(itertools.permutations(range(4)))
MASKS = {
    "none": None, "rows": (TOKENS, TOKENS), "batch": (2, 1, TOKENS, TOKENS), "heads": (HEADS, TOKENS, TOKENS),
    "keys": (2, 1, 1, TOKENS),
}  # fmt: skip


def sdpa_calls() -> Iterator[tuple[str, list[torch.Tensor], dict[str, Any]]]:
    """Return names, tensors and options of calls."""
    torch.manual_seed(0)
    shape = (2, HEADS, TOKENS, CHANNELS)
    contiguous = torch.randn(shape)
    for order in ORDERS:
        x = placed(shape, order)
        yield f"query {order}", [x, contiguous, contiguous], {}
        yield f"all {order}", [x, x, x], {}
        yield f"all padded {order}", [y := placed(shape, order, padded=True), y, y], {}
    usual = placed(shape, (0, 2, 1, 3))
    for dtype in (torch.float16, torch.bfloat16):
        yield f"usual {dtype}", [usual.to(dtype)] * 3, {}
    for name, size in MASKS.items():
        for kind in (torch.bool, torch.float32):
            mask = None if size is None else torch.ones(size, dtype=kind)
            yield f"mask {name} {kind}", [usual] * 3, {"attn_mask": mask}
    yield "causal", [usual] * 3, {"is_causal": True}
    yield "scale", [usual] * 3, {"scale": 0.3}
    yield "grouped", [placed((2, 6, TOKENS, CHANNELS), (0, 2, 1, 3)), usual, usual], {"enable_gqa": True}
    yield "wide values", [usual, usual, torch.randn(2, HEADS, TOKENS, 16)], {}
    yield "other keys", [usual, torch.randn(2, HEADS, 7, CHANNELS), torch.randn(2, HEADS, 7, CHANNELS)], {}
    yield "one head of keys", [usual, usual[:, :1], usual[:, :1]], {}
    yield "one batch of keys", [usual, usual[:1], usual[:1]], {}
    yield "one query", [usual[:, :, :1], usual, usual], {}
    yield "one head", [usual[:, :1]] * 3, {}
    yield "one image", [usual[:1]] * 3, {}
    yield "no image", [usual[:0]] * 3, {}
    yield "no query", [usual[:, :, :0], usual, usual], {}
    yield "three dimensions", [contiguous[0]] * 3, {}
    yield "three, transposed", [usual[0]] * 3, {}
    yield "two dimensions", [contiguous[0, 0]] * 3, {}
    five = placed((2, 2, HEADS, TOKENS, CHANNELS), (0, 1, 3, 2, 4))
    yield "five dimensions", [five] * 3, {}
    yield "five, contiguous", [five.contiguous()] * 3, {}


CALLS = {name: (tensors, options) for name, tensors, options in sdpa_calls()}


@pytest.mark.parametrize("name", few(CALLS))
def test_sdpa(name: str) -> None:
    tensors, options = CALLS[name]
    want = F.scaled_dot_product_attention(*tensors, **options).stride()
    with qflash.sdpa(fallback="error"):
        assert F.scaled_dot_product_attention(*tensors, **options).stride() == want
    qflash.sdpa.enable(fallback="error")
    try:
        assert F.scaled_dot_product_attention(*tensors, **options).stride() == want
    finally:
        qflash.sdpa.disable()
    model = qflash.patch(Attention(**options), strict=True)
    assert model(*tensors).stride() == want


def test_sdpa_where_pytorch_is_told_to_take_its_plain_kernel() -> None:
    x = placed((2, HEADS, TOKENS, CHANNELS), (0, 2, 1, 3))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), qflash.sdpa():
        assert F.scaled_dot_product_attention(x, x, x).is_contiguous()
    with qflash.sdpa():
        assert F.scaled_dot_product_attention(x, x, x).transpose(1, 2).is_contiguous()


def test_values_do_not_depend_on_the_layout() -> None:
    for tensors, options in CALLS.values():
        if 1 in (x.shape[0] for x in tensors[1:]) or tensors[0].numel() == 0:
            continue
        with qflash.sdpa():
            got = F.scaled_dot_product_attention(*tensors, **options)
        assert torch.equal(got, qflash.attention(*tensors, **options))


@pytest.mark.parametrize("name", ["wide values", "five dimensions", "usual torch.float16", "query (1, 0, 2, 3)"])
def test_compiled_sdpa_is_viewed_as_it_is_without(name: str) -> None:
    tensors, options = CALLS[name]
    want = F.scaled_dot_product_attention(*tensors, **options)
    join = want.is_contiguous()

    def viewed(*tensors: torch.Tensor) -> torch.Tensor:
        out = F.scaled_dot_product_attention(*tensors, **options)
        return out.view(-1, out.shape[-1]) if join else out * 1

    with qflash.sdpa(fallback="error"):
        got = torch.compile(viewed, backend="eager", fullgraph=True)(*tensors)
    assert got.shape == (viewed(*tensors)).shape


def weights(scores: torch.Tensor) -> torch.Tensor:
    return (scores * 0.3).softmax(dim=-1)


def by_einsum(first: str, second: str) -> Function:
    return lambda q, k, v: torch.einsum(second, weights(torch.einsum(first, q, k)), v)


def by_einsum_backwards(first: str, second: str) -> Function:
    return lambda q, k, v: torch.einsum(second, v, weights(torch.einsum(first, q, k)))


def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.flatten(0, 1) for x in tensors]


PRODUCTS: dict[str, Function] = {
    "@": lambda q, k, v: weights(q @ k.transpose(-2, -1)) @ v,
    "matmul": lambda q, k, v: torch.matmul(weights(torch.matmul(q, k.mT)), v),
    "method": lambda q, k, v: weights(q.matmul(k.mT)).matmul(v),
    "turned": lambda q, k, v: v.mT @ weights(q @ k.mT).transpose(-2, -1),
    "turned back": lambda q, k, v: (v.mT @ weights(q @ k.mT).transpose(2, 3)).mT,
    "scores turned": lambda q, k, v: weights((k @ q.mT).transpose(-2, -1)) @ v,
    "bmm": lambda q, k, v: torch.bmm(weights(torch.bmm(flat(q)[0], flat(k)[0].mT)), flat(v)[0]),
    "baddbmm": lambda q, k, v: weights(torch.baddbmm(torch.zeros(1), flat(q)[0], flat(k)[0].mT)).bmm(flat(v)[0]),
    "joined": lambda q, k, v: weights(q @ k.mT).flatten(0, 1) @ flat(v)[0],
    "one value": lambda q, k, v: weights(q @ k.mT) @ v[:1],
    "half": lambda q, k, v: weights(q.half() @ k.half().mT) @ v.half(),
    "einsum": by_einsum("bhid,bhjd->bhij", "bhij,bhjd->bhid"),
    "einsum to tokens first": by_einsum("bhid,bhjd->bhij", "bhij,bhjd->bihd"),
    "einsum to channels first": by_einsum("bhid,bhjd->bhij", "bhij,bhjd->bhdi"),
    "einsum to heads last": by_einsum("bhid,bhjd->bhij", "bhij,bhjd->bdih"),
    "einsum, heads first": by_einsum("bhid,bhjd->hbij", "hbij,bhjd->bhid"),
    "einsum, values first": by_einsum_backwards("bhid,bhjd->bhij", "bhjd,bhij->bhid"),
    "einsum, values first, turned": by_einsum_backwards("bhid,bhjd->bhij", "bhjd,bhij->bdhi"),
    "einsum, then @": lambda q, k, v: weights(torch.einsum("bhid,bhjd->bhij", q, k)) @ v,
    "@, then einsum": lambda q, k, v: torch.einsum("bhij,bhjd->bihd", weights(q @ k.mT), v),
}
SHAPES = {
    "usual": (2, HEADS, TOKENS, CHANNELS), "one image": (1, HEADS, TOKENS, CHANNELS), "one head": (2, 1, TOKENS, CHANNELS),
    "one of each": (1, 1, TOKENS, CHANNELS), "one token": (2, HEADS, 1, CHANNELS), "one channel": (2, HEADS, TOKENS, 1),
}  # fmt: skip
"""Batch, heads, tokens, channels."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spelling", PRODUCTS)
def test_products(spelling: str, shape: str) -> None:
    model = Calls(PRODUCTS[spelling])
    orders = ORDERS if shape == "usual" else ORDERS[:3]
    inputs = [[placed(SHAPES[shape], order) for _ in range(3)] for order in orders]
    wants = [model(*tensors) for tensors in inputs]
    patched = qflash.patch(Named(PRODUCTS[spelling]), strict=True)
    for tensors, want in zip(inputs, wants, strict=True):
        got = patched(*tensors)
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
    assert qflash.coverage(patched).integer


class Named(Calls):
    """A module that patch() knows by its code: products and a softmax, which are not called."""

    def idle(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k).softmax(-1) @ v


class Viewed(nn.Module):
    """Attention whose output is viewed, as LeViT's convolutional form does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(24, 72)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(2, 16, 3, 3, 8).permute(2, 0, 3, 1, 4)
        return (((q @ k.transpose(-2, -1)) * 8**-0.5).softmax(-1) @ v).view(6, 16, 8)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_view_of_a_product(compiled: bool) -> None:
    model, x = Viewed().eval(), torch.randn(2, 16, 24)
    want = model(x)
    qflash.patch(model, strict=True)
    got = (torch.compile(model, backend="eager", fullgraph=True) if compiled else model)(x)
    assert (got - want).norm() < 0.1 * want.norm()


# --- architectures of timm

ARCHITECTURES = (
    "levit_conv_128s", "levit_conv_256d", "levit_conv_384_s8", "levit_128s", "beit_base_patch16_224", "botnet26t_256",
    "coat_tiny", "eva02_tiny_patch14_224", "gcvit_xxtiny", "mobilevit_xxs", "tiny_vit_5m_224", "volo_d1_224",
)  # fmt: skip
"""Of several kinds of attention one; scripts/survey_models.py runs every architecture that there is."""
MORE = (
    "cait_xxs24_224", "convit_tiny", "crossvit_tiny_240", "davit_tiny", "edgenext_xx_small", "efficientformer_l1",
    "efficientformerv2_s0", "fastvit_sa12", "halonet26t", "hiera_tiny_224", "lambda_resnet26t", "maxvit_rmlp_pico_rw_256",
    "mobilenetv4_hybrid_medium", "mvitv2_tiny", "nest_tiny", "pit_ti_224", "pvt_v2_b0", "swin_tiny_patch4_window7_224",
    "swinv2_tiny_window8_256", "tnt_s_patch16_224", "twins_svt_small", "vit_tiny_patch16_224", "vitamin_small_224",
    "xcit_nano_12_p16_224",
)  # fmt: skip


@pytest.fixture(scope="module")
def survey() -> Any:
    return load_script(Path(__file__).parents[2] / "scripts" / "survey_models.py")


@pytest.mark.parametrize("name", [*ARCHITECTURES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_an_architecture_runs_patched_as_it_does_without(name: str, survey: Any) -> None:
    timm = pytest.importorskip("timm")
    if name not in timm.list_models():
        pytest.skip("not in this release of timm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert survey.run_architecture(name)["error"] is None
