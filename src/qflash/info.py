"""What this installation is and can do: versions, devices, back ends and a table of features.

Everything about availability comes from :mod:`qflash.backends`, which is what decides at run time.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from typing import Any

import torch

from . import backends
from .integrations.timm import ADAPTERS
from .specification.fixed_point import MAX_HEAD_DIM, MAX_KEYS
from .validation import FLOAT_DTYPES
from .versions import driver_version, package_version

_BACKENDS = ("reference", "cpu", "interpreter", "triton")
_FLOATS = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES)

# of each of _BACKENDS
_RUNS_ON = ("any PyTorch device", "CPU with a C compiler", "CPU with TRITON_INTERPRET=1", "NVIDIA GPU, sm_80 or newer")

# Feature -> (reference, cpu, interpreter, triton). The kernels are one source for all architectures, so that what
# differs between architectures is in _ARCHITECTURES and not in a column each.
_FEATURES: dict[str, tuple[str, str, str, str]] = {
    "int8 in, int8 out": ("yes", "yes", "yes", "yes, no float instruction"),
    "int8 in, float out": (_FLOATS, _FLOATS, _FLOATS, _FLOATS),
    "float in, float out": (_FLOATS, _FLOATS, _FLOATS, _FLOATS),
    "bool mask, any broadcast": ("yes", "yes", "yes", "yes"),
    "additive mask (bias), any broadcast": ("yes", "yes", "yes", "yes"),
    "causal": ("yes", "yes", "yes", "yes"),
    "grouped-query attention": ("yes", "yes", "yes", "yes"),
    "queries ≠ keys": ("yes", "yes", "yes", "yes"),
    "head dimension": (f"1-{MAX_HEAD_DIM}",) * 4,
    "keys": (f"0-{MAX_KEYS}",) * 4,
    "every recipe": ("yes", "yes", "yes", "yes"),
    "torch.compile": ("yes",) * 4,
    "CUDA graphs": ("not tested", "no", "no", "yes"),
    "backward": ("no", "no", "no", "no"),
}

_ARCHITECTURES: dict[str, tuple[str, str]] = {
    "sm_80": ("A100", "IMMA"),
    "sm_86": ("RTX 30, A10, A40", "IMMA"),
    "sm_89": ("RTX 40, L4, L40", "IMMA"),
    "sm_90": ("H100, H200", "IGMMA"),
    "sm_100": ("B200", "IMMA or UTCIMMA, by Triton's version"),
    "sm_120": ("RTX 50", "IMMA"),
}


def _devices() -> list[dict[str, Any]]:
    found = [torch.device("cpu")]
    if torch.cuda.is_available():
        found += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    result = []
    for device in found:
        entry: dict[str, Any] = {"device": str(device), "name": platform.processor() or platform.machine()}
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            entry["name"] = properties.name
            entry["architecture"] = f"sm_{properties.major}{properties.minor}"
            entry["memory_gib"] = round(properties.total_memory / 2**30, 1)
        entry["auto"], _ = backends.auto_backend(device)
        entry["cpu_unavailable"] = backends.cpu_unavailable(device)
        entry["triton_unavailable"] = backends.triton_unavailable(device)
        result.append(entry)
    return result


def _patching() -> list[dict[str, str | None]]:
    """Return every kind of attention module that :func:`qflash.patch` takes, and why it is not available here (or None)."""
    kinds: list[dict[str, str | None]] = [
        {"models": "modules that call scaled_dot_product_attention", "route": "sdpa", "package": "any", "unavailable": None},
        {"models": "modules with a softmax between two products", "route": "softmax", "package": "any", "unavailable": None},
    ]  # fmt: skip
    return kinds + [
        {
            "models": adapter.name,
            "route": "adapter",
            "package": adapter.package,
            "unavailable": None if importlib.util.find_spec(adapter.package) else f"{adapter.package} is not installed",
        }
        for adapter in ADAPTERS
    ]


def _cuda_unavailable() -> str | None:
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return "this build of PyTorch has no CUDA"
    return "PyTorch finds no NVIDIA GPU with a working driver"


def collect_info() -> dict[str, Any]:
    """Return what ``qflash info`` shows, as JSON-serialisable values."""
    return {
        "versions": {
            "qflash": package_version("qflash"),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": backends.triton_version(),
            "timm": package_version("timm"),
            "transformers": package_version("transformers"),
            "cuda_runtime": torch.version.cuda,
            "nvidia_driver": driver_version(),
        },
        "devices": _devices(),
        "triton_missing": backends.triton_missing(),
        "cuda_unavailable": _cuda_unavailable(),
        "interpreter": backends.interpreting(),
        "patching": _patching(),
        "backends": [{"backend": name, "runs_on": where} for name, where in zip(_BACKENDS, _RUNS_ON, strict=True)],
        "features": [{"feature": name, **dict(zip(_BACKENDS, row, strict=True))} for name, row in _FEATURES.items()],
        "architectures": [
            {"architecture": name, "for_instance": examples, "int8_tensor_core": instruction}
            for name, (examples, instruction) in _ARCHITECTURES.items()
        ],
    }


def print_info() -> None:
    """Print :func:`collect_info` as tables."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    data = collect_info()
    console = Console()

    def show(title: str, headings: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
        table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_header=any(headings))
        for heading in headings:
            table.add_column(heading, overflow="fold")  # cells are broken, never cut
        for row in rows:
            table.add_row(*("-" if cell is None else str(cell) for cell in row))
        console.print(table)

    show("Versions", ("", ""), list(data["versions"].items()))
    console.print("[bold]Devices[/bold]\n")
    for entry in data["devices"]:
        more = [entry["name"], *([entry["architecture"], f"{entry['memory_gib']} GiB"] if "architecture" in entry else [])]
        # whole lines: a terminal breaks them, and what is to be typed stays in one piece
        for text in (
            f'  {entry["device"]}: {", ".join(more)}; backend="auto" is {entry["auto"]}',
            f"    cpu: {entry['cpu_unavailable'] or 'available'}",
            f"    triton: {entry['triton_unavailable'] or 'available'}",
        ):
            console.print(text, soft_wrap=True, highlight=False, markup=False)
    console.print()
    if data["cuda_unavailable"]:
        console.print(f"No CUDA device: {data['cuda_unavailable']}.\n", soft_wrap=True)
    show(
        "Attention modules qflash.patch takes",
        ("attention modules", "route", "package", "here"),
        [(row["models"], row["route"], row["package"], row["unavailable"] or "available") for row in data["patching"]],
    )
    show("Back ends", ("", "runs on"), [tuple(row.values()) for row in data["backends"]])
    show("Features", ("feature", *_BACKENDS), [tuple(row.values()) for row in data["features"]])
    show(
        "Architectures the kernels compile for (qflash-lab verify)",
        ("architecture", "for instance", "int8 matrix instruction"),
        [tuple(row.values()) for row in data["architectures"]],
    )
