"""Which calls the kernels for Hopper take, and measured rules for how they divide them. They change speed, never a bit.

A number without another note was found on one H200 with Triton 3.6, CUDA-graph replay, medians of nine, all divisions of a
shape in alternation. The data lie in ``benchmarks/archive``:

* heads that stay in shared memory, keys read once or twice: ``spans_trial_h200.json``, ``walk_first_h200.json`` and
  ``walk_trial_h200.json``;
* programs that pass from head to head: ``heads_trial_h200.json``;
* linear layers of integer networks: ``linear_h100.json``, on one H100;
* long rows of few heads from floats: ``quantise_apart_h100.json``, on one H100; of so few that a block of 64 queries has a
  processor to itself: ``long_rows_h200.json``;
* packed sequences, the longest first: ``varlen_order_h100.json``, on one H100;
* sums of V in programs of eight warps: ``division_h100.json``, on one H100;
* keys and values quantised by clusters: ``cluster_quantise_h200.json``.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton

from ....specification import fixed_point as fp
from ...heuristics import REGISTERS_OF_THREE, Work
from ...tiles import (
    MOST_UNROLL,
    SHORT_ROW,
    SM90_RESIDENT,
    SM90_STREAMING,
    AttentionShape,
    LinearTiles,
    Tiles,
    channel_spans,
    fits_block,
    is_crowded,
    most_programs,
    row_fits_registers,
    shared_bytes,
    unusual,
    widest_span,
)
from ...triton import rules as portable
from ..constants import Plan

STAGE_INT8 = 0.5
"""What it takes to bring a head's keys and values to shared memory, in the time of one block of queries."""
STAGE_FLOATS = 1.2
"""The same if they are quantised on the way, by four warps beside another program of narrow heads."""
STAGE_FLOATS_CROWDED = 2.0
"""The same by four warps with wide heads, or beside two other programs."""
STAGE_FLOATS_BY_EIGHT = 1.5
"""The same of wide heads by eight warps."""
NEXT_INT8, NEXT_FLOATS, NEXT_WIDE_FLOATS = 0.3, 0.8, 1.5
"""Cost of moving to the next head, in units of one query block; part of it overlaps with other programs."""
PASSING_BY_FOUR, PASSING_BY_EIGHT = 1.05, 1.01
"""Factors of a block's time in programs that pass from head to head: they take more registers, which four warps lack."""

APART_KEYS = 1200
"""Keys from which few heads are quantised by launches of their own: between 1025, where that is slower for 6 heads and level
for 12, and 1370."""
BIASED_KEYS_OF_THREE = 144
"""Keys of rows with a bias, at most, of which three programs a processor have registers; with more they would spill."""
FEW_QUERIES = 32
"""Queries of a class token or of pooling, at most: a program works on them for less time than on quantising their keys."""


def _misfit(shape: AttentionShape, capability: tuple[int, int]) -> str | None:
    """Return why no kernel for Hopper takes shapes and recipe like these, or None."""
    if capability[0] != 9:
        return f"it is for Hopper (sm_90), this is sm_{capability[0]}{capability[1]}"
    if reason := unusual(shape.recipe):
        return reason
    if shape.head_dim != shape.value_dim or shape.head_dim % 8 or shape.head_dim > 128:
        return (
            f"it takes 8 to 128 channels, a multiple of 8, as many of value; these are {shape.head_dim} and {shape.value_dim}"
        )
    return None


_MASKS = "it takes a bool mask or a bias of 16-bit floats, but no other and no causal order"


def _holds_masked(keys: int, head_dim: int) -> bool:
    """Tell whether :mod:`.sm90.attention_resident` takes rows with a mask, by warps that have sixteen queries each."""
    return keys <= SHORT_ROW and widest_span(head_dim) <= 64


