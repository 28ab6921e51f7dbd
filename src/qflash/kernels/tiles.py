"""How a kernel divides its work: rules, and a table of what ``qflash tune`` measured on this machine's GPU.

Tiles change speed, never a bit. Without a table the rules hold, which work everywhere; nothing is measured in a user's call.
"""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
import reprlib
import warnings
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

import torch
import triton

from ..folders import cache_folder, make_cache_folder, write_whole
from ..recipe import DEFAULT, Recipe

SHORT_ROW = 256
"""Most keys of a row that is held whole by every kernel for such rows."""
_HELD = 288, 608
"""Most scores of a row that :mod:`.hopper` holds whole, padding included: one warp's, or those of two that share it."""
_SHARED, _RESERVED = 228 * 1024, 1024
"""Bytes of shared memory of a processor (Hopper), and of these what each program takes besides its own."""
SHORT_OF_REGISTERS = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 9)
"""Whether the assembler (that of Triton 3.9) waits behind every product with fewer numbers in registers than that of 3.6."""
GENERAL, HOPPER, WINDOWS, LONG_HOPPER = range(4)
"""Kernels: :mod:`.short` and :mod:`.long` take every call; :mod:`.hopper`, :mod:`.windows` and :mod:`.long_hopper` what they
are written for. What is not for HOPPER may still be for LONG_HOPPER."""

HOPPER_BLOCKS = ((64, 4), (64, 8), (128, 8))
"""(queries a block, warps) of :mod:`.hopper`: a warp for every sixteen queries, or two."""


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
        kernel: GENERAL, or a kernel that is asked first. HOPPER has its own tiles over the keys, WINDOWS and LONG_HOPPER none
            but their own; if the call is not theirs, GENERAL has the other fields.
        programs: programs that share all heads' blocks evenly and go from head to head (:mod:`.hopper`), instead of ``splits``
            for each head; 0 for the latter.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int = 0
    splits: int = 0
    kernel: int = GENERAL
    programs: int = 0

    @property
    def across(self) -> int:
        """Warps that share sixteen queries in :mod:`.hopper`."""
        return 16 * self.warps // self.block_m


def most_queries(value_dim: int) -> int:
    """Return the largest BLOCK_M for a value dimension.

    Past it the accumulators crowd out everything else, and Triton 3.6 has been seen to emit broken kernels.
    """
    return 8192 // triton.next_power_of_2(value_dim)


def row_widths(keys: int, across: int = 1) -> tuple[int, ...]:
    """Return the tiles of a row of scores in :mod:`.hopper`: powers of two, and together not much wider than the row.

    Where ``across`` warps share a row, each has at least sixteen neighbouring columns of a tile.
    """
    widths = keys // 128 * [128]
    for width in (64, 32):
        if sum(widths) + width <= keys:
            widths.append(width)
    left = keys - sum(widths)
    least = 8 if across == 1 else 16 * across
    return (*widths, max(least, 8 if left <= 8 else 16 if left <= 16 else 32)) if left else tuple(widths)


def is_held(keys: int, across: int = 1) -> bool:
    """Tell whether :mod:`.hopper` holds rows of scores whole, ``across`` warps a row. Others it walks over twice."""
    return sum(row_widths(keys, across)) <= _HELD[across - 1]


def is_crowded(keys: int) -> bool:
    """Tell whether :mod:`.hopper` has registers for little else than a row's scores where it holds so many keys whole.

    With anything else under way the assembler then waits behind every product and says so (C7512).
    """
    return keys > (448 if SHORT_OF_REGISTERS else 512)


def shared_bytes(keys: int, head_dim: int, tail: int = 0) -> int:
    """Return the shared memory that :mod:`.hopper` takes where it walks over rows.

    Args:
        keys: keys a row.
        head_dim: channels.
        tail: places for queries past whole blocks that are a matter of their own.
    """
    widths, spans = row_widths(keys), [kernel_width(span) for span in channel_spans(head_dim)]
    values = [max(value_width(span), 64 if tail else 16) for span in channel_spans(head_dim)]
    key_rows, value_rows = (sum(max(width, rows) for width in widths) for rows in (64 if tail else 32, 32))
    held = key_rows * sum(spans) + value_rows * sum(values)
    # sums and scales of V's channels, and what reductions by eight warps pass through
    aside = 16 * sum(spans)
    return held + aside + tail * (sum(spans) + sum(max(width, 64) for width in widths))


