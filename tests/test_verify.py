"""``qflash verify``: the reader of machine code, a planted float, and the real kernels on three targets.

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
from qflash import verify


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
    found = verify.early_operands(verify.parse_sass(LOOP.format(load=load, between=between)))
    assert [i.address for i in found] == ([0x40] if early else [])


@pytest.mark.slow
def test_heads_in_two_spans_take_the_queries_of_their_block() -> None:
    done = run_compiling("-m", "qflash", "verify", "--case", "vit-729-72", "--target", "sm_90", "--format", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = json.loads(done.stdout)
    assert report["kernel"] == "hopper_kernel" and report["passed"] and report["error"] is None


def _one(text: str) -> verify.Instruction:
    instructions = verify.parse_sass(f"        /*0010*/                   {text} ;")
    (instruction,) = instructions
    return instruction


@pytest.mark.parametrize(
    "text",
    [
        "FADD R4, R4, R5",
        "@P0 FMUL R4, R4, 1.5",
        "@!UP1 FFMA.FTZ R1, R2, R3, R4",
        "FSETP.GEU.AND P0, PT, |R4|, 1.175e-38, PT",
        "FMNMX R0, R1, R2, !PT",
        "FSEL R0, R1, R2, P0",
        "FCHK P0, R1, R2",
        "MUFU.RCP R6, R6",
        "I2F.RP R6, R7",
        "I2FP.F32.S32 R4, R4",
        "UI2FP.F32.U32 UR4, UR4",
        "F2I.FTZ.U32.TRUNC.NTZ R5, R4",
        "F2F.F64.F32 R2, R4",
        "F2FP.BF16.F32.PACK_AB R4, R5, R4",
        "FRND R0, R1",
        "HADD2.F32 R0, -RZ, R1.H0_H0",
        "HMUL2 R1, R2, R3",
        "HFMA2 R0, R1, R2, RZ",
        "HFMA2.MMA R0, R1, 1, 1, RZ",
        "HMMA.16816.F32 R4, R8, R12, R4",
        "HGMMA.64x64x16.F32 R24, gdesc[UR4], R24",
        "QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24",
        "UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UPT",
        "DADD R2, R2, R4",
        "DMMA.884 R2, R2, R4, R2",
        "RED.E.ADD.F32.FTZ.RN.STRONG.GPU [R2.64], R5",
        "UFADD UR4, UR4, UR5",
        "FNEWTHING R1, R2",
    ],
)
def test_float_instructions(text: str) -> None:
    assert verify.is_float(_one(text))
    assert not verify.is_constant_move(_one(text))


@pytest.mark.parametrize(
    "text",
    [
        "IMMA.16832.S8.S8.SAT R64, R76.reuse.ROW, R56.COL, RZ",
        "IGMMA.64x128x32.S8.S8 R88, gdesc[UR20], RZ, !UPT",
        "UTCIMMA gdesc[UR4], gdesc[UR6], tmem[UR15], tmem[UR10], idesc[UR11], !UPT",
        "IMAD.MOV.U32 R15, RZ, RZ, 0x3f800000",
        "ULDC.64 UR16, c[0x0][0x230]",
        "FLO.U32 R4, R5",
        "UFLO.U32 UR4, UR5",
        "FENCE.VIEW.ASYNC.S",
        "DEPBAR.LE SB0, 0x0",
        "I2IP.S8.S32.SAT R4, R5, R6, RZ",
        "SHF.R.S32.HI R4, RZ, 0x1f, R4",
        "USHF.R.S32.HI UR4, URZ, 0x1f, UR10",
        "SHFL.BFLY PT, R4, R5, 0x1, 0x1f",
        "LDGDEPBAR",
        "BRA.U UP0, `(.L_x_0)",
    ],
)
def test_integer_instructions(text: str) -> None:
    assert not verify.is_float(_one(text))


@pytest.mark.parametrize(
    "text",
    [
        "HFMA2.MMA R5, -RZ, RZ, 0, 0",
        "HFMA2 R0, -RZ, RZ, 0, 5.9604644775390625e-08",
        "@P1 HFMA2.MMA R3, -RZ, RZ, 1.875, -0",
        "HFMA2 R9, -RZ, RZ, 0, 0                ?trans1",
    ],
)
def test_constant_moves_are_no_arithmetic(text: str) -> None:
    assert verify.is_constant_move(_one(text))
    assert not verify.is_float(_one(text))


SASS = """
	//## File "/somewhere/kernel.py", line 7
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   IMMA.16832.S8.S8 R4, R8.ROW, R10.COL, RZ ;
        /*0020*/                   VIMNMX R5, R4, R6, !PT ;
	//## File "/somewhere/kernel.py", line 9
        /*0030*/              @!P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0040*/                   IMMA.16832.S8.S8 R4, R8.ROW, R10.COL, RZ ;
        /*0050*/                   IMAD R4, R4, R5, R6 ;
        /*0060*/                   VIMNMX R5, R4, R6, !PT ;
        /*0070*/               @P0 BRA `(.L_x_2) ;
.L_x_3:
        /*0080*/                   IMMA.16832.S8.S8 R4, R8.ROW, R10.COL, RZ ;
        /*0090*/                   IMMA.16832.S8.S8 R4, R8.ROW, R10.COL, RZ ;
.L_x_4:
        /*00a0*/                   IADD3 R4, R4, 0x1, RZ ;
        /*00b0*/               @P0 BRA `(.L_x_4) ;
        /*00c0*/               @P0 BRA `(.L_x_3) ;
        /*00d0*/                   EXIT ;
.L_x_5:
        /*00e0*/                   BRA `(.L_x_5);
        /*00f0*/                   NOP;
