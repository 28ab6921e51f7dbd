"""NVIDIA machine code (SASS): disassembled, read into instructions, their blocks and loops.

Nothing here knows what is looked for in it: that is :mod:`.verify.proof` and :mod:`.verify.shared_memory`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence


class DisassemblyError(RuntimeError):
    """Machine code cannot be disassembled here."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One SASS instruction.

    Attributes:
        address: byte offset in the code.
        opcode: with its modifiers.
        operands: everything after the opcode.
        source: file and line of the Python source it comes from, if known.
        guard: the predicate that can turn it off, ``"!P0"`` for instance; empty if there is none.
        target: where a branch goes, if it says so.
    """

    address: int
    opcode: str
    operands: str
    source: str = ""
    guard: str = ""
    target: int | None = None

    @property
    def predicated(self) -> bool:
        """Whether a predicate can turn it off."""
        return bool(self.guard)

    @property
    def parts(self) -> list[str]:
        """The opcode without modifiers, then these."""
        return self.opcode.split(".")

    @property
    def base(self) -> str:
        """The opcode without modifiers."""
        return self.parts[0]

    @property
    def operand_list(self) -> list[str]:
        """The operands one by one."""
        return [operand.strip() for operand in self.operands.split(",")]

    @property
    def matrices(self) -> int:
        """Matrices of eight rows of sixteen bytes that an LDSM or STSM moves."""
        last = self.parts[-1]
        return int(last) if last in ("2", "4") else 1

    @property
    def written(self) -> tuple[str, ...]:
        """The registers that it writes, predicates left out."""
        operands, parts = self.operand_list, self.parts
        if is_predicate(operands[0]) and len(operands) > 1 and self.base != "FCHK":
            # one that is written besides
            operands = operands[1:]
        first = re.fullmatch(r"(U?R)(\d+)", operands[0])
        if first is None or self.base in ("STS", "STG", "STL", "STSM"):
            return ()
        count = max({"64": 2, "128": 4, "WIDE": 2}.get(part, 1) for part in parts)
        if shape := re.search(r"GMMA\.64x(\d+)x", self.opcode):
            count = int(shape[1]) // 2
        elif is_tensor_core(self):
            count = 4
        elif self.base == "LDSM":
            count = self.matrices
        elif (self.base == "CS2R" and "32" not in parts) or (self.base == "F2I" and {"S64", "U64"} & set(parts)):
            count = 2
        return tuple(f"{first[1]}{int(first[2]) + index}" for index in range(count))


# Anything that looks like float counts as float unless named here, so that an opcode nobody has seen yet fails.
_FLOAT_BASE = re.compile(r"U?(?:[FHD][A-Z0-9_]+|MUFU|I2F[A-Z0-9]*|UTC[HQO]M+A|[QO]G?MMA)")
_NOT_FLOAT = re.compile(r"U?(?:FLO|FENCE|FOOTPRINT|DEPBAR)")
_FLOAT_MODIFIER = re.compile(r"\.(?:B?F(?:16|32|64)|TF32|E\dM\d)")
_ZERO_OR_NUMBER = re.compile(r"[-+]?(?:U?RZ(?:\.H\d_H\d)?|0x[0-9a-f]+|\d[\d.]*(?:e[-+]?\d+)?|INF|QNAN)", re.IGNORECASE)
_TENSOR_CORE = re.compile(r"(?:UTC)?[A-Z]{1,2}MMA")
_PREDICATE = re.compile(r"!?U?P(?:\d|T)")

_SOURCE = re.compile(r'//## File "([^"]+)", line (\d+)')
_LABEL = re.compile(r"^\s*(\.L_[\w.]+):")
# ?trans1 and &req={0} behind the operands are none
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+\{?\s*(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;?&]*)[;?&]")
_BRANCH_TARGET = re.compile(r"`\((\.L_[\w.]+)\)|\b(0x[0-9a-f]+)")


def is_predicate(operand: str) -> bool:
    """Tell whether an operand is a predicate, a thread's or a warp's."""
    return bool(_PREDICATE.fullmatch(operand))


def is_constant_move(instruction: Instruction) -> bool:
    """Tell whether an HFMA2 only loads a constant: ptxas spreads moves over pipes and uses ``0 * 0 + c`` for it."""
    if instruction.base not in ("HFMA2", "HFMA2_MMA"):
        return False
    sources = instruction.operand_list[1:]
    return len(sources) >= 3 and all(_ZERO_OR_NUMBER.fullmatch(source) for source in sources)


def is_float(instruction: Instruction) -> bool:
    """Tell whether an instruction computes, compares, converts or selects floats (constant moves do not)."""
    if _NOT_FLOAT.fullmatch(instruction.base) or is_constant_move(instruction):
        return False
    return bool(_FLOAT_BASE.fullmatch(instruction.base) or _FLOAT_MODIFIER.search(instruction.opcode.upper()))


def is_tensor_core(instruction: Instruction) -> bool:
    """Tell whether an instruction is a matrix product on tensor cores, of any type."""
    return bool(_TENSOR_CORE.fullmatch(instruction.base))


def parse_sass(text: str) -> list[Instruction]:
    """Read the output of ``nvdisasm -c -g`` or ``cuobjdump -sass``; padding (NOP) is left out."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    goals: dict[int, str] = {}
    source = ""
    for line in text.splitlines():
        if found := _SOURCE.search(line):
            source = f"{pathlib.PurePath(found[1]).name}:{found[2]}"
        elif found := _LABEL.match(line):
            waiting.append(found[1])
        elif (found := _INSTRUCTION.search(line)) and found[3] != "NOP":
            address, opcode, operands = int(found[1], 16), found[3], found[4].strip()
            labels.update(dict.fromkeys(waiting, address))
            waiting.clear()
            instructions.append(Instruction(address, opcode, operands, source, guard=(found[2] or "").strip(" @")))
            if opcode.startswith(("BRA", "JMP")) and (to := _BRANCH_TARGET.findall(operands)):
                goals[address] = to[-1][0] or to[-1][1]
    for index, instruction in enumerate(instructions):
        if goal := goals.get(instruction.address):
            target = int(goal, 16) if goal.startswith("0x") else labels.get(goal)
            instructions[index] = dataclasses.replace(instruction, target=target)
    return instructions


