"""Which lengths of rows have a kernel of their own.

Where registers do not hold a row's scores, :mod:`.gluon.sm90.attention_resident` is compiled for each number of keys, which
takes seconds. A process does so for the first few. Further lengths take kernels that are the same for all, with the same bits,
unless :func:`qflash.warmup` was told of them, in this process or an earlier one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import warnings
from collections.abc import Iterable, Iterator

from ..paths import cache_folder, make_cache_folder, write_whole

MOST_LENGTHS = 4
"""That a process compiles for as they come."""

_first: set[int] = set()
_expected: set[int] = set()
_all = False


def lengths_path() -> pathlib.Path:
    """Return where :func:`qflash.warmup` keeps lengths: ``lengths.json`` in the user's cache folder."""
    return cache_folder() / "lengths.json"


@functools.cache
def _kept() -> frozenset[int]:
    try:
        path = lengths_path()
        found = json.loads(path.read_text(encoding="utf-8"))["lengths"]
        if not all(type(keys) is int for keys in found):
            raise ValueError("lengths must be integers")
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        warnings.warn(f"{path} is no list of lengths and is ignored: {type(error).__name__}: {error}", stacklevel=3)
        return frozenset()
    return frozenset(found)


def worth_compiling(keys: int) -> bool:
    """Tell whether a kernel may be compiled for so many keys."""
    if _all or keys in _expected or keys in _first or keys in _kept():
        return True
    if len(_first) < MOST_LENGTHS:
        _first.add(keys)
    return keys in _first


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """Count no length that is asked for meanwhile."""
    before = _first.copy()
    try:
        yield
    finally:
        _first.intersection_update(before)


def expect(lengths: Iterable[int]) -> None:
    """Let this process compile for some lengths, however many there are."""
    _expected.update(lengths)


def expect_all() -> None:
    """Let this process compile for every length: what is timed is what a model of one length would get."""
    global _all
    _all = True


def keep(lengths: Iterable[int]) -> None:
    """Let later processes know lengths that there are kernels for.

    Raises:
        OSError: they cannot be written.
    """
    make_cache_folder()
    _kept.cache_clear()  # what another process has added
    write_whole(lengths_path(), json.dumps({"lengths": sorted(_kept() | set(lengths))}) + "\n")
    _kept.cache_clear()