"""


def test_loops_and_sources() -> None:
    instructions = verify.parse_sass(SASS)
    assert len(instructions) == 15
    assert instructions[0].source == "kernel.py:7"
    assert instructions[3].source == "kernel.py:9"
    spans = [(body[0].address, body[-1].address) for body in verify.find_loops(instructions)]
    assert spans == [(0x10, 0x30), (0x40, 0x70), (0x80, 0xC0), (0xA0, 0xB0)]
    # one pass with a masked twin (3 and 4 instructions), one pass of two products with a small loop inside (5)
    assert verify.hot_loop_sizes(instructions) == [3, 5]


def test_waiting_behind_the_code_is_no_loop_around_it() -> None:
    text = """
        /*0000*/              @!P0 BRA `(.L_wait) ;
.L_back:
        /*0010*/                   IMMA.16832.S8.S8 R4, R8.ROW, R10.COL, RZ ;
        /*0020*/                   EXIT ;
.L_wait:
        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R5 ;
        /*0040*/                   BRA.U !UP0, `(.L_wait) ;
        /*0050*/                   BRA `(.L_back) ;
"""
    instructions = verify.parse_sass(text)
    (loop,) = verify.find_loops(instructions)
    assert [i.address for i in loop] == [0x30, 0x40]
    assert verify.hot_loop_sizes(instructions) == []


def test_addresses_instead_of_labels() -> None:
    text = """
        /*0000*/                   IMMA.16832.S8.S8 R4, R8.ROW, R10.COL, RZ ;   /* 0x0000000000047802 */
                                                                            /* 0x000fe20000000f00 */
        /*0010*/              @!P0 BRA 0x0 ;                                    /* 0x0000000000007947 */
"""
    assert verify.hot_loop_sizes(verify.parse_sass(text)) == [2]


def test_missing_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("TRITON_NVDISASM_PATH", str(tmp_path / "nowhere"))
    with pytest.raises(verify.VerificationError, match="TRITON_NVDISASM_PATH"):
        verify.find_tool("nvdisasm")
    monkeypatch.delenv("TRITON_NVDISASM_PATH")
    assert verify.find_tool("nvdisasm") is not None
    monkeypatch.setattr(verify, "find_tool", lambda name: None)
    with pytest.raises(verify.VerificationError, match="no disassembler"):
        verify.disassemble(b"")


def test_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(verify.VerificationError, match="TRITON_INTERPRET"):
        verify.verify()


if __name__ == "__main__":
    _print_planted()
