"""Versions of what is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import subprocess


def package_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """Return the NVIDIA kernel driver's version; read from /proc, which needs no tool and no GPU context."""
    try:
        text = pathlib.Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else None


def source_commit() -> str | None:
    """Return the commit that runs: ``QFLASH_COMMIT`` where it is set, for copies without git; otherwise what git says.

    Changes that are not committed show as ``-dirty``; it is None outside a clone of this project, and without git.
    """
    root = pathlib.Path(__file__).resolve().parents[2]
    named = os.environ.get("QFLASH_COMMIT")
    if named or not (root / ".git").exists():
        return named or None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
