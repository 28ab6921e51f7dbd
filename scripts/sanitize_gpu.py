"""Run the GPU kernels under NVIDIA's compute-sanitizer, with several of its tools, and compare every result with the reference.

First the calls of ``tests/gpu_driver/matrix.py`` are made plainly, which compiles the kernels, with zones around what they
allocate. Then each tool watches the same calls, with every tensor an allocation of its own, and a planted fault that it has to
find. The calls are divided among processes that run side by side on one GPU.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import datetime
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "lab" / "src"), str(ROOT / "tests")]

TOOLS = ("racecheck", "memcheck", "initcheck", "synccheck")
"""The slowest first."""
TOOL_OPTIONS = {
    # allocations that lie side by side would hide an access that leaves one for the other; PyTorch asks for things that a
    # driver may refuse, and what a call of ours is refused raises
    "memcheck": ("--padding", "512", "--report-api-errors", "no"),
}
COMMON_OPTIONS = (
    "--target-processes", "application-only", "--launch-timeout", "300", "--max-connections", "100", "--show-backtrace", "no",
    "--error-exitcode", "9", "--print-limit", "100000",
)  # fmt: skip
MOST_FAULTS = 5
"""Calls with other bits after which a worker gives up."""
NOT_POSSIBLE = 2
"""Exit status where there is no GPU or no compute-sanitizer."""


# --- worker ---


def count_launches(launched: collections.Counter[str]) -> None:
    """Have Triton note the names of the kernels that it launches."""
    import triton

    triton.knobs.runtime.launch_enter_hook.add(lambda metadata: launched.update((metadata.get()["name"],)))


def work(arguments: argparse.Namespace) -> int:
    """Make a share of the calls; write to ``--report`` what was made and what had other bits than the reference."""
    import torch

    from gpu_driver import CALL, matrix, zones_on
    from helpers import same_bits
    from qflash.kernels import lengths

    torch.set_num_threads(1)
    lengths.expect_all()
    device = torch.device(arguments.device)
    backend = "triton" if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1" else "cpu"
    index, count = arguments.share
    calls = matrix.calls()[index - 1 :: count][: arguments.limit]
    kinds: collections.Counter[str] = collections.Counter()
    launched: collections.Counter[str] = collections.Counter()
    faults: list[str] = []
    allocated = 0
    if device.type == "cuda":
        count_launches(launched)
    start = time.monotonic()
    for call in calls:
        # compute-sanitizer writes between these lines
        print(f"{CALL}{call.name}", flush=True)
        expected = call.results("reference", matrix.CPU)
        try:
            with zones_on(device) if arguments.zones else contextlib.nullcontext() as zones:
                found = [x.cpu() for x in call.results(backend, device)]
                made, damaged = zones.take() if zones else (0, 0)
            allocated += made
            if damaged:
                faults.append(f"{call.name}: {damaged} of {made} allocations have other bytes around them")
            if not all(same_bits(one, other) for one, other in zip(found, expected, strict=True)):
                faults.append(f"{call.name}: other bits than the reference")
            kinds[call.kind] += 1
        except Exception as error:
            faults.append(f"{call.name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            if device.type == "cuda" and not still_works():
                faults.append("the GPU takes no more calls of this process")
                break
        if len(faults) >= MOST_FAULTS:
            break
    if device.type == "cuda" and kinds and not launched:
        faults.append("no kernel was launched")
    done = {
        "calls": sum(kinds.values()),
        "kinds": dict(kinds),
        "kernels": dict(launched),
        "allocations_with_zones": allocated,
        "faults": faults,
        "seconds": round(time.monotonic() - start, 1),
    }
    if arguments.report:
        arguments.report.write_text(json.dumps(done), encoding="utf-8")
    for fault in faults:
        print(fault, file=sys.stderr)
    # in a report the faults are looked at; another exit status would be one more error of compute-sanitizer's
    return 0 if arguments.report else int(bool(faults))


def still_works() -> bool:
    """Tell whether the process can go on using the GPU."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def plant(tool: str) -> int:
    """Commit the fault that a tool has to find."""
    import torch

    from gpu_driver import planted

    # a fault may end the context
    with contextlib.suppress(RuntimeError):
        planted.FAULTS[tool]()
        torch.cuda.synchronize()
    return 0


# --- driver ---


