"""The reader of machine code: instructions, what is float among them, loops, the tools that disassemble."""

from __future__ import annotations

import pathlib

import pytest

from qflash_lab.verify import sass


def _one(text: str) -> sass.Instruction:
    instructions = sass.parse_sass(f"        /*0010*/                   {text} ;")
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
    assert sass.is_float(_one(text))
    assert not sass.is_constant_move(_one(text))


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
    assert not sass.is_float(_one(text))


@pytest.mark.parametrize(
    "text",
    [
        "HFMA2.MMA R5, -RZ, RZ, 0, 0",
        "HFMA2 R0, -RZ, RZ, 0, 5.9604644775390625e-08",
        "@P1 HFMA2.MMA R3, -RZ, RZ, 1.875, -0",
        "HFMA2 R9, -RZ, RZ, 0, 0                ?trans1",
        "HFMA2 R14, -RZ, RZ, 0, 0               &req={0}    ?trans1",
    ],
)
def test_constant_moves_are_no_arithmetic(text: str) -> None:
    assert sass.is_constant_move(_one(text))
    assert not sass.is_float(_one(text))


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
    instructions = sass.parse_sass(SASS)
    assert len(instructions) == 15
    assert instructions[0].source == "kernel.py:7"
    assert instructions[3].source == "kernel.py:9"
    spans = [(body[0].address, body[-1].address) for body in sass.find_loops(instructions)]
    assert spans == [(0x10, 0x30), (0x40, 0x70), (0x80, 0xC0), (0xA0, 0xB0)]
    # one pass with a masked twin (3 and 4 instructions), one pass of two products with a small loop inside (5)
    assert sass.hot_loop_sizes(instructions) == [3, 5]


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
    instructions = sass.parse_sass(text)
    (loop,) = sass.find_loops(instructions)
    assert [i.address for i in loop] == [0x30, 0x40]
    assert sass.hot_loop_sizes(instructions) == []


def test_addresses_instead_of_labels() -> None:
    text = """
        /*0000*/                   IMMA.16832.S8.S8 R4, R8.ROW, R10.COL, RZ ;   /* 0x0000000000047802 */
                                                                            /* 0x000fe20000000f00 */
        /*0010*/              @!P0 BRA 0x0 ;                                    /* 0x0000000000007947 */
"""
    assert sass.hot_loop_sizes(sass.parse_sass(text)) == [2]


def test_missing_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("TRITON_NVDISASM_PATH", str(tmp_path / "nowhere"))
    with pytest.raises(sass.DisassemblyError, match="TRITON_NVDISASM_PATH"):
        sass.find_tool("nvdisasm")
    monkeypatch.delenv("TRITON_NVDISASM_PATH")
    assert sass.find_tool("nvdisasm") is not None
    monkeypatch.setattr(sass, "find_tool", lambda name: None)
    with pytest.raises(sass.DisassemblyError, match="no disassembler"):
        sass.disassemble(b"")
