"""What ``qflash.export_c`` writes: a program, built with a C compiler alone, prints the network's integers."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import cpu_driver
import qflash
from allocations import COUNTER
from helpers import few
from qflash.kernels.cpu import launch
from qflash.network import c_export
from small_networks import KINDS, draw

COMPILER = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
SANITIZED = ("CFLAGS=-g -O0 -march=native -ffp-contract=off -fno-trapping-math -fsanitize=address,undefined", "OPENMP=")
pytestmark = pytest.mark.skipif(COMPILER is None or shutil.which("make") is None, reason="needs make and a C compiler")


@pytest.fixture(scope="module")
def programs(made: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """Folders with the program built as the Makefile says, and with sanitizers; networks differ in ``network.bin`` alone."""
    found = {}
    for name, options in (("plain", ()), ("sanitized", SANITIZED)):
        folder = tmp_path_factory.mktemp(name)
        qflash.export_c(made("class token")[1], folder)
        done = subprocess.run(["make", f"CC={COMPILER}", *options], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found[name] = folder
    return found


def run(folder: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # too much memory is an answer, not the end
    environment = os.environ | {"ASAN_OPTIONS": "allocator_may_return_null=1:detect_leaks=0"}
    command = [str(folder / "network"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def printed(folder: pathlib.Path, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run the program of a folder on images; return what it printed, by name."""
    (folder / "images.raw").write_bytes(images.contiguous().numpy().tobytes())
    done = run(folder, "images.raw")
    assert done.returncode == 0, done.stderr
    rows: dict[str, list[list[int]]] = {}
    for line in done.stdout.splitlines():
        name, *numbers = line.split(" ")
        rows.setdefault(name, []).append([int(x) for x in numbers])
    return {name: torch.tensor(each, dtype=torch.int32) for name, each in rows.items()}


@pytest.mark.parametrize("kind", few(KINDS, 3))
def test_the_program_prints_the_networks_integers(made: Any, programs: dict[str, pathlib.Path], kind: str) -> None:
    model, network = made(kind)
    images = draw(model, 4, seed=21)
    wanted = network(images).flatten(1)
    for folder, batch in ((programs["plain"], 2), (programs["sanitized"], 1)):
        network.export_c(folder, batch=batch)
        (found,) = printed(folder, images[:4]).values()
        assert torch.equal(found, wanted)


def exported(made: Any, programs: dict[str, pathlib.Path]) -> tuple[pathlib.Path, bytes]:
    """Write a network and an image for the program with sanitizers; return its folder and the network's file."""
    folder = programs["sanitized"]
    model, network = made("class token")
    network.export_c(folder)
    (folder / "images.raw").write_bytes(draw(model, 1).numpy().tobytes())
    return folder, (folder / "network.bin").read_bytes()


