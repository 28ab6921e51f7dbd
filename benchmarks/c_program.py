"""Measure the program that ``qflash.export_c`` writes: its size, its memory, and what opening a network takes.

    python benchmarks/c_program.py [--network FILE]

exports DeiT-S at batch 1, of random weights or of a file of ``network.save``, builds it with ``$CC`` (default ``cc``) for one
thread and writes results/c_program.json beside this script. Times are of the processor, the median of processes that each open
the network once; memory is what the operating system counts for the process (resident).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import tempfile
from typing import Any

import openvino_networks
import qflash
from declared import RESULTS

PROCESSES = 5
MEASURE = """
#include "runtime.c"
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

static long resident(void) { /* kB */
    long pages = 0, all = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%ld %ld", &all, &pages) != 2) exit(1);
    fclose(file);
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

int main(void) {
    char *memory, *begin;
    int64_t bytes;
    qflash_network *network;
    static uint8_t images[3 * 224 * 224];
    const long empty = resident();
    const double start = now();
    if (qflash_open("network.bin", &network)) return 1;
    const double opened = now();
    if (qflash_compute(network, images)) return 1;
    const double first = now();
    for (int i = 0; i < 10; i++) qflash_compute(network, images);
    const double last = now();
    const long running = resident();
    if (read_file("network.bin", &memory, &begin, &bytes)) return 1;
    const double before = now();
    volatile uint64_t sum = checksum(begin, bytes - 8);
    const double summed = now();
    (void)sum;
    printf("{\\"open_ms\\": %.3f, \\"checksum_ms\\": %.3f, \\"first_ms\\": %.3f, \\"later_ms\\": %.3f, ", opened - start,
           summed - before, first - opened, (last - first) / 10);
    printf("\\"empty_kb\\": %ld, \\"running_kb\\": %ld}\\n", empty, running);
    return 0;
}
"""
"""Opens and runs ``network.bin``; the sources' own functions, to time the checksum that `qflash_open` has in it."""


def measure(network: Any, folder: pathlib.Path) -> dict[str, Any]:
    """Export, build, run; return what was found."""
    qflash.export_c(network, folder)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    subprocess.run(["make", f"CC={shlex.join(compiler)}", "OPENMP="], cwd=folder, check=True, capture_output=True)
    subprocess.run(["strip", "network"], cwd=folder, check=True)
    (folder / "measure.c").write_text(MEASURE, encoding="utf-8")
    flags = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
    command = [*compiler, *flags, "measure.c", "network.c", "attention.c", "threads.c", "-o", "measure", "-lm"]
    subprocess.run(command, cwd=folder, check=True)
    runs = []
    for _ in range(PROCESSES):
        done = subprocess.run(["./measure"], cwd=folder, check=True, capture_output=True, text=True)
        runs.append(json.loads(done.stdout))
    version = subprocess.run([*compiler, "--version"], check=True, capture_output=True, text=True).stdout.splitlines()[0]
    return {
        "date": datetime.date.today().isoformat(), **openvino_networks.cpu(), "compiler": version,
        "program_bytes": (folder / "network").stat().st_size, "file_bytes": (folder / "network.bin").stat().st_size,
        **{key: statistics.median(run[key] for run in runs) for key in runs[0]},
    }  # fmt: skip


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--network", type=pathlib.Path, help="a file of network.save, in place of random weights")
    given = parser.parse_args()
    network = openvino_networks.random_subject("DeiT-S").network if given.network is None else qflash.load_model(given.network)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(network, pathlib.Path(folder))
    print(json.dumps(found, indent=1))
    (RESULTS / "c_program.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
