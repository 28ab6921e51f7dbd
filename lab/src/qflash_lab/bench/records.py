"""Raw results: JSON with the environment, and CSV."""

from __future__ import annotations

import csv
import datetime
import json
import math
import os
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from qflash.backends import triton_version

from . import nvml


def cpu() -> dict[str, Any]:
    """Return the processor's name, those of its vector instructions that matter here, its cores, and their load."""
    try:
        info = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        info = ""
    name = re.search(r"^model name\s*: (.*)$", info, re.MULTILINE)
    flags = re.search(r"^flags\s*: (.*)$", info, re.MULTILINE)
    vectors = [
        word for word in ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8") if flags and word in flags[1].split()
    ]
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    return {"cpu": name[1] if name else platform.processor(), "vectors": vectors, "cores": os.cpu_count(), "load_average": load}


def c_compiler() -> str | None:
    """Return the first line of what the compiler of the CPU kernels says about itself; None where there is none."""
    from qflash.kernels.cpu.launch import _compiler

    try:
        done = subprocess.run([*_compiler(), "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)


def source_commit() -> str | None:
    """Return the commit that runs: ``QFLASH_COMMIT`` where it is set, for copies without git; otherwise what git says.

    Changes that are not committed show as ``-dirty``; it is None outside a clone of this project, and without git.
    """
    root = pathlib.Path(__file__).resolve().parents[4]
    named = os.environ.get("QFLASH_COMMIT")
    if named or not (root / ".git").exists():
        return named or None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def command_line(*words: str) -> str:
    """Return a command as records keep it: of paths that only one machine has, the last part."""
    return " ".join(re.sub(r"(?:^|(?<==))/(?:[^/]+/)*?([^/]*)/?$", r"\1", word) for word in words)


def environment(device: torch.device) -> dict[str, Any]:
    """Return what a reader needs to judge or repeat a measurement: device, versions, commit, clocks, date, command line."""
    from qflash import __version__
    from qflash.versions import driver_version

    program = pathlib.Path(sys.argv[0]).name
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command_line(
            program if program.endswith(".py") and program != "__main__.py" else "qflash-lab", *sys.argv[1:]
        ),
        "qflash": __version__,
        "commit": source_commit(),
        "torch": torch.__version__,
        "triton": triton_version(),
        "python": platform.python_version(),
        "device_type": device.type,
    }
    if device.type != "cuda":
        return (
            found
            | {"device": f"{platform.machine()} CPU", "threads": torch.get_num_threads(), "compiler": c_compiler()}
            | cpu()
        )
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