def most_programs(shared: int) -> int:
    """Return how many programs with so much shared memory a processor has room for, on Hopper."""
    return _SHARED // (shared + _RESERVED) if shared <= _SHARED - _RESERVED else 0


class Shares(NamedTuple):
    """How programs of :mod:`.hopper` share heads.

    Attributes:
        splits: programs a head, if each keeps to one; else 0.
        programs: programs that go from head to head; else 0.
        duration: how long they take, in blocks of queries.
    """

    splits: int
    programs: int
    duration: float


@functools.lru_cache(1024)
def share_walk(queries: int, heads: int, each: int, processors: int, head_dim: int, fused: bool) -> Shares:
    """Return how programs had best share the heads whose rows :mod:`.hopper` walks over.

    Programs that keep to a head take their places in rounds; those that go from head to head all take as many blocks, but
    bring more heads' keys to the chip. How long that takes, in blocks, is measured: where all programs do it at once, and
    later, where each does it when it gets there.

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
    first = 0.5
    if fused:
        # in four warps it takes longer, which another narrow head's program beside them hides
        first = 1.5 if wide and each == 1 else 2.0 if wide or each == 3 else 1.2
    found = [
        Shares(splits, 0, triton.cdiv(heads * splits, places) * (triton.cdiv(blocks, splits) + first))
        for splits in range(1, blocks + 1)
    ]
    if each > 1 and 0 < queries % block_m <= 16 and not fused:
        # a program that has a head to itself takes the last few queries as half a block
        found.append(Shares(1, 0, triton.cdiv(heads, places) * (blocks - 0.5 + first)))
    if each == 1 or (each == 2 and not fused):
        share = triton.cdiv(heads * blocks, places)
        later = 0.3 if not fused else 1.5 if wide else 0.8
        most = max((share * (program + 1) - 1) // blocks - share * program // blocks for program in range(places))
        # takes more registers, of which the others have fewer to spare, or none
        found.append(Shares(0, places, (share + first + most * later) * (1.01 if each == 1 else 1.05)))
    return min(found, key=lambda shares: shares.duration)


def is_short(recipe: Recipe, head_dim: int, value_dim: int, keys: int) -> bool:
    """Tell whether the rules hold a row whole, which makes attention one launch (:mod:`.short`)."""
    return recipe.normalization == "two_pass" and 0 < keys <= SHORT_ROW and max(head_dim, value_dim) <= 128


def kernel_width(channels: int) -> int:
    """Return the channels that kernels for Hopper take for a head of ``channels``: those past the last are zero."""
    return 32 if channels <= 32 else 64 if channels <= 64 else 128


def value_width(channels: int) -> int:
    """Return the same of values in :mod:`.hopper`: a power of two of 16 at least."""
    return max(16, 1 << (channels - 1).bit_length())


def channel_spans(channels: int) -> tuple[int, ...]:
    """Return the parts in which :mod:`.hopper` takes a head's channels, each with the :func:`kernel_width` of its own.

    Its products need powers of two, of which 64 and 32 are nearer to 72, 80 and 96 channels than 128.
    """
    return (64, channels - 64) if 64 < channels <= 96 else (channels,)


def widest_span(channels: int) -> int:
    """Return the channels of a head's largest span, on which the registers of :mod:`.hopper` depend."""
    return max(channel_spans(channels))


def _is_usual(recipe: Recipe) -> bool:
    """Tell whether the arithmetic is the one that :mod:`.hopper` and :mod:`.windows` are written for, DEFAULT's."""
    return (
        recipe.exponential == "quadratic"
        and recipe.probability_bits == 8
        and recipe.probability_rounding == "nearest"
        and recipe.output == "accumulator"
    )


