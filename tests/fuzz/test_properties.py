"""What may change no bit, and what has to move an output, for calls of any kind."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
from unittest import mock

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import qflash
from fuzz import examples
from fuzz.calls import KINDS, Call, IntegerCall, calls, integer_calls, recipes
from helpers import default_dtype, same_bits
from qflash.backends import cpu_missing
from qflash.kernels.cpu import launch as cpu
from qflash.specification import reference
from qflash.specification.attention_call import int8_call
from qflash.specification.fixed_point import BIAS_LIMIT
from qflash.specification.recipe import Recipe

WORK = 1 << 20
DYADIC = ("steps", "zeros")
"""Kinds of numbers whose sums with other such numbers float32 holds."""


def hides(call: Call) -> bool:
    """Tell whether a call's hidden tokens are replaced by seen ones (docs/algorithm.md, step 1)."""
    return call.mask not in ("none", "causal")


def seen_by_any(mask: torch.Tensor, call: Call) -> torch.Tensor:
    """Return which keys any row of a mask shows, (batch, heads, keys)."""
    seen = mask if mask.dtype == torch.bool else qflash.quantize_bias(mask) > -BIAS_LIMIT
    return seen.any(dim=2).expand(call.batch, call.heads, call.keys)


def rows(recipe: Recipe) -> bool:
    """Tell whether nothing is shared over the whole tensor."""
    return "tensor" not in (recipe.query_granularity, recipe.key_granularity, recipe.value_granularity)


@examples(20)
@given(calls(work=WORK), st.integers(0, 1 << 20))
def test_the_order_of_keys_does_not_count(call: Call, seed: int) -> None:
    # a mean over the keys holds each seen token as often as the order of the hidden ones says
    assume(call.recipe.normalization == "two_pass" and call.mask != "causal")
    assume(not hides(call) or not call.recipe.takes_exact_sum(call.keys))
    query, key, value, mask = call.tensors()
    order = torch.randperm(call.keys, generator=torch.Generator().manual_seed(seed))
    other = query, key[:, :, order], value[:, :, order], None if mask is None else mask[..., order]
    assert same_bits(call.run("auto", other), call.run("auto", (query, key, value, mask)))


@examples(20)
@given(
    calls(kinds=DYADIC, dtypes=(torch.float32,), recipe=recipes().map(lambda r: r.replace(smooth_key=True)), work=WORK),
    st.integers(0, 1 << 20),
)
def test_what_all_keys_have_in_common_does_not_count(call: Call, seed: int) -> None:
    query, key, value, mask = call.tensors()
    generator = torch.Generator().manual_seed(seed)
    common = torch.randint(-4096, 4096, (call.batch, call.key_heads, 1, call.head_dim), generator=generator) / 4
    # the mask hides the same tokens; a copy of a seen token has what is common, too
    other = call.run("auto", (query, key + common, value, mask))
    assert same_bits(other, call.run("auto", (query, key, value, mask)))


