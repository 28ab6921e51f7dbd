"""Where the package keeps what it makes for this machine."""

from __future__ import annotations

import os
import pathlib
import stat
import uuid


def cache_folder() -> pathlib.Path:
    """Return the user's cache folder for QFlash (``$XDG_CACHE_HOME/qflash`` or ``~/.cache/qflash``), which may not exist yet.

    Raises:
        FileNotFoundError: the user has no home.
    """
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return pathlib.Path(given or pathlib.Path.home() / ".cache") / "qflash"
    except RuntimeError as error:
        raise FileNotFoundError(f"there is no folder to keep files in: {error}; set XDG_CACHE_HOME to one") from error


def check_private(path: pathlib.Path) -> None:
    """Make sure that nobody else can have put what is there.

    Raises:
        OSError: there is no such file or folder, it is another user's, or others can write to it.
    """
    found = path.stat()
    # Windows has neither owners by number nor these bits
    if hasattr(os, "getuid") and found.st_uid != os.getuid():
        raise PermissionError(f"{path} is another user's")
    if hasattr(os, "getuid") and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users can write to {path} (chmod go-w takes that from them)")


def make_cache_folder() -> pathlib.Path:
    """Return :func:`cache_folder`, made for this user alone if it does not exist yet.

    Raises:
        OSError: it cannot be made, it is another user's, or others can write to it.
    """
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder)
    return folder


def with_package(*folders: pathlib.Path) -> dict[str, str]:
    """Return this process's environment for one that imports the packages in ``folders``, and its own path after that."""
    path = os.pathsep.join(filter(None, (*map(str, folders), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path}


def write_whole(path: pathlib.Path, text: str) -> None:
    """Write a file that is either the old or the new one, never half of it, whoever else is writing it."""
    beside = path.with_name(f"{path.name}.{uuid.uuid4().hex}.new")
    try:
        beside.write_text(text, encoding="utf-8", newline="")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
