"""Hidden tokens on a GPU: found and replaced by launches alone, with the reference's bits; also run from PTX."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

import qflash
from helpers import attention_launches, same_bits
from qflash import execution, unseen_tokens
from qflash.kernels import launch_recorder
from qflash.kernels.dispatch import launch_quantize_long
from qflash.kernels.triton.unseen_tokens import launch_places, take
from qflash.specification.attention_call import AttentionCall, float_call
from qflash.specification.recipe import DEFAULT

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SHAPES = (
    # batch, period of the mask, heads, key heads, heads of the mask, queries, keys, head dimension
    (4, 2, 2, 2, 2, 49, 49, 32),
    (2, 1, 2, 1, 1, 49, 49, 32),
    (3, 3, 2, 2, 1, 64, 64, 32),
    (2, 2, 4, 2, 4, 20, 70, 16),
    (1, 1, 2, 1, 2, 33, 197, 64),
    (2, 1, 2, 2, 1, 40, 257, 32),
    (2, 2, 4, 2, 4, 40, 300, 16),
)


def draw_call(case: int) -> AttentionCall:
    """Draw float tensors, of which the hidden ones are loud, and a mask with a row for each query."""
    batch, period, heads, key_heads, mask_heads, queries, keys, head_dim = SHAPES[case % len(SHAPES)]
    chance, generator = random.Random(case), torch.Generator(CUDA).manual_seed(case)
    dtype = chance.choice((torch.float16, torch.bfloat16, torch.float32))
    query, key, value = (
        torch.randn(batch, count, tokens, head_dim, generator=generator, device=CUDA)
        for count, tokens in ((heads, queries), (key_heads, keys), (key_heads, keys))
    )
    # of some heads nothing is hidden, of others all but a few tokens, and one sees nothing
    keep = torch.rand(period, mask_heads, 1, keys, generator=generator, device=CUDA) < chance.choice((0.1, 0.7, 0.98))
    rows = torch.rand(period, mask_heads, queries, keys, generator=generator, device=CUDA) < chance.choice((0.05, 0.5, 1.0))
    mask = keep & rows
    if case % 3 == 0:
        mask[-1, -1] = False
    if case % 2 == 0 or (queries, head_dim) in ((49, 32), (64, 32)):
        bias = torch.randn(mask.shape, generator=generator, device=CUDA)
        hidden = chance.choice((-torch.inf, -60000.0, -3000.0))
        mask = torch.where(mask, bias, hidden).to(torch.float32 if hidden == -3000.0 else dtype)
    call = float_call(
        query, key, value, mask, False, head_dim**-0.5, DEFAULT.replace(smooth_value=chance.random() < 0.5)
    )  # fmt: skip
    seen = unseen_tokens.seen_tokens(call, lambda bias: execution.quantize_bias(bias, "reference"))
    seen = seen.repeat(batch // period, 1, 1).expand(batch, key_heads, keys)
    loud = torch.where(seen | ~seen.any(dim=-1, keepdim=True), 1.0, 300.0)[..., None]
    return dataclasses.replace(
        call, query=query.to(dtype), key=(key * loud).to(dtype), value=(value * loud).to(dtype), out_dtype=dtype
    )  # fmt: skip


def places_in_pytorch(call: AttentionCall) -> torch.Tensor:
    """Return the places that the specification takes tokens from."""
    seen = unseen_tokens.seen_tokens(call, lambda bias: execution.quantize_bias(bias, "reference"))
    return unseen_tokens._places(seen, call)


@pytest.mark.parametrize("case", range(4 * len(SHAPES)))
def test_places_are_those_of_the_specification(case: int) -> None:
    call = draw_call(case)
    masks = [call.mask]
    if call.mask is not None and call.mask.is_floating_point():
        # a NaN is no hidden key
        call.mask[0, 0, -1, call.keys // 2] = torch.nan
        masks.append(execution.quantize_bias(call.mask, "reference"))
    expected = places_in_pytorch(call)
    for mask in masks:
        places = launch_places(dataclasses.replace(call, mask=mask))
        assert torch.equal(places, expected.to(torch.int32))
    taken, other = take(call, places), unseen_tokens.taken(call, expected)
    assert torch.equal(taken.key, other.key) and torch.equal(taken.value, other.value)


@pytest.mark.parametrize("case", range(4 * len(SHAPES)))
def test_kernels_that_quantise_take_tokens_from_their_places(case: int) -> None:
    call = draw_call(case)
    placed = dataclasses.replace(call, places=places_in_pytorch(call).to(torch.int32))
    moved = unseen_tokens.without_unseen(call, lambda bias: execution.quantize_bias(bias, "reference"))
    if call.keys > 256:
        for recipe in (DEFAULT.replace(smooth_value=offset) for offset in (False, True)):
            one = launch_quantize_long(call.query, call.key, call.value, recipe, places=placed.places)
            other = launch_quantize_long(moved.query, moved.key, moved.value, recipe)
            assert all(x is y or torch.equal(x, y) for x, y in zip(one, other, strict=True) if x is not None)
        return
    out = torch.empty_like(call.query)
    (launch,) = attention_launches(placed, out)
    is_window = (call.queries, call.head_dim) in ((49, 32), (64, 32))
    assert launch.kernel.__name__ == ("windows_kernel" if is_window else "short_kernel")
    launch.run()
    expected = execution.attend(call, "reference")
    assert same_bits(out, expected)


@pytest.mark.parametrize("case", range(4 * len(SHAPES)))
@pytest.mark.parametrize("recipe", [None, "accurate", "paper"])
def test_attention_has_the_reference_bits(case: int, recipe: str | None) -> None:
    call = draw_call(case)
    options = {"enable_gqa": True, "recipe": recipe}
    period = 1 if call.mask is None else call.mask.shape[0]
    mask = None if call.mask is None else call.mask.repeat(call.batch // period, 1, 1, 1)
    expected = qflash.attention(call.query, call.key, call.value, mask, **options, backend="reference")
    for _ in range(2):
        assert same_bits(qflash.attention(call.query, call.key, call.value, mask, **options), expected)


def test_a_graph_looks_at_the_mask_of_each_replay() -> None:
    query, key, value = (torch.randn(2, 2, 70, 32, device=CUDA) for _ in range(3))
    mask = torch.ones(2, 1, 70, 70, dtype=torch.bool, device=CUDA)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        qflash.attention(query, key, value, mask)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = qflash.attention(query, key, value, mask)
    for hidden in (0, 9, 69, 30):
        mask.fill_(True)
        mask[..., 70 - hidden :] = False
        key[:, :, 70 - hidden :] *= 100
        graph.replay()
        assert same_bits(out, qflash.attention(query, key, value, mask, backend="reference")), hidden


def test_a_call_with_a_mask_is_repeated() -> None:
    call = draw_call(0)
    with launch_recorder.LaunchRecorder() as recording:
        execution.attend(call, "triton")
    assert recording.is_pure
    assert [launch.kernel.__name__ for launch in recording.launches] == ["seen_kernel", "windows_kernel"]