@examples(20)
@given(calls(dtypes=(torch.float32,), masks=("none", "causal", "padding", "bool", "bias"), work=WORK), st.integers(0, 1 << 20))
def test_what_all_values_have_in_common_comes_out(call: Call, seed: int) -> None:
    query, key, value, mask = call.tensors()
    common = torch.randn((1, 1, 1, call.value_dim), generator=torch.Generator().manual_seed(seed)) * 30
    moved = value + common
    first, other = (call.run("auto", (query, key, x, mask)).double() for x in (value, moved))
    has_key = (call.run("auto", (query, key, torch.ones_like(value), mask)) != 0).any(dim=-1, keepdim=True)
    # the weights are the same; each value is off by half a step, and an output by a step at most if it is floored
    granularity, steps = call.recipe.value_granularity, 1.0 + (call.recipe.output == "value_scale")
    blocks = -(-call.keys // call.recipe.key_block) if call.recipe.normalization == "online" else 1
    scales = sum(qflash.quantize(x, granularity).scale.double() for x in (value, moved))
    scales = scales.repeat_interleave(call.group, dim=1) if scales.shape[1] > 1 else scales
    limit = scales * (steps + 1.1 * (blocks - 1)) + moved.abs().max() * 2.0**-19
    assert bool(((other - first - common).abs() <= limit)[has_key.expand_as(first)].all())
    assert not first[~has_key.expand_as(first)].any()


@examples(20)
@given(calls(recipe=recipes().filter(rows), work=WORK))
def test_batch_elements_and_heads_are_alone(call: Call) -> None:
    query, key, value, mask = call.tensors()
    whole = call.run("auto", (query, key, value, mask))
    for i in range(call.batch):
        for h in range(call.key_heads):
            of_query, of_key = slice(h * call.group, (h + 1) * call.group), slice(h, h + 1)
            part = mask
            if part is not None:
                part = part[i : i + 1] if part.shape[0] > 1 else part
                part = part[:, of_query] if part.shape[1] > 1 else part
            tensors = query[i : i + 1, of_query], key[i : i + 1, of_key], value[i : i + 1, of_key], part
            assert same_bits(call.run("auto", tensors), whole[i : i + 1, of_query])


@examples(15)
@given(
    calls(
        masks=("none", "padding", "bool", "bias", "far"),
        recipe=recipes().map(lambda r: r.replace(query_granularity="token", balance=False)),
        work=WORK,
    ),
    st.data(),
)
def test_queries_are_alone(call: Call, data: st.DataObject) -> None:
    assume(call.queries > 2)
    query, key, value, mask = call.tensors()
    first = data.draw(st.integers(0, call.queries - 2))
    some = slice(first, data.draw(st.integers(first + 1, call.queries)))
    part = mask[:, :, some] if mask is not None and mask.shape[2] > 1 else mask
    # alone they may see fewer tokens, and what no query sees does not count
    assume(mask is None or part is None or torch.equal(seen_by_any(mask, call), seen_by_any(part, call)))
    whole = call.run("auto", (query, key, value, mask))
    assert same_bits(call.run("auto", (query[:, :, some], key, value, part)), whole[:, :, some])


@examples(30)
@given(calls(masks=("padding", "padding bias", "bool", "bias", "causal"), work=WORK), st.sampled_from(KINDS))
def test_hidden_content_does_not_count(call: Call, kind: str) -> None:
    query, key, value, mask = call.tensors()
    shape = (call.batch, call.heads, call.keys)
    if mask is None:
        seen = (torch.arange(call.keys) < call.queries).expand(shape)
    else:
        seen = seen_by_any(mask, call)
    seen = seen.unflatten(1, (call.key_heads, -1)).any(dim=2)
    # a head that sees nothing keeps its tokens, whose ranges its tensor may share
    hidden = (~seen & seen.any(dim=-1, keepdim=True))[..., None]
    fill_key, fill_value = (x.roll(1, dims=2) for x in dataclasses.replace(call, kinds=(kind,) * 3).tensors(1)[1:3])
    other = query, torch.where(hidden, fill_key, key), torch.where(hidden, fill_value, value), mask
    assert same_bits(call.run("auto", other), call.run("auto", (query, key, value, mask)))


@examples(25)
@given(integer_calls(work=1 << 18), st.sampled_from((16, 48, 64, 1000)))
def test_tiles_and_checks_leave_the_bits_alone(call: IntegerCall, tile: int) -> None:
    assume(call.out_dtype is not None and not call.center)
    tensors, mask = call.tensors()
    if mask is not None and mask.is_floating_point():
        mask = qflash.quantize_bias(mask)
    four = [part for x in tensors for part in (x.values, x.scale.view((1,) * (4 - x.scale.dim()) + x.scale.shape))]
    options = mask, call.call.mask == "causal", call.call.factor, None, call.out_dtype, call.call.recipe
    expected = reference.int8_attention(int8_call(*four, *options))
    assert same_bits(reference.int8_attention(int8_call(*four, *options), tile=tile, checked=True), expected)


@examples(20)
@given(calls(work=WORK))
def test_memory_does_not_count(call: Call) -> None:
    tensors = call.tensors()
    copies = [None if x is None else x.clone(memory_format=torch.contiguous_format) for x in tensors]
    before = [None if x is None else x.clone() for x in tensors]
    assert same_bits(call.run("auto", copies), call.run("auto", tensors))
    assert all(x is None or same_bits(x, y) for x, y in zip(tensors, before, strict=True))


def threads(count: int) -> contextlib.AbstractContextManager[object]:
    """Have the C kernels run on a number of threads, however small the call."""
    return mock.patch.object(cpu, "threads_for", return_value=count)


CIRCUMSTANCES = {
    "inference mode": torch.inference_mode,
    "no gradient": torch.no_grad,
    "float64 by default": lambda: default_dtype(torch.float64),
    "float16 by default": lambda: default_dtype(torch.float16),
    "two threads": lambda: threads(2),
    "seven threads": lambda: threads(7),
}


@pytest.mark.skipif(cpu_missing() is not None, reason="the reference has no threads")
@examples(25)
@given(calls(work=WORK), st.sampled_from(sorted(CIRCUMSTANCES)), st.booleans())
def test_circumstances_do_not_count(call: Call, name: str, gradient: bool) -> None:
    tensors = call.tensors()
    expected = call.run("auto", tensors)
    if gradient:
        tensors = (tensors[0].detach().requires_grad_(), *tensors[1:])
    with CIRCUMSTANCES[name]():
        for _ in range(2):
            assert same_bits(call.run("auto", tensors).detach(), expected)


@examples(6)
@given(st.lists(calls(work=1 << 18), min_size=2, max_size=5))
def test_threads_of_python_do_not_disturb_each_other(drawn: list[Call]) -> None:
    tensors = [call.tensors() for call in drawn]
    expected = [call.run("reference", given) for call, given in zip(drawn, tensors, strict=True)]

    def run_all(first: int) -> bool:
        order = [(first + i) % len(drawn) for i in range(2 * len(drawn))]
        return all(same_bits(drawn[i].run("auto", tensors[i]), expected[i]) for i in order)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run_all, range(8)))
