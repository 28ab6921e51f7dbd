"""Which calls the portable kernels take, and rules for how they divide them: measured on Hopper, else read off machine code.

A number without another note was found on one H200 with Triton 3.6, CUDA-graph replay, medians of nine, all divisions of a
shape in alternation. The data lie in ``benchmarks/archive``: ``tried_h200.json``.
"""

from __future__ import annotations

import triton

from ..heuristics import REGISTERS_OF_FOUR, REGISTERS_OF_SIX, REGISTERS_OF_THREE, REGISTERS_OF_THREE_INT8, Work
from ..tiles import AttentionShape, Tiles, is_short, most_queries

LONE_WARP_HEADS = 1024
"""Heads (windows times heads) from which :mod:`.triton.attention_resident` takes windows by programs of one warp."""
MANY_HEADS = 512
"""Heads from which it takes fewer registers, for more programs a processor."""


def _block(shape: AttentionShape) -> int:
    return min(64 if shape.queries > 32 else 32 if shape.queries > 16 else 16, most_queries(shape.value_dim))


def resident_misfit(shape: AttentionShape, capability: tuple[int, int]) -> str | None:
    """Return why :mod:`.triton.attention_resident` does not take shapes and recipe like these, or None."""
    if shape.mask == "bias" and not shape.fused:
        return "beside int8 it takes a bias in fixed point"
    return None if is_short(shape) else "it takes up to 256 keys of up to 128 channels, and two passes over them"


def resident_plan(shape: AttentionShape, capability: tuple[int, int]) -> Tiles:
    """Return the tiles of :mod:`.triton.attention_resident`."""
    hopper, block_m, fused, masked = capability[0] == 9, _block(shape), shape.fused, shape.masked
    wide = shape.head_dim > 64 or shape.recipe.probability_bits == 15
    block_n = max(32, min(128, triton.next_power_of_2(shape.keys)))
    general = Tiles(block_m, block_n, 8 if wide and not hopper and block_m == 64 else 4, 1)
    narrow = max(shape.head_dim, shape.value_dim) <= 32 and shape.recipe.probability_bits == 8
    if hopper and block_n == 64 and block_m == 64 and narrow:
        # thousands of windows fill the GPU with programs of one warp, which waits for no other
        if shape.heads >= LONE_WARP_HEADS:
            return general._replace(block_m=32 if fused and not masked else 16, warps=1, registers=REGISTERS_OF_THREE)
        if shape.heads >= MANY_HEADS and masked and not fused:
            return general._replace(block_m=32, warps=2, registers=REGISTERS_OF_FOUR)
        if shape.heads >= MANY_HEADS:
            return general._replace(registers=REGISTERS_OF_SIX)
    return general


def streaming_misfit(shape: AttentionShape, capability: tuple[int, int]) -> str | None:
    """Return None: :mod:`.triton.attention_streaming` takes everything."""
    return None


def streaming_plan(shape: AttentionShape, capability: tuple[int, int]) -> Tiles:
    """Return the tiles of :mod:`.triton.attention_streaming`."""
    hopper, block_m, recipe = capability[0] == 9, _block(shape), shape.recipe
    wide, widest = shape.head_dim > 64 or recipe.probability_bits == 15, max(shape.head_dim, shape.value_dim)
    if recipe.normalization == "online":
        return Tiles(block_m, recipe.key_block, 4, 1 if widest > 256 else 2)
    if widest > 256:
        # two stages of keys and values take 64 KiB of shared memory, which every architecture has
        return Tiles(block_m, 32, 4, 2)
    if not hopper and wide:
        return Tiles(block_m, 64, 8 if block_m == 64 else 4, 2)
    if widest > 128 or recipe.probability_bits == 15:
        return Tiles(block_m, 64, 4, 3)
    if shape.masked or not hopper or recipe.key_granularity == "token":
        return Tiles(block_m, 128, 4, 3)
    # three programs a processor instead of two: 3 to 7 % at 4096 keys
    return Tiles(block_m, 64, 4, 4, REGISTERS_OF_THREE) if wide else Tiles(block_m, 128, 4, 3, REGISTERS_OF_THREE)


def split_resident(tiles: Tiles, work: Work, narrow: bool) -> Tiles:
    """Fill in how many programs share a head of :mod:`.triton.attention_resident`, and how many registers a thread has.

    Args:
        narrow: up to 64 channels, 8-bit P, no bias beside int8: a program then fits a third of a processor.
    """
    fused, processors = work.fused, work.processors
    splits = min(triton.cdiv(work.queries, tiles.block_m), tiles.splits or max(1, 3 * processors // max(1, work.heads)))
    registers = tiles.registers
    if not registers and tiles.warps == 4 and tiles.block_n > 64 and narrow:
        programs = splits * work.heads
        if fused and programs > 2 * processors:
            registers = REGISTERS_OF_THREE
        elif not fused and 2 * processors < programs <= 3 * processors:
            registers = REGISTERS_OF_THREE_INT8
    return tiles._replace(splits=splits, registers=registers)
