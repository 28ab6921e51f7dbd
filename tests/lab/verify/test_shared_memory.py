"""Accesses to shared memory whose addresses are worked out from machine code."""

from __future__ import annotations

import json

import pytest

from helpers import run_compiling
from qflash_lab.verify import sass
from qflash_lab.verify.shared_memory import accesses_outside

# R0: a thread's number of 128; R4: where shared memory begins
START = """
S2R R0, SR_TID.X
UMOV UR4, 0x400
S2UR UR5, SR_CgaCtaId
ULEA UR4, UR5, UR4, 0x18
"""


def code(text: str) -> list[sass.Instruction]:
    """Machine code as nvdisasm prints it, from instructions and labels a line each."""
    lines, address = [], 0
    for line in (START + text).strip().splitlines():
        if line.endswith(":"):
            lines.append(line)
            continue
        lines.append(f"        /*{address:04x}*/                   {line} ;")
        address += 16
    return sass.parse_sass("\n".join(lines))


def outside(text: str, shared: int = 512) -> list[str]:
    """The accesses found; all of them are known."""
    instructions = code(text)
    found, known = accesses_outside(instructions, 128, shared)
    assert known == sum(i.base in ("LDS", "STS", "LDSM") for i in instructions)
    return [f"{i.opcode} {i.operands}" for i in found]


# what the assembler of Triton 3.6 made of two offsets, (tid & 120) * 8 and (tid & 120) / 2: the second from the first
OVERWRITTEN = """
LOP3.LUT R49, R0, 0x78, RZ, 0xc0, !PT
IMAD R49, R49, 0x8, RZ
STS [R49+UR4], R24
SHF.R.U32.HI R3, RZ, 0x1, R49
STS [R3+UR4+0x3c0], R24
"""


def test_an_offset_from_a_register_that_was_overwritten_is_found() -> None:
    assert outside(OVERWRITTEN, 1024) == ["STS [R3+UR4+0x3c0], R24"]
    right = OVERWRITTEN.replace("IMAD R49, R49", "IMAD R50, R49").replace("[R49+", "[R50+")
    assert outside(right, 1024) == []


@pytest.mark.parametrize(
    ("text", "shared", "wrong"),
    [
        ("IMAD.SHL.U32 R1, R0, 0x4, RZ\nSTS [R1+UR4], R9", 512, False),
        ("IMAD.SHL.U32 R1, R0, 0x4, RZ\nSTS [R1+UR4], R9", 508, True),
        ("IMAD.SHL.U32 R1, R0, 0x4, RZ\nSTS [R1+UR4+-0x4], R9", 512, True),  # before its beginning
        ("IMAD.SHL.U32 R1, R0, 0x4, RZ\nLDS.64 R8, [R1+UR4]", 1024, True),  # misaligned
        ("LEA R1, R0, UR4, 0x3\nLDS.64 R8, [R1]", 1024, False),
        ("LEA.HI R1, R0, UR4, RZ, 0x1f\nLDS.U8 R8, [R1]", 64, False),
        ("LEA.HI R1, R0, UR4, RZ, 0x1f\nLDS.U8 R8, [R1]", 63, True),
        ("IADD3 R1, R0, -0x40, UR4\nLDS.U8 R8, [R1+0x40]", 128, False),
        ("VIADD R1, R0, UR4\nLOP3.LUT R1, R1, 0x7fc, RZ, 0xc0, !PT\nLDS R8, [R1]", 128, False),
        ("VIMNMX R1, R0, 0x3, PT\nIMAD R1, R1, 0x4, RZ\nSTS [R1+UR4], R9", 16, False),
        ("VIMNMX R1, R0, 0x3, !PT\nIMAD R1, R1, 0x4, RZ\nSTS [R1+UR4], R9", 16, True),
        # matrices take the addresses of eight threads, or of all
        ("LOP3.LUT R1, R0, 0x1f, RZ, 0xc0, !PT\nIMAD.SHL.U32 R1, R1, 0x10, RZ\nLDSM.16.M88 R8, [R1+UR4]", 128, False),
        ("LOP3.LUT R1, R0, 0x1f, RZ, 0xc0, !PT\nIMAD.SHL.U32 R1, R1, 0x10, RZ\nLDSM.16.M88.4 R8, [R1+UR4]", 128, True),
        # threads that a predicate leaves out do no harm
        ("IMAD.SHL.U32 R1, R0, 0x4, RZ\nISETP.GE.U32.AND P0, PT, R0, 0x4, PT\n@!P0 STS [R1+UR4], R9", 16, False),
        ("IMAD.SHL.U32 R1, R0, 0x4, RZ\nISETP.GT.U32.AND P0, PT, R0, 0x4, PT\n@!P0 STS [R1+UR4], R9", 16, True),
        ("ISETP.NE.AND P0, PT, R0, RZ, PT\nSEL R1, RZ, 0x8, P0\nSTS [R1+UR4], R9", 12, False),
        ("UISETP.NE.AND UP0, UPT, UR5, URZ, UPT\nPLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0\n@P0 STS [R0+UR4], R9", 4, False),
        ("ISETP.NE.AND P0, PT, R0, RZ, PT\nSEL R1, RZ, 0x8, P0\nSTS [R1+UR4], R9", 8, True),
        # put aside and taken back
        ("IMAD.SHL.U32 R1, R0, 0x4, RZ\nSTL [R1+0x8], R1\nMOV R1, RZ\nLDL R2, [R1+0x8]\nSTS [R2+UR4], R9", 508, True),
        ("R2UR UR6, R0\nULOP3.LUT UR6, UR6, 0x60, URZ, 0xc0, !UPT\nUIADD3 UR6, UR6, UR4, URZ\nSTS [UR6], R9", 100, False),
        ("R2UR UR6, R0\nULOP3.LUT UR6, UR6, 0x60, URZ, 0xc0, !UPT\nUIADD3 UR6, UR6, UR4, URZ\nSTS [UR6], R9", 96, True),
    ],
)  # fmt: skip
def test_addresses(text: str, shared: int, wrong: bool) -> None:
    assert bool(outside(text, shared)) == wrong


