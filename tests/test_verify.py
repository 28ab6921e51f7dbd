"""``qflash verify``: what it looks for, a planted float, and the real kernels on three targets.

conftest.py turns Triton's interpreter on, under which nothing is compiled; what compiles runs in a process
of its own with that variable removed. Run as a script, this file prints the planted kernels' reports.
"""

from __future__ import annotations

import json
import pathlib
import types

import pytest
import torch
import triton
import triton.language as tl

from helpers import run_compiling
from qflash import sass, verify


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
    reports = {
        kernel.__name__: verify.examine(
            types.SimpleNamespace(kernel=kernel, grid=(1,), arguments=arguments, options={"num_warps": 4}), "planted", target
        ).to_dict()
        for kernel, target in ((clean_kernel, "sm_90"), (division_kernel, "sm_90"), (float_kernel, "sm_80"))
    }
    print(json.dumps(reports))


def test_planted_floats_are_found() -> None:
    """A float multiplication and an integer division, which ptxas writes with a float reciprocal, both show."""
    done = run_compiling(__file__)
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)
    assert reports["clean_kernel"]["passed"]
    assert reports["clean_kernel"]["instructions"] > 5
    division = " ".join(reports["division_kernel"]["float_instructions"])
    assert "MUFU.RCP" in division
    assert "I2F" in division
    assert "F2I" in division
    assert not reports["division_kernel"]["passed"]
    assert "test_verify.py:" in division, "the report says which source line a float comes from"
    assert not reports["float_kernel"]["passed"]
    assert any(name.startswith(("FFMA", "FFADD", "FADD")) for name in reports["float_kernel"]["float_instructions"])


@pytest.mark.slow
def test_attention_kernels_hold_no_float(tmp_path: pathlib.Path) -> None:
    targets = ("sm_80", "sm_90", "sm_120")
    done = run_compiling(
        "-m", "qflash", "verify", "--case", "swin", "--format", "json", "--dump", str(tmp_path),
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


def test_every_case_spells_out_a_call() -> None:
    for case in verify.CASES:
        call = verify.kernel_call(case, "sm_90")
        vision = ("vit", "vit-hundreds", "vit-257", "vit-577", "vit-1370", "vit-80", "vit-257-80", "vit-729-72")
        by_hand = dict.fromkeys(vision, "hopper_kernel")
        by_hand |= dict.fromkeys(("long-64", "long-128"), "long_hopper_kernel")
        anywhere = dict.fromkeys(("swin", "swin-windows", "swin-thousands"), "windows_kernel")
        assert call.kernel.__name__ == (by_hand | anywhere).get(case.name, case.kernel)
        assert {"BLOCK_N", "KEYS", "SPAN"} & set(call.arguments)
        assert verify.kernel_call(case, "sm_80").kernel.__name__ == anywhere.get(case.name, case.kernel)
        pointers = {name: x for name, x in call.arguments.items() if isinstance(x, torch.Tensor)}
        assert all(x.device.type == "meta" for x in pointers.values())
        assert pointers["o_ptr" if case.kernel != "pack_value_kernel" else "packed_ptr"].dtype == torch.int8
    names = [case.name for case in verify.CASES]
    assert len(set(names)) == len(names)


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
    found = verify.early_operands(sass.parse_sass(LOOP.format(load=load, between=between)))
    assert [i.address for i in found] == ([0x40] if early else [])


@pytest.mark.slow
def test_heads_in_two_spans_take_the_queries_of_their_block() -> None:
    done = run_compiling("-m", "qflash", "verify", "--case", "vit-729-72", "--target", "sm_90", "--format", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = json.loads(done.stdout)
    assert report["kernel"] == "hopper_kernel" and report["passed"] and report["error"] is None


def test_verification_says_that_it_needs_a_disassembler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(sass, "find_tool", lambda name: None)
    with pytest.raises(verify.VerificationError, match="no disassembler"):
        verify.verify()


def test_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(verify.VerificationError, match="TRITON_INTERPRET"):
        verify.verify()


if __name__ == "__main__":
    _print_planted()
