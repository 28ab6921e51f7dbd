"""The golden model in C: it computes the golden vectors, under sanitizers too, and says which bound an input breaks."""

from __future__ import annotations

import importlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cpu_driver

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "golden"
FILES = sorted(map(str, GOLDEN.glob("*.safetensors")))
COMPILER = shutil.which(os.environ.get("CC", "cc"))
pytestmark = pytest.mark.skipif(not FILES or COMPILER is None, reason="needs the repository's golden vectors and a C compiler")


def check(folder: pathlib.Path, files: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(folder / "check_reference.py"), *files]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_the_model_computes_the_golden_vectors() -> None:
    done = check(GOLDEN, FILES)
    counts = [list(map(int, re.findall(r" (\d+) ", line))) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(cases for cases, _, _ in counts) >= 362 and sum(left_out for _, _, left_out in counts) <= 32


@pytest.mark.slow
def test_sanitizers_find_nothing() -> None:
    if reason := cpu_driver.sanitizers_missing():
        pytest.skip(reason)
    libraries = [
        subprocess.run([str(COMPILER), f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(map(os.path.isabs, libraries)):
        pytest.skip("the compiler's sanitizers are not to be loaded first")
    options = {"CFLAGS": " ".join(cpu_driver.SANITIZE), "LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}
    done = check(GOLDEN, FILES, **options)
    assert done.returncode == 0 and "0 mismatches" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "file"),
    [
        ("59898 - 10 * r", "59899 - 10 * r", "networks"),
        ("654339257", "654339258", "networks"),
        ("q = e - p * 512", "q = e - p * 511", "norms"),
        ("1515870810", "1515870811", "attention"),
        ("bits == 8 ? 301 : 299", "bits == 8 ? 303 : 299", "attention"),
        ("seen[j % count]", "seen[0]", "attention"),
        ("first * cosine - second * sine", "first * cosine + second * sine", "rotary"),
        ("by->ids[z * by->keys + j] < 0", "by->ids[z * by->keys + j] < -1", "texts"),
        ("padded ? most(ids[i], 0)", "padded ? magnitude(ids[i])", "texts"),
        ("id[t] > id[place]", "id[t] >= id[place]", "texts"),
        ("place < 0 && id[t] == token", "id[t] == token", "texts"),
    ],
)
def test_a_mistake_is_noticed(tmp_path: pathlib.Path, right: str, wrong: str, file: str) -> None:
    for name in ("checker.py", "check_reference.py", "reference.h"):
        shutil.copy(GOLDEN / name, tmp_path)
    text = (GOLDEN / "reference.c").read_text(encoding="utf-8")
    assert text.count(right) == 1
    (tmp_path / "reference.c").write_text(text.replace(right, wrong), encoding="utf-8")
    done = check(tmp_path, [str(GOLDEN / f"{file}.safetensors")])
    assert done.returncode == 1 and "MISMATCH" in done.stdout, done.stdout + done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    sys.path.insert(0, str(GOLDEN))
    try:
        module = importlib.import_module("check_reference")
        yield module.Model(module.compile_model(tmp_path_factory.mktemp("model")))
    finally:
        sys.path.remove(str(GOLDEN))
        for name in ("check_reference", "checker"):
            sys.modules.pop(name, None)


ONES = np.ones(3, np.int64)


@pytest.mark.parametrize(
    ("operation", "arguments", "bound"),
    [
        ("linear", (ONES[None] * 1 << 15, np.ones((3, 3)), ONES, ONES, 0, 8), "x"),
        ("linear", (ONES[None], np.full((3, 3), 128), ONES, ONES, 0, 8), "W"),
        ("linear", (ONES[None], np.full((3, 3), 127), ONES, ONES, 16, 8), "sums of a layer"),
        ("linear", (ONES[None], np.ones((3, 3)), ONES, -ONES, 0, 8), "R"),
        ("activated", ("gelu", ONES[None], np.ones((3, 3)), ONES, ONES, 0, ONES * 8193, ONES, 8), "M"),
        ("activated", ("relu", ONES[None], np.ones((3, 3)), ONES, ONES, 0, ONES, ONES, 31), "n"),
        ("gated", (np.ones((1, 6)), -1, ONES, ONES, "silu", 8), "A"),
        ("layer_norm", (np.ones((1, 4097)), 16, np.ones(4097), np.ones(4097), 20, 8), "C"),
        ("layer_norm", (ONES[None], (1 << 46) + 1, ONES, ONES, 20, 8), "E"),
        ("layer_norm", (ONES[None], 16, ONES, ONES << 30, 20, 8), "B"),
        ("inverse_root", (ONES << 27,), "v"),
        ("narrow", (ONES[None], ONES, ONES, 16, 8), "left"),
        ("rotary", (np.ones((1, 1, 2)), np.full((1, 1, 1), 20000), ONES[:2], ONES[:2]), "c"),
        ("embed", (np.array([[3]]), np.ones((3, 2)), None, True), "id"),
        ("embed", (np.array([[-1]]), np.ones((3, 2)), None, False), "id"),
        ("select_token", (np.full((1, 1, 2), 1 << 15), np.array([[0]]), None), "h"),
        ("cut_patches", (np.full((1, 1, 2, 2), 256), (2, 2)), "pixel"),
        ("reciprocal", (ONES,), "D"),
    ],
)
def test_a_broken_bound_is_named(model: Any, operation: str, arguments: tuple[Any, ...], bound: str) -> None:
    with pytest.raises(ValueError, match=f"^[a-z_]+: {re.escape(bound)} is out of bounds$"):
        getattr(model, operation)(*arguments)


def test_the_model_is_short_and_plain() -> None:
    text = (GOLDEN / "reference.c").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 2000
    assert set(re.findall(r"#include (\S+)", text)) <= {'"reference.h"', "<math.h>", "<stdlib.h>", "<string.h>"}
    assert "__" not in text