@pytest.mark.parametrize(
    "text",
    [
        "ULDC UR6, c[0x0][0x210]\nSTS [R0+UR6], R9",  # an argument
        "LDG.E R1, desc[UR8][R2.64]\nSTS [R1+UR4], R9",
        "IMAD.WIDE R0, R5, R6, R8\nMOV R1, R0\nSTS [R1+UR4], R9",
        "IGMMA.64x64x32.S8.S8 R0, gdesc[UR8], RZ, !UPT\nSTS [R31+UR4], R9",
        "SHFL.BFLY PT, R1, R0, 0x1, 0x1f\nSTS [R1+UR4], R9",
        "S2R R1, SR_CTAID.X\nSTS [R1+UR4], R9",
        "STL [R1], R0\nSTL [R9], R7\nLDL R2, [R1]\nSTS [R2+UR4], R9",  # which may have gone there, too
        "STL [R1], R0\nLDL R2, [R9]\nSTS [R2+UR4], R9",
        # of two ways neither is known to be taken
        "ISETP.NE.AND P0, PT, R7, RZ, PT\nMOV R1, RZ\n@P0 BRA `(.L_x_1)\nMOV R1, 0x8000\n.L_x_1:\nSTS [R1+UR4], R9",
    ],
)
def test_what_is_unknown_passes(text: str) -> None:
    instructions = code(text)
    assert accesses_outside(instructions, 128, 16) == ([], 0)


def test_of_a_loop_the_first_turn_counts() -> None:
    loop = "MOV R1, RZ\n.L_x_1:\nSTS [R1+UR4], R9\nVIADD R1, R1, 0x100\n@P1 BRA `(.L_x_1)\nEXIT"
    assert outside(loop, 16) == []
    assert outside(loop.replace("MOV R1, RZ", "MOV R1, 0x10"), 16) == ["STS [R1+UR4], R9"]
    # behind it nobody knows how many there were
    behind = loop.replace("EXIT", "STS [R1+UR4], R9\nEXIT")
    assert accesses_outside(code(behind), 128, 16) == ([], 1)


COMPILED = """
import json
from qflash_lab.verify import cases, sass
from qflash_lab.verify.compile import compile_call
from qflash_lab.verify.shared_memory import accesses_outside

(case,) = [case for case in cases.CASES if case.name == "vit-hundreds"]
compiled = compile_call(cases.kernel_call(case, "sm_90"), "sm_90")
instructions = sass.parse_sass(sass.disassemble(compiled.asm["cubin"])[0])
shared = compiled.metadata.shared
accesses = [i for i in instructions if i.base in ("LDS", "STS", "LDSM", "STSM", "LDGSTS") and i.guard != "!PT"]
found = [accesses_outside(instructions, 128, bytes) for bytes in (shared, shared // 2)]
print(json.dumps([len(accesses), *([len(outside), known] for outside, known in found)]))
"""


@pytest.mark.slow
def test_most_addresses_of_a_kernel_are_known_and_inside() -> None:
    done = run_compiling("-c", COMPILED)
    assert done.returncode == 0, done.stderr
    accesses, (inside, known), (outside_half, _) = json.loads(done.stdout)
    assert inside == 0 and outside_half > 10
    assert 50 < 0.85 * accesses < known <= accesses