class Runner:
    """Starts workers, several at a time, with or without compute-sanitizer.

    Attributes:
        sanitizer: the program.
        given: options for it besides this script's.
        seconds: how long a worker may take.
        folder: for reports.
    """

    def __init__(self, sanitizer: str, given: list[str], seconds: float, folder: pathlib.Path) -> None:
        self.sanitizer, self.given, self.seconds, self.folder = sanitizer, given, seconds, folder

    def options(self, tool: str) -> list[str]:
        """Return the command that a tool's workers stand behind."""
        return [self.sanitizer, "--tool", tool, *COMMON_OPTIONS, *TOOL_OPTIONS.get(tool, ()), *self.given]

    def start(self, tool: str | None, *words: str) -> tuple[str, str]:
        """Run a worker; return what it and the tool wrote, and why it counts as failed, which is empty if it does not."""
        environment = dict(os.environ)
        if tool:
            # with PyTorch's pools an access past a tensor would still lie within an allocation
            environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        command = [*(self.options(tool) if tool else ()), sys.executable, str(pathlib.Path(__file__).resolve()), "--worker"]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
        with subprocess.Popen([*command, *words], env=environment, text=True, errors="replace", **pipes) as process:
            try:
                output, errors = process.communicate(timeout=self.seconds)
            except subprocess.TimeoutExpired:
                # the group has nobody but the tool and its worker
                os.killpg(process.pid, 9)
                output, errors = process.communicate()
                return output, f"ended after {self.seconds:.0f} s"
        allowed = (0, 9) if tool else (0,)
        last = (errors.strip() or output.strip()).splitlines()[-1:] or [""]
        return output, "" if process.returncode in allowed else f"exit status {process.returncode}: {last[0]}"

    def share(self, tool: str | None, index: int, count: int, limit: int | None) -> dict[str, Any]:
        """Run a share of the calls; return the worker's report, with what the tool said."""
        from gpu_driver import read_findings

        report = self.folder / f"{tool}-{index}.json"
        words = ["--share", f"{index}/{count}", "--report", str(report), *(["--limit", str(limit)] if limit else [])]
        start = time.monotonic()
        output, failure = self.start(tool, *words, *([] if tool else ["--zones"]))
        done: dict[str, Any] = {"calls": 0, "kinds": {}, "kernels": {}, "faults": []}
        if report.exists():
            done = json.loads(report.read_text(encoding="utf-8"))
        else:
            failure = failure or "no report"
        if failure:
            done["faults"].append(f"worker {index} of {count}: {failure}")
        if tool:
            found = read_findings(output)
            done |= {name: getattr(found, name) for name in ("errors", "warnings", "reports", "by_call")}
            if not found.ended:
                done["faults"].append(f"worker {index} of {count}: {tool} did not say how many errors there were")
        done["seconds"] = time.monotonic() - start
        return done

    def planted(self, tool: str) -> dict[str, Any]:
        """Let a tool watch its planted fault; return what it said of it."""
        from gpu_driver import read_findings

        output, failure = self.start(tool, "--plant", tool)
        found = read_findings(output)
        return {
            "found": found.errors + found.warnings > 0,
            "report": found.reports[:1],
            **({"failure": failure} if failure else {}),
        }


def add_up(shares: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one record of several shares' reports."""
    kinds: collections.Counter[str] = collections.Counter()
    kernels: collections.Counter[str] = collections.Counter()
    for share in shares:
        kinds.update(share["kinds"])
        kernels.update(share["kernels"])
    total: dict[str, Any] = {
        "calls": sum(share["calls"] for share in shares),
        "launches": sum(kernels.values()),
        "kernels": dict(sorted(kernels.items())),
        "kinds": dict(kinds),
        "processes": len(shares),
        # of the slowest process: they run side by side
        "seconds": round(max(share["seconds"] for share in shares)),
        "faults": [fault for share in shares for fault in share["faults"]],
    }
    if "errors" in shares[0]:
        total |= {name: sum(share[name] for share in shares) for name in ("errors", "warnings")}
        total["reports"] = [report for share in shares for report in share["reports"]][:20]
        total["by_call"] = {call: count for share in shares for call, count in share["by_call"].items()}
    else:
        total["allocations_with_zones"] = sum(share.get("allocations_with_zones", 0) for share in shares)
    return total


def is_clean(done: dict[str, Any]) -> bool:
    """Tell whether nothing was reported, and a planted fault was."""
    planted = done.get("planted")
    counts = len(done["faults"]) + done.get("errors", 0) + done.get("warnings", 0)
    return not counts and (planted is None or planted["found"])


def find_sanitizer() -> str | None:
    """Return compute-sanitizer's path, if there is one."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.path.join(home, "bin"))


def first_line(command: list[str], mark: str = "") -> str:
    """Return the first line that a program prints with some text in it."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return next((line.strip() for line in done.stdout.splitlines() if mark in line), "unknown")


def machine(sanitizer: str) -> dict[str, Any]:
    """Return what was run on what."""
    import torch
    import triton

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(
            [
                "python",
                "scripts/sanitize_gpu.py",
                *(os.path.basename(word) if os.path.isabs(word) else word for word in sys.argv[1:]),
            ]
        ),
        "device": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
        "driver": first_line(query),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "compute_sanitizer": first_line([sanitizer, "--version"], "Version"),
    }


