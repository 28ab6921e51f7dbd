"""The CPU kernels in programs of their own: under sanitizers, and for another architecture in an emulator.

A short run of what ``scripts/sanitize_cpu.py`` does for all instruction sets.
"""

from __future__ import annotations

import io
import itertools
import os
import pathlib
import shutil
import subprocess
import warnings

import pytest
import torch

import cpu_driver
import qflash
from cpu_driver import DriverError, DriverLibrary, matrix
from network_cases import draw_layer_norm, draw_linear, draw_narrow
from qflash.kernels.cpu import launch, network


def make_library(level: str, folder: pathlib.Path, checks: tuple[str, ...]) -> DriverLibrary:
    """Build the kernels without optimisation, which takes the compiler the least time; skip where that is not possible."""
    one = cpu_driver.LEVELS[level]
    reason = one.missing() or (cpu_driver.sanitizers_missing() if checks == cpu_driver.SANITIZE else None)
    if reason:
        pytest.skip(reason)
    program = cpu_driver.build(one, folder, checks, "-O0")
    command = [*([one.emulator] if one.emulator else []), str(program)]
    return DriverLibrary(command, {**os.environ, **cpu_driver.SANITIZER_OPTIONS})


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> DriverLibrary:
    return make_library("native", tmp_path_factory.mktemp("sanitized"), cpu_driver.SANITIZE)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> DriverLibrary:
    return make_library("native", tmp_path_factory.mktemp("plain"), ())


def run_matrix(library: DriverLibrary) -> None:
    with cpu_driver.kernels_in(library, matrix.threads_for):
        for kind, number, check in matrix.checks(0.04):
            if kind != "longest rows":
                check(number)
    assert library.calls > 80


def test_no_access_outside_and_no_undefined_behaviour(sanitized: DriverLibrary) -> None:
    run_matrix(sanitized)


@pytest.mark.parametrize(
    "level", ["aarch64", *(pytest.param(f"aarch64 {name}", marks=pytest.mark.slow) for name in ("dot product", "i8mm"))]
)
def test_the_aarch64_kernels_have_the_reference_bits(tmp_path: pathlib.Path, level: str) -> None:
    run_matrix(make_library(level, tmp_path, ()))


