"""The table of what ``qflash-lab tune`` measured on this machine's GPU, and the tiles of a call: the table's, or the rules'.

Nothing is measured in a user's call.
"""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
import reprlib
import warnings
from collections.abc import Iterable, Iterator

import torch
import triton

from ..paths import cache_folder
from ..specification.recipe import DEFAULT
from .device import capability_of, device_name, processors_of
from .families import choose_tiles
from .tiles import (
    SHORT_ROW,
    SM90_BLOCKS,
    SM90_RESIDENT,
    WINDOWS,
    AttentionShape,
    Tiles,
    fits_block,
    most_queries,
    row_fits_registers,
)

KERNELS_VERSION = 3
"""Raised whenever tiles get another meaning or a kernel another speed, so that tables measured before are ignored."""


def table_path() -> pathlib.Path:
    """Return where ``qflash-lab tune`` keeps its table: ``tiles.json`` in the user's cache folder."""
    return cache_folder() / "tiles.json"


def table_key(device: str, shape: AttentionShape) -> str:
    """Return the table's name for a kind of call: heads (batch included) count by powers of two."""
    recipe, head_dim, value_dim, queries, keys, heads, fused, *_ = shape
    kind = "fused" if fused else "int8"
    load = triton.next_power_of_2(max(1, heads))
    return f"{device}|{kind}|{recipe.probability_bits} bits|{head_dim}x{value_dim}|{queries}x{keys}|{load}"


def _are_tiles(entry: object) -> bool:
    """Tell whether ``entry`` of a table's JSON spells :class:`Tiles`: 64.0 and true are numbers, and none of it."""
    if not isinstance(entry, list) or not 4 <= len(entry) <= len(Tiles._fields):
        return False
    return all(type(x) is (str if name == "family" else int) for name, x in zip(Tiles._fields, entry, strict=False))


def _ignore(what: str) -> None:
    warnings.warn(f"{what} (`qflash-lab tune` writes them anew; until then the rules hold)", stacklevel=3)


@functools.cache
def read_table() -> dict[str, Tiles]:
    try:
        path = table_path()
        table = json.loads(path.read_text(encoding="utf-8"))
        entries, version = dict(table["tiles"].items()), table.get("kernels")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _ignore(f"{path} is not a table of qflash-lab tune and is ignored: {type(error).__name__}: {error}")
        return {}
    if version != KERNELS_VERSION:
        _ignore(f"{path} was measured with other kernels (version {version!r}, now {KERNELS_VERSION}) and is ignored")
        return {}
    bad = [key for key, entry in entries.items() if not _are_tiles(entry)]
    if bad:
        first = reprlib.repr({bad[0]: entries[bad[0]]})
        _ignore(f"{len(bad)} of {len(entries)} entries of {path} are not tiles and are ignored, the first is {first}")
    return {key: Tiles(*entry) for key, entry in entries.items() if _are_tiles(entry)}


@functools.cache
def _warn_of_misfits(path: pathlib.Path) -> None:
    _ignore(f"{path} has tiles that qflash-lab tune would not measure for the calls they are of, and they are ignored")


@functools.lru_cache(1024)
def _measurable(shape: AttentionShape, capability: tuple[int, int], processors: int) -> frozenset[Tiles]:
    """Return all that ``qflash-lab tune`` measures for the calls that share a key of the table.

    Args:
        shape: one of theirs, with the power of two for heads.
    """
    # heads count by powers of two there, and so do the rules, but for the power itself
    rules = {choose_tiles(shape._replace(heads=heads), capability) for heads in (shape.heads // 2 + 1, shape.heads)}
    sizes = shape.value_dim, shape.queries, shape.keys
    return frozenset(tiles for rule in rules for tiles in candidates(rule, *sizes, processors))


def tiles_for(shape: AttentionShape, device: torch.device, *, reread: bool = True) -> Tiles:
    """Return the tiles of a call on ``device``: the table's if it has them, else by the rules of :func:`choose_tiles`.

    Without ``reread`` the rules' in any case: the table may have what is not to be compiled.
    """
    capability = capability_of(device)
    rule = choose_tiles(shape, capability, reread=reread)
    if device.type != "cuda" or shape.masked or not reread:
        return rule
    table = read_table()
    if table and shape.recipe.normalization == "two_pass":
        found = table.get(table_key(device_name(device.index or 0), shape))
        if found is not None:
            # of the recipe the table knows the bits of P alone
            recipe = DEFAULT.replace(probability_bits=shape.recipe.probability_bits)
            alike = shape._replace(recipe=recipe, heads=triton.next_power_of_2(max(1, shape.heads)))
            if found in _measurable(alike, capability, processors_of(device)):
                return found
            _warn_of_misfits(table_path())
    return rule


def candidates(rule: Tiles, value_dim: int, queries: int, keys: int, processors: int = 132) -> Iterator[Tiles]:
    """Yield the rules' tiles, then others worth a try on a GPU with so many streaming multiprocessors."""
    yield rule
    seen = {rule}
    blocks_m = [m for m in (rule.block_m, 32, 64, 128) if m <= most_queries(value_dim) and m < 2 * max(queries, 16)]
    hopper = rule.family == SM90_RESIDENT
    if keys <= SHORT_ROW or hopper:
        warps = [(64, 4), (32, 4)] if rule.block_n > 64 else [(64, 4), (32, 2), (32, 1), (16, 1)]
        blocks_of_sm90 = (
            rule._replace(block_m=m, warps=warps, registers=registers, splits=splits)
            for m, warps in SM90_BLOCKS
            # three programs a processor, if they have four warps each
            for registers in ((0, 168) if warps == 4 else (0,))
            for splits in range(1, 1 + -(-queries // m))
            if hopper and m < 2 * max(queries, 16) and fits_block(m, warps, value_dim, keys)
        )
        # where keys are read twice, programs that pass from head to head: two of four warps a processor, or one of eight
        passing = (
            rule._replace(block_m=m, warps=warps, programs=processors * 8 // warps)
            for m, warps in SM90_BLOCKS
            if hopper and not row_fits_registers(keys, 16 * warps // m) and fits_block(m, warps, value_dim, keys)
        )
        tried: Iterable[Tiles] = (
            Tiles(m, rule.block_n, w, 1, registers, splits)
            for m, w in warps
            if m <= max(blocks_m)
            for registers in (0, 80, 128, 168)
            for splits in (1, 2, 4)
            if splits <= -(-queries // m)
        )
        windows = (rule._replace(splits=splits) for splits in (1, 2, 4) if rule.family == WINDOWS)
        tried = itertools.chain(blocks_of_sm90, passing, windows, tried if keys <= SHORT_ROW else ())
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
