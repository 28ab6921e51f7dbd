"""DTensors on two processes: the bits of one, and no more communication than a scale of a whole tensor takes.

The processes run this file as a script. Each case compares DTensors with the same call on whole tensors.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qflash
from helpers import run_two_processes

GATHER, REDUCE = "all_gather_into_tensor", "all_reduce"
BATCH, HEADS, QUERIES, KEYS = 0, 1, 2, 2


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of attention.

    Attributes:
        placements: dimension along which query, key and value lie apart, None where each process has the whole.
        out: the same of the output.
        communication: what DTensor sends, and how often.
        groups: heads of key and value; the query has four.
        mask: shape of a bool mask, and how it lies.
        options: of :func:`qflash.attention`.
        lead: dimensions before the heads.
    """

    placements: tuple[int | None, int | None, int | None]
    out: int | None
    recipe: str = "default"
    communication: dict[str, int] = dataclasses.field(default_factory=dict)
    groups: int = 4
    mask: tuple[tuple[int, ...], int | None] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    lead: tuple[int, ...] = (4,)


BATCHES, ALL_HEADS = (BATCH,) * 3, (HEADS,) * 3
SOME_QUERIES = (QUERIES, None, None)
CASES = (
    Case(BATCHES, BATCH),
    Case(ALL_HEADS, HEADS),
    Case(ALL_HEADS, HEADS, groups=2),
    Case((HEADS, None, None), HEADS, groups=1),
    Case(ALL_HEADS, HEADS, options={"is_causal": True}),
    Case(BATCHES, BATCH, mask=((4, 1, 1, 70), BATCH)),
    # windows: one mask for each, which repeats over the images
    Case(BATCHES, BATCH, mask=((2, 1, 6, 70), None), lead=(4, 2)),
    Case(BATCHES, BATCH, mask=((1, 1, 6, 70), None)),
    Case(ALL_HEADS, HEADS, mask=((1, 4, 6, 70), HEADS)),
    Case(SOME_QUERIES, QUERIES),
    Case(SOME_QUERIES, QUERIES, mask=((4, 1, 1, 70), None)),
    Case((QUERIES, KEYS, KEYS), QUERIES, communication={GATHER: 2}),
    # keys that half of the queries see, and an order among all
    Case(SOME_QUERIES, None, mask=((1, 1, 6, 70), None), communication={GATHER: 1}),
    Case(SOME_QUERIES, None, communication={GATHER: 1}, options={"is_causal": True}),
    Case(BATCHES, BATCH, "accurate"),
    Case(ALL_HEADS, HEADS, "accurate"),
    # factors that balance query and key come of all queries
    Case(SOME_QUERIES, None, "accurate", {GATHER: 1}),
    Case(BATCHES, BATCH, "paper", {REDUCE: 1}),
    Case(ALL_HEADS, HEADS, "paper", {REDUCE: 1}),
    Case(SOME_QUERIES, QUERIES, "paper", {REDUCE: 1}),
    Case(BATCHES, None, "paper", {GATHER: 3}, options={"is_causal": True}),
    Case((None, None, None), None, "paper", {REDUCE: 1}),
)


