"""Tiles: the rules, the table of ``qflash-lab tune``, and what tuning needs besides a GPU."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pathlib
import random
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from helpers import attention_launches
from qflash import execution, varlen
from qflash.kernels import device as kernels_device
from qflash.kernels import lengths, tiles, tuning_table
from qflash.kernels.families import choose_tiles
from qflash.kernels.gluon.sm90 import rules
from qflash.kernels.gluon.windows import launch
from qflash.kernels.launch_recorder import LaunchRecorder, each_argument
from qflash.kernels.tiles import AttentionShape, Tiles
from qflash.kernels.tuning_table import candidates
from qflash.specification.attention_call import float_call, int8_call
from qflash.specification.recipe import ACCURATE, DEFAULT, PAPER
from qflash_lab.bench.tune import save_table
from qflash_lab.cli import app


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning_table, "device_name", lambda index: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(kernels_device, "_processors", lambda index: 132)
    read_anew()
    yield tuning_table.table_path()
    read_anew()


def test_a_table_of_other_kernels_is_ignored(table: pathlib.Path) -> None:
    save_table({KEY: Tiles(64, 128, 4, 1, 168, 2, tiles.SM90_RESIDENT)}, {})
    stored = json.loads(table.read_text())
    for version in (None, 0, tuning_table.KERNELS_VERSION + 1, str(tuning_table.KERNELS_VERSION)):
        table.write_text(json.dumps(stored | {"kernels": version}))
        read_anew()
        with pytest.warns(UserWarning, match=r"other kernels \(version .*, now \d+\) and is ignored \(`qflash-lab tune`"):
            assert choose() == rules_tiles()
    # what is written then is of these kernels, without the entries of others
    save_table({"another": rules_tiles()}, {})
    read_anew()
    assert choose() == rules_tiles() and set(json.loads(table.read_text())["tiles"]) == {"another"}


def read_anew() -> None:
    """Know nothing of a table, as a new process does."""
    tuning_table.read_table.cache_clear()
    tuning_table._warn_of_misfits.cache_clear()


def rules_tiles() -> Tiles:
    """Return the rules' tiles for what :func:`choose` asks for."""
    return choose_tiles(AttentionShape(DEFAULT, 64, 64, 197, 197, heads=48), (9, 0))


def choose(heads: int = 48, fused: bool = False, recipe=DEFAULT) -> Tiles:
    return tuning_table.tiles_for(AttentionShape(recipe, 64, 64, 197, 197, heads, fused), torch.device("cuda:0"))


def test_without_a_table_the_rules_hold(table: pathlib.Path) -> None:
    assert not table.exists()
    assert choose() == rules_tiles()


def test_a_saved_entry_is_used_for_its_kind_alone(table: pathlib.Path) -> None:
    rule, best = choose(), Tiles(64, 128, 4, 1, 168, 2)
    key = tuning_table.table_key("GPU", AttentionShape(DEFAULT, 64, 64, 197, 197, 48, False))
    assert save_table({key: best}, {}) == table
    assert choose() == best
    assert choose(heads=40) == best  # the same power of two
    assert choose(heads=400) == rule
    assert choose(fused=True) == rule
    assert choose(recipe=ACCURATE) == choose_tiles(AttentionShape(ACCURATE, 64, 64, 197, 197), (9, 0))
    assert choose(recipe=PAPER) == choose_tiles(AttentionShape(PAPER, 64, 64, 197, 197), (9, 0))
    other = Tiles(32, 128, 4, 1)
    save_table({tuning_table.table_key("another", AttentionShape(DEFAULT, 64, 64, 197, 197, 48, False)): other}, {})
    assert choose() == best
    assert len(json.loads(table.read_text())["tiles"]) == 2


def test_a_saved_block_is_as_large_as_the_kernel_takes(table: pathlib.Path) -> None:
    for keys, dim in ((256, 80), (577, 80), (401, 128)):
        rule = choose_tiles(AttentionShape(DEFAULT, dim, dim, keys, keys, heads=48), (9, 0))
        wide = rule._replace(block_m=128, warps=8, splits=1)
        assert wide in candidates(rule, dim, keys, keys)
        save_table({tuning_table.table_key("GPU", AttentionShape(DEFAULT, dim, dim, keys, keys, 48, False)): wide}, {})
        assert tuning_table.tiles_for(AttentionShape(DEFAULT, dim, dim, keys, keys, 48, False), torch.device("cuda:0")) == wide
        # where rows do not begin at multiples of eight bytes another kernel has them
        one = torch.ones(1, 1, 1, 1, device="meta")
        for row, kernel, block in ((dim, "hopper_kernel", 128), (dim + 1, "long_kernel" if keys > 256 else "short_kernel", 64)):
            x = torch.zeros(48, 1, keys, row, dtype=torch.int8, device="meta")[..., :dim]
            call = attention_launches(
                int8_call(x, one, x, one, x, one, None, False, 0.1, one, x.dtype, DEFAULT), x, tiles=wide
            )[-1]
            assert (call.kernel.__name__, call.arguments["BLOCK_M"]) == (kernel, block)


def test_thousands_of_windows_get_programs_of_one_warp(table: pathlib.Path) -> None:
    def windows(heads: int, **kind: bool) -> Tiles:
        return choose_tiles(AttentionShape(DEFAULT, 32, 32, 49, 49, heads=heads, **kind), (9, 0))

    assert windows(100).warps == windows(600).warps == 4
    assert windows(4096).warps == windows(4096, fused=True).warps == windows(4096, fused=True, masked=True).warps == 1
    assert choose_tiles(AttentionShape(DEFAULT, 32, 32, 49, 49, heads=4096), (8, 0)).warps == 4
    assert choose_tiles(AttentionShape(DEFAULT, 64, 64, 49, 49, heads=4096), (9, 0)).warps == 4


