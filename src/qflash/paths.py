"""Where the package keeps what it makes for this machine."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import stat
import uuid
from collections.abc import Iterator
from typing import IO


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


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file that replaces the one at ``path`` when the block ends, and not at all if it raises.

    So the file there is always the old or the new one, whoever else is writing it. On Linux the new one has no name before it
    is whole: a process that is killed leaves nothing behind. Where that cannot be done it is beside the old one, under a name
    that ends in ``.new``. Permissions are those of the file that is replaced, or what the process's umask leaves. A link is
    followed; a device or pipe is written to as it is.

    Raises:
        OSError: the file cannot be written; its ``filename`` is set.
    """
    path = pathlib.Path(os.path.realpath(path))
    beside = path.with_name(f".{uuid.uuid4().hex}.new")
    try:
        found = path.stat() if path.exists() else None
        if found is not None and not stat.S_ISREG(found.st_mode):
            with path.open("wb") as file:
                yield file
            return
        unnamed = _open_unnamed(path.parent)
        with beside.open("xb") if unnamed is None else unnamed as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if found is not None and hasattr(os, "fchmod"):
                os.fchmod(file.fileno(), stat.S_IMODE(found.st_mode))
            if unnamed is not None:
                # with a folder's descriptor, which an absolute path needs none of, Python follows the link to the file
                os.link(_descriptor(file), beside, src_dir_fd=file.fileno())
        beside.replace(path)
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def _descriptor(file: IO[bytes]) -> str:
    """Return the path that an open file without a name has."""
    return f"/proc/self/fd/{file.fileno()}"


def _open_unnamed(folder: pathlib.Path) -> IO[bytes] | None:
    """Open a new file in a folder that has no name yet; None where the system has no such files."""
    if not hasattr(os, "O_TMPFILE"):
        return None
    try:
        file = os.fdopen(os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o666), "wb")
    except OSError as error:
        # the file system has none, or the kernel takes the flag for that of a folder
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            return None
        raise
    if os.path.exists(_descriptor(file)):
        return file
    file.close()
    return None


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file as :func:`whole_file` does; text as UTF-8, with the line ends that it has."""
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
