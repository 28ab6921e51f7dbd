"""The example that runs under torchrun: a process is killed, and no image is lost; damaged files; a folder of another run."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("timm")
pytest.importorskip("sklearn")
from photo_networks import logits_of, save_network
from qflash_lab.evaluation.photo_files import write_crops
from qflash_lab.evaluation.real_data import sample_photos

EXAMPLE = Path(__file__).parents[2] / "examples" / "features_torchrun.py"
COUNT, PART = 41, 4


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos in two folders, one of which cannot be decoded."""
    folder = tmp_path_factory.mktemp("photos")
    small = [photo.resize((120, 80)) for photo in sample_photos()]
    for place in range(2):
        write_crops(folder / str(place), COUNT // 2, small, seed=place)
    (folder / "broken.JPG").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="module")
def network(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_network(sorted(photos.rglob("*.jpg")), tmp_path_factory.mktemp("network"), depth=1, side=32)


@pytest.fixture(scope="module")
def wanted(photos: Path, network: Path) -> dict[str, list[int]]:
    """What the network makes of each photo by itself, and zeros for the damaged file."""
    paths = sorted(photos.rglob("*.jpg"))
    rows = logits_of(paths, network)
    names = (path.relative_to(photos).as_posix() for path in paths)
    return dict(zip(names, rows, strict=True)) | {"broken.JPG": [0] * 10}


def command(network: Path, photos: Path, output: Path, *more: Any) -> list[str]:
    return [str(word) for word in (EXAMPLE, network, photos, output, "--batch", 3, "--part", PART, *more)]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """The example, in this process."""

    def run(words: list[str]) -> None:
        monkeypatch.setattr(sys, "argv", words)
        runpy.run_path(words[0], run_name="__main__")

    return run


def check_features(output: Path, wanted: dict[str, list[int]]) -> None:
    """Require every image once, in parts, with the integers that it has by itself."""
    parts = [np.load(path) for path in sorted(output.glob("*.npz"))]
    full, rest = divmod(len(wanted), PART)
    assert [len(part["name"]) for part in parts] == [PART] * full + [rest] * (rest > 0)
    names, rows, errors = (np.concatenate([part[column] for part in parts]) for column in ("name", "embedding", "error"))
    assert rows.dtype == np.int32 and names.tolist() == sorted(wanted)
    assert dict(zip(names.tolist(), rows.tolist(), strict=True)) == wanted
    assert [name for name, error in zip(names, errors, strict=True) if error] == ["broken.JPG"] * ("broken.JPG" in wanted)
    assert all(error.startswith("UnidentifiedImageError") for error in errors if error)


def test_missing_parts_are_computed_again(
    main: Callable[[list[str]], None],
    photos: Path,
    network: Path,
    wanted: dict[str, list[int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output, report = tmp_path / "features", tmp_path / "report"
    main(command(network, photos, output, "--report", report))
    check_features(output, wanted)
    found = json.loads((report / "0.json").read_text())
    assert (found["images"], found["channels"]) == (COUNT, 10)
    assert found["decode"] > 0 and 0 < found["network"] < found["end"] - found["start"]
    (output / "part-00001.npz").unlink()
    (output / "part-00002.npz").rename(output / "part-00002.1234")
    capsys.readouterr()
    main(command(network, photos, output))
    assert f"process 0: {2 * PART} images in" in capsys.readouterr().out
    check_features(output, wanted)
    for images, folder, reason in (
        (photos / "0", output, "holds features of another network, other images or other parts"),
        (output, tmp_path / "new", "holds no images"),
    ):
        with pytest.raises(SystemExit):
            main(command(network, images, folder))
        assert reason in capsys.readouterr().err


def children(parent: int) -> list[int]:
    """Return the processes that torchrun has started for the example."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            own = f"PPid:\t{parent}\n" in (folder / "status").read_text()
            if own and EXAMPLE.name.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.mark.slow
def test_a_killed_process_loses_no_image(photos: Path, network: Path, wanted: dict[str, list[int]], tmp_path: Path) -> None:
    images, output, copies = tmp_path / "photos", tmp_path / "features", 20
    for copy in range(copies):
        shutil.copytree(photos / "0", images / str(copy), copy_function=os.link)
    names = [name.removeprefix("0/") for name in wanted if name.startswith("0/")]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    words = [sys.executable, *launcher, *command(network, images, output)]
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, text=True, stderr=subprocess.PIPE, env=own, start_new_session=True) as torchrun:
        try:
            while torchrun.poll() is None and len(workers := children(torchrun.pid)) < 2:
                time.sleep(0.05)
            while torchrun.poll() is None and not list(output.glob("*.npz")):
                time.sleep(0.001)
            os.kill(workers[0], signal.SIGKILL)
            written = len(list(output.glob("*.npz")))
            errors = torchrun.communicate(timeout=600)[1]
        finally:
            if torchrun.poll() is None:
                os.killpg(torchrun.pid, signal.SIGKILL)
    assert torchrun.returncode == 0, errors[-3000:]
    assert 0 < written < copies * len(names) / PART, "it was not killed in the middle"
    check_features(output, {f"{copy}/{name}": wanted[f"0/{name}"] for copy in range(copies) for name in names})
