"""Packages that a plain install lacks."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import re

_DISTRIBUTIONS = {"sklearn": "scikit-learn", "pynvml": "nvidia-ml-py", "PIL": "pillow", "tosa_serializer": "tosa-tools"}
"""What pip calls modules that have another name."""


def install_hint(*names: str) -> str:
    """Return the command that installs modules, wherever this package came from: their own names, with the versions it needs.

    Args:
        names: as they are imported.
    """
    wanted: list[str] = []
    for package in ("qflash", "qflash-lab"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            wanted += importlib.metadata.requires(package) or []
    known = {}
    for text in wanted:
        requirement = text.partition(";")[0].strip()
        known[re.split(r"[^\w.-]", requirement, maxsplit=1)[0]] = requirement
    words = []
    for name in names:
        distribution = _DISTRIBUTIONS.get(name, name)
        requirement = known.get(distribution, distribution)
        words.append(requirement if re.fullmatch(r"[\w.-]+", requirement) else f'"{requirement}"')
    return f"pip install {' '.join(words)}"


def require_packages(what: str, *names: str) -> None:
    """Ask for packages before minutes of work rather than behind them.

    Args:
        what: needs them; the message begins with it.
        names: as they are imported.

    Raises:
        ImportError: some are not installed; the message names them and the command that installs them.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"{what} also needs {', '.join(missing)}: {install_hint(*missing)}")
