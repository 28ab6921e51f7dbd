"""Shared-memory accesses that leave a block's shared memory, found in machine code without running it.

ptxas has been seen to work a thread's offset out anew from a register that no longer held what it once did (Triton 3.6's, in a
kernel short of registers, from PTX that was right): a thread then writes where nobody may. Most addresses in shared memory
follow from the thread's number and constants alone, so they can be worked out here, for all threads of a block at once.
Whatever depends on anything else (memory, arguments, the block's place, a second turn of a loop) is unknown, and an access to
an unknown address passes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

import numpy as np

from .sass import Instruction, basic_blocks, is_predicate

WINDOW = 0x400
"""Where a block's shared memory begins: the first kilobyte is the system's."""
_MASK = 0xFFFFFFFF
_ACCESSES = {"LDS", "STS", "LDSM", "STSM", "LDGSTS", "ATOMS"}
_WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
# these only read predicates
_NO_RESULT = {"STS", "STSM", "STG", "LDGSTS", "RED", "BRA", "EXIT"}

Numbers = np.ndarray
"""One for each thread of a block: integers below 2**32, or truth values."""


@dataclasses.dataclass
class _State:
    """What is known where control has come to: registers and predicates by name, spilled registers by offset."""

    registers: dict[str, Numbers] = dataclasses.field(default_factory=dict)
    spilled: dict[str, Numbers] = dataclasses.field(default_factory=dict)

    def copy(self) -> _State:
        return _State(dict(self.registers), dict(self.spilled))

    def meet(self, other: _State) -> _State:
        """What both know alike."""

        def alike(a: dict[str, Numbers], b: dict[str, Numbers]) -> dict[str, Numbers]:
            return {name: x for name, x in a.items() if name in b and np.array_equal(x, b[name])}

        return _State(alike(self.registers, other.registers), alike(self.spilled, other.spilled))


def _size(parts: Sequence[str]) -> int:
    """Bytes that a load or a store moves for a thread, by its modifiers."""
    return next((_WIDTHS[part] for part in parts if part in _WIDTHS), 4)


def _signed(x: Numbers) -> Numbers:
    return ((x + 2**31) & _MASK) - 2**31


def _lop3(a: Numbers, b: Numbers, c: Numbers, table: int) -> Numbers:
    """Bit by bit what a table of eight says of three bits."""
    result = np.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            chosen = [x if index & place else ~x & _MASK for x, place in ((a, 4), (b, 2), (c, 1))]
            result |= chosen[0] & chosen[1] & chosen[2]
    return result


def _left(x: Numbers, by: Numbers) -> Numbers:
    return np.where(by < 32, x << np.minimum(by, 31), 0)


_COMPARE: dict[str, Callable[[Numbers, Numbers], Numbers]] = {
    "GE": np.greater_equal, "GT": np.greater, "LE": np.less_equal, "LT": np.less, "EQ": np.equal, "NE": np.not_equal,
}  # fmt: skip


class _Block:
    """A block of threads that carries out as much as is known."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.state = _State()

    def value(self, text: str) -> Numbers | None:
        """An operand, None if it is unknown."""
        found = re.fullmatch(r"(-?)(~?)(U?R(?:\d+|Z)|0x[0-9a-f]+)(?:\.reuse)?", text.strip())
        if found is None:
            return None
        minus, inverse, name = found.groups()
        x: Numbers | None
        if name in ("RZ", "URZ"):
            x = np.zeros(self.threads, dtype=np.int64)
        elif name.startswith("0x"):
            x = np.full(self.threads, int(name, 16), dtype=np.int64)
        else:
            x = self.state.registers.get(name)
        if x is None:
            return None
        return (~x if inverse else -x if minus else x) & _MASK

    def predicate(self, text: str) -> Numbers | None:
        """A predicate, None if it is unknown."""
        name = text.strip().removeprefix("!")
        x = np.ones(self.threads, dtype=bool) if name in ("PT", "UPT") else self.state.registers.get(name)
        return x if x is None or not text.strip().startswith("!") else ~x

    def active(self, instruction: Instruction) -> Numbers | None:
        """The threads that carry an instruction out, None if they are unknown."""
        return self.predicate(instruction.guard or "PT")

    def write(self, name: str, x: Numbers | None, active: Numbers | None) -> None:
        """Set a register or predicate in active threads; None is unknown."""
        if name in ("RZ", "URZ", "PT", "UPT"):
            return
        before = self.state.registers.get(name)
        if x is None or active is None or (before is None and not active.all()):
            self.state.registers.pop(name, None)
        else:
            self.state.registers[name] = x if before is None else np.where(active, x, before)

    def address(self, text: str) -> Numbers | None:
        """The sum in a pair of brackets."""
        terms = [self.value(term) for term in text.replace("+-", "+ -").split("+")]
        known = [term for term in terms if term is not None]
        return sum(known, np.zeros(self.threads, dtype=np.int64)) & _MASK if len(known) == len(terms) else None

    def result(self, base: str, parts: Sequence[str], operands: Sequence[str]) -> Numbers | None:
        """What a known integer instruction writes to its first operand; None if that is unknown."""
        # predicates among the operands are carries
        names = [name for name in operands[1:] if not is_predicate(name)]
        x = [self.value(name) for name in names]
        name = base.removeprefix("U")
        if base == "S2R" and operands[1] == "SR_TID.X":
            return np.arange(self.threads, dtype=np.int64)
        if base in ("S2R", "S2UR") and operands[1] == "SR_CgaCtaId":
            return np.zeros(self.threads, dtype=np.int64)
        if name == "MOV" or (name == "IMAD" and "MOV" in parts):
            return x[-1]
        if base == "R2UR" and x[0] is not None:
            # that of a warp's first thread
            return x[0].reshape(-1, 32)[:, :1].repeat(32, 1).reshape(-1)
        if name == "LOP3":
            return self.logic(names, x)
        if name == "SEL" and len(x) > 1 and x[0] is not None and x[1] is not None:
            chosen = self.predicate(operands[3])
            return None if chosen is None else np.where(chosen, x[0], x[1])
        known = [number for number in x if number is not None]
        if len(known) < len(x) or not known or {"X", "HI_X"} & set(parts):
            return None
        if name == "IMAD" and not {"WIDE", "HI"} & set(parts) and len(x) == 3:
            return (_signed(known[0]) * _signed(known[1]) + _signed(known[2])) & _MASK
        if name in ("IADD3", "VIADD"):
            return sum(known, np.zeros(self.threads, dtype=np.int64)) & _MASK
        if name == "LEA" and "HI" not in parts and len(x) == 3:
            return (_left(known[0], known[2]) + known[1]) & _MASK
        if name == "LEA" and "SX32" not in parts and len(x) == 4 and not known[2].any():
            return ((known[0] >> (32 - known[3])) + known[1]) & _MASK
        if name == "SHF" and not {"64", "S64", "U64", "W"} & set(parts) and len(x) == 3:
            if parts[1] == "R" and "HI" in parts and not known[0].any():
                by = np.minimum(known[1], 32)
                return known[2] >> by if "U32" in parts else (_signed(known[2]) >> by) & _MASK
            if parts[1] == "L" and "HI" not in parts and not known[2].any():
                return _left(known[0], known[1]) & _MASK
        if name in ("VIMNMX", "IMNMX") and operands[3] in ("PT", "UPT", "!PT", "!UPT"):
            a, b = known[:2] if "U32" in parts else (_signed(known[0]), _signed(known[1]))
            return (np.maximum(a, b) if operands[3].startswith("!") else np.minimum(a, b)) & _MASK
        if name == "SGXT":
            bits = int(known[1][0])
            low = known[0] & ((1 << bits) - 1)
            return low if "U32" in parts else np.where(low >> (bits - 1) & 1, low - (1 << bits), low) & _MASK
        return None

    def logic(self, names: Sequence[str], x: Sequence[Numbers | None]) -> Numbers | None:
        """A bitwise operation of three, of which the third often does not matter."""
        if len(names) < 4 or not names[3].startswith("0x"):
            return None
        table = int(names[3], 16)
        if table & 0x55 == (table >> 1) & 0x55:
            x = [x[0], x[1], np.zeros(self.threads, dtype=np.int64)]
        a, b, c = x[:3]
        return None if a is None or b is None or c is None else _lop3(a, b, c, table)

    def compare(self, parts: Sequence[str], operands: Sequence[str], active: Numbers | None) -> None:
        """An ISETP."""
        a, b, others = self.value(operands[2]), self.value(operands[3]), self.predicate(operands[4])
        truth = None
        if a is not None and b is not None and others is not None and parts[1] in _COMPARE and "EX" not in parts:
            if "U32" not in parts:
                a, b = _signed(a), _signed(b)
            truth = _COMPARE[parts[1]](a, b)
            truth = truth | others if "OR" in parts else truth & others if "AND" in parts else None
        self.write(operands[0], truth, active)
        self.write(operands[1], None, active)

    def spill(self, parts: Sequence[str], operands: Sequence[str], active: Numbers | None) -> None:
        """A store to local memory, or a load from it."""
        store = parts[0] == "STL"
        place, number = operands[:2] if store else (operands[1], operands[0])
        at = re.search(r"\[R1(?:\+(0x[0-9a-f]+))?\]", place)
        first = re.fullmatch(r"R(\d+)(?:\.reuse)?", number)
        if store and at is None:
            # it may be anywhere
            self.state.spilled.clear()
            return
        for index in range(max(1, _size(parts) // 4)):
            offset = str(int(at[1] or "0", 16) + 4 * index) if at else "unknown"
            name = f"R{int(first[1]) + index}" if first else number
            if not store:
                self.write(name, self.state.spilled.get(offset), active)
            elif (x := self.value(name)) is None or active is None or not active.all():
                self.state.spilled.pop(offset, None)
            else:
                self.state.spilled[offset] = x

    def carry_out(self, instruction: Instruction) -> None:
        """Change what is known as an instruction does."""
        parts, operands = instruction.parts, instruction.operand_list
        base = parts[0]
        active = self.active(instruction)
        if base in _NO_RESULT:
            return
        if base in ("STL", "LDL"):
            self.spill(parts, operands, active)
            return
        if base.removeprefix("U") == "ISETP":
            self.compare(parts, operands, active)
            return
        if base == "PLOP3" and [*operands[1:4], *operands[5:]] == ["PT", "PT", "PT", "0x80", "0x0"]:
            # the conjunction of three, two of them true
            self.write(operands[0], self.predicate(operands[4]), active)
            return
        # predicates may be read here or written, where only a choice is sure to read them: forgetting one does no harm
        for name in re.findall(r"\bU?P\d\b", instruction.operands if base not in ("SEL", "USEL", "R2P") else ""):
            self.write(name, None, active)
        if base == "R2P":
            for index in range(7):
                self.write(f"P{index}", None, None)
            return
        if is_predicate(operands[0]):
            operands = operands[1:]
        for name in instruction.written:
            self.write(name, None if base == "SHFL" or name != operands[0] else self.result(base, parts, operands), active)

    def outside(self, instruction: Instruction, shared: int) -> bool | None:
        """Tell whether an access is known to leave ``shared`` bytes, or to be misaligned; None if it is no known access."""
        parts = instruction.parts
        found = re.search(r"(?<!desc)\[([^\]]*)\]", instruction.operands)
        if parts[0] not in _ACCESSES or found is None or instruction.guard == "!PT":
            return None
        at = self.address(found[1])
        active = self.active(instruction)
        if at is None or active is None:
            return None
        size = _size(parts)
        if parts[0] in ("LDSM", "STSM"):
            # each row of a matrix is at a thread's address
            size = 16
            active = active & (np.arange(self.threads) % 32 < 8 * instruction.matrices)
        wrong = (at < WINDOW) | (at + size > WINDOW + shared) | (at % size != 0)
        return bool((wrong & active).any())


def accesses_outside(kernel: Sequence[Instruction], threads: int, shared: int) -> tuple[list[Instruction], int]:
    """Return the accesses that leave a block's shared memory or are misaligned, and how many accesses are known.

    Args:
        kernel: its instructions in the order of their addresses.
        threads: of a block.
        shared: bytes of shared memory of a block.
    """
    found: list[Instruction] = []
    known = 0
    blocks, successors = basic_blocks(kernel)
    loops = [(header, last) for last, goals in enumerate(successors) for header in goals if header <= last]
    before: dict[int, _State] = {0: _State()}
    block = _Block(threads)
    for index, instructions in enumerate(blocks):
        if index not in before:
            continue
        block.state = before[index].copy()
        for instruction in instructions:
            outside = block.outside(instruction, shared)
            known += outside is not None
            if outside:
                found.append(instruction)
            block.carry_out(instruction)
        for following in successors[index]:
            if following <= index:
                # of a loop the first turn counts
                continue
            after = block.state.copy()
            for header, last in loops:
                if header <= index <= last < following and header in before:
                    # behind it, what no turn has changed
                    after = after.meet(before[header])
            before[following] = before[following].meet(after) if following in before else after
    return found, known
