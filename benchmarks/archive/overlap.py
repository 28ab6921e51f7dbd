"""How tensor-core products and instructions share a processor of Hopper: ``python benchmarks/archive/overlap.py OUT.json``.

Warpgroups that do nothing but products of 64 x 128 numbers, a step of the tensor core deep, beside others that do nothing but
instructions of one kind; and warpgroups that do both by turns, freely or, with named barriers, one at its products at a time.
CUDA C is generated here, compiled by NVRTC, which PyTorch brings, and timed by the processor's own clock. Results say how many
cycles a product and an instruction take a quarter of a processor; on an H200 they are ``../results/overlap_h200.json``.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qflash_lab.bench import records

INSTRUCTIONS = {
    # of each of the two integer pipes, with three registers to read, two or one
    "imad, three registers": "mad.lo.s32 %0,%0,%1,%2;",
    "imad, two registers": "mad.lo.s32 %0,%0,12345,%1;",
    "lop3, three registers": "lop3.b32 %0,%0,%1,%2,0x96;",
    "shf, one register": "shf.l.wrap.b32 %0,%0,%0,5;",
}
MIXES = {
    "both pipes, few registers": ("imad, two registers", "shf, one register"),
    "both pipes, three registers": ("imad, three registers", "lop3, three registers"),
    **{name: (name, name) for name in INSTRUCTIONS},
}
PRODUCTS = {"int8": ("m64n128k32.s32.s8.s8", 64, ""), "fp16, sums in fp16": ("m64n128k16.f16.f16.f16", 32, ",1,1,0,0")}
LIBRARIES = Path(torch.__file__).resolve().parent.parent / "nvidia"
"""Where PyTorch's packages of CUDA libraries are, if it was built with CUDA."""
_CYCLES = 100_000
_MOST_GROUPS = 8


class Case(NamedTuple):
    """One kernel.

    Attributes:
        products: a key of PRODUCTS, None for none.
        mix: a key of MIXES, None for none.
        apart: warpgroups at products and at instructions; in turns the same ones do both.
        body: instructions of a loop, or of a turn.
        count: products of a turn, 0 where nobody takes turns.
        ordered: whether one warpgroup at a time is at its products.
    """

    products: str | None
    mix: str | None
    apart: tuple[int, int]
    body: int = 64
    count: int = 0  # type: ignore[assignment]
    ordered: bool = False


def cases() -> list[Case]:
    """Return everything that is measured."""
    found = [Case(None, mix, (0, groups)) for mix in MIXES for groups in (1, 2, 3)]
    for products in PRODUCTS:
        found += [Case(products, None, (groups, 0)) for groups in (1, 2)]
        found += [Case(products, mix, apart) for mix in MIXES for apart in ((1, 1), (1, 2), (2, 2))]
        for mix in tuple(MIXES)[:2]:
            for count, body in ((3, 256), (4, 512), (6, 512), (12, 512), (12, 1024)):
                for groups in (2, 3):
                    found += [Case(products, mix, (groups, 0), body, count, ordered) for ordered in (False, True)]
    return found


def _instructions(mix: str, count: int) -> str:
    lines = []
    for index in range(count):
        text = INSTRUCTIONS[MIXES[mix][index % 2]]
        inputs = [f'"r"({name}{index % 8})' for name in "yz"[: ("%1" in text) + ("%2" in text)]]
        lines.append(f'asm volatile("{text}" : "+r"(x{index % 8}) : {", ".join(inputs)});')
    return "\n".join(lines) + "\n"


