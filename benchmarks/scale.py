"""Time features of many images with Ray Data and torchrun, and a service with Ray Serve; evaluate with two processes.

    python benchmarks/scale.py [--part features] [--model deit_tiny_patch16_224] [--workers 2] [--name scale_cpu]

runs the examples ``features_ray_data.py``, ``features_torchrun.py``, ``serve_ray.py`` and ``serve_ray_load.py``, and
``qflash-lab evaluate`` under torchrun, with a network of random weights, whose speed is that of trained ones, on JPEG crops of
scikit-learn's photos. It writes results/NAME.json beside this script, keeping the parts that were not run, for
docs/how_to/scale.md. Needs timm and qflash-lab, and for the parts ``features`` and ``serve`` the extra ``ray``; no network.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import qflash
from qflash_lab.bench import records

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
PARTS = ("features", "loader", "serve", "torchrun")
ON_RAY = {"features", "serve"}
BOUND_MS = 500.0
"""Of the 99th percentile of latency, under which requests a second count."""
LADDER = 1.3
"""Between a rate of requests and the next one that is tried."""
SUBSET = 200
"""Images that both evaluations judge."""
DISTINCT = 1000
"""JPEG files with a content of their own; further ones are links to them."""


def torchrun(processes: int) -> list[Any]:
    """Return the words that have several processes run what follows."""
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes] if processes > 1 else []


def python(*words: Any, processes: int = 1, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with torch's threads divided among the processes."""
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=1800, check=False, **options
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    return done


def make_network(model: str, photos: Path, path: Path) -> dict[str, Any]:
    """Quantise a model of timm with random weights, calibrated on photos, and say what it is."""
    import timm
    from PIL import Image

    torch.manual_seed(0)
    floats = timm.create_model(model, pretrained=False).eval()
    transform = qflash.image_transform(floats)
    pixels = torch.stack([transform(Image.open(each)) for each in sorted(photos.glob("*.jpg"))[:32]])
    network = qflash.quantize_model(floats, pixels.split(16), mean=transform.mean, std=transform.std, progress=False)
    network.about["images"] = {**floats.pretrained_cfg, "input_size": transform.size}
    network.save(path)
    return {"model": model, "size": list(transform.size)}