def resident_misfit(shape: AttentionShape, capability: tuple[int, int]) -> str | None:
    """Return why :mod:`.sm90.attention_resident` does not take shapes and recipe like these, or None."""
    if reason := _misfit(shape, capability):
        return reason
    if shape.masked and not shape.mask:
        return _MASKS
    if shape.masked and not _holds_masked(shape.keys, shape.head_dim):
        return f"with a mask it takes up to {SHORT_ROW} keys of up to 96 channels"
    if shape.mask == "bias" and not shape.fused:
        return "beside int8 it takes no bias"
    if shape.keys <= 64:
        return f"it takes more than 64 keys, these are {shape.keys}"
    if shape.fused and shape.queries <= FEW_QUERIES and shape.keys > SHORT_ROW and shape.head_dim > 64:
        # not measured: of narrow heads one launch is slow where rows are long (:func:`quantises_apart`)
        return f"it takes more than {FEW_QUERIES} queries of so many wide float keys, these are {shape.queries}"
    if row_fits_registers(shape.keys) or most_programs(shared_bytes(shape.keys, shape.head_dim)) > 0:
        return None
    return f"{shape.keys} keys of {shape.head_dim} channels do not fit a processor's shared memory"


def resident_plan(shape: AttentionShape, capability: tuple[int, int]) -> Tiles:
    """Return the tiles of :mod:`.sm90.attention_resident`."""
    # heads that wide are quantised by eight warps, which have the registers for it
    warps = 8 if shape.fused and widest_span(shape.head_dim) > 64 and row_fits_registers(shape.keys) else 4
    return Tiles(64, 128, warps, 1 if shape.keys <= SHORT_ROW else 3, family=SM90_RESIDENT)


def streams(shape: AttentionShape, capability: tuple[int, int]) -> str | None:
    """Return why :mod:`.sm90.attention_streaming` does not know shapes and recipe like these, or None."""
    if reason := _misfit(shape, capability):
        return reason
    if shape.masked and not shape.mask:
        return _MASKS
    if shape.head_dim <= 32:
        return f"it takes more than 32 channels, these are {shape.head_dim}"
    if shape.queries <= FEW_QUERIES:
        return f"it takes more than {FEW_QUERIES} queries, these are {shape.queries}"
    # two tiles at least
    least = 129 if shape.mask == "bias" and not _holds_masked(shape.keys, shape.head_dim) else SHORT_ROW + 1
    if least <= shape.keys <= fp.SECTION_KEYS:
        return None
    return f"it takes {least} to {fp.SECTION_KEYS} keys, these are {shape.keys}"


def streaming_misfit(shape: AttentionShape, capability: tuple[int, int]) -> str | None:
    """Return why :mod:`.sm90.attention_streaming` is not chosen for shapes and recipe like these, or None."""
    return "it takes one key scale a head" if shape.recipe.key_granularity == "token" else streams(shape, capability)


def streaming_plan(shape: AttentionShape, capability: tuple[int, int]) -> Tiles:
    """Return the tiles of :mod:`.sm90.attention_streaming`."""
    return portable.streaming_plan(shape, capability)._replace(family=SM90_STREAMING)


def _split_reread(tiles: Tiles, work: Work) -> Tiles:
    """:func:`split_sm90_resident` where keys are read twice, because registers do not hold a row's scores."""
    queries, keys, heads, head_dim, fused, *_, processors = work
    room = most_programs(shared_bytes(keys, head_dim))
    if not tiles.splits and queries > 64:
        blocks = triton.cdiv(queries, 64)
        if blocks * heads <= processors:
            # the call takes as long as one warp's chain of instructions
            if head_dim <= 64 and (fused or row_fits_registers(keys, 2)) and fits_block(64, 8, head_dim, keys):
                # two warps share it, and their registers hold the row, or all eight quantise the head
                return tiles._replace(block_m=64, warps=8, splits=blocks)
            if not fused:
                # blocks of 128 would leave processors idle
                return tiles._replace(block_m=64, warps=4, splits=blocks)
        if room == 1 or triton.cdiv(queries, 128) * heads <= processors:
            # one program of eight warps a processor fetches the keys once
            tiles = tiles._replace(block_m=128, warps=8)
    each = 1 if tiles.warps == 8 else min(room, 3 if head_dim <= 64 else 2)
    splits, programs = min(triton.cdiv(queries, tiles.block_m), tiles.splits), 0
    if not splits:
        splits, programs, duration = share_heads(queries, heads, each, processors, head_dim, fused)
        if each == 2 and (heads <= processors or not (fused and head_dim > 64)):
            # Most processors would have two programs of four warps. If one of eight takes no longer, keys are fetched once, not
            # twice. Not where each quantises several wide heads: the other then computes meanwhile.
            alone = share_heads(queries, heads, 1, processors, head_dim, fused)
            most = alone.programs or head_dim > 64 or 2 * (programs or splits * heads) > 3 * processors
            if most and alone.duration <= duration:
                tiles, each, splits, programs = tiles._replace(block_m=128, warps=8), 1, alone.splits, alone.programs
    registers = tiles.registers or (REGISTERS_OF_THREE if each == 3 and (programs or splits * heads) > 2 * processors else 0)
    return tiles._replace(splits=splits, programs=programs, registers=registers)