@pytest.fixture
def clang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile with clang, whose ThreadSanitizer knows its OpenMP; skip where there is none."""
    monkeypatch.setenv("CC", "clang")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no clang
        if reason := cpu_driver.races_missing():
            pytest.skip(reason)


def test_no_race_between_threads(clang: None, tmp_path: pathlib.Path) -> None:
    run_matrix(make_library("native", tmp_path, cpu_driver.RACES))


def test_a_race_between_threads_is_noticed(clang: None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = shutil.copytree(cpu_driver.KERNELS, tmp_path / "kernels")
    source = kernels / "attention.c"
    text = source.read_text(encoding="utf-8")
    assert "#pragma omp barrier" in text
    source.write_text(text.replace("#pragma omp barrier", ""), encoding="utf-8")
    monkeypatch.setattr(cpu_driver, "KERNELS", kernels)
    library = make_library("native", tmp_path, cpu_driver.RACES)

    def many_calls() -> None:
        # threads that happen to come one after the other have no race
        for _ in range(100):
            launch.launch_quantize(torch.ones(3, 4, 50, 64), "tensor")

    with pytest.raises(DriverError, match="ThreadSanitizer: data race"), cpu_driver.kernels_in(library, lambda work: 3):
        many_calls()


def shorten(monkeypatch: pytest.MonkeyPatch, spans: str, name: str) -> None:
    """Have the driver believe that a tensor is a byte shorter than it is."""
    of = getattr(cpu_driver, spans)
    monkeypatch.setattr(cpu_driver, spans, lambda numbers: (found := of(numbers)) | {name: found[name] - 1})


def test_a_write_behind_an_output_is_noticed(
    sanitized: DriverLibrary, plain: DriverLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch, "_norm_spans", "out")
    shorten(monkeypatch, "_linear_spans", "out")
    shorten(monkeypatch, "_narrow_spans", "out")
    for library, said in ((sanitized, "heap-buffer-overflow"), (plain, "written outside of buffer")):
        for draw in (draw_layer_norm, draw_linear, draw_narrow):
            layer = next(layer for layer in map(draw, itertools.count()) if layer.run("reference").numel())
            with pytest.raises(DriverError, match=said), cpu_driver.kernels_in(library):
                layer.run("cpu")


def test_a_read_behind_an_input_is_noticed(sanitized: DriverLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, "_conversion_spans", "x")
    with pytest.raises(DriverError, match="heap-buffer-overflow"), cpu_driver.kernels_in(sanitized):
        launch.launch_quantize(torch.ones(1, 1, 5, 7), "token")


def test_a_read_behind_packed_tokens_is_noticed(sanitized: DriverLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, "_conversion_spans", "x")
    x, cumulative = torch.ones(9, 1, 7), torch.tensor([0, 4, 4, 9])
    with pytest.raises(DriverError, match="heap-buffer-overflow"), cpu_driver.kernels_in(sanitized):
        qflash.varlen_attention(x, x, x, cumulative, cumulative, 5, 5, backend="cpu")


@pytest.mark.parametrize("given", ["scale", "offset"])
def test_a_read_behind_what_is_given_is_noticed(sanitized: DriverLibrary, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    shorten(monkeypatch, "_conversion_spans", given)
    one = torch.ones(1, 2, 1, 7)
    with pytest.raises(DriverError, match="heap-buffer-overflow"), cpu_driver.kernels_in(sanitized):
        launch.launch_quantize_values(one.expand(3, 2, 5, 7), one, one)


TWO_ARRAYS = """
#include "products.h"
int main(int count, char **words) {
    (void)words;
    int64_t taken = 0;
    next_array(NULL, &taken, 10), next_array(NULL, &taken, 10);
    char *memory = malloc(taken);
    taken = 0;
    char *one = next_array(memory, &taken, 10), *other = next_array(memory, &taken, 10);
    memset(one, 0, 9 + count);
    memset(other, 0, 10);
    free(memory);
    return 0;
}
"""


def test_a_write_between_arrays_of_a_workspace_is_noticed(tmp_path: pathlib.Path) -> None:
    if reason := cpu_driver.sanitizers_missing():
        pytest.skip(reason)
    source, program = tmp_path / "two.c", tmp_path / "two"
    source.write_text(TWO_ARRAYS, encoding="utf-8")
    command = [*launch._compiler(), "-w", *cpu_driver.SANITIZE, f"-I{cpu_driver.KERNELS}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    assert subprocess.run([program]).returncode == 0
    done = subprocess.run([program, "one more"], capture_output=True, text=True)
    assert done.returncode and "use-after-poison" in done.stderr


def test_undefined_behaviour_is_noticed(sanitized: DriverLibrary) -> None:
    """An epsilon that :func:`qflash.network.execution.integer_layer_norm` refuses."""
    h = torch.tensor([[5, 7, 9]], dtype=torch.int16)
    constants = (1 << 63) - 1, h[0].int(), h[0].int(), 8, torch.int8
    with cpu_driver.kernels_in(sanitized), pytest.raises(DriverError, match="runtime error: signed integer overflow"):
        network.launch_layer_norm(h, *constants, centred=True, residual=None)


def test_recorded_calls_give_the_same_elsewhere(plain: DriverLibrary) -> None:
    """On a machine without Python the driver takes them from a file."""
    plain.record, plain.answers = io.BytesIO(), io.BytesIO()
    try:
        with cpu_driver.kernels_in(plain):
            outputs = [draw_linear(number).run("cpu") for number in range(5)]
        expected = plain.answers.getvalue()
        done = subprocess.run(plain.command, input=plain.record.getvalue(), capture_output=True, check=True)
    finally:
        plain.record = plain.answers = None
    head = cpu_driver.MAGIC.to_bytes(8, "little") + bytes(8)
    assert expected == b"".join(head + bytes(out.untyped_storage()) for out in outputs if out.numel())
    assert done.stdout == expected
