"""How a kernel divides its work, and which shapes the kernels for Hopper and for windows know."""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton

from ..specification.recipe import Recipe

SHORT_ROW = 256
"""Most keys of a row whose scores every resident kernel keeps in registers."""

_HELD = 288, 608
"""Most scores of a row, padding included, that :mod:`.sm90.attention_resident` keeps in registers: of one warp, or of two."""

_SHARED, _RESERVED = 228 * 1024, 1024
"""Bytes of shared memory of a processor (Hopper), and of these what each program takes besides its own."""

SHORT_OF_REGISTERS = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 9)
"""Whether the assembler (that of Triton 3.9) waits behind every product with fewer numbers in registers than that of 3.6."""

PORTABLE, SM90_RESIDENT, WINDOWS, SM90_STREAMING = "triton", "sm90.resident", "windows", "sm90.streaming"
"""Families that tiles are chosen for; PORTABLE stands for both of :mod:`.triton`."""

MOST_UNROLL = 2
"""Most tiles of 128 keys an iteration of :mod:`.sm90.attention_resident` where it reads keys twice; registers hold no four."""

SM90_BLOCKS = ((64, 4), (64, 8), (128, 8))
"""(queries a block, warps) of :mod:`.sm90.attention_resident`: a warp for every sixteen queries, or two."""


class LinearTiles(NamedTuple):
    """How :mod:`.gluon.sm90.linear` divides a layer.

    Attributes:
        block_m: rows a tile.
        block_n: outputs a tile.
        stages: slots of the ring in shared memory, a step of inputs each.
        warps: warps a program.
        programs: programs a streaming multiprocessor.
        registers: most registers a thread.
    """

    block_m: int
    block_n: int
    stages: int
    warps: int
    programs: int
    registers: int


class Tiles(NamedTuple):
    """One division of the work.

    Attributes:
        block_m: queries a block.
        block_n: keys a tile; a short row has one or two.
        warps: warps a program.
        stages: loads in flight in a loop.
        registers: most registers a thread, 0 for the compiler's choice.
        splits: programs that share a head's query blocks (short rows), or warps that share a window's; 0 chooses by the size of
            the machine.
        family: that they are for. SM90_RESIDENT has its own tiles over the keys, WINDOWS and SM90_STREAMING none but their own;
            if the call's memory format is not theirs, the others fall back on these fields.
        programs: programs that share all heads' blocks evenly and go from head to head (:mod:`.sm90.attention_resident`),
            instead of ``splits`` for each head; 0 for the latter.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int = 0
    splits: int = 0
    family: str = PORTABLE
    programs: int = 0

    @property
    def across(self) -> int:
        """Warps that share sixteen queries in :mod:`.sm90.attention_resident`."""
        return 16 * self.warps // self.block_m


class AttentionShape(NamedTuple):
    """What the rules look at of a call.

    Attributes:
        recipe: the numerical choices.
        head_dim, value_dim: channels of query and key, and of value.
        queries, keys: tokens of a head.
        heads: heads times batch.
        fused: whether the kernel quantises, too.
        masked: whether there is a mask or a bias, a causal one included.
        mask: "bool", or "bias" for one of 16-bit floats, if that is all; else empty.
    """

    recipe: Recipe
    head_dim: int
    value_dim: int
    queries: int
    keys: int
    heads: int = 1
    fused: bool = False
    masked: bool = False
    mask: str = ""


def most_queries(value_dim: int) -> int:
    """Return the largest BLOCK_M for a value dimension.

    Past it the accumulators crowd out everything else, and Triton 3.6 has been seen to emit broken kernels.
    """
    return 8192 // triton.next_power_of_2(value_dim)


def row_widths(keys: int, across: int = 1) -> tuple[int, ...]:
    """Return the tiles of a row of scores in :mod:`.sm90.attention_resident`: powers of two, little wider than the row.

    Where ``across`` warps share a row, each has at least sixteen neighbouring columns of a tile.
    """
    widths = keys // 128 * [128]
    for width in (64, 32):
        if sum(widths) + width <= keys:
            widths.append(width)
    left = keys - sum(widths)
    least = 8 if across == 1 else 16 * across
    return (*widths, max(least, 8 if left <= 8 else 16 if left <= 16 else 32)) if left else tuple(widths)


def row_fits_registers(keys: int, across: int = 1) -> bool:
    """Tell whether :mod:`.sm90.attention_resident` keeps a row's scores in registers, of ``across`` warps."""
    return sum(row_widths(keys, across)) <= _HELD[across - 1]


