"""Write an integer network for browsers and node: :func:`export_web`."""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .c_export import SOURCES, write_program
from .export_checks import to_export
from .graph import IntegerNetwork
from .inputs import check_input, takes_ids

_PAGE = ("qflash.js", "qflash.d.ts", "index.html")


def export_web(
    network: IntegerNetwork, folder: str | os.PathLike[str], *, name: str | None = None, example: torch.Tensor | None = None,
    size: int | Sequence[int] | None = None,
) -> None:  # fmt: skip
    """Write a network as a page and an npm package that run it in browsers and node, without a server's help.

    The folder gets the network as WebAssembly with 128-bit vectors, its weights, ``qflash.js``, which gives int32 outputs for
    uint8 pixels, bit for bit those of ``network``, and ``index.html``, which classifies images and shows whether the outputs
    of an example equal those that are computed here. Any server of files serves it: ``python -m http.server``. Class names and
    cropping are those of ``network.about``.

    Args:
        network: what :func:`qflash.quantize_model` or :func:`qflash.load_model` returns, on the CPU, of images.
        folder: is made if it is not there. Files of the same names are replaced.
        name: of the page and the package; ``network.about["name"]`` unless given.
        example: uint8 (1, channels, height, width); a drawn pattern unless given.
        size: of the images, of a network with several; the first of ``network.image_sizes`` if None.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the network takes no images of one or three channels, a node has no C kernel, or ``example`` has
            another shape.
        RuntimeError: Zig's compiler (``pip install ziglang``) or the C kernels are missing, or it fails.
        OSError: the folder cannot be written to.
    """
    network = to_export(network, folder, size)
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a string, got {type(name).__name__}")
    if takes_ids(network.image) or network.image[0] not in (1, 3):
        raise ValueError(f"network must take images of one or three channels, takes {network.image}")
    if example is None:
        example = _pattern(*network.image)
    else:
        check_input(example, network.image)
        if len(example) != 1:
            raise ValueError(f"example must be one image, got {len(example)}")
        example = example.cpu().contiguous()
    compiler = _compiler()
    labels = list(network.about.get("labels", ()))
    crop, squash = _cropping(network.about.get("images") or {})
    title = name or network.about.get("name") or "Integer network"
    place = pathlib.Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        write_program(network, scratch)
        _compile(compiler, scratch, place / "qflash.wasm")
        shutil.copyfile(pathlib.Path(scratch) / "network.bin", place / "network.bin")
    with torch.inference_mode():
        outputs = network.run(example)
    page = importlib.resources.files("qflash.kernels.cpu").joinpath("program").joinpath("web")
    for each in _PAGE:
        (place / each).write_bytes(page.joinpath(each).read_bytes())
    (place / "example.bin").write_bytes(example.numpy().tobytes())
    about = {
        "name": title, "labels": labels, "bytes": (place / "network.bin").stat().st_size, "crop": crop, "squash": squash,
        "example": {output: x.flatten().tolist() for output, x in outputs.items()},
    }  # fmt: skip
    (place / "network.json").write_text(json.dumps(about, ensure_ascii=False), encoding="utf-8")
    (place / "package.json").write_text(json.dumps(_package(title), indent=2) + "\n", encoding="utf-8")


def _package(title: str) -> dict[str, Any]:
    """Return what npm reads."""
    slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "integer-network"
    files = ["network.bin", "network.json", "qflash.wasm", "example.bin", *_PAGE]
    return {
        "name": slug[:200], "version": "1.0.0", "description": f"{title} in integers, by QFlash", "type": "module",
        "exports": {
            ".": {"types": "./qflash.d.ts", "default": "./qflash.js"}, "./network.json": "./network.json",
        },
        "files": files,
    }  # fmt: skip


def _pattern(channels: int, height: int, width: int) -> torch.Tensor:
    """Return an image of rings on slopes, the same everywhere: made of integers."""
    y, x = (torch.arange(size, dtype=torch.int64, device="cpu") for size in (height, width))
    y, x = y[:, None], x[None]
    rings = ((2 * y - height) ** 2 + (2 * x - width) ** 2) * 6 // (height * width) % 2
    slopes = (255 * x // width, 255 * y // height, 255 - 255 * x // width)
    planes = [(slope.expand(height, width) * (1 + rings) // 2) for slope in slopes[:channels]]
    return torch.stack(planes).to(torch.uint8)[None]


def _cropping(images: Mapping[str, Any]) -> tuple[float, bool]:
    """Return how much of the shorter side is kept, and whether the whole image is squeezed."""
    if "input_size" in images:  # of timm
        return float(images.get("crop_pct") or 1), images.get("crop_mode") == "squash"
    size, crop = images.get("size") or {}, images.get("crop_size") or {}
    if images.get("do_center_crop") and crop:
        kept = min(crop.values()) / min(size.values()) if isinstance(size, Mapping) and size else 1.0
        return min(float(kept), 1.0), False
    return 1.0, isinstance(size, Mapping) and "height" in size


def _compiler() -> list[str]:
    """Return the command of Zig's C compiler: that of the package ``ziglang``, or the one on the path.

    Raises:
        RuntimeError: there is neither.
    """
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    if found := shutil.which("zig"):
        return [found, "cc"]
    raise RuntimeError("export_web compiles with Zig's C compiler, which is not installed: pip install ziglang")


def _compile(compiler: Sequence[str], folder: str, to: pathlib.Path) -> None:
    """Compile a folder's sources with the options of its Makefile.

    Raises:
        RuntimeError: the compiler does not take them; the message has its first words.
    """
    rules = (pathlib.Path(folder) / "Makefile").read_text(encoding="utf-8")
    options = [word for name in ("FLAGS", "WASM_FLAGS") for word in shlex.split(_variable(rules, name))]
    command = [*compiler, *options, *SOURCES, "-o", str(to.absolute()), "-lm"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(compiler)} failed: {done.stderr.strip()[:1000]}")


def _variable(rules: str, name: str) -> str:
    """Return a variable of a Makefile."""
    found = re.search(rf"^{name} = (.*)$", rules, re.MULTILINE)
    assert found
    return found[1]