def measure_features(network: Path, photos: Path, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Return the report of ``features_ray_data.py``."""
    report = folder / "features.json"
    python(
        EXAMPLES / "features_ray_data.py", network, photos, folder / "features", "--workers", given.workers, "--batch",
        given.batch, "--report", report, processes=given.workers,
    )  # fmt: skip
    return dict(json.loads(report.read_text()))


def measure_loader(network: Path, photos: Path, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Return images a second of ``features_torchrun.py``, from the first process's start to the last one's end."""
    reports = folder / "loader"
    command = [EXAMPLES / "features_torchrun.py", network, photos, folder / "parts", "--batch", given.batch]
    python(
        *torchrun(given.workers), *command, "--loaders", given.loaders, "--report", reports, processes=given.workers,
    )  # fmt: skip
    found = [json.loads(path.read_text()) for path in sorted(reports.glob("*.json"))]
    images = sum(each["images"] for each in found)
    seconds = max(each["end"] for each in found) - min(each["start"] for each in found)
    decode, busy = (sum(each[stage] for each in found) for stage in ("decode", "network"))
    return {
        "images": images, "processes": len(found), "device": found[0]["device"], "batch": given.batch,
        "loaders": given.loaders, "seconds": round(seconds, 2), "images_per_second": round(images / seconds, 1),
        "decode_percent": round(100 * decode / (decode + busy), 1),
        "network_percent": round(100 * busy / (seconds * len(found)), 1),
    }  # fmt: skip


@contextlib.contextmanager
def serving(network: Path, given: argparse.Namespace) -> Iterator[str]:
    """Start ``serve_ray.py`` and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, EXAMPLES / "serve_ray.py", network, "--replicas", given.workers, "--batch", given.serve_batch,
        "--deadline", given.deadline, "--port", port,
    ]  # fmt: skip
    threads = str(max(1, (os.cpu_count() or 1) // given.workers))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "RAY_USAGE_STATS_ENABLED": "0"}
    server = subprocess.Popen(list(map(str, command)), env=environment, stdout=subprocess.DEVNULL)
    try:
        for _ in range(3000):
            if server.poll() is not None:
                raise RuntimeError("serve_ray.py ended before it served")
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.send_signal(signal.SIGINT)  # Ray's processes end with it
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def measure_serve(network: Path, photos: Path, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Return the highest rate whose requests are all answered with a p99 below the bound, and what faults lead to."""

    def load(rate: float, seconds: float, *more: Any) -> dict[str, Any]:
        report = folder / "load.json"
        python(
            EXAMPLES / "serve_ray_load.py", url, photos, "--rate", rate, "--seconds", seconds, "--deadline", given.deadline,
            "--network", network, "--report", report, *more,
        )  # fmt: skip
        found = dict(json.loads(report.read_text()))
        print(found, flush=True)
        return found

    with serving(network, given) as url:
        load(given.rate, 3)  # what is compiled or read when it is first needed
        tried: list[dict[str, Any]] = []
        best: dict[str, Any] | None = None
        rate = given.rate
        while True:
            tried.append(load(round(rate, 1), given.seconds))
            if tried[-1]["outcomes"].get("answered") != tried[-1]["requests"] or tried[-1]["p99_ms"] > BOUND_MS:
                break
            best, rate = tried[-1], rate * LADDER
        if best is None:
            raise RuntimeError(f"{given.rate} requests a second are too many; begin with fewer by --rate")
        overload = load(round(4 * best["rate"], 1), given.seconds)
        killed = load(round(best["rate"] / 3, 1), 4 * given.seconds, "--kill", given.seconds)
    return {
        "replicas": given.workers, "batch": given.serve_batch, "deadline": given.deadline, "bound_ms": BOUND_MS,
        "best": best, "tried": tried, "overload": overload, "killed": killed,
    }  # fmt: skip


def measure_torchrun(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Return Top-1 of one and of several processes, which must be the same image by image."""
    command = ["-m", "qflash_lab", "evaluate", "--model", "digits-vit", "--integer", "--method", "fp32", "--subset", SUBSET]
    results: dict[int, tuple[Any, float, Any]] = {}
    for count in (1, given.workers):
        output = folder / f"evaluate-{count}"
        start = time.perf_counter()
        python(*torchrun(count), *command, "--output", output, processes=count)
        record = json.loads((output / "evaluate.json").read_text())
        results[count] = record["models"], round(time.perf_counter() - start, 1), record["conditions"]
    one, several = results[1], results[given.workers]
    if one[0] != several[0]:
        raise RuntimeError("several processes do not give what one gives")
    rows = {row["method"]: row["right"] for row in one[0][0]["methods"]}
    return {
        "images": SUBSET, "processes": given.workers, "device": one[2]["device"], "equal": True, "right": rows,
        "seconds": [one[1], several[1]],
    }  # fmt: skip


def main() -> None:
    """Run the parts and write what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="repeatable; all if left out")
    parser.add_argument("--model", default="deit_tiny_patch16_224", help="of timm")
    parser.add_argument("--photos", type=int, default=1000, help=f"JPEG files, {DISTINCT} different ones at most")
    parser.add_argument("--workers", type=int, default=2, help="workers, replicas and processes")
    parser.add_argument("--batch", type=int, default=16, help="images a call, of features")
    parser.add_argument("--loaders", type=int, default=1, help="processes that decode for each of torchrun's")
    parser.add_argument("--serve-batch", type=int, default=8, help="images a call, of the service")
    parser.add_argument("--deadline", type=float, default=1.0, help="seconds, of the service")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second that are tried first")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load")
    parser.add_argument("--name", default="scale_cpu", help="of the result file")
    given = parser.parse_args()
    if given.workers < 2:
        parser.error("--workers must be at least 2: one is killed")
    parts = given.part or PARTS

    from qflash_lab.evaluation.photo_files import write_crops
    from qflash_lab.evaluation.real_data import sample_photos

    path = HERE / "results" / f"{given.name}.json"
    record = json.loads(path.read_text()) if path.is_file() else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        photos, network = folder / "photos", folder / "network.safetensors"
        conditions = {
            "environment": records.environment(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
            "gpus": torch.cuda.device_count(),
            "cores": os.cpu_count(),
        }
        if set(parts) != {"torchrun"}:
            names = write_crops(photos, min(given.photos, DISTINCT), sample_photos())
            for place in range(len(names), given.photos):
                (photos / f"{place:06}.jpg").hardlink_to(photos / names[place % len(names)])
            size = sum(each.stat().st_size for each in photos.iterdir())
            conditions |= make_network(given.model, photos, network)
            conditions |= {"photo_kilobytes": round(size / given.photos / 1000, 1), "distinct_photos": len(names)}
        if set(parts) & ON_RAY:
            conditions |= {"ray": metadata.version("ray")}
        for part in parts:
            if part == "features":
                found = measure_features(network, photos, folder, given)
            elif part == "loader":
                found = measure_loader(network, photos, folder, given)
            elif part == "serve":
                found = measure_serve(network, photos, folder, given)
            else:
                found = measure_torchrun(folder, given)
            print(part, found, flush=True)
            record[part] = found | {"conditions": conditions}
            path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