def source(name: str, case: Case) -> str:
    """Return a case's kernel: it writes the rounds and cycles of each warpgroup of each block."""
    producers, others = case.apart
    groups = producers + others
    numbers = "".join(f"int {letter}{i} = seed * {i + 3} + threadIdx.x * {ord(letter)};" for letter in "xyz" for i in range(8))
    kept = "".join(f"keep ^= x{i};" for i in range(8))
    text = f"""extern "C" __global__ __launch_bounds__({128 * groups}, 1)
void {name}(int seed, unsigned cycles, unsigned* out) {{
extern __shared__ __align__(1024) int memory[];
for (int i = threadIdx.x; i < 8192; i += blockDim.x) memory[i] = i * 2654435761u * seed;
asm volatile("fence.proxy.async;"); __syncthreads();
unsigned rounds = 0; int keep = 0; int group = threadIdx.x / 128; unsigned start = clock();
"""
    if case.products:
        shape, registers, tail = PRODUCTS[case.products]
        sums = ", ".join(f"%{i}" for i in range(registers))
        outputs = ", ".join(f'"+r"(a{i})' for i in range(registers))
        # operands in shared memory, from its first kilobyte on, which is the system's: eight rows of 16 bytes side by side
        product = (
            f'asm volatile("{{.reg .pred p; setp.eq.u32 p,0,0; wgmma.mma_async.sync.aligned.{shape} {{{sums}}}, '
            f'%{registers}, %{registers + 1}, p{tail};}}" : {outputs} : "l"(left), "l"(right));\n'
        )
        together = (
            'asm volatile("wgmma.fence.sync.aligned;");\n' + product * (case.count or 32)
            + 'asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;");\n'
        )  # fmt: skip
        text += f"if (group < {producers}) {{\n" + "".join(f"int a{i} = 0;" for i in range(registers))
        text += "const unsigned long long left = (1024ull >> 4) | (8ull << 16) | (16ull << 32), right = left + (8192 >> 4);\n"
        condition = "clock() - start < cycles"
        if case.count:
            text += numbers
        if case.ordered:
            # a barrier for each warpgroup, which the one before it lets go on
            condition = "rounds < 100"
            text += f"unsigned mine = 1 + group, next = 1 + (group + 1) % {producers};\n"
            text += f'if (group == {producers - 1}) asm volatile("bar.arrive 1, 256;");\n'
            take = 'asm volatile("bar.sync %0, 256;" :: "r"(mine));\n'
            give = 'asm volatile("bar.arrive %0, 256;" :: "r"(next));\n'
            together = take + together + give
        body = _instructions(case.mix, case.body) if case.count and case.mix else ""
        text += f"do {{\n{together}{body}rounds++; }} while ({condition});\n"
        if case.ordered:
            text += 'if (group == 0) asm volatile("bar.sync 1, 256;");\n'
        text += "".join(f"keep ^= a{i};" for i in range(registers)) + (kept if case.count else "") + "}\n"
    if others and case.mix:
        loop = f"#pragma unroll 1\nfor (int i = 0; i < {4096 // case.body}; i++) {{ {_instructions(case.mix, case.body)} }}\n"
        text += (
            f"if (group >= {producers}) {{\n{numbers} do {{\n{loop} rounds++; }} while (clock() - start < cycles);\n{kept} }}\n"
        )
    return (
        text
        + f"""unsigned taken = clock() - start;
if (threadIdx.x % 128 == 0) {{
out[(blockIdx.x * {_MOST_GROUPS} + group) * 2] = rounds; out[(blockIdx.x * {_MOST_GROUPS} + group) * 2 + 1] = taken; }}
if (keep == 123456789) out[15] = keep; }}
"""
    )


def compile_cubin(text: str) -> bytes:
    """Compile CUDA C for sm_90a."""
    # the first opens the second by its name
    for pattern in ("libnvrtc-builtins.so*", "libnvrtc.so*"):
        for path in sorted(LIBRARIES.rglob(pattern)):
            library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"overlap.cu", 0, None, None)
    options = (ctypes.c_char_p * 3)(b"-arch=sm_90a", b"-std=c++17", b"-w")
    failed = library.nvrtcCompileProgram(program, 3, options)
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    if failed:
        raise RuntimeError(f"NVRTC: {log.value.decode()}")
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, cubin)
    return cubin.raw


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA driver error {status}")


def _each(rounds: torch.Tensor, cycles: torch.Tensor, count: int) -> float | None:
    """Cycles for one of ``count`` things a round, of (blocks, warpgroups); None without warpgroups."""
    return float((cycles.mean(1) / rounds.sum(1) / count).mean()) if rounds.shape[1] else None


def measure(found: list[Case]) -> list[dict[str, Any]]:
    """Run every case on the current GPU, a block a processor, twice, and return what the second run took."""
    driver, module = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    torch.zeros(1, device="cuda")
    _check(
        driver.cuModuleLoadData(ctypes.byref(module), compile_cubin("".join(source(f"k{i}", c) for i, c in enumerate(found))))
    )
    rows = []
    for index, case in enumerate(found):
        producers, others = case.apart
        function = ctypes.c_void_p()
        _check(driver.cuModuleGetFunction(ctypes.byref(function), module, f"k{index}".encode()))
        out = torch.zeros(processors * _MOST_GROUPS * 2, dtype=torch.int32, device="cuda")
        for _ in range(2):
            values = ctypes.c_int(12345), ctypes.c_uint(_CYCLES), ctypes.c_void_p(out.data_ptr())
            arguments = (ctypes.c_void_p * 3)(*(ctypes.cast(ctypes.pointer(x), ctypes.c_void_p) for x in values))
            _check(
                driver.cuLaunchKernel(
                    function, processors, 1, 1, 128 * (producers + others), 1, 1, 32768, None, arguments, None
                )
            )
            torch.cuda.synchronize()
        rounds, cycles = out.view(processors, _MOST_GROUPS, 2).double().cpu().unbind(2)
        products, rest = slice(producers), slice(producers, producers + others)
        row = case._asdict()
        row["cycles a turn" if case.count else "cycles a product"] = _each(
            rounds[:, products], cycles[:, products], 1 if case.count else 32
        )
        row["cycles an instruction"] = _each(rounds[:, rest], cycles[:, rest], 4096)
        rows.append(row)
    return rows


def main(output: Path) -> None:
    """Measure everything and write it to ``output``."""
    records.write_json(output, {"environment": records.environment(torch.device("cuda")), "rows": measure(cases())})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, metavar="OUT.json", help="where the results go")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it measures a GPU, and PyTorch finds none")
    main(arguments.output)