def fits_hopper(recipe: Recipe, head_dim: int, value_dim: int, queries: int, keys: int) -> bool:
    """Tell whether :mod:`.hopper` knows the shapes and the recipe. It takes no mask, and one key scale a head."""
    return (
        recipe.normalization == "two_pass"
        and head_dim == value_dim
        and 8 <= head_dim <= 128
        and head_dim % 8 == 0
        and queries > 32
        and keys > 64
        and (is_held(keys) or most_programs(shared_bytes(keys, head_dim)) > 0)
        and _is_usual(recipe)
    )


def fits_block(block_m: int, warps: int, head_dim: int, keys: int) -> bool:
    """Tell whether :mod:`.hopper` can take so many queries and warps: a warp or two for sixteen queries, if registers do."""
    across = 16 * warps // block_m
    held = is_held(keys, across)
    fits = not held or block_m <= most_queries(widest_span(head_dim))
    return (block_m, warps) in HOPPER_BLOCKS and (held or across == 1) and fits


def fits_windows(recipe: Recipe, head_dim: int, value_dim: int, queries: int, keys: int) -> bool:
    """Tell whether :mod:`.windows` knows the shapes and the recipe. It takes a bias, and one key scale a head."""
    return (
        is_short(recipe, head_dim, value_dim, keys)
        and head_dim == value_dim == 32
        and 8 < queries <= 64
        and 32 < keys <= 64
        and _is_usual(recipe)
    )


def fits_long_hopper(recipe: Recipe, head_dim: int, value_dim: int, queries: int, keys: int) -> bool:
    """Tell whether :mod:`.long_hopper` knows the shapes and the recipe. It takes no mask, and one key scale a head."""
    return (
        recipe.normalization == "two_pass"
        and head_dim == value_dim
        and 32 < head_dim <= 128
        and head_dim % 8 == 0
        and queries > 32
        and keys > SHORT_ROW
        and _is_usual(recipe)
    )


def choose_tiles(
    recipe: Recipe,
    head_dim: int,
    value_dim: int,
    queries: int,
    keys: int,
    capability: tuple[int, int],
    *,
    heads: int = 1,
    fused: bool = False,
    masked: bool = False,
    walk: bool = True,
) -> Tiles:
    """Return the tiles for an architecture, from what was measured (Hopper) or read off machine code (the others).

    Args:
        heads: heads times batch.
        fused: whether the kernel quantises, too.
        masked: whether there is a mask or a bias, a causal one included.
        walk: whether :mod:`.hopper` may walk over rows that it does not hold, for which it is compiled for every length.
    """
    block_m = min(64 if queries > 32 else 32 if queries > 16 else 16, most_queries(value_dim))
    hopper = capability[0] == 9
    wide = head_dim > 64 or recipe.probability_bits == 15
    if recipe.normalization == "online":
        return Tiles(block_m, recipe.key_block, 4, 2)
    if hopper and not masked and fits_hopper(recipe, head_dim, value_dim, queries, keys):
        if is_held(keys):
            # heads that wide are quantised by eight warps, which have the registers for it
            warps = 8 if fused and widest_span(head_dim) > 64 else 4
            return Tiles(64, 128, warps, 1 if keys <= SHORT_ROW else 3, kernel=HOPPER)
        if walk:
            return Tiles(64, 128, 4, 3, kernel=HOPPER)
    if is_short(recipe, head_dim, value_dim, keys):
        block_n = max(32, min(128, triton.next_power_of_2(keys)))
        general = Tiles(block_m, block_n, 8 if wide and not hopper and block_m == 64 else 4, 1)
        if capability >= (8, 0) and fits_windows(recipe, head_dim, value_dim, queries, keys):
            general = general._replace(kernel=WINDOWS)
        if hopper and block_n == 64 and block_m == 64 and max(head_dim, value_dim) <= 32 and recipe.probability_bits == 8:
            # Thousands of windows fill the machine with programs of one warp, which has nobody to wait for.
            if heads >= 1024:
                return general._replace(block_m=32 if fused and not masked else 16, warps=1, registers=168)
            if heads >= 512 and masked and not fused:
                return general._replace(block_m=32, warps=2, registers=128)
            if heads >= 512:
                return general._replace(registers=80)
        return general
    if not hopper and wide:
        return Tiles(block_m, 64, 8 if block_m == 64 else 4, 2)
    if max(head_dim, value_dim) > 128 or recipe.probability_bits == 15:
        return Tiles(block_m, 64, 4, 3)
    if masked or not hopper or recipe.key_granularity == "token":
        return Tiles(block_m, 128, 4, 3)
    # three programs a processor instead of two: 3 to 7 % at 4096 keys on an H200
    general = Tiles(block_m, 64, 4, 4, 168) if wide else Tiles(block_m, 128, 4, 3, 168)
    if fits_long_hopper(recipe, head_dim, value_dim, queries, keys):
        return general._replace(kernel=LONG_HOPPER)
    return general


