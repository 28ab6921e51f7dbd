"""Gated products: their integers against float64, their modules, and what conversion makes of SwiGLU and its like."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import qflash
from helpers import few
from network_cases import CHECK, draw_gated
from qflash.network import activations, conversion
from qflash.network.conversion import Range
from qflash.network.operators.gated import Gated
from qflash.specification import layers as op
from qflash.specification.gated import gated
from small_networks import build, decibels, draw, normalise, timm


@pytest.mark.parametrize("number", range(30))
def test_products_keep_their_bounds(number: int) -> None:
    draw_gated(number).check_bounds()


@pytest.mark.parametrize(
    ("name", "slope", "off"), [("gelu", 1.0, 0.0023), ("silu", 1.0, 0.0039), ("silu", 1.702, 0.0023), ("relu", 1.0, 0.0)]
)
def test_products_are_those_of_floats(name: str, slope: float, off: float) -> None:
    torch.manual_seed(3)
    gate, value = 4 * torch.randn(4000, 1, dtype=torch.float64), 2 * torch.randn(4000, 1, dtype=torch.float64)
    gate[:3], value[:3] = torch.tensor([[11.0], [-11.0], [0.0]]), 5.0
    made = activations.floating(name, slope, gate)
    ranges = [Range(x.amin(dim=0), x.amax(dim=0), x.mean(dim=0)) for x in (made, value)]
    units = conversion.gated_units(name, slope, *ranges)
    module = Gated(1, "int32", name)
    grid = conversion.finish_gated(module, units, 2.0**-16, 0.75)
    module.check_values()
    x = torch.cat((gate / units.gate, value / units.value), dim=1).round().clamp(*op.INT16).to(torch.int16)
    got = module(x, backend="reference").double() * grid.step + grid.middle
    # what rounding gate, value and the activation's input takes, and its polynomial; GELU and SiLU rise by at most 1.13
    rounding = value.abs() * (off + 1.13 * (units.gate + units.activation) / 2 + units.activation / 2)
    rounding += made.abs() * units.value / 2 + 1e-4
    assert bool(((got - made * value).abs() <= rounding).all())


@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_products_saturate(dtype: str) -> None:
    module = Gated(2, dtype, "silu")
    module.gate_multiplier = 1 << 30
    module.multiplier.fill_((1 << 31) - 1)
    ends = torch.tensor([[32767, 32767, 32767, -32768], [-32768, -32768, 32767, 32767]], dtype=torch.int16)
    low, high = op.LIMITS[module.dtype]
    assert module(ends, backend="reference").tolist() == [[high, low], [0, 0]]


def test_sizes_and_integers_are_looked_at() -> None:
    for sizes, words in (
        ((0, "int8", "silu"), "channels must be whole and from 1"),
        ((4, "float32", "silu"), "dtype must be one of int8, int16, int32, got 'float32'"),
        ((4, "int8", "tanh"), "activation must be one of gelu, silu, relu, got 'tanh'"),
        ((4, "int8", 3), "activation must be one of gelu, silu, relu, got 3"),
    ):
        with pytest.raises(ValueError, match=words):
            Gated(*sizes)  # type: ignore[arg-type]
    for name, value in (("gate_multiplier", -1), ("multiplier", -1), ("offset", -(1 << 30))):
        module = Gated(4, "int8", "silu")
        setattr(module, name, value if name == "gate_multiplier" else torch.full((4,), value, dtype=torch.int32))
        with pytest.raises(ValueError, match=f"{name} must be from .* got {value}"):
            module.check_values()


def test_a_product_out_of_range_is_noticed() -> None:
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(OverflowError, match="gated: u spans"):
        gated(torch.tensor([[-32768, 1]], dtype=torch.int16), 1 << 32, one, one, "silu", torch.int8, CHECK)


def test_units_that_products_cannot_be_brought_to_are_refused() -> None:
    one = torch.ones(1, dtype=torch.float64)
    units = conversion.gated_units("silu", 1.0, Range(-one, one, one), Range(-one, one, one))
    for step, middle in ((1e-9, 0.0), (1.0, 1e9)):
        with pytest.raises(ValueError, match="the network's scales are degenerate"):
            conversion.finish_gated(Gated(1, "int8", "silu"), units, step, middle)
    with pytest.raises(ValueError, match=r"an activation of SiLU is 300; integer networks take up to 256"):
        conversion.gated_units("silu", 1.0, Range(-one, 300 * one, one), Range(-one, one, one))


MLPS: dict[str, tuple[Any, Any]] = {
    "SwiGLUPacked": (timm.layers.SwiGLUPacked, nn.SiLU),
    "SwiGLU with a norm": (functools.partial(timm.layers.SwiGLU, norm_layer=nn.LayerNorm), nn.SiLU),
    "GEGLU": (functools.partial(timm.layers.GluMlp, gate_last=False), nn.GELU),
    "ReGLU": (timm.layers.GluMlp, nn.ReLU),
}


@pytest.mark.parametrize("name", few(MLPS, 2))
def test_a_gated_mlp_is_close_in_all_its_forms(name: str) -> None:
    mlp, act = MLPS[name]
    model = build("vit", num_classes=10)
    torch.manual_seed(1)
    for block in model.blocks:
        block.mlp = mlp(48, 96, act_layer=act)
    model.eval()
    images, fresh = draw(model, 24), draw(model, 4, seed=9)
    network = qflash.quantize_model(model, [images], progress=False)
    kinds = [type(network.part(node.name)).__name__ for node in network.nodes]
    assert kinds.count("Gated") == 2
    with torch.no_grad():
        want = model(normalise(model, fresh))
    got = network(fresh)
    assert decibels(want, network.dequantize(got)) > 30
    network.backend = "reference"
    assert torch.equal(network(fresh), got)
    kept = qflash.quantize_model(model, [images], progress=False, keep_float=["blocks"])
    assert decibels(want, kept.dequantize(kept(fresh))) > 30
    assert qflash.compare(network, model, fresh).nodes
