"""INT-FlashAttention and QAttn: formula against float64, kernel against formula, and the SQNR the paper measured."""

from __future__ import annotations

import json
import math

import pytest
import torch

from helpers import exact_attention, make_inputs, outlier_inputs, run_compiling
from qflash.specification.quantization import scale_shape
from qflash_lab.baselines import get_method, int_flash, qattn
from qflash_lab.baselines.online import BLOCK
from qflash_lab.bench.metrics import sqnr
from qflash_lab.bench.workloads import get_workload, paper_inputs

NAMES = ("int-flash-full", "int-flash-half", "qattn")
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def int8(x: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric quantisation in float64: integers and their scale."""
    scale = x.double().abs().amax(dim=dims, keepdim=True) / 127
    return (x.double() / scale).round(), scale


def plain(name: str, inputs: Tensors, mask: torch.Tensor | None = None, scale: float | None = None) -> torch.Tensor:
    """The method in float64, tile after tile, with weights rounded as its paper says."""
    query, key, value = inputs
    grain = (0, 1, 2, 3) if name == "qattn" else (3,)
    (q, q_scale), (k, k_scale) = int8(query, grain), int8(key, grain)
    v, v_scale = int8(value, (2, 3) if name == "int-flash-full" else grain)
    if name == "int-flash-half":
        v, v_scale = value.half().double(), torch.ones(())
    scores = (q * q_scale) @ (k * k_scale).mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    highest = torch.full_like(scores[..., :1], -math.inf)
    total, out = torch.zeros_like(highest), torch.zeros(*scores.shape[:3], value.shape[3], dtype=torch.float64)
    for start in range(0, scores.shape[3], BLOCK):
        part = scores[..., start : start + BLOCK]
        new = torch.maximum(highest, part.amax(-1, keepdim=True))
        weights, shrink = torch.exp(part - new), torch.exp(highest - new)
        rounded = {
            "int-flash-full": lambda w: (127 * w).round() / 127,
            "int-flash-half": lambda w: w.half().double(),
            "qattn": lambda w: w.bfloat16().double(),
        }[name](weights)
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + rounded @ v[..., start : start + BLOCK, :] * v_scale
        highest = new
    return out / total


# --- formulas -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [1, 49, 64, 197])
def test_formula_is_the_papers(name: str, tokens: int) -> None:
    inputs = make_inputs(2, 2, 20, tokens, 32, seed=tokens, amplitude=2.0)
    # one weight at the edge of two roundings may fall either way in float32; the method itself is at 30 to 40 dB
    assert sqnr(plain(name, inputs), get_method(name).attention(*inputs)) > 70


@pytest.mark.parametrize("name", NAMES)
def test_formula_takes_masks_scales_and_other_widths(name: str) -> None:
    inputs = make_inputs(2, 3, 20, 97, 16, 24)
    generator = torch.Generator().manual_seed(1)
    keep = torch.rand(2, 1, 20, 97, generator=generator) < 0.3
    keep[..., 70] = True
    bias = 2 * torch.randn(1, 3, 20, 97, generator=generator)
    for mask, scale in ((keep, None), (bias, 0.3), (None, 0.5)):
        got = get_method(name).attention(*inputs, attn_mask=mask, scale=scale)
        assert sqnr(plain(name, inputs, mask, scale), got) > 70
        assert sqnr(exact_attention(*inputs, mask, scale=scale), got) > 30


@pytest.mark.parametrize("name", NAMES)
def test_row_without_a_key_is_zero(name: str) -> None:
    inputs = make_inputs(1, 2, 5, 70, 16)
    keep = torch.ones(1, 1, 5, 70, dtype=torch.bool)
    keep[..., 2, :] = False
    keep[..., 3, :66] = False
    out = get_method(name).attention(*inputs, attn_mask=keep)
    assert torch.equal(out[:, :, 2], torch.zeros_like(out[:, :, 2]))
    assert sqnr(exact_attention(*inputs, keep), out) > 30
    empty = get_method(name).attention(inputs[0], inputs[1][:, :, :0], inputs[2][:, :, :0])
    assert torch.equal(empty, torch.zeros(1, 2, 5, 16))


@pytest.mark.parametrize("name", NAMES)
def test_bad_arguments(name: str) -> None:
    query, key, value = make_inputs(1, 2, 5)
    method = get_method(name)
    with pytest.raises(TypeError, match="query must be float16"):
        method.attention(query.long(), key, value)
    with pytest.raises(ValueError, match="key must have query's head dimension 32, got 31"):
        method.attention(query, key[..., :31], value)
    for scale in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="scale must be positive and finite, got"):
            method.attention(query, key, value, scale=scale)
    assert method.prepare is not None
    with pytest.raises(ValueError, match="kernel cannot run: the kernel takes at most 128 channels, got 130"):
        method.prepare(*make_inputs(1, 1, 4, head_dim=130))


# --- kernel ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(1, 2, 40, 49, 32, 32), (2, 1, 33, 197, 64, 64), (1, 1, 17, 64, 16, 16), (1, 1, 5, 130, 128, 40)], ids=str
)
@pytest.mark.parametrize("name", NAMES)
def test_kernel_is_the_formula(name: str, shape: tuple[int, ...]) -> None:
    batch, heads, queries, keys, head_dim, value_dim = shape
    inputs = make_inputs(batch, heads, queries, keys, head_dim, value_dim, seed=keys, amplitude=2.0)
    module = qattn if name == "qattn" else int_flash
    options = {} if name == "qattn" else {"full": name == "int-flash-full"}
    if name == "qattn":
        operands = tuple(qattn.quantize(x) for x in inputs)
    else:
        operands = int_flash.quantize_operands(*inputs, **options)
    for block in (BLOCK, 32) if keys == 130 else (BLOCK,):
        expected = module.formula(operands, None, 0.2, block=block)
        out = torch.empty_like(expected)
        module.kernel_call(operands, 0.2, out, tiles=(32, block, 4, 2)).run()
        assert sqnr(expected, out) > 80, block
    default = module.formula(operands, None, head_dim**-0.5)
    got = get_method(name).prepare(*inputs)()  # type: ignore[misc]
    if name == "qattn":  # rounded to int8 at one fitted scale, as the original does
        assert got.values.dtype == torch.int8 and got.scale.shape == ()
        assert float(got.scale) == pytest.approx(float(default.abs().amax() / 127), rel=1e-4)
        apart = (got.values - (default / got.scale).round().clamp(-128, 127)).abs()
        assert float(apart.max()) <= 1 and float((apart == 0).float().mean()) > 0.99
        return
    assert got.dtype == torch.float16
    assert sqnr(default, got) > 70  # float16 output: about 73 dB


def test_int8_output_is_rounded_to_even_and_saturates() -> None:
    # one key: the output is V
    query, key, value = torch.ones(1, 1, 1, 16), torch.ones(1, 1, 1, 16), torch.arange(-127.0, 129.0, 16.0).reshape(1, 1, 1, 16)
    value[..., 0] = -127.0
    operands = qattn.quantize_operands(query, key, value)
    values = operands[2].values.float()
    out = torch.empty(1, 1, 1, 16, dtype=torch.int8)
    for step in (2.0, 0.5):
        qattn.kernel_call(operands, 1.0, out, output_scale=operands[2].scale.reshape(()) * step).run()
        assert torch.equal(out.float(), (values / step).round().clamp(-128, 127)), step
    with pytest.raises(ValueError, match="output_scale goes with an int8 out"):
        qattn.kernel_call(operands, 1.0, out)
    with pytest.raises(ValueError, match="output_scale goes with an int8 out"):
        qattn.kernel_call(operands, 1.0, out.float(), output_scale=operands[2].scale.reshape(()))


def _print_compiled() -> None:
    """Compile one kernel of each kind, without a GPU, for a shape of Swin's and print the machine code's reports."""
    from qflash_lab.verify import proof

    def quantized(granularity: str) -> qattn.QuantizedTensor:
        values = torch.empty((8, 4, 49, 32), dtype=torch.int8, device="meta")
        return qattn.QuantizedTensor.from_kernel(values, torch.empty(scale_shape(values.shape, granularity), device="meta"))

    token, head, tensor = (quantized(granularity) for granularity in ("token", "head", "tensor"))
    out = torch.empty(token.shape, dtype=torch.float16, device="meta")
    calls = (
        int_flash.kernel_call(int_flash.Operands(token, token, head.values, head.scale), 0.2, out),
        int_flash.kernel_call(int_flash.Operands(token, token, out, None), 0.2, out),
        qattn.kernel_call((tensor, tensor, tensor), 0.2, out),
    )
    targets = ("sm_90", "sm_80", "sm_90")
    print(json.dumps([proof.examine(call, "", target).to_dict() for call, target in zip(calls, targets, strict=True)]))


def test_kernels_compile_to_the_tensor_cores_they_name() -> None:
    ran = run_compiling(__file__)
    assert ran.returncode == 0, ran.stderr
    full, half, mixed = json.loads(ran.stdout)
    assert all(report["error"] is None and report["spills"] == 0 for report in (full, half, mixed))
    assert {opcode.partition(".")[0] for opcode in full["tensor_core"]} == {"IGMMA"}
    assert {opcode.partition(".")[0] for opcode in half["tensor_core"]} == {"IMMA", "HMMA"}
    assert {opcode.partition(".")[0] for opcode in mixed["tensor_core"]} == {"IGMMA", "HGMMA"}
    assert all("BF16" in opcode for opcode in mixed["tensor_core"] if opcode.startswith("HGMMA"))


def test_outliers() -> None:
    query, key, value = outlier_inputs(heads=2)
    exact = exact_attention(query, key, value)
    token, tensor = (sqnr(exact, get_method(name).attention(query, key, value)) for name in ("int-flash-half", "qattn"))
    assert token > tensor + 3  # what one scale a token is for


# --- the paper's accuracy table -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "workload", "paper"),
    [
        ("int-flash-half", "A2", 38.19),
        ("int-flash-half", "A7", 39.07),
        ("int-flash-full", "A2", 36.92),
        ("int-flash-full", "A7", 37.80),
    ],
)
def test_int_flash_has_the_papers_sqnr(name: str, workload: str, paper: float) -> None:
    inputs = paper_inputs(get_workload(workload), 8)
    assert sqnr(exact_attention(*inputs), get_method(name).attention(*inputs)) == pytest.approx(paper, abs=0.5)


@pytest.mark.parametrize(("workload", "paper"), [("A2", 34.12), ("A7", 34.75)])
def test_qattn_has_the_papers_sqnr_in_its_pipeline(workload: str, paper: float) -> None:
    """By itself above the paper; with bfloat16 quotients and an int8 output cut off within 0.5 dB of it."""
    inputs = paper_inputs(get_workload(workload), 8)
    exact = exact_attention(*inputs)
    assert 3.0 < sqnr(exact, get_method("qattn").attention(*inputs)) - paper < 4.0
    operands = []
    for x in inputs:
        narrow = x.bfloat16()
        scale = narrow.abs().amax() / 127
        operands.append(qattn.QuantizedTensor((narrow / scale).round().to(torch.int8), scale.float()))
    out = qattn.formula((operands[0], operands[1], operands[2]), None, inputs[0].shape[-1] ** -0.5)
    step = out.abs().amax() / 127
    assert sqnr(exact, (out / step).trunc() * step) == pytest.approx(paper, abs=0.5)


if __name__ == "__main__":
    _print_compiled()
