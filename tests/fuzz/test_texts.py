"""Operators of networks of texts: back ends and the golden checker agree, and hidden keys change nothing."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pathlib
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import qflash
from fuzz import examples
from fuzz.calls import recipes
from fuzz.test_saved_networks import ODD, check, places_of, saved
from helpers import DEVICE, load_script
from qflash.backends import cpu_missing
from qflash.network.modules import Attention
from qflash.network.operators.select_token import SelectToken
from qflash.network.operators.token_embedding import TokenEmbedding
from qflash.network.vectors import _golden_network
from small_networks import in_ours, rewrite

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "golden"
NETWORKS = ("text-padded", "text-end", "text-largest")

pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="only the repository has the golden vectors and their checker")
needs_a_compiler = pytest.mark.skipif(cpu_missing() is not None, reason=str(cpu_missing()))


@functools.cache
def checker() -> ModuleType:
    return load_script(GOLDEN / "checker.py")


@dataclasses.dataclass(frozen=True)
class TextCall:
    """Attention of texts: sizes of the operator, and what its numbers are drawn with."""

    batch: int
    tokens: int
    heads: int
    head_dim: int
    first: int
    padded: bool
    causal: bool
    bias: bool
    hidden: float
    """Share of the places without a token."""
    wide: bool
    """Whether ids are int64."""
    recipe: qflash.Recipe
    seed: int

    def make(self) -> tuple[Attention, torch.Tensor, torch.Tensor | None]:
        """Return the operator, queries, keys and values, and the ids."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (1, self.heads, self.first or self.tokens, self.tokens) if self.bias else None
        module = Attention(
            self.heads, self.head_dim, self.head_dim**-0.5, self.recipe.key, shape, first=self.first, padded=self.padded,
            causal=self.causal,
        )  # fmt: skip
        for name, scale in (("query", 0.05), ("key", 0.05), ("value", 0.02), ("output", 0.012)):
            buffer = module.get_buffer(f"{name}_scale")
            buffer.copy_((scale * torch.randn(buffer.shape, generator=generator).exp()).view(torch.int32))
        if shape is not None:
            module.get_buffer("bias").copy_(qflash.quantize_bias(3 * torch.randn(shape, generator=generator)))
        x = torch.randint(-128, 128, (self.batch, self.tokens, 3 * self.heads * self.head_dim), generator=generator)
        if not self.padded:
            return module, x.to(torch.int8), None
        ids = torch.randint(0, 1 << 20, (self.batch, self.tokens), generator=generator)
        ids[torch.rand(ids.shape, generator=generator) < self.hidden] = -1 - self.seed % 3
        return module, x.to(torch.int8), ids if self.wide else ids.int()


@st.composite
def text_calls(draw: st.DrawFn, most: int = 90) -> TextCall:
    tokens = draw(st.integers(1, most))
    causal = draw(st.booleans())
    return TextCall(
        batch=draw(st.integers(1, 3)), tokens=tokens, heads=draw(st.integers(1, 3)), head_dim=draw(st.integers(1, 40)),
        first=draw(st.sampled_from([0, 0, 1, tokens])), padded=draw(st.booleans()), causal=causal,
        bias=not causal and draw(st.booleans()), hidden=draw(st.sampled_from([0.0, 0.2, 0.7, 1.0])),
        wide=draw(st.booleans()), recipe=draw(recipes()).replace(row_sum="rounded"), seed=draw(st.integers(0, 1 << 20)),
    )  # fmt: skip


def run(module: Attention, x: torch.Tensor, ids: torch.Tensor | None, backend: str) -> torch.Tensor:
    return module(x, *(() if ids is None else (ids,)), backend=backend)  # type: ignore[no-any-return]


@needs_a_compiler
@examples(15)
@given(text_calls())
def test_back_ends_and_the_checker_agree(call: TextCall) -> None:
    module, x, ids = call.make()
    want = run(module, x, ids, "reference")
    assert torch.equal(run(module, x, ids, "cpu"), want)
    scales = {
        f"{name}_scale": module.get_buffer(f"{name}_scale").numpy().view(np.float32) for name in ("query", "key", "value")
    }
    found = checker().text_attention(
        x.numpy(), None if ids is None else ids.numpy(), call.heads, call.first, call.causal, **scales,
        output_scale=module.output_scale.numpy().view(np.float32), recipe=dataclasses.asdict(call.recipe),
        softmax_scale=module.softmax_scale, bias=None if module.bias is None else module.bias.numpy().astype(np.int64),
    )  # fmt: skip
    assert np.array_equal(found, want.numpy())


@pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/gpu has networks of texts")
@examples(1)
@given(text_calls(most=20))
def test_the_interpreter_agrees(call: TextCall) -> None:
    module, x, ids = call.make()
    assert torch.equal(run(module, x, ids, "triton"), run(module, x, ids, "reference"))


@examples(25)
@given(text_calls())
def test_a_text_without_its_hidden_keys_has_the_same_bits(call: TextCall) -> None:
    call = dataclasses.replace(call, padded=True, first=0)
    if call.recipe.normalization == "online":
        # blocks of keys begin elsewhere if one between others is left out
        call = dataclasses.replace(call, recipe=qflash.DEFAULT.replace(row_sum="rounded"))
    module, x, ids = call.make()
    assert ids is not None
    found = run(module, x, ids, "auto")
    for number, text in enumerate(ids):
        seen = (text >= 0).nonzero()[:, 0]
        if not len(seen):
            assert not found[number].any()
            continue
        alone = copy.deepcopy(module)
        if alone.bias is not None:
            alone.bias = alone.bias[:, :, seen][..., seen].contiguous()
        assert torch.equal(run(alone, x[number : number + 1, seen], text[seen][None], "auto")[0], found[number, seen])
        # nor does it matter what stands where there is no token
        other = torch.where((text >= 0)[:, None], x[number], 127)[None]
        assert torch.equal(run(module, other, text[None], "auto")[0, seen], found[number, seen])


@examples(40)
@given(st.data())
def test_embeddings_and_ends_of_texts(data: st.DataObject) -> None:
    draw = data.draw
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20), "seed"))
    batch, tokens, channels, rows = (draw(st.integers(1, most)) for most in (4, 12, 6, 9))
    padded, positioned = draw(st.booleans(), "padded"), draw(st.booleans(), "positions")
    ids = torch.randint(-3 if padded else 0, rows, (batch, tokens), generator=generator)
    places = positioned * (tokens + padded * draw(st.integers(0, 3), "more places"))
    module = TokenEmbedding(rows, channels, places, padded)
    for x in (module.table, module.position):
        if x is not None:
            x.copy_(torch.randint(-32768, 32768, x.shape, generator=generator))
    h = module(ids)
    position = None if module.position is None else module.position.numpy()
    assert np.array_equal(checker().embed(ids.numpy(), module.table.numpy(), position, padded), h.numpy())
    token = draw(st.one_of(st.none(), st.integers(0, rows)), "token")
    taken = SelectToken(token)(h, ids.int() if draw(st.booleans(), "int32") else ids)
    assert np.array_equal(checker().select_token(h.numpy(), ids.numpy(), token), taken.numpy())


@functools.cache
def network_of(name: str) -> tuple[qflash.network.graph.IntegerNetwork, torch.Tensor]:
    _, cases = load_script(ROOT / "scripts" / "make_golden.py").read(GOLDEN / "texts.safetensors")
    case = cases[f"network/{name}"]
    return _golden_network(case.parameters, case.inputs), case.inputs["images"]


@needs_a_compiler
@examples(12)
@given(data=st.data(), name=st.sampled_from(NETWORKS))
def test_changed_headers(data: st.DataObject, name: str) -> None:
    network, ids = network_of(name)

    def change(ours: dict[str, Any]) -> None:
        for _ in range(data.draw(st.integers(1, 2), "changes")):
            # sizes are where masks and ends of texts are
            nodes = [("nodes", number, "sizes") for number in range(len(ours["nodes"]))]
            starts = data.draw(st.sampled_from([(), *nodes]), "part")
            x: Any = ours
            for key in starts:
                x = x[key]
            *way, last = data.draw(st.sampled_from(places_of(x)), "place") if places_of(x) else [None]
            if last is None:
                continue
            for key in way:
                x = x[key]
            x[last] = copy.deepcopy(data.draw(st.sampled_from(ODD), "value"))

    check(rewrite(saved(network), in_ours(change)), ids, network)