def basic_blocks(instructions: Sequence[Instruction]) -> tuple[list[list[Instruction]], list[list[int]]]:
    """Return the basic blocks and, for each, the indices of its successors."""
    starts = {i.target for i in instructions if i.target is not None}
    blocks: list[list[Instruction]] = []
    fresh = True
    for instruction in instructions:
        if fresh or instruction.address in starts:
            blocks.append([])
        blocks[-1].append(instruction)
        fresh = instruction.base in ("BRA", "JMP", "BRX", "JMX", "EXIT", "RET")
    at = {block[0].address: index for index, block in enumerate(blocks)}
    successors = []
    for index, block in enumerate(blocks):
        last = block[-1]
        following = [] if last.target is None or last.target not in at else [at[last.target]]
        # a branch may also depend on a register or a uniform predicate among its operands
        conditional = last.predicated or (last.target is not None and "," in last.operands)
        leaves = last.base in ("BRA", "JMP", "BRX", "JMX", "EXIT", "RET") and not conditional
        if not leaves and index + 1 < len(blocks):
            following.append(index + 1)
        successors.append(following)
    return blocks, successors


def find_loops(instructions: Sequence[Instruction]) -> list[list[Instruction]]:
    """Return the body of every natural loop.

    A jump backwards is not enough: ptxas moves the waiting for a barrier behind the code and jumps back from there.
    """
    blocks, successors = basic_blocks(instructions)
    predecessors: list[list[int]] = [[] for _ in blocks]
    reachable, stack = set(), [0] if blocks else []
    while stack:
        index = stack.pop()
        if index not in reachable:
            reachable.add(index)
            stack.extend(successors[index])
    for index in reachable:
        for following in successors[index]:
            predecessors[following].append(index)
    dominators = {index: {0} if index == 0 else set(reachable) for index in reachable}
    changed = True
    while changed:
        changed = False
        for index in sorted(reachable - {0}):
            new = set.intersection(*(dominators[before] for before in predecessors[index])) | {index}
            if new != dominators[index]:
                dominators[index], changed = new, True
    bodies: dict[int, set[int]] = {}
    for index in reachable:
        for header in successors[index]:
            if header in dominators[index]:
                body = bodies.setdefault(header, {header})
                stack = [index]
                while stack:
                    member = stack.pop()
                    if member not in body:
                        body.add(member)
                        stack.extend(predecessors[member])
    return [[i for index in sorted(body) for i in blocks[index]] for _, body in sorted(bodies.items())]


