"""Raw results: JSON with the environment, and CSV."""

from __future__ import annotations

import csv
import datetime
import json
import math
import pathlib
import platform
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..backends import triton_version
from . import nvml


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


def environment(device: torch.device) -> dict[str, Any]:
    """Return what a reader needs to judge or repeat a measurement: device, versions, clocks, date, command line."""
    from .. import __version__
    from ..versions import driver_version

    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["qflash", *sys.argv[1:]]),
        "qflash": __version__,
        "torch": torch.__version__,
        "triton": triton_version(),
        "python": platform.python_version(),
        "device_type": device.type,
    }
    if device.type != "cuda":
        return found | {"device": f"{platform.machine()} CPU", "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return found | {
        "device": properties.name,
        "capability": f"sm_{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nvml": nvml.snapshot(device),
    }


def finite(x: Any) -> Any:
    """Replace what JSON has no word for (NaN, infinity) by its name, recursively."""
    if isinstance(x, dict):
        return {key: finite(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [finite(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def write_json(path: pathlib.Path, record: dict[str, Any]) -> None:
    """Write a record, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(finite(record), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def write_csv(path: pathlib.Path, rows: Iterable[dict[str, Any]], fields: Sequence[str]) -> None:
    """Write rows, an empty cell for None."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fields, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
