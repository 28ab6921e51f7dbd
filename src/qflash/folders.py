"""Where the package keeps what it makes for this machine."""

from __future__ import annotations

import os
import pathlib


def cache_folder() -> pathlib.Path:
    """Return the user's cache folder for QFlash (``$XDG_CACHE_HOME/qflash`` or ``~/.cache/qflash``), which may not exist yet.

    Raises:
        RuntimeError: the user has no home.
    """
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "qflash"
