"""Packages that a plain install lacks."""

from __future__ import annotations

import importlib.util


def require_packages(what: str, *names: str, extra: str = "demo") -> None:
    """Ask for packages before minutes of work rather than behind them.

    Args:
        what: needs them; the message begins with it.
        names: as they are imported.
        extra: of this package, which brings them.

    Raises:
        ImportError: some are not installed; the message names them and the extra that brings them.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f'{what} also needs {", ".join(missing)}: pip install "qflash[{extra}]"')