def test_hopper_has_kernels_of_its_own() -> None:
    def rule(keys: int = 197, dim: int = 64, queries: int = 197, recipe=DEFAULT, capability=(9, 0), **more: bool) -> Tiles:
        return choose_tiles(AttentionShape(recipe, dim, dim, queries, keys, **more), capability)

    assert rule().family == rule(keys=256).family == rule(keys=65, dim=32).family == tiles.SM90_RESIDENT
    assert rule(dim=80).family == rule(keys=729, dim=72).family == tiles.SM90_RESIDENT
    assert rule(keys=257).family == rule(keys=257, dim=32).family == rule(keys=577).family == tiles.SM90_RESIDENT
    assert rule(keys=1281, dim=72).family == rule(keys=1152, dim=96).family == tiles.SM90_RESIDENT
    assert rule(keys=4096, dim=128).family == rule(keys=1825).family == rule(keys=897, dim=104).family == tiles.SM90_STREAMING
    assert rule(keys=1345, dim=72).family == rule(keys=1217, dim=96).family == tiles.SM90_STREAMING
    # a class token, and pooling
    assert rule(queries=1).family == rule(keys=1370, queries=32).family == tiles.SM90_RESIDENT
    assert rule(keys=1281, dim=72, queries=1).family == tiles.SM90_RESIDENT
    others = [
        rule(keys=4096, dim=32),
        rule(keys=1825, queries=32),
        rule(keys=1281, dim=72, queries=1, fused=True),
        rule(keys=257, masked=True),
        rule(keys=64),
        rule(dim=84),
        rule(dim=136),
        rule(masked=True),
        rule(capability=(8, 0)),
    ]
    others += [
        rule(capability=(10, 0)),
        rule(recipe=PAPER),
        rule(recipe=ACCURATE),
        rule(recipe=DEFAULT.replace(exponential="linear")),
    ]
    assert {other.family for other in others} == {tiles.PORTABLE}
    tried = list(candidates(rule(), 64, 197, 197))
    assert {(t.splits, t.registers) for t in tried if t.family != tiles.PORTABLE} >= {(splits, 168) for splits in (1, 2, 3, 4)}
    assert any(t.family == tiles.PORTABLE for t in tried)


def test_programs_keep_to_a_head_or_go_from_head_to_head() -> None:
    def shares(queries: int, heads: int, each: int, fused: bool, dim: int = 64) -> tuple[int, int]:
        return rules.share_heads(queries, heads, each, 132, dim, fused)[:2]

    # 96 heads on 132 processors: eight of 1056 blocks each rather than eleven for 96 of them
    assert shares(1370, 96, 1, False) == shares(1370, 96, 1, True) == (0, 132)
    # where they fill the machine as they are
    assert shares(1025, 24, 1, False) == (5, 0)
    assert shares(785, 128, 1, True) == shares(729, 256, 1, True, 72) == (1, 0)
    # 264 places: as many blocks for all, but from floats, for which four warps have no registers, programs keep to a head
    assert shares(785, 96, 2, False) == (0, 264)
    assert shares(785, 96, 2, True) == (2, 0)
    assert shares(64, 0, 2, True) == (1, 0)


def test_a_process_compiles_for_so_many_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    from qflash.kernels import lengths

    monkeypatch.setattr(lengths, "_first", set())
    monkeypatch.setattr(lengths, "MOST_LENGTHS", 2)
    monkeypatch.setattr(lengths, "_expected", set())
    monkeypatch.setattr(lengths, "_kept", frozenset)
    monkeypatch.setattr(lengths, "_all", False)
    assert [lengths.worth_compiling(keys) for keys in (577, 401, 577, 785, 401)] == [True, True, True, False, True]
    lengths.expect((785, 1025))
    assert [lengths.worth_compiling(keys) for keys in (785, 1025, 786)] == [True, True, False]
    lengths.expect_all()
    assert lengths.worth_compiling(786)
    # what further ones take is compiled for any length
    for dim, kernel in ((64, tiles.SM90_STREAMING), (128, tiles.SM90_STREAMING), (32, tiles.PORTABLE)):
        assert choose_tiles(AttentionShape(DEFAULT, dim, dim, 577, 577), (9, 0), reread=False).family == kernel
    assert choose_tiles(AttentionShape(DEFAULT, 64, 64, 257, 257), (9, 0), reread=False).family == tiles.SM90_RESIDENT


@pytest.mark.parametrize("across", [1, 2])
def test_tiles_of_a_row_cover_it_and_little_more(across: int) -> None:
    for keys in range(65, 2000):
        widths = tiles.row_widths(keys, across)
        assert keys <= sum(widths) < keys + 32 and sum(widths[:-1]) < keys
        assert all(width in (8, 16, 32, 64, 128) for width in widths) and list(widths) == sorted(widths, reverse=True)
        assert across == 1 or min(widths) >= 32
    assert tiles.row_fits_registers(288) and not tiles.row_fits_registers(289)
    assert tiles.row_fits_registers(608, 2) and not tiles.row_fits_registers(609, 2)


def test_programs_that_a_processor_has_room_for() -> None:
    # of 228 KiB, each takes one besides its own
    assert [tiles.most_programs(kib * 1024) for kib in (228, 227, 114, 113, 76, 75)] == [0, 1, 1, 2, 2, 3]
    assert tiles.most_programs(tiles.shared_bytes(577, 64)) == tiles.most_programs(tiles.shared_bytes(577, 64, 8)) == 2
    assert tiles.most_programs(tiles.shared_bytes(1024, 64)) == 1
    # tiles for the keys, a row of 64 bytes each, and for the values, and 32 rows at least; sums and scales of channels
    assert tiles.shared_bytes(577, 64) == 2 * 608 * 64 + 1024
    assert tiles.shared_bytes(577, 64, 8) == (608 + 640) * 64 + 1024 + 8 * (64 + 640)


