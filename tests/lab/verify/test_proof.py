"""``qflash-lab verify``: what it looks for, a planted float, and the real kernels on three targets.

conftest.py turns Triton's interpreter on, under which nothing is compiled; what compiles runs in a process
of its own with that variable removed. Run as a script, this file prints the planted kernels' reports.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import random
import sys
from collections.abc import Hashable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from typer.testing import CliRunner

from helpers import run_compiling, slow
from qflash import backends, execution
from qflash.kernels.device import STAND_IN
from qflash.kernels.launch_recorder import KernelLaunch, LaunchRecorder
from qflash.specification.attention_call import float_call, int8_call
from qflash.specification.quantization import scale_shape
from qflash.specification.recipe import ACCURATE, DEFAULT, PAPER
from qflash_lab.cli import app
from qflash_lab.verify import cases as verify_cases
from qflash_lab.verify import compile, proof, sass


@triton.jit
def clean_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0)
    tl.store(y_ptr + i, (x * n) >> 3, mask=i < n)


@triton.jit
def division_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i) // n)


@triton.jit
def float_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, (tl.load(x_ptr + i).to(tl.float32) * 1.5 + n).to(tl.int32))


def _print_planted() -> None:
    x = torch.empty(128, dtype=torch.int32, device="meta")
    arguments = {"x_ptr": x, "y_ptr": x, "n": 7, "BLOCK": 128}
    floats = arguments | {"x_ptr": x.float()}
    calls = (
        (clean_kernel, arguments, "sm_90"), (division_kernel, arguments, "sm_90"), (float_kernel, arguments, "sm_80"),
        (float_kernel, floats, "sm_80"),
    )  # fmt: skip
    reports = [
        proof.examine(KernelLaunch(kernel, (1,), given, {"num_warps": 4}), "", target) for kernel, given, target in calls
    ]
    print(json.dumps([report.to_dict() for report in reports]))


@pytest.mark.slow
def test_planted_floats_are_found() -> None:
    """A float multiplication and an integer division, which ptxas writes with a float reciprocal, both show."""
    done = run_compiling(__file__)
    assert done.returncode == 0, done.stderr
    clean, divided, multiplied, of_floats = json.loads(done.stdout)
    assert clean["passed"]
    assert clean["instructions"] > 5
    division = " ".join(divided["float_instructions"])
    assert "MUFU.RCP" in division
    assert "I2F" in division
    assert "F2I" in division
    assert not divided["passed"]
    assert "test_proof.py:" in division, "the report says which source line a float comes from"
    assert not multiplied["passed"]
    for report in (multiplied, of_floats):
        assert any(name.startswith(("FFMA", "FFADD", "FADD")) for name in report["float_instructions"])
    assert multiplied["integer"] and not of_floats["integer"], "what reads floats may have such instructions"
    assert of_floats["passed"]


@pytest.mark.slow
def test_attention_kernels_hold_no_float(tmp_path: pathlib.Path) -> None:
    targets = ("sm_80", "sm_90", "sm_120")
    done = run_compiling(
        "-m", "qflash_lab", "verify", "--case", "swin", "--format", "json", "--dump", str(tmp_path),
        *(part for target in targets for part in ("--target", target)),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    reports = json.loads(done.stdout)
    assert [report["target"] for report in reports] == list(targets)
    for report in reports:
        assert report["passed"]
        assert report["float_count"] == 0
        assert report["per_score"] > 1
        assert report["registers"] > 16
        assert any(opcode.startswith("IMMA") for opcode in report["tensor_core"])
        assert (tmp_path / f"swin.{report['target']}.ptx").stat().st_size > 1000
        assert "MMA" in (tmp_path / f"swin.{report['target']}.sass").read_text()


@pytest.mark.slow
def test_layers_of_networks_hold_no_float() -> None:
    targets = ("sm_80", "sm_90")
    done = run_compiling(
        "-m", "qflash_lab", "verify", "--case", "layer-norm-merge", "--case", "cut-patches", "--case", "linear-windows",
        "--case", "layer-norm", "--case", "linear-gelu", "--case", "linear-patches", "--case", "linear-silu", "--case", "gated",
        "--format", "json", *(part for target in targets for part in ("--target", target)),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    reports = json.loads(done.stdout)
    assert len(reports) == 16
    for report in reports:
        assert report["passed"] and report["integer"] and report["float_count"] == 0
        assert bool(report["tensor_core"]) == report["case"].startswith("linear")


def test_every_case_spells_out_a_call() -> None:
    vision = ("vit", "vit-hundreds", "vit-257", "class-token", "vit-577", "vit-1370", "vit-80", "vit-257-80", "vit-729-72")
    by_hand = dict.fromkeys(vision, "hopper_kernel") | dict.fromkeys(("long-64", "long-128", "varlen"), "long_hopper_kernel")
    by_hand |= {"vit-785-few": "hopper_kernel", "vit-bool-tensor": "hopper_kernel", "varlen-short": "packed_hopper_kernel"}
    anywhere = dict.fromkeys(("swin", "swin-windows", "swin-thousands"), "windows_kernel")
    anywhere |= dict.fromkeys(("vit-paper", "long-causal-gqa", "long-accurate", "vae-512"), "long_kernel")
    anywhere |= dict.fromkeys(("longest", "varlen-accurate"), "long_kernel")
    anywhere |= {"pack-value": "pack_value_kernel"}
    for case in verify_cases.CASES:
        call = verify_cases.kernel_call(case, "sm_90")
        if isinstance(case, verify_cases.LayerCase):
            # inputs no multiple of 16, or int16, which the kernel for Hopper does not take
            odd = case.name in ("linear-patches", "linear-wide")
            linear = "int8_linear_kernel" if odd else "hopper_linear_kernel"
            linear = "patches_kernel" if case.name == "cut-patches" else linear
            others = {"mean": "integer_mean_kernel", "gated": "gated_kernel", "rotary": "rotary_kernel"}
            other = others.get(case.name, "integer_layer_norm_kernel")
            assert call.kernel.__name__ == (linear if case.outputs else other)
            assert str(call.arguments["o_ptr"].dtype) == f"torch.{case.output}"
            assert getattr(call.arguments.get("PLAN"), "EARLY", False) == case.settled
            continue
        assert call.kernel.__name__ == (by_hand | anywhere).get(case.name, "short_kernel")
        assert {"BLOCK_N", "KEYS", "RING"} & set(call.arguments)
        general = "long_kernel" if case.tokens > 256 or case.layout == "varlen" else "short_kernel"
        assert verify_cases.kernel_call(case, "sm_80").kernel.__name__ == anywhere.get(case.name, general)
        pointers = {name: x for name, x in call.arguments.items() if isinstance(x, torch.Tensor)}
        assert all(x.device.type == "meta" for x in pointers.values())
        out = pointers["o_ptr" if case.name != "pack-value" else "packed_ptr"]
        assert str(out.dtype) == f"torch.{case.output}"
    names = [case.name for case in verify_cases.CASES]
    assert len(set(names)) == len(names)


@functools.cache
def distinct(target: str) -> dict[Hashable, verify_cases.Case]:
    return verify_cases.distinct(target)


def draw_launches(
    rng: random.Random, target: str, heads: int = 4, tokens: Sequence[int] = verify_cases.TOKENS
) -> list[KernelLaunch]:
    """Draw a call of an operator and return its launches, spelt out without :mod:`.verify.cases`, which has such sizes."""
    keys, channels = rng.choice(tokens), rng.choice(verify_cases.HEAD_DIMS)
    recipe = rng.choice((DEFAULT, DEFAULT, PAPER, ACCURATE))
    plain = recipe == DEFAULT and rng.random() < 0.5
    batch = rng.choice(verify_cases.BATCHES) if plain and heads == 4 else rng.randint(1, 300) if plain else 8
    tensors = [torch.empty(batch, heads, keys, channels, dtype=torch.int8, device="meta") for _ in range(3)]
    one_scale = not plain and rng.random() < 0.5
    if plain and rng.random() < 0.5:
        tensors = [x.half() for x in tensors]
    dtype = tensors[0].dtype
    kind = rng.choice(("none", "causal", "bool", "bias"))
    mask = None
    if kind in ("bool", "bias"):
        mask = torch.empty(batch, 1, keys, keys, dtype=torch.bool, device="meta")
        if kind == "bias":
            mask = torch.empty(1, heads, keys, keys, dtype=torch.int32 if dtype == torch.int8 else dtype, device="meta")
    options = kind == "causal", channels**-0.5
    place = STAND_IN.set(tuple(divmod(int(target[3:]), 10)))
    try:
        with LaunchRecorder(launching=False) as recording:
            if dtype != torch.int8:
                execution.attend(float_call(*tensors, mask, *options, recipe), "triton")
            else:
                kinds = recipe.query_granularity, recipe.key_granularity, recipe.value_granularity
                scales = [
                    torch.empty(scale_shape(x.shape, "tensor" if one_scale else kind), device="meta")
                    for x, kind in zip(tensors, kinds, strict=True)
                ]
                given = [x for pair in zip(tensors, scales, strict=True) for x in pair]
                execution.attend(int8_call(*given, mask, *options, scales[2], torch.int8, recipe), "triton")
    finally:
        STAND_IN.reset(place)
    return recording.launches


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.slow
def test_whatever_an_operator_launches_is_among_the_cases(target: str) -> None:
    rng = random.Random(target)
    for _ in range(300):
        for call in draw_launches(rng, target):
            assert verify_cases.signature(call) in distinct(target), call


def constants(signature: Any) -> Hashable:
    """Kernel, options and constants but strides and counts of heads and blocks."""
    name, options, *arguments = signature
    found = {x[0]: x[1] for x in arguments if x[0].isupper() and x[0] not in ("HEADS", "BLOCKS", "STRIDES")}
    if hasattr(found.get("PLAN"), "HEADS"):
        found["PLAN"] = dataclasses.replace(found["PLAN"], HEADS=0, BLOCKS=0)
    return name, options, frozenset(found.items())


@pytest.mark.parametrize("tokens", [(49, 577), slow(verify_cases.TOKENS)], ids=str)
def test_other_numbers_of_heads_have_the_constants_of_cases(tokens: Sequence[int]) -> None:
    every = verify_cases.distinct("sm_90", [f"{count}x*" for count in tokens])
    rng, known = random.Random(0), {constants(signature) for signature in every}
    for _ in range(300):
        for call in draw_launches(rng, "sm_90", heads=rng.choice((1, 3, 12)), tokens=tokens):
            assert constants(verify_cases.signature(call)) in known, call


def _print_keys() -> None:
    import triton.knobs

    keys: list[str] = []
    triton.knobs.runtime.jit_cache_hook = lambda *, key, **_: keys.append(key) or True
    rng, found = random.Random(5), []
    for target in ("sm_80", "sm_90"):
        for case in rng.sample(list(verify_cases.calls()), 150):
            for call in verify_cases.launches(case, target):
                compile.compile_call(call, target)
                found.append((repr(verify_cases.signature(call)), f"{call.kernel.__name__} {target} {keys.pop()}", target))
    print(json.dumps(found))


@pytest.mark.slow
def test_a_signature_is_what_triton_compiles_apart() -> None:
    done = run_compiling(__file__, "keys")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    ours, theirs = {(a, target) for a, _, target in found}, {b for _, b, _ in found}
    assert len(found) > len(ours) > 100
    assert len(ours) == len(theirs) == len({tuple(pair) for pair in found})


def test_names_and_patterns_pick_cases() -> None:
    def names(*patterns: str) -> set[str]:
        return {case.name for case, _ in proof._pick_jobs(patterns, ["sm_90"], map)}

    assert names("vit", "swin") == {"vit", "swin"}
    assert names("4096x64") == {"4096x64"}
    assert names("4096x64:*") == {"4096x64:0-pack_value"}
    every = names("197x64*")
    assert {"197x64", "197x64-bias", "197x64-causal-tensor"} <= every and all(name.startswith("197x64") for name in every)
    assert names("[a-z]*") == {case.name for case in verify_cases.CASES}
    with pytest.raises(proof.VerificationError, match="unknown case 197x64-nothing"):
        names("vit", "197x64-nothing")


def test_no_name_that_a_pattern_fits_is_left_out() -> None:
    draw = random.Random(0)
    names = ["49x16", "49x16-causal", "a:b"]
    launches = [(name, f"{name}{tail}") for name in names for tail in ("", ":0-pack_value", ":1-x")]
    parts = ["4", "9", "x16", "-", "*", "?", ":", "[0-9]", "[!a]", "[]*:]", "[", "b"]
    fitting = 0
    for _ in range(5000):
        pattern = "".join(draw.choice(parts) for _ in range(5))
        for name, launch in launches:
            if verify_cases.fits_pattern(launch, (pattern,)):
                fitting += 1
                assert verify_cases.may_fit_pattern(name, (pattern,)), pattern
    assert fitting > 100
    # and what can be seen not to fit is not spelt out
    assert not any(verify_cases.may_fit_pattern(case.name, ("[a-z]*", "49x16-none:*")) for case in verify_cases.calls())


def test_a_sample_can_be_drawn_again() -> None:
    assert [proof.sample_size(text, 100) for text in ("7", "1/40", "1000", "3/4")] == [7, 3, 100, 75]
    every = range(60)
    assert proof.draw_sample(every, "1/6", 7) == proof.draw_sample(every, "10", 7) != proof.draw_sample(every, "10", 8)
    assert proof.draw_sample(every, "99", 7) == list(every)
    for text in ("0", "-1", "1/0", "a", "0.5", ""):
        with pytest.raises(proof.VerificationError, match="sample must be"):
            proof.sample_size(text, 100)


def test_a_sample_is_the_same_every_day(monkeypatch: pytest.MonkeyPatch) -> None:
    class DrawnError(Exception):
        pass

    def draw_sample(every: Any, text: str, seed: object) -> None:
        raise DrawnError(seed)

    monkeypatch.setattr(backends, "interpreting", lambda: False)
    monkeypatch.setattr(proof, "disassemblers", lambda: None)
    monkeypatch.setattr(proof, "_pick_jobs", lambda *_: [])
    monkeypatch.setattr(proof, "draw_sample", draw_sample)
    with pytest.raises(DrawnError) as drawn:
        proof.verify(sample="5", workers=1)
    assert drawn.value.args == (0,)
    result = CliRunner().invoke(app, ["verify", "--sample", "5"])
    assert isinstance(result.exception, DrawnError) and result.exception.args == (0,)


LOOP = """
.L_x_0:
        /*0010*/              @P0 LDG.E.64 R{load}, desc[UR24][R24.64+0x40] ;
        /*0020*/                   IGMMA.64x128x32.S8.S8 R88, R160, gdesc[UR40], RZ, !UPT ;
        /*0030*/                   {between} ;
        /*0040*/                   IGMMA.64x128x32.S8.S8 R88, R180, gdesc[UR40], R88, gsb0 ;
        /*0050*/                   IGMMA.64x128x32.S8.S8 R24, gdesc[UR40], RZ, !UPT ;
        /*0060*/                   STG.E.128 desc[UR24][R18.64], R24 ;
        /*0070*/              @!P0 BRA `(.L_x_0) ;
        /*0080*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("load", "between", "early"),
    [
        (180, "IADD3 R2, R2, R3, RZ", True),
        (179, "IADD3 R2, R2, R180, RZ", True),  # the second of two registers
        (182, "IMAD.MOV.U32 R182, RZ, RZ, R7", True),  # one of two written since
        (182, "CS2R R4, SRZ", True),
        (4, "IMAD.MOV.U32 R181, RZ, RZ, R5", True),  # a copy
        (181, "CS2R.32 R181, SR_CLOCKLO", True),  # one register of two
        (184, "CS2R R180, SRZ", False),
        (180, "CS2R R180, SRZ", False),
        (180, "IMAD.WIDE.U32 R180, R2, R3, R4", False),
        (183, "SHFL.BFLY PT, R183, R2, 0x1, 0x1f", False),
    ],
)
def test_products_that_read_what_is_on_its_way_are_found(load: int, between: str, early: bool) -> None:
    found = proof.early_operands(sass.parse_sass(LOOP.format(load=load, between=between)))
    assert [i.address for i in found] == ([0x40] if early else [])


@pytest.mark.slow
def test_heads_in_two_spans_take_the_queries_of_their_block() -> None:
    done = run_compiling("-m", "qflash_lab", "verify", "--case", "vit-729-72", "--target", "sm_90", "--format", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = json.loads(done.stdout)
    assert report["kernel"] == "hopper_kernel" and report["passed"] and report["error"] is None


def test_verification_says_that_it_needs_a_disassembler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(sass, "find_tool", lambda name: None)
    with pytest.raises(proof.VerificationError, match="no disassembler"):
        proof.verify()


def test_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(proof.VerificationError, match="TRITON_INTERPRET"):
        proof.verify()


def test_a_kernel_that_does_not_compile_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    case = proof.CASES[0]
    for error, said in (
        (RuntimeError("at line 3:\nno such layout"), "RuntimeError: no such layout"),
        (KeyError(), "KeyError: "),
    ):
        monkeypatch.setattr(proof, "examine", mock.Mock(side_effect=error))
        report = proof._examine_case(case, "sm_90", None)
        assert (report.case, report.target, report.error) == (case.name, "sm_90", said)
    # but what the verification itself lacks ends it
    monkeypatch.setattr(proof, "examine", mock.Mock(side_effect=proof.VerificationError("no disassembler")))
    with pytest.raises(proof.VerificationError, match="no disassembler"):
        proof._examine_case(case, "sm_90", None)


def test_an_empty_disassembly_proves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    compiled = SimpleNamespace(asm={"cubin": b"", "ptx": "// ptx"}, metadata=SimpleNamespace())
    monkeypatch.setattr(proof, "compile_call", lambda call, target: compiled)
    monkeypatch.setattr(proof, "disassemble", lambda cubin: ("no instruction\n", {}))
    with pytest.raises(proof.VerificationError, match="the disassembler printed no instruction for some on sm_90"):
        proof.examine(SimpleNamespace(), "some", "sm_90", tmp_path)  # type: ignore[arg-type]
    assert (tmp_path / "some.sm_90.sass").read_text() == "no instruction\n"


def test_verification_says_that_it_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qflash.backends.triton_missing", lambda: "Triton is not installed")
    with pytest.raises(proof.VerificationError, match="Triton is not installed"):
        proof.verify(["vit"], ["sm_90"])


if __name__ == "__main__":
    _print_keys() if "keys" in sys.argv else _print_planted()