def product_loops(instructions: Sequence[Instruction]) -> list[list[Instruction]]:
    """Return the loops that hold matrix products."""
    return [body for body in find_loops(instructions) if any(map(is_tensor_core, body))]


def hot_loop_sizes(instructions: Sequence[Instruction]) -> list[int]:
    """Return the instructions of one iteration of each hot loop; none for a kernel without a loop over keys.

    A hot loop is an innermost loop with matrix products. Each pass over the keys has up to two of them, with
    and without the test which keys take part, and both have the same products: the smaller one is the hot one.
    """
    matrix = product_loops(instructions)
    addresses = [{i.address for i in body} for body in matrix]
    smallest: dict[int, int] = {}
    for body, own in zip(matrix, addresses, strict=True):
        if not any(other < own for other in addresses):
            products = sum(map(is_tensor_core, body))
            smallest[products] = min(len(body), smallest.get(products, len(body)))
    return [smallest[products] for products in sorted(smallest)]


def find_tool(name: str) -> pathlib.Path | None:
    """Find ``nvdisasm`` or ``cuobjdump``: ``TRITON_<NAME>_PATH``, then Triton's own package, then ``PATH``.

    Raises:
        DisassemblyError: the environment variable names no file.
    """
    variable = f"TRITON_{name.upper()}_PATH"
    if given := os.environ.get(variable):
        if not pathlib.Path(given).is_file():
            raise DisassemblyError(f"{variable} is {given}, which is not a file")
        return pathlib.Path(given)
    spec = importlib.util.find_spec("triton")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        expected = pathlib.Path(root, "backends", "nvidia", "bin", name)
        for path in (expected, *pathlib.Path(root).glob(f"**/bin/{name}")):
            if path.is_file() and os.access(path, os.X_OK):
                return path
    found = shutil.which(name)
    return pathlib.Path(found) if found else None


def disassemblers() -> tuple[pathlib.Path | None, pathlib.Path | None]:
    """Return ``nvdisasm`` and ``cuobjdump``, one of which may be missing.

    Raises:
        DisassemblyError: both are.
    """
    tools = find_tool("nvdisasm"), find_tool("cuobjdump")
    if tools == (None, None):
        raise DisassemblyError(
            "no disassembler: neither nvdisasm nor cuobjdump is in Triton's package or on PATH; "
            "set TRITON_NVDISASM_PATH or TRITON_CUOBJDUMP_PATH"
        )
    return tools


def _run(*command: str | pathlib.Path) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


def disassemble(cubin: bytes) -> tuple[str, dict[str, int]]:
    """Return a cubin's SASS and, where ``cuobjdump`` exists, what it says of registers, stack and local memory.

    Raises:
        DisassemblyError: there is no disassembler.
    """
    nvdisasm, cuobjdump = disassemblers()
    with tempfile.TemporaryDirectory(prefix="qflash-sass-") as folder:
        path = pathlib.Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        sass = _run(nvdisasm, "-c", "-g", path) if nvdisasm else _run(cuobjdump or "", "-sass", path)
        usage = _run(cuobjdump, "-res-usage", path) if cuobjdump else ""
    return sass, {name.lower(): int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
