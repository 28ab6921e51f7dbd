"""Load for ``serve_ray.py``: what becomes of every request, under overload and while a replica is killed.

    python examples/serve_ray_load.py http://127.0.0.1:8000 photos/ --rate 50 --seconds 10 --deadline 1 --kill 5

Requests leave at fixed times, whether or not earlier ones were answered, as those of independent users do. Each ends as
``answered`` (200, with integers that were compared if ``--network`` is given), ``retryable`` (429 or 503 with Retry-After) or
``wrong`` (anything else: another status, other integers, no response). ``late`` counts those that took longer than the
deadline, whatever they got. ``--kill`` kills the process of a replica after so many seconds, on this machine alone.
"""

import argparse
import asyncio
import collections
import io
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import aiohttp
import torch
from PIL import Image

import qflash


def expected(file: Path, contents: list[bytes]) -> list[list[int]]:
    """Return a network's integers for image files, one at a time."""
    network = qflash.load_model(file)
    plain = {"input_size": network.image, "mean": [0.5], "std": [0.5], "crop_pct": 1.0}
    transform = qflash.image_transform(network.about.get("images") or plain, network.image[1:])
    with torch.inference_mode():
        return [network(transform(Image.open(io.BytesIO(content)))[None])[0].tolist() for content in contents]


def replica_processes() -> list[int]:
    """Return the processes of replicas of ``serve_ray.py`` on this machine, as Ray names them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:  # it has just ended
            continue
        if command.startswith(b"ray::ServeReplica:qflash:Replica"):
            found.append(int(path.parent.name))
    return found


async def send(session: aiohttp.ClientSession, url: str, content: bytes, wanted: list[int] | None) -> tuple[str, float]:
    """Send an image; return what became of it, and the seconds it took."""
    start = time.perf_counter()
    try:
        async with session.post(url, data=content) as response:
            answer = await response.json()
            seconds = time.perf_counter() - start
            if response.status == 200:
                return ("answered" if wanted in (None, answer["embedding"]) else "wrong: other integers"), seconds
            if response.status in (429, 503) and "Retry-After" in response.headers:
                return f"retryable: {response.status}", seconds
            return f"wrong: status {response.status}", seconds
    except (aiohttp.ClientError, ValueError) as error:
        return f"wrong: {type(error).__name__}", time.perf_counter() - start


async def run(given: argparse.Namespace, contents: list[bytes], wanted: list[Any]) -> list[tuple[str, float]]:
    """Send requests at their times and return what became of each."""
    tasks, killed = [], given.kill is None
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60)) as session:
        start = time.perf_counter()
        for place in range(round(given.rate * given.seconds)):
            due = start + place / given.rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if not killed and due - start >= given.kill:
                os.kill(replica_processes()[0], signal.SIGKILL)
                killed = True
            which = place % len(contents)
            tasks.append(asyncio.create_task(send(session, given.url + "/embedding", contents[which], wanted[which])))
        return await asyncio.gather(*tasks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("images", type=Path, help="folder of .jpg files, of which 32 are sent in turns")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--deadline", type=float, default=1.0, help="seconds; as of the server")
    parser.add_argument("--kill", type=float, help="seconds until a replica is killed")
    parser.add_argument("--network", type=Path, help="the server's file, to compare integers with")
    parser.add_argument("--report", type=Path, help="JSON file for the counts")
    given = parser.parse_args()
    contents = [path.read_bytes() for path in sorted(given.images.glob("*.jpg"))[:32]]
    if not contents:
        parser.error(f"{given.images} holds no .jpg file")
    if min(given.rate, given.seconds, given.deadline) <= 0:
        parser.error("--rate, --seconds and --deadline must be positive")
    if given.kill is not None and not replica_processes():
        parser.error("--kill needs replicas on this machine; there are none")
    wanted = expected(given.network, contents) if given.network else [None] * len(contents)

    outcomes = asyncio.run(run(given, contents, wanted))
    answered = sorted(seconds for outcome, seconds in outcomes if outcome == "answered")
    counts = collections.Counter(outcome for outcome, _ in outcomes)
    report = {
        "rate": given.rate, "seconds": given.seconds, "deadline": given.deadline, "killed": given.kill is not None,
        "requests": len(outcomes), "outcomes": dict(sorted(counts.items())),
        "late": sum(seconds > given.deadline for _, seconds in outcomes),
        "answered_per_second": round(len(answered) / given.seconds, 1),
        "p50_ms": round(1000 * answered[len(answered) // 2], 1) if answered else None,
        "p99_ms": round(1000 * answered[int(0.99 * (len(answered) - 1))], 1) if answered else None,
        "slowest_ms": round(1000 * max(seconds for _, seconds in outcomes), 1),
    }  # fmt: skip
    if given.report is not None:
        given.report.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