class Block(nn.Module):
    """Attention as tensor parallelism splits it: a layer each for query, key and value, and one behind."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, tokens, 64)."""
        query, key, value = (layer(x).unflatten(-1, (-1, 16)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


def counts_of(sent: Any) -> dict[str, int]:
    return {str(name).split(".")[-1].strip("')>"): count for name, count in sent.get_comm_counts().items()}


def cases_in_two_processes(device: str) -> Iterator[dict[str, Any]]:
    """Run every case on a kind of device in this process, which is one of two, and yield what it gave."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    # on GPUs it makes the process's own the current one
    mesh = init_device_mesh(device, (2,))
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device)

    def parts(x: torch.Tensor, dim: int | None) -> Any:
        return distribute_tensor(x, mesh, [Replicate() if dim is None else Shard(dim)])

    def shape_of(x: Any) -> int | None:
        (placement,) = x.placements
        return placement.dim if isinstance(placement, Shard) else None

    for case in CASES:
        shapes = (4, 6, 16), (case.groups, 70, 16), (case.groups, 70, 24)
        tensors = [drawn(*case.lead, *shape) for shape in shapes]
        mask = None if case.mask is None else (torch.rand(case.mask[0], generator=generator) > 0.4).to(device)
        options = {"recipe": case.recipe, "enable_gqa": case.groups < 4, **case.options}
        want = qflash.attention(*tensors, mask, **options)
        lying = [parts(x, dim) for x, dim in zip(tensors, case.placements, strict=True)]
        lying.append(None if case.mask is None or mask is None else parts(mask, case.mask[1]))
        with CommDebugMode() as sent:
            got = qflash.attention(*lying, **options)
        equal = torch.equal(got.full_tensor(), want)  # type: ignore[attr-defined]
        yield {"equal": equal, "out": shape_of(got), "communication": counts_of(sent)}

        if case.recipe == "default" and mask is None:
            quantised = [qflash.quantize(each, "head") for each in tensors]
            values = [qflash.quantize(each, "head") for each in lying[:3]]
            given = {**options, "output_scale": 0.02}
            whole, apart = (qflash.int8_attention(*each, **given) for each in (quantised, values))
            yield {"equal": torch.equal(apart.values.full_tensor(), whole.values)}

    packed = [drawn(9, 4, 16) for _ in range(3)]
    lengths = torch.tensor([0, 2, 9], dtype=torch.int32, device=device)
    for recipe, dim in (("default", 1), ("default", 0), ("paper", 1)):
        want = qflash.varlen_attention(*packed, lengths, lengths, 7, 7, recipe=recipe)
        lying, whole = [parts(x, dim) for x in packed], parts(lengths, None)
        got = qflash.varlen_attention(*lying, whole, whole, 7, 7, recipe=recipe)
        yield {
            "equal": torch.equal(got.full_tensor(), want) and shape_of(got) == (1 if dim == 1 and recipe == "default" else None)
        }  # type: ignore[attr-defined]

    bias = drawn(4, 6, 8) * 900
    for dim in (0, 1, 2, None):
        yield {"equal": torch.equal(qflash.quantize_bias(parts(bias, dim)).full_tensor(), qflash.quantize_bias(bias))}

    x = drawn(4, 6, 8)
    for granularity in ("tensor", "head", "token", "channel"):
        for center in (False, True)[: 1 if granularity == "token" else 2]:
            want_values = qflash.quantize(x, granularity, center=center)
            for dim in (0, 1, 2, None):
                got_values = qflash.quantize(parts(x, dim), granularity, center=center)
                same = (
                    torch.equal(a.full_tensor(), b)  # type: ignore[attr-defined]
                    for a, b in ((got_values.values, want_values.values), (got_values.scale, want_values.scale))
                )
                yield {"equal": all(same)}
    middle = drawn(6, 1, 8)
    steps = (torch.rand(6, 1, 8, generator=generator) + 0.1).to(device)
    rows = drawn(4, 6, 5, 8)
    for dim in (0, 1, 2, None):
        for center in (None, middle):
            want = torch.ops.qflash.quantize_with_scale(rows, steps, "auto", center)
            beside = None if center is None else parts(center, None)
            got = torch.ops.qflash.quantize_with_scale(parts(rows, dim), parts(steps, None), "auto", beside)
            yield {"equal": torch.equal(got.full_tensor(), want) and shape_of(got) == dim}
    # sums that are still to be made
    halves = parts(x, None) / 2
    partial = type(halves).from_local(halves.to_local(), mesh, [Partial("sum")])
    yield {"equal": torch.equal(qflash.quantize(partial).values.full_tensor(), qflash.quantize(x).values)}  # type: ignore[attr-defined]

    with torch.no_grad():
        block, given = Block().eval().to(device), drawn(2, 70, 64)
        for layer in block.parameters():
            layer.copy_(drawn(*layer.shape) / 8)
        with qflash.sdpa(fallback="error"):
            whole = block(given)
            apart = ColwiseParallel(use_local_output=False)
            plan = {"query": apart, "key": apart, "value": apart, "out": RowwiseParallel()}
            split = parallelize_module(block, mesh, plan)(given)  # type: ignore[arg-type]
        # the last layer's sums are made in another order
        yield {"equal": torch.allclose(whole, split, rtol=0, atol=1e-5)}


@pytest.fixture
def first_of_two() -> Iterator[Any]:
    """Return a mesh of two processes, of which this is the first and the other does nothing."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    from torch.distributed.tensor import init_device_mesh

    torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def own_half(x: torch.Tensor, dim: int | None) -> torch.Tensor:
    return x if dim is None else x.chunk(2, dim)[0].contiguous()


def test_one_of_two_processes(first_of_two: Any) -> None:
    """What is sent, and the bits of what takes nothing that is sent: all that one process can tell, and tells every day."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    generator = torch.Generator().manual_seed(0)

    def lying(x: torch.Tensor, dim: int | None) -> torch.Tensor:
        placement = Replicate() if dim is None else Shard(dim)
        half = own_half(x, dim)
        return DTensor.from_local(half, first_of_two, [placement], run_check=False, shape=x.shape, stride=x.stride())

    def lies(got: Any, want: torch.Tensor, dim: int | None) -> bool:
        return list(got.placements) == [Replicate() if dim is None else Shard(dim)] and got.shape == want.shape

    def check(got: Any, want: torch.Tensor, dim: int | None) -> None:
        assert lies(got, want, dim)
        assert torch.equal(got.to_local(), own_half(want, dim))

    for case in CASES:
        shapes = (4, 6, 16), (case.groups, 70, 16), (case.groups, 70, 24)
        tensors = [torch.randn(*case.lead, *shape, generator=generator) for shape in shapes]
        mask = None if case.mask is None else torch.rand(case.mask[0], generator=generator) > 0.4
        options = {"recipe": case.recipe, "enable_gqa": case.groups < 4, **case.options}
        parts = [lying(x, dim) for x, dim in zip(tensors, case.placements, strict=True)]
        masks = None if case.mask is None or mask is None else lying(mask, case.mask[1])
        want = qflash.attention(*tensors, mask, **options)
        with CommDebugMode() as sent:
            got = qflash.attention(*parts, masks, **options)
        assert counts_of(sent) == case.communication
        assert lies(got, want, case.out)
        if case.communication:
            continue
        check(got, want, case.out)
        if case.recipe == "default" and mask is None and QUERIES not in case.placements:
            given = {**options, "output_scale": 0.02}
            apart = qflash.int8_attention(*(qflash.quantize(x, "head") for x in parts), **given)
            whole = qflash.int8_attention(*(qflash.quantize(x, "head") for x in tensors), **given)
            check(apart.values, whole.values, case.out)  # type: ignore[union-attr]
    with CommDebugMode() as sent:
        packed, lengths = [torch.randn(9, 4, 16, generator=generator) for _ in range(3)], torch.tensor([0, 2, 9])
        want = qflash.varlen_attention(*packed, lengths, lengths, 7, 7)
        everywhere = lying(lengths, None)
        check(qflash.varlen_attention(*(lying(x, 1) for x in packed), everywhere, everywhere, 7, 7), want, 1)
        x = torch.randn(4, 6, 8, generator=generator)
        for granularity, dims in {"head": (0,), "token": (0, 1), "channel": (0, 2)}.items():
            for center in (False, True)[: 1 if granularity == "token" else 2]:
                whole = qflash.quantize(x, granularity, center=center)
                for dim in dims:
                    apart = qflash.quantize(lying(x, dim), granularity, center=center)
                    check(apart.values, whole.values, dim)
                    check(apart.scale, whole.scale, dim)
        for dim in (0, 1):
            check(qflash.quantize_bias(lying(x, dim)), qflash.quantize_bias(x), dim)
        steps = torch.rand(6, 1, 8, generator=generator) + 0.1
        rows = torch.randn(4, 6, 5, 8, generator=generator)
        for dim in (0, 2):
            want = torch.ops.qflash.quantize_with_scale(rows, steps, "auto")
            check(torch.ops.qflash.quantize_with_scale(lying(rows, dim), lying(steps, None), "auto"), want, dim)
    assert sent.get_total_counts() == 0


def check_two_processes(device: str) -> None:
    """Run this file in two processes and require what each case gives."""
    for printed in run_two_processes(__file__, device):
        found = json.loads(printed.splitlines()[-1])
        for case, result in zip(CASES, (each for each in found if "out" in each), strict=True):
            assert result == {"equal": True, "out": case.out, "communication": case.communication}, case
        others = [each["equal"] for each in found if "out" not in each]
        kept = sum(case.recipe == "default" and case.mask is None for case in CASES)
        # int8 tensors, packed sequences, given scales, biases, scales of four granularities (all but per token also centred),
        # sums to be made, a module
        assert others == [True] * (kept + 3 + 8 + 4 + 7 * 4 + 1 + 1)


@pytest.mark.slow
def test_two_processes_give_the_bits_of_one() -> None:
    check_two_processes("cpu")


if __name__ == "__main__":
    torch.distributed.init_process_group({"cpu": "gloo", "cuda": "nccl"}[sys.argv[1]])
    print(json.dumps(list(cases_in_two_processes(sys.argv[1]))))
    torch.distributed.destroy_process_group()
