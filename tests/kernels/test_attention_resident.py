"""One launch that quantises and attends has exactly the bits of quantising and attending by the specification."""

from __future__ import annotations

import pytest
import torch

import qflash
from helpers import DEVICE, attention_launches, draw_fused_case, make_inputs, print_products, products_printed_by, same_bits
from qflash import execution
from qflash.kernels.dispatch import launch_fused, one_launch
from qflash.kernels.tiles import SM90_RESIDENT, Tiles, shared_bytes
from qflash.specification.attention_call import float_call
from qflash.specification.recipe import ACCURATE, DEFAULT, PAPER, Recipe
from qflash.unseen_tokens import without_unseen
from qflash_lab.verify.compile import compile_call


def by_the_specification(query, key, value, mask, is_causal, scale, recipe) -> torch.Tensor:
    return execution.attention(query, key, value, mask, is_causal, scale, recipe.key, "reference")


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.slow
def test_fused_launch_has_the_bits_of_the_specification(seed: int) -> None:
    case = draw_fused_case(seed, small=True)
    arguments = case.arguments(DEVICE)
    call = without_unseen(float_call(*arguments), execution.quantize_bias)
    assert same_bits(launch_fused(call, one_launch(call, case.tiles)), by_the_specification(*arguments)), case


@pytest.mark.parametrize(("tokens", "head_dim"), [(197, 64), (49, 32)])
def test_paper_shapes(tokens: int, head_dim: int) -> None:
    inputs = [x.to(DEVICE) for x in make_inputs(1, 1, tokens, head_dim=head_dim, dtype=torch.float16)]
    got = launch_fused(float_call(*inputs, None, False, head_dim**-0.5, DEFAULT))
    assert same_bits(got, by_the_specification(*inputs, None, False, head_dim**-0.5, DEFAULT))


def test_what_one_launch_can_do() -> None:
    def can(
        recipe: Recipe,
        head_dim: int,
        value_dim: int,
        keys: int,
        device: str = "meta",
        masked: bool = False,
        aligned: bool = True,
    ) -> bool:
        shapes = (1, 2, 197, head_dim), (1, 2, keys, head_dim), (1, 2, keys, value_dim)
        query, key, value = (torch.empty(shape, dtype=torch.float16, device=device) for shape in shapes)
        mask = torch.empty(1, 1, 197, keys, dtype=torch.bool, device=device) if masked else None
        call = float_call(query, key if aligned else key.mT.contiguous().mT, value, mask, False, 1.0, recipe)
        return one_launch(call).family is not None

    assert can(DEFAULT, 64, 64, 197)
    assert can(DEFAULT.replace(query_granularity="head", value_granularity="head"), 128, 16, 128)
    for recipe in (PAPER, ACCURATE, DEFAULT.replace(rotate=True), DEFAULT.replace(value_granularity="tensor")):
        assert not can(recipe, 64, 64, 197)
        assert not can(recipe, 64, 64, 257)
    assert not can(DEFAULT, 256, 256, 49)  # a row of so many channels is not held whole
    # a few more keys than the other kernels hold are a matter of Hopper's alone, for which tensors without a device stand
    assert can(DEFAULT, 64, 64, 257) and can(DEFAULT, 32, 32, 288) and can(DEFAULT, 80, 80, 257)
    assert not can(DEFAULT, 64, 64, 257, device="cpu")
    # and so are heads so wide
    assert can(DEFAULT, 128, 128, 197)
    assert not can(DEFAULT, 128, 128, 197, device="cpu")
    assert not can(DEFAULT, 64, 64, 257, masked=True)
    assert not can(DEFAULT, 64, 64, 257, aligned=False)
    # as are rows whose keys and values fit a processor's shared memory
    assert can(DEFAULT, 64, 64, 577) and can(DEFAULT, 72, 72, 1025)
    assert not can(DEFAULT, 64, 64, 1825) and not can(DEFAULT, 72, 72, 1345) and not can(DEFAULT, 104, 104, 897)
    assert not can(DEFAULT, 84, 84, 257)
    query = torch.empty(1, 2, 257, 64, device="meta")
    with pytest.raises(ValueError, match="257 keys"):
        attention_launches(float_call(query, query, query, None, False, 1.0, DEFAULT), query)
    inputs = make_inputs(1, 1, 8)
    with pytest.raises(ValueError, match="one launch cannot"):
        launch_fused(float_call(*(x.to(DEVICE) for x in inputs), None, False, 1.0, PAPER))


@pytest.mark.parametrize("recipe", [DEFAULT, ACCURATE])
def test_wide_heads_with_few_keys(recipe: Recipe) -> None:
    query, key, value = (x.to(DEVICE) for x in make_inputs(1, 2, 40, head_dim=256, dtype=torch.float16))
    got = qflash.attention(query, key, value, recipe=recipe, backend="triton")
    assert same_bits(got, qflash.attention(query, key, value, recipe=recipe, backend="reference"))


def test_attention_takes_the_fused_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from qflash.kernels import dispatch

    taken = []
    launch = dispatch.launch_fused
    monkeypatch.setattr(
        dispatch, "launch_fused", lambda *arguments, **options: taken.append(1) or launch(*arguments, **options)
    )
    inputs = [x.to(DEVICE) for x in make_inputs(1, 1, 20)]
    qflash.attention(*inputs, backend="triton")
    assert taken == [1]
    qflash.attention(*inputs, backend="triton", recipe="accurate")
    assert taken == [1]


def _compile_for_hopper() -> None:
    """Compile the Hopper kernel from floats; print how many products each of its forms has."""
    for (keys, head_dim), (block_m, warps), dtype in (
        ((197, 64), (64, 4), torch.float16),
        ((197, 64), (64, 8), torch.bfloat16),
        ((65, 32), (64, 8), torch.float16),
        ((128, 128), (64, 8), torch.float16),
        ((197, 64), (128, 8), torch.float16),
        ((257, 64), (64, 4), torch.float16),
        ((257, 72), (64, 8), torch.float16),
        ((480, 64), (64, 8), torch.float16),
        ((577, 64), (64, 4), torch.float16),
        ((577, 64), (64, 8), torch.bfloat16),
        ((729, 72), (128, 8), torch.float16),
    ):
        x = torch.empty(1, 3, keys, head_dim, dtype=dtype, device="meta")
        tiles = Tiles(block_m, 128, warps, 1, splits={480: 8, 577: 10}.get(keys, 2), family=SM90_RESIDENT)
        (call,) = attention_launches(float_call(x, x, x, None, False, 0.1, DEFAULT), torch.empty_like(x), tiles=tiles)
        assert call.kernel.__name__ == "hopper_kernel"
        print_products(call)
        if call.arguments["PLAN"].UNROLL:
            # how many programs a processor has room for hangs on it
            assert compile_call(call, "sm_90").metadata.shared <= shared_bytes(keys, head_dim)


@pytest.mark.slow
def test_the_hopper_kernel_compiles_from_floats() -> None:
    products = products_printed_by(__file__)
    assert len(products) == 11
    assert min(products) > 4


if __name__ == "__main__":
    _compile_for_hopper()
