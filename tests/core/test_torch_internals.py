"""Names of PyTorch that are not public may go: qflash still imports, computes the same bits, and only repeats nothing."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from helpers import run_compiling
from qflash import torch_internals

RUN = """
import json
import torch
from torch.autograd import forward_ad

for owner, name in {gone!r}:
    delattr({{"_C": torch._C, "_C._functorch": torch._C._functorch, "DispatchKey": torch._C.DispatchKey,
              "forward_ad": forward_ad}}[owner], name)
import qflash
from qflash import plan_cache, torch_internals

x = [torch.randn(1, 2, 9, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
outputs = [qflash.attention(*x, backend="auto") for _ in range(2)]
expected = qflash.attention(*x, backend="reference")
print(json.dumps([torch_internals.KNOWS_STATE, len(plan_cache._plans), [torch.equal(out, expected) for out in outputs]]))
"""
NAMES = [
    ("_C", "_len_torch_function_stack"), ("_C", "_dispatch_keys"), ("_C", "_dispatch_tls_local_include_set"),
]  # fmt: skip


@pytest.mark.parametrize("gone", NAMES, ids=lambda gone: gone[1])
@pytest.mark.slow
def test_without_a_name_nothing_is_repeated(gone: tuple[str, str]) -> None:
    done = run_compiling("-c", RUN.format(gone=[gone]))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, 0, [True, True]]


def test_with_all_of_them_calls_are_repeated() -> None:
    done = run_compiling("-c", RUN.format(gone=[]))
    assert done.returncode == 0, done.stderr
    knows, plans, right = json.loads(done.stdout)
    assert knows and torch_internals.KNOWS_STATE and right == [True, True]
    assert plans in (0, 1, 2)


def test_the_longest_sequence_is_found_without_the_name() -> None:
    """By the offsets alone, which every release has."""
    nested = torch.nested.nested_tensor([torch.zeros(length, 2) for length in (3, 7, 0)], layout=torch.jagged)
    assert torch_internals.longest_jagged(nested) == 7
    bare = SimpleNamespace(shape=nested.shape, offsets=nested.offsets)
    assert torch_internals.longest_jagged(bare) == 7  # type: ignore[arg-type]
    none = SimpleNamespace(shape=(0, 0, 2), offsets=lambda: torch.zeros(1, dtype=torch.int64))
    assert torch_internals.longest_jagged(none) == 0  # type: ignore[arg-type]
