"""JPEG files for tests and benchmarks: real content, the same for the same seed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
image = pytest.importorskip("PIL.Image")
from qflash_lab.evaluation import photo_files  # noqa: E402
from qflash_lab.evaluation.real_data import sample_photos  # noqa: E402


def test_crops_of_photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["photo_files", str(tmp_path / "one"), "--count", "6"])
    photo_files.main()
    assert capsys.readouterr().out.startswith("6 files of 2 photos")
    names = photo_files.write_crops(tmp_path / "two", 6, sample_photos())
    assert names == [f"{place:06}.jpg" for place in range(6)]
    contents = [(tmp_path / "one" / name).read_bytes() for name in names]
    assert contents == [(tmp_path / "two" / name).read_bytes() for name in names]
    pictures = [image.open(tmp_path / "one" / name) for name in names]
    assert {picture.format for picture in pictures} == {"JPEG"} and len({picture.size for picture in pictures}) == 6
    assert all(256 <= picture.width <= 640 and 170 <= picture.height <= 427 for picture in pictures)
    other = photo_files.write_crops(tmp_path / "three", 6, sample_photos(), seed=1)
    assert [(tmp_path / "three" / name).read_bytes() for name in other] != contents
