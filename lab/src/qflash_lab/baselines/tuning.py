"""Tiles of the baselines' kernels: the table of what was measured, and what is worth measuring.

``benchmarks/tune_baselines.py`` measures :func:`float_softmax_candidates`, :func:`product_candidates` and
:func:`shiftmax_candidates` on a GPU and writes the table, ``tuned.json`` beside this module. Cards and shapes that are not in
it take the kernels' own rules. Nothing is measured in a call.
"""

from __future__ import annotations

import datetime
import functools
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from qflash.kernels.device import device_name

TABLE = pathlib.Path(__file__).with_name("tuned.json")
"""Need not be there."""

MANY_KEYS = 8192
"""From here on a call takes milliseconds, and few candidates are measured."""


class BaselineShape(NamedTuple):
    """What tiles are chosen by.

    Attributes:
        heads: in all, batch included.
        queries, keys: tokens.
        head_dim, value_dim: channels of query and key, and of value.
    """

    heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int


def table_key(card: str, kernel: str, product: str, shape: BaselineShape) -> str:
    """Return the table's name for a kind of call.

    Args:
        card: the GPU's name, as PyTorch has it.
        kernel: ``"float_softmax"``, ``"i_vit_scores"``, ``"i_vit_shiftmax"`` or ``"i_vit_values"``.
        product: type of the operands: ``"int8"``, ``"float16"`` or ``"bfloat16"``.
        shape: of the attention.
    """
    heads, queries, keys, head_dim, value_dim = shape
    return f"{card}|{kernel}|{product}|{heads}|{queries}x{keys}|{head_dim}x{value_dim}"


def read_table(path: pathlib.Path) -> dict[str, tuple[int, ...]]:
    """Return a table's tiles by :func:`table_key`; none if there is no such file.

    Raises:
        ValueError: the file is no table.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        tiles = {key: tuple(entry) for key, entry in json.loads(text)["tiles"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no table of benchmarks/tune_baselines.py: {type(error).__name__}: {error}") from error
    for key, entry in tiles.items():
        if not entry or not all(type(number) is int and number > 0 for number in entry):
            raise ValueError(f"{path}: tiles must be positive integers, got {entry} for {key!r}")
    return tiles


def write_table(path: pathlib.Path, tiles: Mapping[str, Iterable[int]], about: Mapping[str, object]) -> None:
    """Write a table; entries that are there under other names stay.

    Args:
        path: the file.
        tiles: by :func:`table_key`.
        about: where they come from.

    Raises:
        ValueError: the file is there and no table.
        OSError: it cannot be written.
    """
    merged = read_table(path) | {key: tuple(entry) for key, entry in tiles.items()}
    record = {"changed": datetime.date.today().isoformat(), **about}
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(list(merged[key]))}" for key in sorted(merged))
    text = f'{{\n "about": {json.dumps(record)},\n "tiles": {{\n{lines}\n }}\n}}\n'
    path.write_text(text, encoding="utf-8")


@functools.cache
def _table() -> dict[str, tuple[int, ...]]:
    return read_table(TABLE)


def tuned_tiles(kernel: str, product: str, shape: BaselineShape, device: torch.device) -> tuple[int, ...] | None:
    """Return the table's tiles for a call on ``device``, or None: the rules' then; see :func:`table_key`."""
    if device.type != "cuda" or not _table():
        return None
    return _table().get(table_key(device_name(device.index or 0), kernel, product, shape))


def _power_of_two(number: int) -> int:
    """Return the least power of two that is not below ``number``."""
    return 1 << (number - 1).bit_length()


def _first(rule: tuple[int, ...], others: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the rule's tiles and then the others, each once."""
    return list(dict.fromkeys((tuple(rule), *others)))


def float_softmax_candidates(rule: tuple[int, ...], shape: BaselineShape) -> list[tuple[int, ...]]:
    """Return the tiles (queries, keys, warps, stages) worth measuring for the fused kernel, the rule's first."""
    _, queries, keys, head_dim, value_dim = shape
    if keys >= MANY_KEYS:
        return _first(rule, [(128, 128, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (128, 64, 4, 3), (64, 64, 4, 3)])
    most = max(16, _power_of_two(queries))
    least = 16 if queries <= 64 else 32 if queries <= 256 else 64
    warps = {16: (2, 4), 32: (2, 4), 64: (4,), 128: (4, 8)}
    found = []
    for block_m in (block for block in warps if least <= block <= most):
        for block_n in (32, 64, 128):
            if block_n > max(32, _power_of_two(keys)) or (block_n == 32 and keys >= 512):
                continue
            turns = keys // block_n
            for count in warps[block_m]:
                if block_m == 128 and count == 4 and (block_n == 128 or max(head_dim, value_dim) > 64):
                    continue  # spills
                for stages in (2,) if turns < 2 else (2, 3) if turns < 8 else (2, 3, 4):
                    found.append((block_m, block_n, count, stages))
    return _first(rule, found)


def product_candidates(rule: tuple[int, ...], rows: int, columns: int, inner: int) -> list[tuple[int, ...]]:
    """Return the tiles (rows, columns, inner, warps, stages) worth measuring for a product, the rule's first.

    Args:
        rule: what the kernel takes without a table.
        rows, columns, inner: sizes of the product of one head.
    """
    high, wide = max(16, _power_of_two(rows)), max(32, _power_of_two(columns))
    deep = max(32, _power_of_two(inner))
    found = []
    for block_m in (32, 64, 128):
        for block_n in (32, 64, 128, 256):
            if block_m > high or block_n > wide or block_n * 4 < min(wide, 256):
                continue
            if block_m * block_n > 128 * 128 or (rows > 256 and block_m == 32):
                continue
            if block_m * block_n == 128 * 128 and inner % 64:
                continue  # masks along the sum cost registers: spills
            warps = (4, 8) if block_m * block_n >= 128 * 64 else (2, 4) if block_m * block_n <= 32 * 64 else (4,)
            for block_k in {min(64, deep), min(128, deep)}:
                turns = -(-inner // block_k)
                for count in warps:
                    for stages in (2,) if turns < 3 else (3,) if turns < 8 else (3, 4):
                        found.append((block_m, block_n, block_k, count, stages))
    return _first(rule, found)


def shiftmax_candidates(rule: tuple[int, ...], keys: int) -> list[tuple[int, ...]]:
    """Return the tiles (rows, warps) worth measuring for Shiftmax, the rule's first; ``keys`` is the width of a row."""
    width = _power_of_two(keys)
    found = [
        (rows, warps)
        for size in (1024, 2048, 4096, 8192)
        for warps in (2, 4, 8)
        if (rows := size // width) >= 1 and 8 <= size // (32 * warps) <= 64
    ]
    return _first(rule, found)