def exchanged_widths(widths: tuple[int, ...], whole: int, unroll: int) -> tuple[int, ...]:
    """Return the tiles of probabilities that warps of a row exchange in :mod:`.sm90.attention_resident`.

    Args:
        widths: of a row's tiles, ``whole`` of which have 128 keys.
        unroll: tiles an iteration where keys are passed over twice: its tiles have places, and each tile behind the loop. 0
            where registers hold the scores, and all tiles have places.
    """
    return (*widths[:unroll], *widths[whole // unroll * unroll :]) if unroll else widths


def is_crowded(keys: int) -> bool:
    """Tell whether a row of so many keys leaves :mod:`.sm90.attention_resident` registers for little else.

    With anything else under way the assembler then waits behind every product and says so (C7512).
    """
    return keys > (448 if SHORT_OF_REGISTERS else 512)


@functools.lru_cache(1024)
def shared_bytes(keys: int, head_dim: int, tail: int = 0, across: int = 1) -> int:
    """Return the shared memory that :mod:`.sm90.attention_resident` takes where it reads keys twice.

    Args:
        keys: keys a row.
        head_dim: channels.
        tail: places for queries past whole blocks that are a matter of their own.
        across: warps that share sixteen queries, of which there are 64 if these are two.
    """
    widths, spans = row_widths(keys, across), [kernel_width(span) for span in channel_spans(head_dim)]
    values = [max(value_width(span), 64 if tail else 16) for span in channel_spans(head_dim)]
    key_rows, value_rows = (sum(max(width, rows) for width in widths) for rows in (64 if tail else 32, 32))
    staged = key_rows * sum(spans) + value_rows * sum(values)
    # sums and scales of V's channels, and what reductions by eight warps pass through
    extra = 16 * sum(spans)
    if across > 1:
        extra += 64 * (sum(exchanged_widths(widths, keys // 128, MOST_UNROLL)) + 3 * 4 * across)
    return staged + extra + tail * (sum(spans) + sum(max(width, 64) for width in widths))


def most_programs(shared: int) -> int:
    """Return how many programs with so much shared memory a processor has room for, on Hopper."""
    return _SHARED // (shared + _RESERVED) if shared <= _SHARED - _RESERVED else 0


def is_short(shape: AttentionShape) -> bool:
    """Tell whether the rules hold a row whole, which makes attention one launch (:mod:`.triton.attention_resident`)."""
    widest = max(shape.head_dim, shape.value_dim)
    return shape.recipe.normalization == "two_pass" and 0 < shape.keys <= SHORT_ROW and widest <= 128


def kernel_width(channels: int) -> int:
    """Return the channels that kernels for Hopper take for a head of ``channels``: those past the last are zero."""
    return 32 if channels <= 32 else 64 if channels <= 64 else 128


def value_width(channels: int) -> int:
    """Return the same of values in :mod:`.sm90.attention_resident`: a power of two of 16 at least."""
    return max(16, 1 << (channels - 1).bit_length())


def channel_spans(channels: int) -> tuple[int, ...]:
    """Return the parts in which kernels for Hopper take a head's channels, each of its own :func:`kernel_width`.

    Their products need powers of two, of which 64 and 32 are nearer to 72, 80 and 96 channels than 128.
    """
    return (64, channels - 64) if 64 < channels <= 96 else (channels,)


def packed_width(channels: int) -> int:
    """Return the rows that a head's channels of V take where :mod:`.sm90.attention_streaming` wants them: spans, padded."""
    return sum(map(value_width, channel_spans(channels)))


def widest_span(channels: int) -> int:
    """Return the channels of a head's largest span, on which the registers of :mod:`.sm90.attention_resident` depend."""
    return max(channel_spans(channels))


def unusual(recipe: Recipe) -> str | None:
    """Return why kernels that are written for DEFAULT's arithmetic, those for Hopper and for windows, do not take a recipe."""
    wanted = {
        "normalization": "two_pass", "exponential": "quadratic", "probability_bits": 8, "probability_rounding": "nearest",
        "output": "accumulator",
    }  # fmt: skip
    return next((f"it takes {name}={x!r} alone" for name, x in wanted.items() if getattr(recipe, name) != x), None)


def fits_block(block_m: int, warps: int, head_dim: int, keys: int) -> bool:
    """Tell whether :mod:`.sm90.attention_resident` has registers for such blocks: a warp or two for sixteen queries."""
    across = 16 * warps // block_m
    if row_fits_registers(keys, across):
        fits = block_m <= most_queries(widest_span(head_dim))
    else:
        fits = across == 1 or most_programs(shared_bytes(keys, head_dim, across=across)) > 0
    return (block_m, warps) in SM90_BLOCKS and fits


def window_widths(keys: int) -> tuple[int, ...]:
    """Return the tiles of a row of scores in :mod:`.windows.attention`, a power of two each."""
    return (32, *{1: (8,), 2: (16,), 3: (16, 8), 4: (32,)}[(keys - 25) // 8])


def has_half_block(queries: int, warps: int, splits: int) -> bool:
    """Tell whether :mod:`.windows.attention` has code for eight queries, too: programs of one warp with several blocks."""
    return warps == 1 and 16 * splits < queries