def candidates(rule: Tiles, value_dim: int, queries: int, keys: int, processors: int = 132) -> Iterator[Tiles]:
    """Yield the rules' tiles, then others worth a try on a GPU with so many streaming multiprocessors."""
    yield rule
    seen = {rule}
    blocks_m = [m for m in (rule.block_m, 32, 64, 128) if m <= most_queries(value_dim) and m < 2 * max(queries, 16)]
    hopper = rule.kernel == HOPPER
    if keys <= SHORT_ROW or hopper:
        warps = [(64, 4), (32, 4)] if rule.block_n > 64 else [(64, 4), (32, 2), (32, 1), (16, 1)]
        by_hand = (
            rule._replace(block_m=m, warps=warps, registers=registers, splits=splits)
            for m, warps in HOPPER_BLOCKS
            # three programs a processor, if they have four warps each
            for registers in ((0, 168) if warps == 4 else (0,))
            for splits in range(1, 1 + -(-queries // m))
            if hopper and m < 2 * max(queries, 16) and fits_block(m, warps, value_dim, keys)
        )
        # where rows are walked over, programs that go from head to head: two of four warps a processor, or one of eight
        going_on = (
            rule._replace(block_m=m, warps=warps, programs=processors * 8 // warps)
            for m, warps in HOPPER_BLOCKS
            if hopper and not is_held(keys, 16 * warps // m) and fits_block(m, warps, value_dim, keys)
        )
        tried: Iterable[Tiles] = (
            Tiles(m, rule.block_n, w, 1, registers, splits)
            for m, w in warps
            if m <= max(blocks_m)
            for registers in (0, 80, 128, 168)
            for splits in (1, 2, 4)
            if splits <= -(-queries // m)
        )
        windows = (rule._replace(splits=splits) for splits in (1, 2, 4) if rule.kernel == WINDOWS)
        tried = itertools.chain(by_hand, going_on, windows, tried if keys <= SHORT_ROW else ())
    else:
        tried = (
            Tiles(m, n, 8 if m == 128 else 4, stages, registers)
            for m in blocks_m
            if m >= min(64, rule.block_m)
            for n in (64, 128)
            for stages in (3, 4)
            for registers in (0, 128, 168)
        )
    for tiles in tried:
        if tiles not in seen:
            seen.add(tiles)
            yield tiles


def table_path() -> pathlib.Path:
    """Return where ``qflash tune`` keeps its table: ``tiles.json`` in the user's cache folder."""
    return cache_folder() / "tiles.json"


def table_key(
    device: str, fused: bool, recipe: Recipe, head_dim: int, value_dim: int, queries: int, keys: int, heads: int
) -> str:
    """Return the table's name for a kind of call: heads (batch included) count by powers of two."""
    kind = "fused" if fused else "int8"
    load = triton.next_power_of_2(max(1, heads))
    return f"{device}|{kind}|{recipe.probability_bits} bits|{head_dim}x{value_dim}|{queries}x{keys}|{load}"


def _are_tiles(entry: object) -> bool:
    """Tell whether ``entry`` of a table's JSON spells :class:`Tiles`: 64.0 and true are numbers, and none of it."""
    return isinstance(entry, list) and 4 <= len(entry) <= len(Tiles._fields) and all(type(number) is int for number in entry)


def _ignore(what: str) -> None:
    warnings.warn(f"{what} (`qflash tune` writes them anew; until then the rules hold)", stacklevel=3)


@functools.cache
def _table() -> dict[str, Tiles]:
    try:
        path = table_path()
        entries = dict(json.loads(path.read_text(encoding="utf-8"))["tiles"].items())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _ignore(f"{path} is not a table of qflash tune and is ignored: {type(error).__name__}: {error}")
        return {}
    bad = [key for key, entry in entries.items() if not _are_tiles(entry)]
    if bad:
        first = reprlib.repr({bad[0]: entries[bad[0]]})
        _ignore(f"{len(bad)} of {len(entries)} entries of {path} are not tiles and are ignored, the first is {first}")
    return {key: Tiles(*entry) for key, entry in entries.items() if _are_tiles(entry)}


@functools.cache
def _warn_of_misfits(path: pathlib.Path) -> None:
    _ignore(f"{path} has tiles that qflash tune would not measure for the calls they are of, and they are ignored")


@functools.cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def processors_of(device: torch.device) -> int:
    """Return a GPU's streaming multiprocessors; of another device those of an H100."""
    return _processors(device.index or 0) if device.type == "cuda" else 132


STAND_IN: ContextVar[tuple[int, int]] = ContextVar("STAND_IN", default=(9, 0))
"""Compute capability of a device that is no GPU."""


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return a GPU's compute capability; of another device :data:`STAND_IN`."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else STAND_IN.get()


@functools.cache
def _cache_bytes(index: int) -> int:
    return torch.cuda.get_device_properties(index).L2_cache_size


def cache_bytes_of(device: torch.device) -> int:
    """Return the bytes of a GPU's L2; of another device those of an H100."""
    return _cache_bytes(device.index or 0) if device.type == "cuda" else 50 << 20


@functools.cache
def _device_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


@functools.lru_cache(1024)
def _measurable(
    capability: tuple[int, int], fused: bool, bits: int, sizes: tuple[int, int, int, int], load: int, processors: int
) -> frozenset[Tiles]:
    """Return all that ``qflash tune`` measures for the calls that share a key of the table."""
    recipe = DEFAULT.replace(probability_bits=bits)
    # heads count by powers of two there, and so do the rules, but for the power itself
    rules = {choose_tiles(recipe, *sizes, capability, heads=heads, fused=fused) for heads in (load // 2 + 1, load)}
    return frozenset(tiles for rule in rules for tiles in candidates(rule, *sizes[1:], processors))


def tiles_for(
    recipe: Recipe,
    head_dim: int,
    value_dim: int,
    queries: int,
    keys: int,
    heads: int,
    fused: bool,
    device: torch.device,
    *,
    masked: bool = False,
    walk: bool = True,
) -> Tiles:
    """Return the tiles of a call on ``device``: the table's if it has them, else by the rules of :func:`choose_tiles`.

    Without ``walk`` the rules' in any case: the table may have what is not to be compiled.
    """
    capability = capability_of(device)
    rule = choose_tiles(
        recipe, head_dim, value_dim, queries, keys, capability, heads=heads, fused=fused, masked=masked, walk=walk
    )  # fmt: skip
    if device.type != "cuda" or masked or not walk:
        return rule
    table = _table()
    if table and recipe.normalization == "two_pass":
        key = table_key(_device_name(device.index or 0), fused, recipe, head_dim, value_dim, queries, keys, heads)
        found = table.get(key)
        if found is not None:
            sizes, load = (head_dim, value_dim, queries, keys), triton.next_power_of_2(max(1, heads))
            if found in _measurable(capability, fused, recipe.probability_bits, sizes, load, processors_of(device)):
                return found
            _warn_of_misfits(table_path())
    return rule


def save_table(tiles: dict[str, Tiles], about: dict[str, object]) -> pathlib.Path:
    """Add to the table (entries of other devices stay) and use it from now on; returns its path.

    Raises:
        OSError: it cannot be written.
    """
    make_cache_folder()
    _table.cache_clear()  # what another process has added
    merged = {**_table(), **tiles}
    path = table_path()
    write_whole(
        path, json.dumps({"about": about, "tiles": {key: list(entry) for key, entry in merged.items()}}, indent=1) + "\n"
    )
    _table.cache_clear()
    return path
