"""Exceptions in one line, for the rows of what failed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


def describe(error: BaseException) -> str:
    """Return an exception in one line; of a failed capture, what made it fail."""
    while isinstance(error.__context__, Exception) and error.__cause__ is None and "captur" in str(error).lower():
        error = error.__context__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


@contextmanager
def explained() -> Iterator[None]:
    """Add to SDPA's "no kernel" the reason, which it gives as warnings only; other warnings pass by unseen."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            yield
        except RuntimeError as error:
            if not re.search("No (available kernel|viable backend)", str(error)):
                raise
            texts = [str(warning.message).split(" (Triggered internally")[0].strip() for warning in said]
            reasons = [text for text in texts if not re.search("not used because|runtime disabled", text)]
            raise RuntimeError("; ".join(dict.fromkeys(reasons)) or str(error)) from error