def tail_columns(tiles: Tiles, queries: int, head_dim: int) -> int:
    """Return the columns, 8 or 16, for the queries past whole blocks; 0 if :mod:`.sm90.tail_queries` cannot take them."""
    left = queries % tiles.block_m
    return (8 if left <= 8 else 16) if tiles.warps == 4 and head_dim > 32 and 0 < left <= 16 else 0


def _split_in_registers(tiles: Tiles, work: Work) -> Tiles:
    """:func:`split_sm90_resident` where registers hold a row's scores."""
    queries, keys, heads, head_dim, fused, masked, biased, by_channel, processors = work
    narrow, wide = head_dim <= 64, widest_span(head_dim) > 64
    # programs that a processor has room for: more keys and wide heads take registers, and eight warps take all of them
    places = 3 if narrow and keys <= (BIASED_KEYS_OF_THREE if biased else SHORT_ROW) else 1 if tiles.warps == 8 else 2
    blocks = triton.cdiv(queries, tiles.block_m)
    splits = min(blocks, tiles.splits or max(1, places * processors // max(1, heads)))
    if not tiles.splits:
        if splits * heads <= processors and (fused or not narrow) and not masked:
            # processors are left over, so the call takes as long as one warp's chain of instructions: two warps share it
            return tiles._replace(warps=8, splits=splits)
        if splits * heads > processors >= heads > 0:
            # one program a processor fetches the keys fewer times than several; if it quantises, too, it has eight warps
            alone = processors // heads
            if fused and not wide and (places == 3 or not narrow):
                return tiles._replace(block_m=128, warps=8, splits=min(triton.cdiv(queries, 128), alone))
            if not fused and places == 3 and alone == triton.cdiv(queries, 128) > 1:
                # a block of 128 queries by eight warps takes less time than two of 64, one after the other
                return tiles._replace(block_m=128, warps=8, splits=alone)
            # two programs have half of a processor each
            pays = alone > 1 if places == 3 else triton.cdiv(blocks, alone) < 2 * triton.cdiv(blocks, splits)
            if not fused and not wide and pays:
                return tiles._replace(splits=alone)
    # three programs a processor instead of two: up to 256 keys with a few spills; of int8 with up to 8 keys more, and queries
    # past whole blocks, without any, unless there is a scale for each channel
    few_more = not (fused or by_channel) and narrow and keys <= SHORT_ROW + 8 and tail_columns(tiles, queries, head_dim) == 8
    third = places == 3 or few_more
    registers = REGISTERS_OF_THREE if third and splits * heads > 2 * processors else 0
    return tiles._replace(splits=splits, registers=tiles.registers or registers)


def split_sm90_resident(tiles: Tiles, work: Work) -> Tiles:
    """Fill in how many programs share a head, so that the GPU is full but keys are fetched no more often than needed."""
    if tiles.programs:
        return tiles._replace(splits=0)
    return (_split_in_registers if row_fits_registers(work.keys, tiles.across) else _split_reread)(tiles, work)


def quantises_apart(queries: int, keys: int, heads: int, head_dim: int, processors: int) -> bool:
    """Tell whether launches of their own should quantise, although :mod:`.sm90.attention_resident` could do it, too.

    The times are of two launches that quantise, before :mod:`.sm90.quantize`, which saves 2 to 3 us. Where each processor has a
    block of 128 queries at most, the one launch is sooner done if it is repeated: 25.7 against 26.8 us for 12 heads of 1370
    keys. Its code quantises a whole head in registers, and grows with the row. Beside the other kernels of a DINOv2-B it takes
    33.6 us, which costs the model 5 %: it then no longer seems to stay in the instruction caches. Up to one and a half blocks a
    processor, programs of the one launch quantise one or two heads each and wait for the slower: 16 heads of 1374 keys take
    37.1 us and 33.3 apart, 24 of 1370 keys 48.0 and 50.5 (``own_bound_h200.json``). With few queries quantising is most of the
    work, and more programs share it apart: one query of 768 heads of 1370 keys takes 469 us in one launch and 225 with portable
    kernels (``few_queries_h200.json``).

    Args:
        queries, keys, heads, head_dim, processors: as in :class:`Work`.
    """
    few = queries <= FEW_QUERIES or 2 * triton.cdiv(queries, 128) * heads <= 3 * processors
    return keys > APART_KEYS and head_dim <= 64 and few


class Cluster(NamedTuple):
    """How :mod:`.sm90.quantize` divides the keys, or the values, of a head.

    Attributes:
        blocks: of a cluster.
        tiles: of each block, of as many tokens as four warps load sixteen bytes of four times.
    """

    blocks: int
    tiles: int


CLUSTER_WARPS = 4
"""Warps of a block of :mod:`.sm90.quantize`."""
_MOST_TILES = {4: 4, 8: 4, 16: 5}
"""Most tiles of a block, by the blocks of a cluster: five take all registers, so only the largest cluster has them."""


def choose_cluster(tokens: int, channels: int) -> Cluster | None:
    """Return the smallest cluster of :mod:`.sm90.quantize` that holds a head's keys in registers, or None for two launches.

    Smaller clusters with more tiles have fewer ranges to read. Of 40 to 48 or 72 to 96 channels many lanes would idle: 64
    heads of 4096 keys of 80 channels took 78 us, and two launches 74. Clusters of one tile a block were not measured.

    Args:
        tokens: of a head.
        channels: of a head, more than 32.
    """
    width = triton.next_power_of_2(channels)
    tile = 2048 * CLUSTER_WARPS // width
    if channels % 8 or 4 * channels <= 3 * width or tokens <= min(_MOST_TILES) * tile:
        return None
    found = (Cluster(blocks, triton.cdiv(tokens, blocks * tile)) for blocks in _MOST_TILES)
    return next((cluster for cluster in found if cluster.tiles <= _MOST_TILES[cluster.blocks]), None)


def most_packed_keys(head_dim: int, heads: int, processors: int) -> int:
    """Return the longest of packed sequences that :mod:`.gluon.sm90.attention_packed` takes, measured on an H100.

    Longer ones are quantised by a launch of their own, once for all blocks of queries and by more programs at a time. With 64
    images of 64 to 675 patches and 12 heads, one launch took 140 us and two 152; with 16 such images, 60 and 49.

    Args:
        head_dim: channels.
        heads: of all sequences.
        processors: of the GPU.
    """
    spans = len(channel_spans(head_dim))
    if head_dim <= 96 and heads >= 4 * processors:
        return 640 if spans > 1 else 768
    return 384 if spans > 1 else 256


def packed_order(sequences: int, keys: int) -> int:
    """Return how many packed sequences kernels can put in order, the longest first, or 0 if they take them as they lie.

    Args:
        sequences: of the call. More than 1024 are many for a GPU, and a long one at the end costs little.
        keys: of the longest. If that is a tile at most, all sequences are alike.
    """
    if sequences == 1 or keys <= 64:
        return 0
    # few numbers, each of which is a kernel of its own
    return next((most for most in (64, 256, 1024) if sequences <= most), 0)


def split_packed(blocks: int, heads: int, processors: int) -> int:
    """Return how many programs share a head's blocks of queries in :mod:`.gluon.sm90.attention_packed`.

    Each quantises the head's keys and values by itself, so there is one, unless that leaves processors idle.

    Args:
        blocks: of the longest sequence.
        heads: of all sequences.
        processors: of the GPU.
    """
    return min(blocks, max(1, 2 * processors // heads))


def division(tiles: Tiles, work: Work, heads: int) -> Plan:
    """Return how programs of :mod:`.sm90.attention_resident` divide a call's work.

    Args:
        tiles: from :func:`split_sm90_resident`.
        heads: of one batch element.
    """
    queries, keys, all_heads, head_dim, fused, masked, *_, processors = work
    across, splits = tiles.across, tiles.splits
    blocks = triton.cdiv(queries, tiles.block_m)
    twice = not row_fits_registers(keys, across)
    # The last few queries by code of their own pay, on int8, where one program takes a whole head and shares its processor with
    # another. From floats they pay with narrow heads: where keys are read twice, if a thread has all registers.
    loops = max(1, splits) < blocks and splits <= (2 if fused and not twice else 1)
    if not fused:
        pays = all_heads > processors
    elif head_dim > 64:
        pays = False
    else:
        pays = not (twice and tiles.registers)
    tail = tail_columns(tiles, queries, head_dim) if loops and pays and not masked else 0
    if twice and most_programs(shared_bytes(keys, head_dim, tail)) < (3 if tiles.registers else 2):
        tail = 0
    # Products that start from the sums of V's channels save instructions, but wait for the sums; other programs hide that.
    # Beside tail queries from floats there are registers for it in short rows alone.
    programs = splits * all_heads
    eight = not (fused or twice) and tiles.block_m == 128
    if twice:
        begin = all_heads > processors
    else:
        begin = programs > processors or (fused and across == 1) or eight
        begin = begin and not (fused and tail and keys > SHORT_ROW)
    sums = "begin" if begin else "end"
    # For a single block idle tensor cores find the sums sooner than integer additions by four warps do; beside the outputs of
    # wide heads there are no registers for it.
    few = 0 < programs <= processors and splits * tiles.block_m >= queries and not eight
    if few and not (tail or twice or is_crowded(keys)) and (head_dim <= 64 or across > 1):
        sums = "products"
    # programs that pass from head to head have to know how many blocks a head has
    whole = 0 if splits else blocks - (tail > 0)
    # tiles of 128 keys an iteration; a loop of a single iteration is unrolled, and then four tiles do not fit the registers
    unroll = 0 if not twice else 1 if across == 1 and (tiles.registers or keys < 512) else MOST_UNROLL
    return Plan(
        LOOPS=not splits or splits < blocks,
        TAIL=tail,
        ACROSS=across,
        SUMS=sums,
        UNROLL=unroll,
        BLOCKS=whole,
        HEADS=heads if whole else 0,
        # programs with more to do start first, where a processor has three of them
        SPREAD=tail > 0 and splits > 1 and keys <= SHORT_ROW,
    )


class Shares(NamedTuple):
    """How programs of :mod:`.sm90.attention_resident` share heads.

    Attributes:
        splits: programs a head, if each keeps to one; else 0.
        programs: programs that pass from head to head; else 0.
        duration: how long they take, in blocks of queries.
    """

    splits: int
    programs: int
    duration: float


@functools.lru_cache(1024)
def share_heads(queries: int, heads: int, each: int, processors: int, head_dim: int, fused: bool) -> Shares:
    """Return how programs should share heads where :mod:`.sm90.attention_resident` reads keys twice.

    Programs that keep to one head run in rounds, of which the last may be mostly empty. Programs that pass from head to head
    all take the same number of query blocks, but bring the keys of more heads to shared memory. The model counts both in the
    time of one block of queries.

    Args:
        queries: queries of a head.
        heads: heads times batch.
        each: programs a processor, one of eight warps and blocks of 128, or more of four warps and blocks of 64.
        processors: streaming multiprocessors.
        head_dim: channels.
        fused: whether the kernel quantises, too.
    """
    places, block_m, wide = each * processors, 128 if each == 1 else 64, head_dim > 64
    blocks = triton.cdiv(queries, block_m)
    stage = STAGE_INT8
    if fused:
        stage = STAGE_FLOATS_BY_EIGHT if wide and each == 1 else STAGE_FLOATS_CROWDED if wide or each == 3 else STAGE_FLOATS
    found = [
        Shares(splits, 0, triton.cdiv(heads * splits, places) * (triton.cdiv(blocks, splits) + stage))
        for splits in range(1, blocks + 1)
    ]
    if each > 1 and blocks > 1 and 0 < queries % block_m <= 16 and not fused:
        # a program that has a head to itself takes the last few queries in half a block's time
        found.append(Shares(1, 0, triton.cdiv(heads, places) * (blocks - 0.5 + stage)))
    if each == 1 or (each == 2 and not fused):
        share = triton.cdiv(heads * blocks, places)
        following = NEXT_INT8 if not fused else NEXT_WIDE_FLOATS if wide else NEXT_FLOATS
        most = max((share * (program + 1) - 1) // blocks - share * program // blocks for program in range(places))
        factor = PASSING_BY_EIGHT if each == 1 else PASSING_BY_FOUR
        found.append(Shares(0, places, (share + stage + most * following) * factor))
    return min(found, key=lambda shares: shares.duration)


LINEAR_TILES = (
    LinearTiles(128, 128, 3, 8, 2, 128),
    LinearTiles(64, 128, 3, 4, 3, 160),
    LinearTiles(64, 64, 3, 4, 4, 112),
    LinearTiles(64, 64, 6, 4, 2, 160),
    LinearTiles(64, 64, 12, 4, 1, 160),
    LinearTiles(64, 128, 4, 4, 2, 200),
    LinearTiles(64, 128, 8, 4, 1, 200),
)
"""Large, middle and small tiles of :func:`choose_linear_tiles`; small and middle ones with longer rings, too, for two
programs a processor and for one."""
LINE = 128
"""Bytes of a line of memory."""


def choose_linear_tiles(rows: int, inputs: int, outputs: int, processors: int) -> LinearTiles:
    """Return the tiles of a linear layer for :mod:`.gluon.sm90.linear`.

    Large tiles read least, small ones keep more processors busy. Of 33 shapes of DeiT, ViT and Swin at batch 1 to 256 the
    choice among large, middle and small tiles with short rings is the fastest or within 7 % of it on all but two, and within
    16 % on these. Where a processor has one or two tiles, the ring takes the shared memory that more programs would: with few
    programs a layer lasts as long as its steps wait for memory (``few_tiles_h200.json``). The middle tiles' longer rings and
    the exceptions for few inputs and for rows that are not lines of memory are of ``linear_tiles_h200.json``: eleven tiles in
    each of 98 layers of 11 networks at batch 1 and 8, of which the choice is within 1 % of the fastest in all but nine. The
    bounds (768 and 1024 inputs, 384 outputs, 0.7, 0.75 and 1.1 tiles a processor) are fitted to these; DeiT-T, Swin-S and
    Swin-B, which are not among them, take 0.94 to 0.99 of the time with it.
    """
    large, middle, small, small_for_two, small_for_one, middle_for_two, middle_for_one = LINEAR_TILES
    tiles = triton.cdiv(rows, large.block_m) * triton.cdiv(outputs, large.block_n)
    if outputs > inputs:
        enough = 1.5
    elif outputs == inputs:
        # so few inputs leave the products little time beside an output that is read and written in int16
        enough = 8
    else:
        # a step of a row that begins inside a line of memory reads two lines
        enough = 1 if inputs % LINE else 4
    if tiles >= enough * processors:
        return large
    few = triton.cdiv(rows, small.block_m) * triton.cdiv(outputs, small.block_n)
    if outputs != inputs:
        tiles = triton.cdiv(rows, middle.block_m) * triton.cdiv(outputs, middle.block_n)
        if tiles > 2 * processors:
            return middle
        if inputs >= 768 and outputs >= 384 and tiles > 0.75 * processors:
            return middle_for_one if tiles <= 1.1 * processors else middle_for_two
    if few <= processors:
        # with a short ring the kernels before and after find room on the same processor
        return small_for_two if inputs <= 1024 and few <= 0.7 * processors else small_for_one
    return small_for_two if few <= 2 * processors else small
