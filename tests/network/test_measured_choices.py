"""The choices of conversion that docs/integer_network.md gives, checked word by word: found in the integers that come out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import qflash
from qflash.network import conversion
from qflash.network.float_parts import FloatTwin
from qflash.network.modules import LayerNorm, Linear
from qflash.specification.layers import GELU_UNIT, rescale
from small_networks import build, decibels, draw, normalise

IMAGES = 12
UNROTATED = {"vit": 42, "swin": 17}
"""Channels that are no multiple of 4: such streams are not rotated, so integers are of the float model's own channels."""
STEPS = {"qkv": (0.7, 0.75), "proj": (0.5, 0.0), "fc1": (0.5, 0.0), "fc2": (1.0, 0.98), "head": (0.5, 0.9), "merge": (0.5, 0.0)}
"""Of the document: a, and the share f of the channels whose range is the least that counts."""


def uneven(family: str, **options: Any) -> Any:
    """Return a float model whose channels have ranges and weights of many sizes."""
    model = build(family, **options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.weight *= (0.7 * torch.randn(module.weight.shape, generator=generator)).exp()
                module.bias += 0.5 * torch.randn(module.bias.shape, generator=generator)
            if isinstance(module, nn.Linear):
                module.weight *= (0.5 * torch.randn(module.weight.shape[1], generator=generator)).exp()
            if name.endswith("fc1"):
                module.bias += 0.5 * torch.randn(module.bias.shape, generator=generator)
    return model


class Converted:
    """A float model, its integer network, and what the calibration images gave each submodule and made of it."""

    def __init__(self, family: str, **options: Any) -> None:
        self.model: Any = uneven(family, embed_dim=UNROTATED[family], **options)
        images = draw(self.model, IMAGES)
        self.network: Any = qflash.quantize_model(self.model, [images], progress=False)
        self.given: dict[str, torch.Tensor] = {}
        self.made: dict[str, torch.Tensor] = {}
        handles = []
        for name, module in self.model.named_modules():

            def look(_: Any, arguments: Any, out: Any, name: str = name) -> None:
                self.given[name], self.made[name] = arguments[0].double(), out.double()

            handles.append(module.register_forward_hook(look))
        with torch.inference_mode():
            self.model(normalise(self.model, images))
        for handle in handles:
            handle.remove()

    def rows(self, name: str) -> torch.Tensor:
        """What a submodule was given, (rows, channels)."""
        return self.given[name].flatten(0, -2)


@pytest.fixture(scope="module")
def vit() -> Converted:
    return Converted("vit", depth=1, num_classes=10, num_heads=3)


@pytest.fixture(scope="module")
def swin() -> Converted:
    return Converted("swin", num_classes=10)


def grid_of_norm(ours: Any, norm: nn.LayerNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps and middles of a normalisation's outputs, from its integers."""
    step = norm.weight.detach().double() * 2.0 ** (8 + ours.shift) / ours.gain.double()
    return step, norm.bias.detach().double() - ours.offset.double() * 2.0**-ours.shift * step


def grid_of_gelu(ours: Any) -> tuple[torch.Tensor, torch.Tensor]:
    step = 2.0**ours.gelu_shift * GELU_UNIT / ours.gelu_multiplier.double()
    return step, (0.5 - ours.gelu_offset.double() * 2.0**-ours.gelu_shift) * step


def grid_of(which: Converted, layer: str) -> tuple[torch.Tensor, torch.Tensor, str, Any]:
    """Steps and middles of a layer's inputs, its name in the float model, and the integer one."""
    network, model = which.network, which.model
    if layer == "merge":
        norm, name = "layers.1.downsample.norm", "layers.1.downsample.reduction"
        return *grid_of_norm(network.part(norm), model.get_submodule(norm)), name, network.part(name)
    if layer == "head":
        return *grid_of_norm(network.part("norm"), model.norm), "head", network.part("head")
    theirs = model.blocks[0]
    if layer == "qkv":
        name = "blocks.0.attn.qkv"
        return *grid_of_norm(network.part("blocks.0.norm1"), theirs.norm1), name, network.part(name)
    if layer == "fc1":
        name = "blocks.0.mlp.fc1"
        return *grid_of_norm(network.part("blocks.0.norm2"), theirs.norm2), name, network.part(name)
    if layer == "fc2":
        return *grid_of_gelu(network.part("blocks.0.mlp.fc1")), "blocks.0.mlp.fc2", network.part("blocks.0.mlp.fc2")
    value = which.made["blocks.0.attn.qkv"].unflatten(-1, (3, -1))[..., 2, :].flatten(0, -2)
    middle = (value.amax(dim=0) + value.amin(dim=0)) / 2
    scale = network.part("blocks.0.attn.core").output_scale.view(torch.float32).flatten().double()
    return scale, middle, "blocks.0.attn.proj", network.part("blocks.0.attn.proj")


@pytest.mark.parametrize("layer", STEPS)
def test_steps_of_a_layers_inputs(vit: Converted, swin: Converted, layer: str) -> None:
    """In proportion to ``half^a / max|w|^(1 - a)``, as fine as the widest channel allows."""
    which = swin if layer == "merge" else vit
    step, middle, name, _ = grid_of(which, layer)
    rows, weight = which.rows(name), which.model.get_submodule(name).weight.detach().double().abs().amax(dim=0)
    low, high = rows.amin(dim=0), rows.amax(dim=0)
    half = torch.maximum(high - middle, middle - low) if layer == "proj" else (high - low) / 2
    # the head sees one token an image, so there is room for a quarter more
    half = half * 1.25 if layer == "head" else half
    exponent, share = STEPS[layer]
    half = half.clamp(min=float(half.quantile(share)))
    ratio = step / (half**exponent / weight ** (1 - exponent))
    tolerance = 0.02 if layer == "fc2" else 1e-4  # M is a whole number
    assert float(ratio.amax() / ratio.amin()) < 1 + tolerance
    assert float((half / step).amax()) == pytest.approx(127, rel=tolerance)
    if layer == "fc2":
        # the range begins at what GELU has least
        torch.testing.assert_close((low - middle) / step, torch.full_like(low, -128), rtol=0, atol=0.6)
    elif layer != "proj":
        torch.testing.assert_close(middle, (high + low) / 2, rtol=0, atol=1e-3 * float(half.max()))


@pytest.mark.parametrize("layer", STEPS)
def test_rounded_weights_do_not_move_the_mean_output(vit: Converted, swin: Converted, layer: str) -> None:
    """At the mean input an integer layer gives what the float one gives, but for the rounding of its own bias."""
    which = swin if layer == "merge" else vit
    step, middle, name, ours = grid_of(which, layer)
    theirs = which.model.get_submodule(name)
    mean = which.rows(name).mean(dim=0)
    want = theirs.weight.detach().double() @ mean
    want = want if theirs.bias is None else want + theirs.bias.detach().double()
    multiplier, bias = ours.multiplier.double(), ours.bias.double()
    sums = ours.weight.double() @ ((mean - middle) / step) * 2.0**ours.left
    one = multiplier * 2.0**-32
    if layer == "qkv":
        # of the value, whose steps and middles are known
        third = want.shape[0] // 3
        sums, bias, one, want = (x[2 * third :] for x in (sums, bias, one, want))
        value = which.made[name].flatten(0, -2)[:, 2 * third :]
        want = want - (value.amax(dim=0) + value.amin(dim=0)) / 2
        unit: Any = which.network.part("blocks.0.attn.core").value_scale.view(torch.float32).flatten().double()
    else:
        unit = {"fc1": GELU_UNIT, "head": which.network.output_scale, "merge": which.network.units[-1]}.get(
            layer, which.network.units[0]
        )
    error = ((sums + bias) * one * unit - want).abs() / (one * unit)
    # in units of the sums: one half is the bias's rounding, the rest that of the scales above
    assert float(error.max()) < 2.0**ours.left * 0.51 + 2e-6 * float((sums.abs() + bias.abs()).max())


def test_a_stream_has_room_for_twice_what_was_seen(vit: Converted, swin: Converted) -> None:
    for which, blocks in ((vit, ["blocks.0"]), (swin, ["layers.1.blocks.0"])):
        seen = [which.given[f"{name}.norm1"] for name in blocks] + [which.given[f"{name}.norm2"] for name in blocks]
        most = max(float(x.abs().max()) for x in (*seen, *(which.made[name] for name in blocks)))
        assert which.network.units[-1] * 32767 == pytest.approx(2 * most, rel=1e-5)


def test_inputs_of_query_and_key_norms_have_room_for_twice_what_was_seen() -> None:
    which = Converted("vit", depth=1, num_classes=3, qk_norm=True)
    for part in ("q_norm", "k_norm"):
        name = f"blocks.0.attn.{part}"
        ours = which.network.part(name)
        theirs = which.model.get_submodule(name)
        unit = (16 * theirs.weight.numel() * theirs.eps / ours.epsilon) ** 0.5
        assert unit * 32767 == pytest.approx(2 * float(which.given[name].abs().max()), rel=1e-3)


def test_a_factor_a_channel_evens_out_query_and_key() -> None:
    """No score changes, and both are as loud, as far as a factor of 64 goes."""
    size = torch.tensor([[1.0, 4.0, 0.25, 1e9, 1e-9, 0.0, 3.0, 0.0]], dtype=torch.float64)
    query, key = size, torch.tensor([[1.0, 1.0, 4.0, 1.0, 1.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    middle = torch.tensor([[0.0, 5.0, -3.0, 0.5, 0.0, 0.0, 7.0, 0.0]], dtype=torch.float64)
    low, high = torch.stack((-query, middle - key)), torch.stack((query / 2, middle + key))
    query_scale, key_scale, query_step, key_step, found = conversion._query_key_grids(low, high)
    torch.testing.assert_close(found, middle)
    torch.testing.assert_close(query_step * key_step, (query_scale * key_scale).expand(1, 8))
    factor = (query_step / query_scale)[0]
    torch.testing.assert_close(factor[:3], torch.tensor([1.0, 2.0, 0.25], dtype=torch.float64))
    assert factor[[3, 6]].tolist() == [64, 64] and factor[[4, 5]].tolist() == [1 / 64, 1 / 64]
    # the loudest channel takes all 127 units
    assert float((query / query_step).max()) == pytest.approx(127) and float((key / key_step).max()) == pytest.approx(127)


def test_a_key_without_range_costs_the_others_nothing() -> None:
    """Without a limit of the factor its query would be the only one that counts."""
    model = build("vit", num_classes=10)
    images = draw(model, IMAGES)
    plain = qflash.quantize_model(model, [images], progress=False)
    for block in model.blocks:
        with torch.no_grad():
            weight, bias = block.attn.qkv.weight.unflatten(0, (3, 2, 24)), block.attn.qkv.bias.unflatten(0, (3, 2, 24))
            weight[1, :, 5], bias[1, :, 5] = 0, 3.0
            weight[0, :, 7], bias[0, :, 7] = 0, 0.0
    with torch.inference_mode():
        want = model(normalise(model, images))
    network = qflash.quantize_model(model, [images], progress=False)
    for number in range(2):
        for name in ("query_scale", "key_scale"):
            cores = (x.part(f"blocks.{number}.attn.core") for x in (network, plain))
            found, usual = (getattr(x, name).view(torch.float32) for x in cores)
            assert bool((found < 2 * usual).all())
    assert decibels(want, network.dequantize(network(images))) > 30


@pytest.mark.parametrize("factor", [0.25, 3.0])
def test_the_models_own_softmax_scale(factor: float) -> None:
    model = build("vit", num_classes=10)
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.scale = block.attn.scale * factor
    images = draw(model, IMAGES)
    with torch.inference_mode():
        want = model(normalise(model, images))
    network: Any = qflash.quantize_model(model, [images], progress=False)
    assert network.part("blocks.0.attn.core").softmax_scale == pytest.approx(model.blocks[0].attn.scale)
    assert decibels(want, network.dequantize(network(images))) > 30


def test_logits_have_a_unit_as_fine_as_sums_allow(vit: Converted) -> None:
    """A 256th of the coarsest sum's where 32 bits have room, which is in a head of few inputs."""
    step, _, _, _ = grid_of(vit, "head")
    coarsest = float((vit.model.head.weight.detach().double() * step).abs().amax() / 127)
    assert vit.network.output_scale == pytest.approx(coarsest / 256, rel=1e-3)


def test_features_have_eighteen_bits() -> None:
    for options in ({}, {"global_pool": "avg", "fc_norm": False}):
        which = Converted("vit", depth=1, num_classes=0, **options)
        assert which.network.output_scale == pytest.approx(float(which.made["norm"].abs().max()) / 2**18, rel=1e-4)


def test_the_last_norm_before_a_mean_is_fine(swin: Converted) -> None:
    """int16 with a step a channel: 32000 of them to what was seen, but no finer than a 1024th of the coarsest."""
    step, middle = grid_of_norm(swin.network.part("norm"), swin.model.norm)
    most = swin.made["norm"].abs().flatten(0, -2).amax(dim=0) / 32000
    torch.testing.assert_close(step, most.clamp(min=float(most.max()) / 1024), rtol=1e-4, atol=0)
    assert float(middle.abs().max()) < 1e-3 * float(most.max()) * 32000


def linear(weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, step: float, middle: float = 0.0) -> Linear:
    """Convert a layer whose inputs have a step of 1 / 50 and a middle of 0.1."""
    module = Linear(weight.shape[1], weight.shape[0], "int32")
    ones = torch.ones(weight.shape[1], dtype=torch.float64)
    conversion.fill_linear(module, weight, bias, conversion.Grid(ones / 50, ones / 10), mean, step, middle)
    return module


@pytest.mark.parametrize("step", [1e-5, 1e-3, 0.05, 40.0])
def test_a_layers_weights_use_all_of_int8(step: float) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(6, 40, dtype=torch.float64), 3 * torch.randn(6, dtype=torch.float64)
    module = linear(weight, bias, torch.zeros(40, dtype=torch.float64), step, 0.25)
    most = module.weight.to(torch.int64).abs().amax(dim=1)
    # a unit is the least that a whole R gives; of outputs coarser than their sums R is 8 at least
    assert bool((most <= 127).all()) and (step > 1 or bool((most >= 126).all()))
    assert bool((module.multiplier >= 8).all()) and 0 <= module.left <= 30
    x = torch.randint(-128, 128, (64, 40)).double()
    want = (x / 50 + 0.1) @ weight.T + bias - 0.25
    got = rescale((x @ module.weight.double().T).long(), module.left, module.bias, module.multiplier).double() * step
    error = (got - want).abs()
    # rounding of weights, and of the result
    assert float(error.max()) < 40**0.5 * 128 * 0.5 * float(weight.abs().max()) / 126 / 50 + 0.51 * step
    if step < 0.1:
        assert float((got - want).mean().abs()) < 0.51 * step + 0.05


def test_weights_are_rounded_with_error_feedback() -> None:
    """What rounding does to the outputs, of other rows than those that the covariance is of, is less than of the nearest."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(48, 48, generator=generator) * torch.linspace(0.05, 1, 48)[:, None]
    rows = (torch.randn(2000, 48, generator=generator) @ mixing).double()
    weight = torch.randn(20, 48, generator=generator, dtype=torch.float64)
    step, zeros = torch.rand(48, generator=generator, dtype=torch.float64) + 0.5, torch.zeros(48, dtype=torch.float64)
    errors = []
    for covariance in (
        (),
        (torch.cov(rows[:1000].T).float(),),
        tuple(torch.cov(x.T).float() for x in rows[:1000].split(24, 1)),
    ):
        layer = conversion.quantized_linear(weight, None, conversion.Grid(step, zeros, covariance), zeros, 1e-4)
        unit = layer.multiplier.double() * 2.0 ** (layer.left - 32) * 1e-4
        rounded = layer.weight.double() * unit[:, None] / step
        errors.append(float(((rows[1000:] @ (rounded - weight).T) ** 2).mean()))
    nearest, whole, parts = errors
    assert whole < 0.6 * nearest and whole < parts < 0.95 * nearest


def test_channels_too_different_for_float32_are_rounded_to_the_nearest() -> None:
    weight, ones = torch.randn(3, 4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    singular = torch.tensor([[1e30, 2e30], [2e30, 1e30]]).repeat(2, 2)
    plain, other = (
        conversion.quantized_linear(weight, None, conversion.Grid(ones, 0 * ones, covariance), 0 * ones, 1.0)
        for covariance in ((), (singular,))
    )
    assert torch.equal(plain.weight, other.weight)


def test_a_wide_bias_makes_a_rows_unit_coarser() -> None:
    """So that sums with it stay in 32 bits: a row's weights are then small numbers."""
    weight, bias = torch.ones(2, 40, dtype=torch.float64), torch.tensor([0.0, 1e6], dtype=torch.float64)
    module = linear(weight, bias, torch.zeros(40, dtype=torch.float64), 0.01)
    assert module.weight[0].abs().max() >= 126
    sums = 128 * module.weight.to(torch.int64).abs().sum(dim=1) * 2**module.left + module.bias.to(torch.int64).abs()
    assert bool((sums < 1 << 31).all())


@pytest.mark.parametrize(("bias", "shift"), [(0.0, 22), (300.0, 21), (-300.0, 21), (70000.0, 13)])
def test_a_normalisations_constants_are_as_fine_as_they_fit(bias: float, shift: int) -> None:
    """G below 2^31 with 8 bits more than B, B below 2^30; whichever is the larger decides."""
    norm = FloatTwin(torch.ones(4), torch.full((4,), bias), 1e-5)
    module = LayerNorm(4, "int8")
    conversion.finish_norm(module, norm, 1.0, 1.0)
    assert module.shift == shift
    assert module.gain.tolist() == [1 << (8 + shift)] * 4 and module.offset.tolist() == [int(bias * (1 << shift))] * 4
