"""Versions of what is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pathlib
import re


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