def drive(arguments: argparse.Namespace, sanitizer: str) -> int:
    """Run the calls plainly and under every tool; return 1 if anything was found."""
    from qflash.paths import write_whole

    tools = arguments.tool or list(TOOLS)
    shares = arguments.shares or max(1, arguments.processes // len(tools))
    record = {**machine(sanitizer), "options": {}, "plain": {}, "tools": {}}

    def write() -> None:
        if arguments.output:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            write_whole(arguments.output, json.dumps(record, indent=1) + "\n")

    def say(name: str, done: dict[str, Any]) -> None:
        counted = f", {done['errors']} errors, {done['warnings']} warnings" if "errors" in done else ""
        planted = "" if "planted" not in done else f", planted fault {'found' if done['planted']['found'] else 'NOT FOUND'}"
        print(
            f"{name}: {done['calls']} calls, {done['launches']} launches{counted}, {len(done['faults'])} faults{planted}, "
            f"{done['seconds']} s",
            flush=True,
        )
        for fault in done["faults"]:
            print(f"  {fault}", flush=True)
        if done.get("by_call"):
            print(f"  reports while {len(done['by_call'])} calls were made", flush=True)
        for report in done.get("reports", [])[:3]:
            print("  " + "\n    ".join(report), flush=True)

    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(arguments.processes) as pool,
    ):
        runner = Runner(sanitizer, arguments.option, arguments.timeout, pathlib.Path(folder))
        record["options"] = {tool: shlex.join(["compute-sanitizer", *runner.options(tool)[1:]]) for tool in tools}
        count = arguments.processes
        # a worker has every so many calls: limits are of all
        limit = None if arguments.limit is None else -(-arguments.limit // count)
        started = [pool.submit(runner.share, None, index, count, limit) for index in range(1, count + 1)]
        record["plain"] = add_up([one.result() for one in started])
        say("plain", record["plain"])
        write()
        limit = None if arguments.limit is None else -(-arguments.limit // shares)
        planted = {tool: pool.submit(runner.planted, tool) for tool in tools}
        running = {
            tool: [pool.submit(runner.share, tool, index, shares, limit) for index in range(1, shares + 1)] for tool in tools
        }
        for tool, started in running.items():
            done = add_up([one.result() for one in started])
            done["planted"] = planted[tool].result()
            record["tools"][tool] = done
            say(tool, done)
            write()
    return int(not all(map(is_clean, (record["plain"], *record["tools"].values()))))


def list_calls() -> int:
    """Print the calls, with the kernels that they launch on an H100."""
    from gpu_driver import matrix
    from qflash.kernels import lengths

    lengths.expect_all()
    launched: collections.Counter[str] = collections.Counter()
    for call in matrix.calls():
        kernels = matrix.kernels_on_hopper(call)
        launched.update(kernels)
        print(f"{call.name}: {', '.join(kernels) or 'no kernel'}")
    print(", ".join(f"{name} {count}" for name, count in sorted(launched.items())))
    return 0


def share_of(text: str) -> tuple[int, int]:
    """Read ``i/n``."""
    index, count = map(int, text.split("/"))
    if not 1 <= index <= count:
        raise ValueError
    return index, count


def main() -> int:
    """Do what the command line asks for; return 1 if anything was found, 2 where nothing can be run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", action="append", choices=TOOLS, help="only this one; may be repeated")
    parser.add_argument(
        "--processes", type=int, default=min(16, os.cpu_count() or 1), help="at a time (default: CPU threads, up to 16)"
    )
    parser.add_argument("--shares", type=int, help="processes that share a tool's calls (default: by --processes)")
    parser.add_argument("--limit", type=int, metavar="N", help="about so many calls, instead of all")
    parser.add_argument("--timeout", type=float, default=900, help="seconds that a process may take (default: 900)")
    parser.add_argument("--option", action="append", default=[], metavar="=OPTION", help="for compute-sanitizer; repeatable")
    parser.add_argument("--output", type=pathlib.Path, metavar="OUT.json", help="where the record goes")
    parser.add_argument("--list", action="store_true", help="print the calls and their kernels on an H100; needs no GPU")
    own = parser.add_argument_group("of a process that makes calls, which this script starts")
    own.add_argument("--worker", action="store_true", help="make calls here, without compute-sanitizer")
    own.add_argument("--share", type=share_of, default=(1, 1), metavar="I/N", help="every N-th call from the I-th")
    own.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: C kernels, or those in the interpreter")
    own.add_argument("--zones", action="store_true", help="look at bytes around what calls allocate")
    own.add_argument("--report", type=pathlib.Path, help="where the results go")
    own.add_argument("--plant", choices=TOOLS, help="commit a fault instead")
    arguments = parser.parse_args()
    for name in ("processes", "shares", "limit"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    if arguments.list:
        return list_calls()
    if arguments.worker and arguments.device == "cpu" and not arguments.plant:
        return work(arguments)
    import torch

    if not torch.cuda.is_available():
        print("sanitize_gpu.py needs an NVIDIA GPU that PyTorch can use; --list needs none", file=sys.stderr)
        return NOT_POSSIBLE
    if arguments.worker:
        return plant(arguments.plant) if arguments.plant else work(arguments)
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print(
            "sanitize_gpu.py needs compute-sanitizer, a part of NVIDIA's CUDA toolkit, in $PATH or in $CUDA_HOME/bin",
            file=sys.stderr,
        )
        return NOT_POSSIBLE
    return drive(arguments, sanitizer)


if __name__ == "__main__":
    sys.exit(main())