def test_a_damaged_file_is_refused(made: Any, programs: dict[str, pathlib.Path]) -> None:
    """Every bit of the header and the calls, and some of the constants: with sanitizers, so that nothing is read outside."""
    folder, whole = exported(made, programs)
    other = folder / "other.bin"
    for content, words in (
        (b"", "no network"), (b"QFLASHC2", "no network"), (b"x" + whole[1:], "no network"), (whole[:-8], "damaged"),
        (whole[: len(whole) // 2 // 8 * 8], "damaged"), (whole + bytes(8), "damaged"), (whole + b"\0", "damaged"),
    ):  # fmt: skip
        other.write_bytes(content)
        done = run(folder, "images.raw", "other.bin")
        assert done.returncode == 1 and words in done.stderr, (done.returncode, done.stderr[:300])
    for place in range(8, len(whole) - 8, len(whole) // 40):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        other.write_bytes(changed)
        done = run(folder, "images.raw", "other.bin")
        assert done.returncode == 1 and "damaged" in done.stderr, (place, done.stderr[:300])


def resealed(words: Sequence[int]) -> bytes:
    """Return a file of words whose checksum is right."""
    content = b"QFLASHC2" + c_export._words(*words)
    return content + c_export._words(*[_signed(c_export._checksum(content))])


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def test_a_file_whose_checksum_is_right_is_read_with_care(made: Any, programs: dict[str, pathlib.Path]) -> None:
    """Header words and the numbers that calls begin with, each replaced by numbers that would lead outside."""
    folder, whole = exported(made, programs)
    words = [int.from_bytes(whole[i : i + 8], "little", signed=True) for i in range(8, len(whole) - 8, 8)]
    first_call = 11 + 16
    for place in (*range(6), first_call, first_call + 1, first_call + 2, first_call + 3, first_call + 4):
        for wrong in (-2, 1 << 40, (1 << 62) - 1, -(1 << 62)):
            changed = list(words)
            changed[place] = wrong
            (folder / "other.bin").write_bytes(resealed(changed))
            done = run(folder, "images.raw", "other.bin")
            assert done.returncode == 1, (place, wrong, done.stderr[:500])
            assert "damaged" in done.stderr or "not enough memory" in done.stderr, (place, wrong, done.stderr[:500])


def test_wrong_images_are_named(made: Any, programs: dict[str, pathlib.Path]) -> None:
    folder = programs["plain"]
    made("class token")[1].export_c(folder)
    (folder / "short.raw").write_bytes(bytes(100))
    for arguments, status, words in (
        ((), 2, "usage:"), (("nothing.raw",), 1, "nothing.raw: the file cannot be read"),
        (("short.raw",), 1, "100 are left over"),
        (("short.raw", "nothing.bin"), 1, "nothing.bin: the file cannot be read"),
    ):  # fmt: skip
        done = run(folder, *arguments)
        assert done.returncode == status and words in done.stderr, (arguments, done.stderr)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"batch": 0}, ValueError, "batch must be at least 1, got 0"),
        ({"batch": 1.5}, TypeError, "batch must be an integer, got float"),
        ({"folder": 3}, TypeError, "path must be a string or a path, got int"),
    ],
)
def test_arguments_are_checked(
    made: Any, tmp_path: pathlib.Path, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        qflash.export_c(made("class token")[1], **{"folder": tmp_path, **arguments})


@pytest.mark.slow
def test_one_program_for_all_arm_cpus_takes_what_they_have(made: Any, tmp_path: pathlib.Path) -> None:
    """An emulated CPU without the dot product, one with it, and one with i8mm."""
    tools = "aarch64-linux-gnu-gcc", "aarch64-linux-gnu-objdump", "qemu-aarch64"
    if missing := [name for name in tools if not shutil.which(name)]:
        pytest.skip(f"needs {', '.join(missing)}")
    model, network = made("class token")
    network.export_c(tmp_path)
    command = ["make", "arm", f"CC={tools[0]}", "OPENMP=", "FLAGS=-O1 -ffp-contract=off"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for path, instruction in (("plain", None), ("dot", "sdot"), ("i8mm", "usdot")):
        listing = subprocess.run(
            [tools[1], "-d", f"network_{path}.o"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert {word for word in ("sdot", "usdot") if f"\t{word}\t" in listing.stdout} == {instruction} - {None}
    images = draw(model, 2, seed=23)
    (tmp_path / "images.raw").write_bytes(images.numpy().tobytes())
    for cpu in ("cortex-a53", "cortex-a76", "max"):
        done = subprocess.run(
            [tools[2], "-cpu", cpu, "network_arm", "images.raw"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found = [[int(x) for x in line.split(" ")[1:]] for line in done.stdout.splitlines()]
        assert found == network(images).flatten(1).tolist()


FROM_MEMORY = """
#include "qflash_network.h"
#include <stdio.h>
#include <stdlib.h>
int main(void) {
    FILE *file = fopen("network.bin", "rb");
    fseek(file, 0, SEEK_END);
    const long bytes = ftell(file);
    rewind(file);
    char *memory = aligned_alloc(64, (size_t)(bytes / 64 + 2) * 64);
    for (int shift = 8; shift >= 0; shift -= 8) {
        rewind(file);
        if (fread(memory + shift, 1, (size_t)bytes, file) != (size_t)bytes) return 1;
        qflash_network *network;
        printf("%s\\n", qflash_message(qflash_open_memory(memory + shift, bytes, &network)));
        if (network) printf("%lld\\n", (long long)qflash_outputs(network));
        qflash_close(network);
    }
    free(memory);
    fclose(file);
    return 0;
}
"""


@pytest.mark.slow
def test_a_file_in_memory_must_be_aligned(made: Any, tmp_path: pathlib.Path) -> None:
    made("class token")[1].export_c(tmp_path)
    (tmp_path / "main.c").write_text(FROM_MEMORY, encoding="utf-8")
    done = subprocess.run(["make", f"CC={COMPILER}", *SANITIZED], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert run(tmp_path).stdout == "the memory does not begin at a multiple of 64 bytes\nno error\n1\n"


TWO_NETWORKS = """
#include "qflash_network.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef COUNTED
long allocations(void);
#else
static long allocations(void) { return 0; }
#endif
typedef struct {
    qflash_network *network;
    const uint8_t *images;
    int32_t wanted[4096];
    int equal;
} work;
static size_t bytes_of(qflash_network *network) {
    const qflash_tensor out = qflash_output(network, 0);
    size_t bytes = sizeof(int32_t);
    for (int64_t d = 0; d < out.dims; d++) bytes *= (size_t)out.shape[d];
    return bytes;
}
static void *compute(void *given) {
    work *x = given;
    x->equal = 1;
    for (int i = 0; i < 5; i++)
        x->equal &= !qflash_compute(x->network, x->images)
                    && !memcmp(qflash_output(x->network, 0).values, x->wanted, bytes_of(x->network));
    return NULL;
}
int main(void) {
    static work both[2];
    for (int i = 0; i < 2; i++) {
        if (qflash_open("network.bin", &both[i].network)) return 1;
        const int64_t *shape = qflash_images(both[i].network);
        const size_t bytes = (size_t)(shape[0] * shape[1] * shape[2] * shape[3]);
        uint8_t *images = malloc(bytes);
        for (size_t k = 0; k < bytes; k++) images[k] = (uint8_t)(k * (k >> 3) * (size_t)(7 + i));
        both[i].images = images;
        if (qflash_compute(both[i].network, images) || bytes_of(both[i].network) > sizeof both[i].wanted) return 1;
        memcpy(both[i].wanted, qflash_output(both[i].network, 0).values, bytes_of(both[i].network));
    }
    if (!memcmp(both[0].wanted, both[1].wanted, bytes_of(both[0].network))) return 1;
    const long before = allocations();
    free(malloc(1 + (size_t)qflash_outputs(both[0].network)));
    const long counted = allocations();
    for (int i = 0; i < 2; i++) compute(&both[i]);
    printf("%ld %ld\\n", counted - before, allocations() - counted);
    pthread_t thread[2];
    for (int i = 0; i < 2; i++)
        if (pthread_create(&thread[i], NULL, compute, &both[i])) return 1;
    for (int i = 0; i < 2; i++) pthread_join(thread[i], NULL);
    printf("%d %d\\n", both[0].equal, both[1].equal);
    for (int i = 0; i < 2; i++) {
        qflash_close(both[i].network);
        free((void *)both[i].images);
    }
    return 0;
}
"""
"""Two networks of one file: allocations of a malloc and of ten runs, then both run at once."""


def two_networks(folder: pathlib.Path, made: Any, monkeypatch: pytest.MonkeyPatch, kind: str, *options: str) -> str:
    """Build and run that program, whose layers have one and three threads by turns; return what it printed."""
    monkeypatch.setattr(launch, "threads_for", lambda work: 1 + work % 2 * 2)
    monkeypatch.setattr(launch, "_SERIAL_WORK", 0)
    made(kind)[1].export_c(folder)
    (folder / "main.c").write_text(TWO_NETWORKS, encoding="utf-8")
    (folder / "counter.c").write_text(COUNTER, encoding="utf-8")
    done = subprocess.run(["make", *options], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    environment = os.environ | cpu_driver.SANITIZER_OPTIONS
    done = subprocess.run([str(folder / "network")], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc's names of its allocator")
@pytest.mark.parametrize("kind", ["class token", pytest.param("swin", marks=pytest.mark.slow)])
def test_runs_allocate_nothing_and_do_not_disturb_each_other(
    made: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    flags = "CFLAGS=-O0 -march=native -ffp-contract=off -DCOUNTED counter.c"
    assert two_networks(tmp_path, made, monkeypatch, kind, f"CC={COMPILER}", flags) == "1 0\n1 1\n"


@pytest.mark.slow
@pytest.mark.parametrize("openmp", [False, True])
def test_networks_that_run_at_once_have_no_race(
    made: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, openmp: bool
) -> None:
    """With OpenMP by Clang, whose ThreadSanitizer knows it."""
    if openmp:
        monkeypatch.setenv("CC", "clang")
    reason = cpu_driver.races_missing() if openmp else cpu_driver._cannot_run(cpu_driver.NOTHING, cpu_driver.RACES)
    if reason:
        pytest.skip(reason)
    flags = f"CFLAGS=-O1 -march=native -ffp-contract=off {' '.join(cpu_driver.RACES)}"
    options = ["CC=clang"] if openmp else [f"CC={COMPILER}", "OPENMP="]
    assert two_networks(tmp_path, made, monkeypatch, "class token", *options, flags).endswith("1 1\n")