def hopper_call(heads: int, queries: int, keys: int, dim: int, fused: bool, channels: int = 1):
    """Return the launch that the rules choose for so many heads, None if it is not for the kernel that has them for itself.

    On int8 V has ``channels`` scales.
    """
    rule = choose_tiles(AttentionShape(DEFAULT, dim, dim, queries, keys, heads, fused), (9, 0))
    if rule.family != tiles.SM90_RESIDENT:
        return None
    dtype = torch.float16 if fused else torch.int8
    q, k = (torch.zeros(heads, 1, size, dim, dtype=dtype, device="meta") for size in (queries, keys))
    one, out = torch.ones(1, 1, 1, 1, device="meta"), torch.empty_like(q)
    several = torch.ones(1, 1, 1, channels, device="meta")
    if fused:
        (call,) = attention_launches(float_call(q, k, k, None, False, 0.1, DEFAULT), out, tiles=rule)
    else:
        (call,) = attention_launches(
            int8_call(q, one, k, one, k, several, None, False, 0.1, one, out.dtype, DEFAULT), out, tiles=rule
        )
    assert call.kernel.__name__ == "hopper_kernel"
    return call


@pytest.mark.parametrize(
    ("tokens", "dim", "heads", "fused", "grid", "block", "warps", "tail", "unroll", "loops", "sums"),
    [
        (197, 64, 6, False, (4, 1, 6), 64, 4, 0, 0, False, "products"),
        (197, 64, 24, True, (4, 1, 24), 64, 8, 0, 0, False, "products"),
        (197, 64, 48, False, (2, 1, 48), 128, 8, 0, 0, False, "begin"),
        (197, 64, 40, False, (3, 1, 40), 64, 4, 0, 0, True, "end"),
        (197, 64, 48, True, (2, 1, 48), 128, 8, 0, 0, False, "products"),
        (197, 64, 96, False, (4, 1, 96), 64, 4, 0, 0, False, "begin"),
        (197, 64, 96, True, (1, 1, 96), 128, 8, 0, 0, True, "begin"),
        (197, 64, 192, True, (1, 192, 2), 64, 4, 8, 0, True, "begin"),
        (197, 64, 384, False, (1, 1, 384), 64, 4, 8, 0, True, "begin"),
        (197, 64, 384, True, (1, 1, 384), 64, 4, 8, 0, True, "begin"),
        (197, 64, 768, True, (1, 1, 768), 64, 4, 8, 0, True, "begin"),
        # programs that a processor has room for two of
        (257, 64, 16, False, (5, 1, 16), 64, 4, 0, 0, False, "products"),
        (257, 64, 16, True, (5, 1, 16), 64, 8, 0, 0, False, "products"),
        (257, 64, 128, False, (1, 1, 128), 64, 4, 0, 0, True, "end"),
        (257, 64, 48, False, (5, 1, 48), 64, 4, 0, 0, False, "begin"),
        (257, 64, 96, True, (2, 1, 96), 64, 4, 8, 0, True, "end"),
        (257, 64, 1024, False, (1, 1, 1024), 64, 4, 8, 0, True, "begin"),
        # rows that are not held whole, or by two warps
        (401, 64, 12, False, (7, 1, 12), 64, 8, 0, 0, False, "products"),
        (577, 64, 12, True, (10, 1, 12), 64, 8, 0, 0, False, "end"),
        (577, 64, 16, False, (5, 1, 16), 128, 8, 0, 2, False, "end"),
        (577, 64, 128, True, (1, 1, 128), 128, 8, 0, 2, True, "end"),
        (577, 64, 768, True, (1, 1, 768), 64, 4, 8, 2, True, "begin"),
        (577, 64, 768, False, (1, 1, 768), 64, 4, 8, 2, True, "begin"),
        (785, 64, 8, False, (13, 1, 8), 64, 4, 0, 2, False, "end"),
        (785, 64, 8, True, (13, 1, 8), 64, 8, 0, 2, False, "end"),
        (785, 80, 8, True, (7, 1, 8), 128, 8, 0, 2, False, "end"),
        (785, 64, 12, False, (7, 1, 12), 128, 8, 0, 2, False, "end"),
        (1370, 64, 6, False, (22, 1, 6), 64, 4, 0, 2, False, "end"),
        (401, 64, 96, False, (4, 1, 96), 64, 4, 0, 1, True, "end"),
        (401, 64, 768, True, (1, 1, 768), 64, 4, 0, 1, True, "begin"),
        (1025, 64, 16, True, (5, 1, 16), 128, 8, 0, 2, True, "end"),
        # wider heads
        (256, 72, 16, False, (4, 1, 16), 64, 8, 0, 0, False, "products"),
        (256, 72, 128, False, (2, 1, 128), 64, 4, 0, 0, True, "begin"),
        (257, 80, 128, False, (1, 1, 128), 64, 4, 0, 0, True, "end"),
        (256, 72, 128, True, (1, 1, 128), 128, 8, 0, 0, True, "begin"),
        (257, 80, 1024, True, (1, 1, 1024), 64, 4, 0, 0, True, "begin"),
        (256, 128, 16, False, (4, 1, 16), 64, 8, 0, 0, False, "products"),
        (257, 128, 1024, True, (1, 1, 1024), 64, 8, 0, 0, True, "begin"),
        (577, 80, 8, False, (10, 1, 8), 64, 4, 0, 2, False, "end"),
        (577, 80, 16, True, (5, 1, 16), 128, 8, 0, 2, False, "end"),
        (577, 80, 96, True, (1, 1, 96), 128, 8, 0, 2, True, "end"),
        (577, 80, 1024, True, (1, 1, 1024), 64, 4, 0, 2, True, "begin"),
        (577, 80, 1024, False, (1, 1, 1024), 64, 4, 0, 2, True, "begin"),
        (401, 128, 128, True, (1, 1, 128), 128, 8, 0, 1, True, "end"),
        (401, 128, 1024, True, (1, 1, 1024), 64, 4, 0, 1, True, "begin"),
    ],
)
def test_heads_are_shared_out_by_load(
    tokens: int, dim: int, heads: int, fused: bool, grid: tuple[int, int, int], block: int, warps: int, tail: int, unroll: int,
    loops: bool, sums: str,
) -> None:  # fmt: skip
    """Blocks and warps; places for last queries apart, how rows are held, whether programs take several blocks, sums of V."""
    call = hopper_call(heads, tokens, tokens, dim, fused)
    plan = call.arguments["PLAN"]
    assert (call.grid, call.arguments["BLOCK_M"], call.options["num_warps"], plan.BLOCKS) == (grid, block, warps, 0)
    assert (tail, unroll, loops, sums) == (plan.TAIL, plan.UNROLL, plan.LOOPS, plan.SUMS)
    # where the blocks of a head are in the grid's last dimension
    assert (grid == (1, heads, 2)) == plan.SPREAD
    # a warp for every sixteen queries, or two
    assert {(64, 4): 1, (128, 8): 1, (64, 8): 2}[block, warps] == plan.ACROSS


