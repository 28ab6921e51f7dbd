"""The table of what ``qflash tune`` measured on this machine's GPU, and the tiles of a call: the table's, or the rules'.

Nothing is measured in a user's call.
"""

from __future__ import annotations

import functools
import json
import pathlib
import reprlib
import warnings

import torch
import triton

from ..paths import cache_folder, make_cache_folder, write_whole
from ..recipe import DEFAULT, Recipe
from .device import capability_of, device_name, processors_of
from .heuristics import candidates, choose_tiles
from .tiles import Tiles


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
        key = table_key(device_name(device.index or 0), fused, recipe, head_dim, value_dim, queries, keys, heads)
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
