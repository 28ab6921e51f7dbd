"""Run the CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer, for every instruction set, against the reference.

The kernels run in a program of their own (``tests/cpu_driver``), also for another machine in an emulator: for aarch64 they are
cross-compiled and run by qemu (Debian: gcc-aarch64-linux-gnu, qemu-user), where undefined behaviour traps and zones around all
buffers are looked at. With ``--races`` they run under ThreadSanitizer instead, which needs clang, or what ``$CC`` names, and
its OpenMP (Debian: clang, libomp-dev). What cannot be built or run here is left out, and the reason is given.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "lab" / "src"), str(ROOT / "tests")]

import cpu_driver  # noqa: E402
from cpu_driver import matrix  # noqa: E402
from qflash.kernels.cpu import launch  # noqa: E402
from qflash.paths import write_whole  # noqa: E402

MOST_FAULTS = 5
"""Faults of a level after which it is given up."""


def run(level: str, share: float, optimise: str, checks: tuple[str, ...], record: pathlib.Path | None) -> dict[str, Any]:
    """Build for a level and make the calls; return what was done, with the faults."""
    one = cpu_driver.LEVELS[level]
    start = time.monotonic()
    counts: collections.Counter[str] = collections.Counter()
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        program = cpu_driver.build(one, pathlib.Path(folder), checks, optimise)
        command = [*([one.emulator] if one.emulator else []), str(program)]
        library = cpu_driver.DriverLibrary(command, {**os.environ, **cpu_driver.SANITIZER_OPTIONS})
        if record:
            record.mkdir(parents=True, exist_ok=True)
            shutil.copy(program, record / "driver")
            library.record, library.answers = (record / "calls").open("wb"), (record / "results").open("wb")
        with cpu_driver.kernels_in(library, matrix.threads_for):
            for kind, number, check in matrix.checks(share):
                try:
                    check(number)
                    counts[kind] += 1
                except (AssertionError, cpu_driver.DriverError) as error:
                    faults.append(f"{kind} {number}: {str(error) or 'other bits than the reference'}")
                    print(f"{level}: {faults[-1]}", file=sys.stderr)
                    if len(faults) == MOST_FAULTS:
                        break
        for file in (library.record, library.answers):
            if file:
                file.close()
    return {
        "calls": library.calls,
        "checks": dict(counts),
        "failed": len(faults),
        "faults": faults,
        "flags": [flag for flag in (*one.flags, *checks) if not flag.startswith("/")],
        "seconds": round(time.monotonic() - start),
    }


def checks_of(level: cpu_driver.Level, *, races: bool, plain: bool) -> tuple[str, ...]:
    """Return the compiler's flags for what is looked for."""
    if races or plain:
        return cpu_driver.RACES if races else ()
    return cpu_driver.TRAP if level.compiler else cpu_driver.SANITIZE


def compiler_version(command: list[str]) -> str:
    """Return the first line that a compiler says of itself."""
    done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    return done.stdout.splitlines()[0] if done.stdout else "unknown"


def main() -> int:
    """Run what the command line asks for; return 1 if there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--level", action="append", choices=list(cpu_driver.LEVELS), help="only this one; may be repeated")
    parser.add_argument("--share", type=float, default=1.0, help="of the calls of a full run (default: 1)")
    parser.add_argument("--optimise", default="", metavar="FLAG", help="for the compiler; default: as the kernels are shipped")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--races", action="store_true", help="look for races between threads, with clang's ThreadSanitizer")
    instead.add_argument("--plain", action="store_true", help="without sanitizers, as the kernels are shipped")
    parser.add_argument("--record", type=pathlib.Path, metavar="DIR", help="keep program, calls and results of one level")
    parser.add_argument("--output", type=pathlib.Path, metavar="OUT.json", help="where the record goes")
    arguments = parser.parse_args()
    levels = arguments.level or list(cpu_driver.LEVELS)
    if not arguments.share > 0:
        parser.error(f"--share must be positive, got {arguments.share}")
    if arguments.record and len(levels) > 1:
        parser.error("--record is for one level; choose it with --level")
    if arguments.races:
        os.environ.setdefault("CC", "clang")
        if reason := cpu_driver.races_missing():
            parser.error(reason)
    done: dict[str, Any] = {}
    about = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(
            [
                "python",
                "scripts/sanitize_cpu.py",
                *(os.path.basename(word) if os.path.isabs(word) else word for word in sys.argv[1:]),
            ]
        ),
        "machine": f"{platform.machine()}, {platform.system()}",
        "compiler": compiler_version(launch._compiler()),
        "levels": done,
    }
    for level in levels:
        one = cpu_driver.LEVELS[level]
        reason = one.missing()
        if arguments.races and one.compiler:
            reason = "there is no ThreadSanitizer for another machine's programs"
        if reason:
            print(f"{level}: left out, {reason}", flush=True)
            done[level] = {"left_out": reason}
        else:
            checks = checks_of(one, races=arguments.races, plain=arguments.plain)
            done[level] = found = run(level, arguments.share, arguments.optimise, checks, arguments.record)
            print(f"{level}: {found['calls']} calls, {found['failed']} faults, {found['seconds']} s", flush=True)
        if arguments.output:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            write_whole(arguments.output, json.dumps(about, indent=1) + "\n")
    return int(any(one.get("faults") for one in done.values()))


if __name__ == "__main__":
    sys.exit(main())
