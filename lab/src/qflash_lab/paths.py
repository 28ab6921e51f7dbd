"""Where results go."""

from __future__ import annotations

import contextlib
import pathlib
import uuid


def check_output_folder(path: pathlib.Path) -> None:
    """See that a folder for results can be made and written to, before they are measured; leave nothing behind.

    Raises:
        OSError: it cannot; the message names it.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        beside = path / f".{uuid.uuid4().hex}.new"
        beside.touch()
        beside.unlink()
        for folder in missing:
            # another process may have put something there meanwhile
            with contextlib.suppress(OSError):
                folder.rmdir()
    except OSError as error:
        raise type(error)(f"the folder for the results, {str(path)!r}, cannot be used: {error.strerror or error}") from error
