"""Every attention method: the protocol they share."""

from __future__ import annotations

import pytest
import torch

from helpers import exact_attention, make_inputs
from qflash.baselines import METHODS, get_method
from qflash.metrics import sqnr

GRAINS = ("tensor", "head", "token", "channel", "none")


def test_names_and_fields() -> None:
    assert list(METHODS) == [method.name for method in METHODS.values()]
    assert len({method.title for method in METHODS.values()}) == len(METHODS)
    for method in METHODS.values():
        assert {method.query_granularity, method.key_granularity, method.value_granularity} <= set(GRAINS)
        assert all(width in (4, 8, 16, 32) for pair in method.bits for width in pair)
    with pytest.raises(ValueError, match=r"method must be one of fp32, .*got 'nonsense'"):
        get_method("nonsense")


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_method_is_attention(name: str, dtype: torch.dtype) -> None:
    query, key, value = make_inputs(2, 3, 20, 33, 16, 24, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    keep = torch.rand(2, 1, 20, 33, generator=generator) < 0.6
    keep[..., 0] = True
    bias = torch.randn(1, 3, 20, 33, generator=generator).to(dtype)
    for mask, scale in ((None, None), (None, 0.5), (keep, None), (bias, 0.3)):
        out = METHODS[name].attention(query, key, value, attn_mask=mask, scale=scale)
        assert out.shape == (*value.shape[:2], 20, 24)
        assert out.dtype == dtype
        assert sqnr(exact_attention(query, key, value, mask, scale=scale), out) > 10.0
