"""Calls of the CPU kernels with hardly any address space left: a program of its own for ``test_cpu.py``; Linux.

Each call is made with room, then without, then with room again, and has to say that memory ran out, and give the same bits
before and after.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import qflash
from qflash.network import execution

KEYS, CHANNELS = 1 << 17, 256
SPARE = 16 << 20
"""Bytes that are left: enough for outputs and for Python, too few for what a kernel packs."""


@contextlib.contextmanager
def scarce() -> Iterator[None]:
    """Leave next to no memory to this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + SPARE, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def calls() -> dict[str, Callable[[], torch.Tensor]]:
    """Return calls by name, whose outputs are small and whose workspace is not."""
    generator = torch.Generator().manual_seed(0)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)

    key, one = integers(1, 1, KEYS, CHANNELS), torch.ones(1, 1, 1, 1)
    query, key = qflash.QuantizedTensor(integers(1, 1, 1, CHANNELS), one), qflash.QuantizedTensor(key, one)
    x, weight = integers(1, 1 << 13), integers(1 << 13, 1 << 13)
    bias = torch.ones(len(weight), dtype=torch.int32)
    floats = torch.randn(1, 1, KEYS, CHANNELS, generator=generator)

    def attend(scale: float) -> Callable[[], torch.Tensor]:
        return lambda: qflash.int8_attention(query, key, key, scale=scale, out_dtype=torch.float32, backend="cpu")

    return {
        "int8_attention": attend(0.01),
        "attention": lambda: qflash.attention(floats[:, :, :1], floats, floats, backend="cpu"),
        "int8_linear": lambda: execution.int8_linear(x, weight, bias, bias << 20, 4, None, None, torch.int8, "cpu"),
    }


def main() -> None:
    torch.set_num_threads(1)
    for name, call in calls().items():
        outputs = [call(), call()]
        for _ in range(2):
            try:
                with scarce():
                    call()
            except MemoryError as error:
                print(name, error)
            outputs.append(call())
        assert all(torch.equal(outputs[0], other) for other in outputs[1:]), name


if __name__ == "__main__":
    main()
