"""qflash.explain: it says what the operators do, on GPUs that are not there as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import qflash
from qflash.backends import cpu_missing, interpreting
from qflash.kernels import lengths
from qflash_lab.verify import cases

SHAPES = ((49, 32), (197, 64), (197, 84), (577, 64), (1370, 64), (4096, 128), (20, 300))


def draw(tokens: int, head_dim: int, heads: int = 4, batch: int = 1) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(batch, heads, tokens, head_dim, dtype=torch.float16) for _ in range(3))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("recipe", ["default", "accurate", "paper"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=str)
def test_it_names_the_family_that_is_launched(architecture: str, recipe: str, options: dict[str, Any]) -> None:
    for tokens, head_dim in SHAPES:
        tensors = draw(tokens, head_dim)
        said = qflash.explain(*tensors, recipe=recipe, architecture=architecture, **options)
        case = cases.Case(
            "", tokens, head_dim, recipe, "causal" if options else "none", batch=1, input="float16", output="float16"
        )
        launches = cases.launches(case, architecture)
        assert said.backend == "triton" and said.family == launches[-1].family, (tokens, head_dim)
        assert said.fused == (len(launches) == 1), (tokens, head_dim)
        assert said.family not in said.families and list(said.backends) == ["cpu", "reference"]


def test_it_says_why() -> None:
    said = qflash.explain(*draw(197, 84), architecture="sm_90")
    assert said.family == "triton.resident" and not said.fused and "multiple of 8" in said.families["sm90.resident"]
    assert "triton.resident" in said.apart
    assert "8 to 128 channels" in str(said) and str(said).startswith("back end: triton\n  not cpu: it runs on the CPU")
    assert "Hopper" in qflash.explain(*draw(197, 64), architecture="sm_86").families["sm90.resident"]
    bias = torch.zeros(1, 1, 197, 197)
    assert "bias of 16-bit floats" in qflash.explain(*draw(197, 64), bias, architecture="sm_90").families["sm90.resident"]
    for mask in (bias.half(), bias == 0):
        assert qflash.explain(*draw(197, 64), mask, architecture="sm_90").family == "sm90.resident"
        one = mask[..., :1]
        assert qflash.explain(*draw(300, 64), one[:, :, :1], architecture="sm_90").family == "sm90.streaming"
    # few heads of long rows are quantised by launches of their own, where a launch could do it, too
    said = qflash.explain(*draw(1370, 64), architecture="sm_90")
    assert (said.family, said.fused, said.apart) == ("sm90.streaming", False, {})
    apart = torch.zeros(1, 4, 577, 65, dtype=torch.float16)[..., :64]
    assert "neighbours" in qflash.explain(apart, apart, apart, architecture="sm_90").apart["sm90.resident"]


def test_it_says_which_back_end() -> None:
    tensors = draw(20, 16)
    said = qflash.explain(*tensors)
    assert said.backend == ("reference" if cpu_missing() else "cpu") and not said.families
    said = qflash.explain(*tensors, backend="reference")
    assert said.backend == "reference" and "was asked for" in said.backends["cpu"]
    assert "sm_80 or newer" in qflash.explain(*tensors, architecture="sm_75").backends["triton"]
    assert qflash.explain(*draw(0, 16), architecture="sm_90").family.startswith("nothing")
    if interpreting():
        said = qflash.explain(*tensors, backend="triton")
        assert said.family == "triton.resident" and "no Gluon" in said.families["sm90.resident"] and said.fused


def test_it_counts_no_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "_first", {401})
    with lengths.unchanged():
        lengths._first.add(577)
    assert lengths._first == {401}


def test_bad_arguments_are_named() -> None:
    tensors = draw(20, 16)
    for wrong in ("hopper", "90", 90, "sm_9"):
        with pytest.raises(ValueError, match="architecture must be a name like 'sm_90'"):
            qflash.explain(*tensors, architecture=wrong)
    with pytest.raises(ValueError, match=r"backend='cpu' cannot run on sm_90"):
        qflash.explain(*tensors, architecture="sm_90", backend="cpu")
    with pytest.raises(ValueError, match=r"backend='triton' cannot run on sm_75"):
        qflash.explain(*tensors, architecture="sm_75", backend="triton")
    with pytest.raises(ValueError, match="dropout_p"):
        qflash.explain(*tensors, dropout_p=0.5)