@pytest.mark.parametrize(
    ("tokens", "dim", "heads", "fused", "registers"),
    [
        (197, 64, 768, False, 168),
        (197, 64, 384, True, 168),
        (257, 64, 384, False, 168),
        (264, 64, 1024, False, 168),
        # one round of two a processor; last queries not apart, or too many of them; wider heads; from floats
        (257, 64, 264, False, None),
        (257, 32, 1024, False, None),
        (272, 64, 1024, False, None),
        (257, 80, 1024, False, None),
        (257, 64, 1024, True, None),
    ],
)
def test_a_third_program_a_processor(tokens: int, dim: int, heads: int, fused: bool, registers: int | None) -> None:
    assert hopper_call(heads, tokens, tokens, dim, fused).options.get("maxnreg") == registers


def test_no_third_program_where_it_would_spill_for_scales_of_channels() -> None:
    assert "maxnreg" not in hopper_call(1024, 257, 257, 64, False, channels=64).options
    assert hopper_call(1024, 197, 197, 64, False, channels=64).options["maxnreg"] == 168


@pytest.mark.parametrize(
    ("tokens", "dim", "heads", "fused", "programs", "block", "share"),
    [
        (577, 64, 96, True, 120, 128, 4),
        (577, 64, 192, False, 120, 128, 8),
        (785, 64, 96, False, 250, 64, 5),
        (785, 64, 96, True, 112, 128, 6),
        (1025, 64, 96, False, 124, 128, 7),
        (1025, 64, 768, True, 131, 128, 53),
        (1370, 64, 24, True, 132, 128, 2),
        (1370, 64, 48, False, 132, 128, 4),
        (1370, 64, 96, True, 132, 128, 8),
        (577, 80, 96, False, 120, 128, 4),
        (577, 80, 192, False, 120, 128, 8),
        (729, 72, 1024, False, 131, 128, 47),
    ],
)
def test_programs_that_go_from_head_to_head_share_blocks_evenly(
    tokens: int, dim: int, heads: int, fused: bool, programs: int, block: int, share: int
) -> None:
    call = hopper_call(heads, tokens, tokens, dim, fused)
    given, blocks = call.arguments, -(-tokens // block)
    assert call.grid == (programs, 1, 1)
    plan = given["PLAN"]
    assert (given["BLOCK_M"], given["share"], plan.BLOCKS, plan.HEADS) == (block, share, blocks, 1)
    assert given["total"] == heads * blocks and given["total"] - share <= (programs - 1) * share < given["total"]
    assert plan.LOOPS and ("begin" if heads > 132 else "end") == plan.SUMS


@pytest.mark.parametrize(
    ("batch", "keys", "dim", "queries", "apart"),
    [
        (1, 1370, 64, None, True), (1, 1025, 64, None, False), (2, 1370, 64, None, False), (8, 1370, 64, None, False),
        (1, 1300, 72, None, False),
        # with few queries quantising is most of the work
        (64, 1370, 64, 1, True), (64, 1025, 64, 1, False), (64, 1370, 64, 33, False),
    ],
)  # fmt: skip
def test_few_heads_of_long_rows_are_quantised_by_launches_of_their_own(
    batch: int, keys: int, dim: int, queries: int | None, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lengths, "_all", True)
    x = torch.empty(batch, 12, keys, dim, dtype=torch.float16, device="meta")
    with LaunchRecorder(launching=False) as recording:
        execution.attend(float_call(x[:, :, :queries], x, x, None, False, dim**-0.5, DEFAULT), "triton")
    names = [launch.kernel.__name__ for launch in recording.launches]
    alone = ["cluster_quantize_kernel", "long_hopper_kernel"]
    if queries is not None:
        alone = ["long_range_kernel", "long_quantize_kernel", "long_kernel"]
    assert names == (alone if apart else ["hopper_kernel"])


@pytest.mark.parametrize(
    ("keys", "dim", "cluster"),
    [
        (512, 64, None), (513, 64, (4, 2)), (1370, 64, (4, 3)), (2048, 64, (4, 4)), (2049, 64, (8, 3)), (4097, 56, (16, 3)),
        (10240, 64, (16, 5)), (10241, 64, None), (1024, 128, (4, 4)), (1025, 104, (8, 3)), (5120, 128, (16, 5)),
        (5121, 128, None), (256, 128, None), (1370, 48, None), (4096, 80, None), (1370, 100, None),
    ],
)  # fmt: skip
def test_clusters_that_quantise_hold_a_head(keys: int, dim: int, cluster: tuple[int, int] | None) -> None:
    assert rules.choose_cluster(keys, dim) == cluster


APART = ["long_quantize_kernel", "long_hopper_kernel"]


@pytest.mark.parametrize(
    ("sequences", "longest", "dim", "options", "kernels"),
    [
        (64, 768, 64, {}, ["packed_hopper_kernel"]),
        (64, 769, 64, {}, APART),
        (64, 640, 80, {}, ["packed_hopper_kernel"]),
        (64, 641, 80, {}, APART),
        (64, 257, 128, {}, APART),
        (16, 256, 64, {}, ["packed_hopper_kernel"]),
        (16, 257, 64, {}, ["long_range_kernel", *APART]),
        (16, 384, 80, {}, ["packed_hopper_kernel"]),
        (1, 300, 64, {}, ["long_range_kernel", *APART]),
        (64, 2000, 64, {}, ["long_range_kernel", *APART]),
        (64, 200, 64, {"causal": True}, ["long_quantize_kernel", "long_kernel"]),
        (64, 800, 32, {}, ["long_quantize_kernel", "long_kernel"]),
        (64, 200, 64, {"dtype": torch.float32}, ["long_quantize_kernel", "long_kernel"]),
        (64, 200, 64, {"recipe": ACCURATE}, ["long_kernel"]),
        # packed V would reach past 32-bit offsets
        (64, 200, 64, {"tokens": 1 << 24}, ["long_kernel"]),
    ],
)
def test_packed_sequences_take_few_launches(
    sequences: int, longest: int, dim: int, options: dict[str, Any], kernels: list[str]
) -> None:
    x = torch.empty(options.get("tokens", 6400), 12, dim, dtype=options.get("dtype", torch.float16), device="meta")
    cumulative = torch.empty(sequences + 1, dtype=torch.int32, device="meta")
    recipe = options.get("recipe", DEFAULT).key
    with LaunchRecorder(launching=False) as recording:
        varlen.varlen_attention(
            x, x, x, cumulative, cumulative, longest, longest, options.get("causal", False), 0.1, recipe, "triton"
        )  # fmt: skip
    assert [launch.kernel.__name__ for launch in recording.launches] == kernels


@pytest.mark.parametrize(("blocks", "heads", "parts"), [(4, 768, 1), (4, 132, 2), (4, 48, 4), (1, 1, 1), (6, 60, 4)])
def test_packed_heads_are_shared_where_processors_would_be_idle(blocks: int, heads: int, parts: int) -> None:
    assert rules.split_packed(blocks, heads, 132) == parts


@pytest.mark.parametrize(
    ("sequences", "longest", "most"),
    [(1, 300, 0), (256, 64, 0), (2, 65, 64), (64, 700, 64), (65, 700, 256), (257, 99, 1024), (1025, 99, 0)],
)  # fmt: skip
def test_few_kernels_put_packed_sequences_in_order(sequences: int, longest: int, most: int) -> None:
    assert rules.packed_order(sequences, longest) == most


@pytest.mark.parametrize("processors", [16, 78, 114, 132, 144])
def test_the_rules_never_ask_for_what_the_kernel_does_not_take(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_device, "STAND_IN_PROCESSORS", processors)
    chance = random.Random(processors)
    for _ in range(400):
        dim, fused = 8 * chance.randint(1, 16), chance.random() < 0.5
        keys, heads = chance.choice((chance.randint(65, 300), chance.randint(289, 1900))), chance.randint(1, 40) ** 2
        queries = chance.choice((keys, chance.randint(1, 64), chance.randint(33, 2000)))
        call = hopper_call(heads, queries, keys, dim, fused)
        if call is None:
            continue
        given, warps = call.arguments, call.options["num_warps"]
        plan = given["PLAN"]
        programs = call.grid[2 if plan.SPREAD else 0]
        blocks = -(-queries // given["BLOCK_M"])
        assert tiles.fits_block(given["BLOCK_M"], warps, dim, keys)
        if plan.BLOCKS:
            assert call.grid[1:] == (1, 1) and (programs - 1) * given["share"] < given["total"] <= programs * given["share"]
            assert programs <= processors * 8 // warps and plan.LOOPS
            assert plan.BLOCKS in (blocks, queries // given["BLOCK_M"]) and plan.BLOCKS * heads == given["total"]
        else:
            assert 1 <= programs <= blocks and (programs < blocks) == plan.LOOPS
        assert (plan.UNROLL == 0) == tiles.row_fits_registers(keys, plan.ACROSS)
        if plan.TAIL:
            keeps = programs < blocks and programs <= (2 if fused and plan.UNROLL == 0 else 1)
            assert keeps or queries // given["BLOCK_M"] == plan.BLOCKS
            assert warps == 4 and plan.SUMS != "products"
            assert 0 < queries % given["BLOCK_M"] <= plan.TAIL


def test_spans_of_a_head_cover_its_channels() -> None:
    for channels in range(8, 129, 8):
        spans = tiles.channel_spans(channels)
        assert sum(spans) == channels
        widths, value_widths = [tiles.kernel_width(span) for span in spans], [tiles.value_width(span) for span in spans]
        assert all(width >= span for width, span in zip(value_widths, spans, strict=True))
        # the tensor core takes 32 channels of queries and keys at a time, of values eight
        assert all(value <= key and key % 32 == 0 for value, key in zip(value_widths, widths, strict=True))
    assert tiles.channel_spans(64) == (64,) and tiles.channel_spans(104) == (104,)
    assert tiles.channel_spans(72) == (64, 8) and tiles.channel_spans(96) == (64, 32)
    assert tiles.shared_bytes(577, 80) == 608 * (96 + 80) + 16 * 96
    assert tiles.shared_bytes(577, 80, 8) == 640 * 96 + 608 * (64 + 64) + 16 * 96 + 8 * (96 + 640)


def windows_call(windows: int, heads: int = 3, bias: torch.Tensor | None = None, *, fused: bool = False, **options):
    x = torch.zeros(windows, heads, 49, 32, dtype=torch.float16 if fused else torch.int8, device="meta")
    one, out = torch.ones(1, 1, 1, 1, device="meta"), torch.empty_like(x)
    if fused:
        (call,) = attention_launches(float_call(x, x, x, bias, False, 0.1, DEFAULT), out, **options)
    else:
        scales = (one, x, one, x, one)
        (call,) = attention_launches(int8_call(x, *scales, bias, False, 0.1, one, out.dtype, DEFAULT), out, **options)
    return call


@pytest.mark.parametrize(
    ("windows", "grid", "warps", "groups", "splits", "shares", "ways"),
    [
        ((8, None, False), (8, 3, 1), 4, 8, 1, (0, 24), set()),
        ((8, None, True), (8, 3, 1), 4, 8, 1, (0, 24), {"DIVIDED"}),
        ((110, None, False), (110, 3, 1), 4, 110, 1, (2, 66), {"DIVIDED"}),
        ((110, None, True), (110, 3, 1), 4, 110, 1, (2, 66), {"DIVIDED"}),
        ((111, None, False), (111, 3, 1), 2, 111, 1, (2, 69), set()),
        ((111, None, True), (111, 3, 1), 4, 111, 1, (2, 69), {"DIVIDED"}),
        ((264, None, False), (264, 3, 1), 2, 264, 1, (6, 0), set()),
        ((264, None, True), (264, 3, 1), 4, 264, 1, (6, 0), {"DIVIDED"}),
        ((265, None, False), (265, 3, 1), 1, 265, 1, (6, 3), set()),
        ((265, None, True), (265, 3, 1), 4, 265, 1, (6, 3), {"DIVIDED"}),
        ((308, None, False), (308, 3, 1), 1, 308, 1, (7, 0), set()),
        ((308, None, True), (308, 3, 1), 4, 308, 1, (7, 0), {"DIVIDED"}),
        ((309, None, False), (309, 3, 1), 1, 309, 1, (7, 3), set()),
        ((309, None, True), (309, 3, 1), 1, 309, 1, (7, 3), set()),
        ((353, None, False), (353, 3, 1), 1, 353, 1, (8, 3), set()),
        ((353, None, True), (353, 3, 1), 1, 353, 1, (8, 3), set()),
        ((4096, None, False), (4096, 3, 1), 1, 4096, 1, (93, 12), set()),
        ((4096, None, True), (4096, 3, 1), 1, 4096, 1, (93, 12), set()),
        ((4096, 64, False), (132, 16, 1), 1, 11, 1, (16, 0), {"SEVERAL", "TOGETHER"}),
        ((4096, 64, True), (8, 3, 64), 1, 8, 1, (11, 84), {"SEVERAL", "STAGED"}),
        ((4096, 1, False), (132, 16, 1), 1, 683, 1, (15, 69), {"SEVERAL", "TOGETHER"}),
        ((4096, 1, True), (512, 3, 1), 1, 512, 1, (11, 84), {"SEVERAL", "STAGED"}),
        ((2048, 64, False), (132, 16, 1), 1, 11, 1, (16, 0), {"SEVERAL", "TOGETHER"}),
        ((2048, 64, True), (8, 3, 64), 1, 8, 1, (11, 84), {"SEVERAL", "STAGED"}),
        ((44, 44, False), (1, 3, 44), 4, 1, 1, (1, 0), set()),
        ((44, 44, True), (1, 3, 44), 4, 1, 1, (1, 0), {"DIVIDED"}),
        ((64, 64, False), (1, 3, 64), 4, 1, 1, (1, 60), {"DIVIDED"}),
        ((64, 64, True), (1, 3, 64), 4, 1, 1, (1, 60), {"DIVIDED"}),
        ((128, 64, False), (2, 3, 64), 4, 2, 1, (2, 120), {"DIVIDED"}),
        ((128, 64, True), (2, 3, 64), 4, 2, 1, (2, 120), {"DIVIDED"}),
        ((176, 22, False), (132, 8, 1), 1, 8, 2, (8, 0), {"TOGETHER"}),
        ((176, 22, True), (8, 3, 22), 4, 8, 1, (4, 0), {"DIVIDED"}),
        ((177, 59, False), (132, 9, 1), 1, 3, 2, (8, 6), {"TOGETHER"}),
        ((177, 59, True), (6, 3, 59), 1, 3, 2, (8, 6), set()),
        ((4096, 4096, False), (132, 94, 1), 1, 1, 1, (93, 12), {"TOGETHER"}),
        ((4096, 4096, True), (1, 3, 4096), 1, 1, 1, (93, 12), set()),
    ],
)
def test_windows_with_the_same_bias_share_a_program(
    windows: tuple[int, int | None, bool], grid: tuple[int, int, int], warps: int, groups: int, splits: int,
    shares: tuple[int, int], ways: set[str],
) -> None:  # fmt: skip
    """So many windows, their bias's period, from floats or not; on int8 a bias is fixed point."""
    count, period, fused = windows
    bias = None
    if period is not None:
        bias = torch.zeros(period, 3, 49, 49, dtype=torch.float16 if fused else torch.int32, device="meta")
    call = windows_call(count, bias=bias, fused=fused)
    given = dict(each_argument(call.arguments)) | dataclasses.asdict(call.arguments["PLAN"])
    assert call.kernel.__name__ == "windows_kernel"
    assert (call.grid, call.options["num_warps"], given["groups"], given["SPLITS"]) == (grid, warps, groups, splits)
    assert (given["share"], given["longer"]) == shares
    assert (given["windows"], given["periods"]) == (count, period or 1)
    assert {way for way in ("DIVIDED", "SEVERAL", "STAGED", "TOGETHER") if given[way]} == ways


def test_what_the_cache_does_not_hold_is_evicted_first() -> None:
    """Windows on int8 and from floats; rows that are walked over, from floats; not where heads share keys and values."""
    # 50 MiB of query, key, value and output in int8, then in float16
    policies = [windows_call(windows).arguments["PLAN"].POLICY for windows in (2786, 2787)]
    policies += [windows_call(windows, fused=True).arguments["PLAN"].POLICY for windows in (1393, 1394)]
    assert policies == ["", "evict_first"] * 2

    def fused(tokens: int, key_heads: int) -> str:
        q, k = (torch.zeros(64, heads, tokens, 64, dtype=torch.float16, device="meta") for heads in (12, key_heads))
        (call,) = attention_launches(float_call(q, k, k, None, False, 0.1, DEFAULT), torch.empty_like(q))
        assert call.kernel.__name__ == "hopper_kernel"
        return str(call.arguments["PLAN"].POLICY)

    assert [fused(577, 12), fused(577, 4), fused(197, 12)] == ["evict_first", "", ""]
    x, one = torch.zeros(64, 12, 577, 64, dtype=torch.int8, device="meta"), torch.ones(1, 1, 1, 1, device="meta")
    (call,) = attention_launches(
        int8_call(x, one, x, one, x, one, None, False, 0.1, one, torch.empty_like(x).dtype, DEFAULT),
        torch.empty_like(x),
    )
    assert call.kernel.__name__ == "hopper_kernel" and call.arguments["PLAN"].POLICY == ""


def test_a_grid_of_columns_is_not_taller_than_grids_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_device, "STAND_IN_PROCESSORS", 2)
    for windows, together in ((40000, True), (50000, False)):
        call = windows_call(windows, bias=torch.zeros(windows, 3, 49, 49, dtype=torch.int32, device="meta"))
        assert together == call.arguments["PLAN"].TOGETHER
        assert max(call.grid[1:]) <= 65535


@given(st.integers(1, 1 << 15), st.data())
def test_a_rounded_inverse_divides(divisor: int, data: st.DataObject) -> None:
    """What :mod:`qflash.kernels.gluon.windows.attention` does instead of dividing, below the limit of the rule."""
    unit = launch._UNIT
    n = data.draw(st.integers(0, unit // divisor - 1))
    for m in (n, n // divisor * divisor, n // divisor * divisor + divisor - 1):
        if m * divisor < unit:
            assert m * -(-unit // divisor) >> 30 == m // divisor


def test_what_the_windows_kernel_does_not_know_goes_to_the_general_one() -> None:
    def rule(keys: int = 49, dim: int = 32, queries: int = 49, recipe=DEFAULT, capability=(8, 0)) -> str:
        return choose_tiles(AttentionShape(recipe, dim, dim, queries, keys), capability).family

    assert rule() == rule(keys=33) == rule(keys=64, queries=9) == rule(capability=(9, 0)) == tiles.WINDOWS
    others = [
        rule(keys=32),
        rule(dim=16),
        rule(queries=65),
        rule(queries=8),
        rule(recipe=PAPER),
        rule(recipe=ACCURATE),
    ]
    assert set(others) == {tiles.PORTABLE}
    boolean = torch.ones(1, 1, 49, 49, dtype=torch.bool, device="meta")
    assert windows_call(8, bias=boolean).kernel.__name__ == "short_kernel"
    tried = candidates(Tiles(64, 64, 4, 1, family=tiles.WINDOWS), 32, 49, 49)
    assert {t.splits for t in tried if t.family == tiles.WINDOWS} == {0, 1, 2, 4}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_the_interpreter_cannot_run_stays_on_gpus(device: str) -> None:
    x, one = torch.zeros(1, 1, 197, 64, dtype=torch.int8, device=device), torch.ones(1, 1, 1, 1, device=device)
    (call,) = attention_launches(
        int8_call(x, one, x, one, x, one, None, False, 0.1, one, torch.empty_like(x).dtype, DEFAULT),
        torch.empty_like(x),
        tiles=Tiles(64, 128, 4, 1, family=tiles.SM90_RESIDENT),
        guard=device == "cpu",
    )
    assert call.kernel.__name__ == ("short_kernel" if device == "cpu" else "hopper_kernel")


KEY = tuning_table.table_key("GPU", AttentionShape(DEFAULT, 64, 64, 197, 197, 48, False))
"""What :func:`choose` looks for."""


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"tiles": []}', '{"tiles": {"x": [1, 2]}}', '{"tiles": {"x": ["a", 2, 3, 4]}}',
        '{"tiles": {"x": [1e999, 2, 3, 4]}}', "[" * 100_000, '{"tiles": ' + "9" * 5000 + "}", "\udcff",
    ],
    ids=lambda text: ascii(text[:40]),
)  # fmt: skip
def test_a_broken_table_is_ignored_with_a_warning(table: pathlib.Path, text: str) -> None:
    table.parent.mkdir(parents=True)
    text = text.replace('{"tiles"', f'{{"kernels": {tuning_table.KERNELS_VERSION}, "tiles"')
    table.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.warns(UserWarning, match=r"qflash.tiles\.json.*ignored") as warned:
        got = [choose(), choose()]
    assert got == [rules_tiles()] * 2
    assert len(warned) == 1


@pytest.mark.parametrize(
    "entry",
    [
        [256, 128, 4, 1], [100, 128, 4, 1], [64, 128, -1, 1], [64, 128, 4, 1, 168, 99], [64, 128, 4, 1, 0, 0, 9],
        [64, 128, 4, 1, 0, 0, "windows"], [64, 128, 4, 1, 0, 0, "other"],
        [64, 128, 4, 1, 168.0, 2], [64, 128, 4, True, 168, 2], [64, 128, 4],
        [64, 128, 4, 1, 168, 2, "triton", 0, 0], "64", None, 64,
    ],
    ids=str,
)  # fmt: skip
def test_what_tuning_would_not_write_is_not_taken_from_the_table(table: pathlib.Path, entry: object) -> None:
    table.parent.mkdir(parents=True)
    good = tuning_table.table_key("GPU", AttentionShape(DEFAULT, 64, 64, 197, 197, 48, True))
    table.write_text(
        json.dumps({"kernels": tuning_table.KERNELS_VERSION, "tiles": {KEY: entry, good: [64, 128, 4, 1, 168, 2]}})
    )
    with pytest.warns(UserWarning, match=r"qflash.tiles\.json.*ignored") as warned:
        got = [choose(), choose()]
    assert got == [rules_tiles()] * 2
    assert len(warned) == 1
    assert choose(fused=True) == Tiles(64, 128, 4, 1, 168, 2)


numbers = st.integers(-1, 300) | st.sampled_from((16, 32, 64, 128, 4, 1, 0, 168)) | st.floats() | st.booleans()
json_values = st.recursive(
    st.none() | st.text(max_size=5) | numbers | st.integers(),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.sampled_from(("tiles", KEY)) | st.text(max_size=5), inner),
    max_leaves=12,
)
entries = st.lists(numbers, min_size=3, max_size=9) | st.sampled_from(
    [list(x) for x in candidates(rules_tiles(), 64, 197, 197)]
)


@given(
    st.binary(max_size=50)
    | json_values.map(lambda value: json.dumps(value).encode())
    | (entries | json_values).map(
        lambda entry: json.dumps(
            {"kernels": tuning_table.KERNELS_VERSION, "tiles": {KEY: entry, "other": [64, 128, 4, 1]}}
        ).encode()
    )
)
def test_no_table_breaks_a_call_or_brings_tiles_that_tuning_would_not(content: bytes) -> None:
    rule = rules_tiles()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True):
        patch.setenv("XDG_CACHE_HOME", folder)
        patch.setattr(tuning_table, "device_name", lambda index: "GPU")
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        patch.setattr(kernels_device, "_processors", lambda index: 132)
        tuning_table.table_path().parent.mkdir()
        tuning_table.table_path().write_bytes(content)
        read_anew()
        got = choose()
        read_anew()
    assert got in set(candidates(rule, 64, 197, 197))
    assert all(type(x) is (str if name == "family" else int) for name, x in got._asdict().items())
    if got != rule:
        entry = json.loads(content)["tiles"][KEY]
        assert [type(x) for x in entry] == [type(x) for x in got[: len(entry)]] and list(got)[: len(entry)] == entry


def test_what_tuning_keeps_is_found_for_every_number_of_heads(table: pathlib.Path) -> None:
    device = torch.device("cuda:0")
    for measured in (511, 512, 513, 1023, 1024, 1025, 3000):
        for fused in (False, True):
            rule = choose_tiles(AttentionShape(DEFAULT, 32, 32, 49, 49, heads=measured, fused=fused), (9, 0))
            for best in candidates(rule, 32, 49, 49):
                save_table({tuning_table.table_key("GPU", AttentionShape(DEFAULT, 32, 32, 49, 49, measured, fused)): best}, {})
                assert tuning_table.tiles_for(AttentionShape(DEFAULT, 32, 32, 49, 49, measured, fused), device) == best


def test_a_table_is_written_whole_or_not_at_all(table: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = Tiles(64, 128, 4, 1, 168, 2)
    save_table({KEY: best}, {})
    # what another process adds meanwhile stays
    other = json.loads(table.read_text())
    other["tiles"]["other"] = [64, 128, 4, 1]
    table.write_text(json.dumps(other))
    save_table({"third": best}, {})
    assert set(json.loads(table.read_text())["tiles"]) == {KEY, "other", "third"}
    before = table.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_table({"fourth": best}, {})
    assert table.read_bytes() == before and list(table.parent.iterdir()) == [table]


def test_without_a_home_there_is_no_table(table: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")

    def nowhere() -> pathlib.Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(pathlib.Path, "home", nowhere)
    assert choose() == rules_tiles()
    with pytest.raises(OSError, match="XDG_CACHE_HOME"):
        save_table({}, {})


@pytest.mark.parametrize(
    ("queries", "keys", "dim"),
    [(49, 49, 32), (197, 197, 64), (257, 257, 64), (577, 577, 64), (16, 4096, 64), (4096, 4096, 128)],
)
def test_candidates_begin_with_the_rules_and_fit(queries: int, keys: int, dim: int) -> None:
    rule = choose_tiles(AttentionShape(DEFAULT, dim, dim, queries, keys), (9, 0))
    found = list(candidates(rule, dim, queries, keys))
    assert found[0] == rule
    assert len(found) == len(set(found)) > 1
    assert all(one.block_m <= tiles.most_queries(dim) for one in found)


def test_tiles_of_linear_layers_are_near_the_fastest_measured() -> None:
    """What the rule's docstring says of the data it was made from."""
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "archive" / "linear_h100.json"
    times: dict[tuple[int, ...], dict[tiles.LinearTiles, float]] = {}
    for row in json.loads(path.read_text())["rows"]:
        shape = row["rows"], row["inputs"], row["outputs"]
        times.setdefault(shape, {})[tiles.LinearTiles(*(row[name] for name in tiles.LinearTiles._fields))] = row["us"]
    assert len(times) == 33
    ratios = []
    for shape, found in times.items():
        chosen = rules.choose_linear_tiles(*shape, 132)
        # longer rings are another measurement's
        same_block = next(one for one in rules.LINEAR_TILES[:3] if one[:2] == chosen[:2])
        ratios.append(found[same_block] / min(found[one] for one in rules.LINEAR_TILES[:3]))
    assert max(ratios) <= 1.165
    assert sum(ratio > 1.07 for ratio in ratios) <= 2


def test_tiles_of_few_rows_are_near_the_fastest_measured() -> None:
    """A network's time with each tile in one of its layers, for layers of batch 1 and 8."""
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "archive" / "linear_tiles_h200.json"
    times: dict[tuple[str | int, ...], dict[tiles.LinearTiles, float]] = {}
    for row in json.loads(path.read_text())["rows"]:
        layer = row["model"], row["batch"], row["rows"], row["inputs"], row["outputs"]
        times.setdefault(layer, {})[tiles.LinearTiles(*row["tiles"])] = row["us"]
    assert len(times) == 98
    ratios = [found[rules.choose_linear_tiles(*layer[2:], 132)] / min(found.values()) for layer, found in times.items()]
    assert max(ratios) < 1.026
    assert sum(ratio > 1.01 for ratio in ratios) <= 9


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_tune_says_that_it_needs_a_gpu() -> None:
    result = CliRunner().invoke(app, ["tune", "--workload", "A7"])
    assert result.exit_code == 2
    assert "CUDA device" in result.output
