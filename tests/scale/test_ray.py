"""The examples on Ray: workers and replicas are killed, and no image and no request is lost."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import qflash

ray = pytest.importorskip("ray", reason="needs the extra 'ray', which make test does not install; make test-ray does")
pytest.importorskip("aiohttp")
pytest.importorskip("timm")
pq = pytest.importorskip("pyarrow.parquet")

from photo_networks import logits_of, save_network  # noqa: E402
from qflash_lab.evaluation.photo_files import write_crops  # noqa: E402
from qflash_lab.evaluation.real_data import sample_photos  # noqa: E402

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
MARK = "QFLASH_TEST_RUN"
"""Of the environment: it tells the processes of a test from all others."""
COUNT = 400
"""Photos: some 16 MB, which Ray Data reads in as many blocks."""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    write_crops(folder, COUNT, sample_photos())
    return folder


@pytest.fixture(scope="module")
def network(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_network(sorted(photos.glob("*.jpg"))[:32], tmp_path_factory.mktemp("network"), depth=2, side=64)


@pytest.fixture(scope="module")
def wanted(photos: Path, network: Path) -> dict[str, list[int]]:
    """What the network makes of each photo."""
    paths = sorted(photos.glob("*.jpg"))
    return dict(zip((path.name for path in paths), logits_of(paths, network), strict=True))


def environment(mark: str) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, sys.path))
    off = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": "local"}
    return {**os.environ, **off, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", MARK: mark}


@contextlib.contextmanager
def running(*command: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run Python; what it has started ends with it."""
    mark = uuid.uuid4().hex
    words = [sys.executable, "-u", *map(str, command)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(words, env=environment(mark), text=True, start_new_session=True, **pipes)
    try:
        yield process, mark
    finally:
        process.kill()
        process.wait()
        for pid in processes(mark, b""):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def processes(mark: str, name: bytes) -> list[int]:
    """Return the processes of one test whose command line holds a name."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            own = f"{MARK}={mark}".encode() in (folder / "environ").read_bytes()
            if own and name in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 900) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if found := condition():
            return found
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"nothing came: {process.communicate()[0][-3000:]}")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def features(network: Path, images: Path, output: Path, *more: str) -> list[Any]:
    return [EXAMPLES / "features_ray_data.py", network, images, output, "--workers", "2", *more]


def finish(process: subprocess.Popen[str]) -> str:
    printed = process.communicate(timeout=900)[0]
    assert process.returncode == 0, printed[-3000:]
    return printed


def test_a_killed_worker_loses_no_row(photos: Path, network: Path, wanted: dict[str, list[int]], tmp_path: Path) -> None:
    output, report = tmp_path / "features", tmp_path / "report.json"
    with running(*features(network, photos, output, "--report", str(report))) as (process, mark):
        killed: set[int] = set()
        for done in (1, 3):  # first one worker, then the other one: only their successors can finish
            wait_for(lambda done=done: len(list(output.glob("*.parquet"))) >= done, process)
            workers = set(processes(mark, b"Embed")) - killed
            for pid in sorted(workers)[: 1 if done == 1 else 2]:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        written = len(rows_of(output))
        finish(process)
    assert len(killed) >= 2 and 0 < written < COUNT, "the workers were not killed in the middle"
    rows = rows_of(output)
    assert sorted(row["name"] for row in rows) == sorted(wanted)
    assert {row["name"]: row["embedding"] for row in rows} == wanted
    found = json.loads(report.read_text())
    assert found["images"] == found["names"] == COUNT and found["failed"] == 0
    assert found["processes"] > 2 and 0 < found["decode_percent"] < 100


@pytest.mark.parametrize("kind", ["parquet", "webdataset"])
def test_other_sources_and_damaged_files(
    kind: str, photos: Path, network: Path, wanted: dict[str, list[int]], tmp_path: Path
) -> None:
    import tarfile

    import pyarrow as pa

    source, output = tmp_path / "source", tmp_path / "features"
    source.mkdir()
    contents = {path.name: path.read_bytes() for path in sorted(photos.glob("*.jpg"))[:20]} | {"broken.jpg": b"no image"}
    if kind == "parquet":
        pq.write_table(pa.table({"file": list(contents), "jpeg": list(contents.values())}), source / "part.parquet")
        more = ["--format", kind, "--columns", "file", "jpeg"]
    else:
        with tarfile.open(source / "part.tar", "w") as archive:
            for name, content in contents.items():
                for file, data in ((name, content), (f"{Path(name).stem}.cls", b"7")):
                    entry = tarfile.TarInfo(file)
                    entry.size = len(data)
                    archive.addfile(entry, io.BytesIO(data))
        more = ["--format", kind]
    with running(*features(network, source, output, *more)) as (process, _):
        printed = finish(process)
    rows = {row["name"]: row for row in rows_of(output)}
    assert "21 images (1 could not be decoded)" in printed
    assert rows.keys() == contents.keys()
    broken = rows.pop("broken.jpg")
    assert broken["embedding"] is None and broken["error"].startswith("UnidentifiedImageError")
    assert {name: row["embedding"] for name, row in rows.items()} == {name: wanted[name] for name in rows}
    about = json.loads((output / "_network.json").read_text())
    ((name, unit),) = qflash.load_model(network).scales.items()
    assert about == {"network": network.name, "output": name, "unit": unit}
    again = subprocess.run(
        [sys.executable, *map(str, features(network, source, output))],
        capture_output=True,
        text=True,
        env=environment(""),
        check=False,
    )
    assert again.returncode == 2 and "output must be an empty folder" in again.stderr


@pytest.fixture(scope="module")
def server(network: Path) -> Iterator[str]:
    """The address of a server with two replicas."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with running(EXAMPLES / "serve_ray.py", network, "--replicas", 2, "--deadline", 2, "--port", port) as (process, _):
        url = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                return True
            return False

        wait_for(answers, process)
        yield url


def load(url: str, photos: Path, network: Path, report: Path, *more: str) -> dict[str, Any]:
    command = [EXAMPLES / "serve_ray_load.py", url, photos, "--deadline", "2", "--network", network, "--report", report, *more]
    subprocess.run([sys.executable, *map(str, command)], check=True, env=environment(""), timeout=300)
    return dict(json.loads(report.read_text()))


def check(found: dict[str, Any]) -> None:
    """No request was lost, wrong or late."""
    assert sum(found["outcomes"].values()) == found["requests"]
    assert set(found["outcomes"]) <= {"answered", "retryable: 429", "retryable: 503"}, found
    assert found["late"] == 0, found


def test_a_killed_replica_loses_no_request(server: str, photos: Path, network: Path, tmp_path: Path) -> None:
    found = load(server, photos, network, tmp_path / "killed.json", "--rate", "10", "--seconds", "20", "--kill", "5")
    check(found)
    assert found["killed"] and found["outcomes"]["answered"] > 60, found


def test_overload_is_refused_in_time(server: str, photos: Path, network: Path, tmp_path: Path) -> None:
    for rate in (150, 300, 600, 1200):  # what is too much depends on the machine
        found = load(server, photos, network, tmp_path / "overload.json", "--rate", str(rate), "--seconds", "6")
        check(found)
        if found["outcomes"].get("retryable: 429", 0):
            return
    pytest.fail(f"nothing was refused: {found}")


def test_answers(server: str, photos: Path, network: Path, wanted: dict[str, list[int]]) -> None:
    import urllib.error
    import urllib.request

    def post(path: str, data: bytes) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(urllib.request.Request(server + path, data=data), timeout=10) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    name, row = next(iter(wanted.items()))
    (unit,) = qflash.load_model(network).scales.values()
    content = (photos / name).read_bytes()
    assert post("/embedding", content) == (200, {"embedding": row, "unit": unit})
    status, answer = post("/classes?top=2", content)
    best = sorted(range(10), key=row.__getitem__, reverse=True)[:2]
    assert status == 200
    assert answer == {"classes": [{"class": str(place), "logit": row[place] * unit} for place in best]}
    status, answer = post("/classes", b"no image")
    assert status == 400 and answer["error"].startswith("no image: UnidentifiedImageError")
    assert post("/classes?top=no", content) == (400, {"error": "top must be a positive integer, got 'no'"})
    assert post("/classes", bytes((20 << 20) + 1))[0] == 413
