"""What a release is looked at for before it is tagged: ``scripts/release.py``."""

from __future__ import annotations

import io
import pathlib
import tarfile
import zipfile
from types import ModuleType

import pytest

import qflash
from helpers import load_script

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "release.py"
pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="only the repository has the script")


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return load_script(SCRIPT)


def test_the_version_is_the_packages(release: ModuleType) -> None:
    assert release.version_of((ROOT / "pyproject.toml").read_text()) == qflash.__version__
    with pytest.raises(release.ReleaseError, match="three numbers"):
        release.version_of('version = "1.0"\n')


def test_a_release_has_a_dated_section_of_changes(release: ModuleType) -> None:
    release.check_changes("# Changes\n\n## 1.2.3, 2026-01-31\n", "1.2.3")
    for text in ("## Unreleased\n", "## 1.2.3\n", "## 11.2.3, 2026-01-31\n"):
        with pytest.raises(release.ReleaseError, match=r"'## 1\.2\.3, YYYY-MM-DD'"):
            release.check_changes(text, "1.2.3")


def _wheel(path: pathlib.Path, names: list[str]) -> pathlib.Path:
    with zipfile.ZipFile(path, "w") as wheel:
        for name in names:
            wheel.writestr(name, "")
    return path


def test_a_wheel_holds_the_package_and_nothing_else(release: ModuleType, tmp_path: pathlib.Path) -> None:
    names = [*release.NEEDED, "qflash-1.0.0.dist-info/METADATA"]
    release.check_wheel(_wheel(tmp_path / "good.whl", names))
    with pytest.raises(release.ReleaseError, match=r"lacks qflash/kernels/cpu/network\.c"):
        release.check_wheel(_wheel(tmp_path / "short.whl", [name for name in names if "network.c" not in name]))
    for extra in ("tests/helpers.py", "qflash/api.pyc"):
        with pytest.raises(release.ReleaseError, match=f"holds {extra}"):
            release.check_wheel(_wheel(tmp_path / "long.whl", [*names, extra]))


def test_a_source_archive_can_be_built_from(release: ModuleType, tmp_path: pathlib.Path) -> None:
    names = ["pyproject.toml", "README.md", "LICENSE", *(f"src/{name}" for name in release.NEEDED)]
    for kept, message in ((names, None), (names[1:], "lacks pyproject.toml")):
        path = tmp_path / f"{len(kept)}.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name in kept:
                archive.addfile(tarfile.TarInfo(f"qflash-1.0.0/{name}"), io.BytesIO())
        if message is None:
            release.check_sdist(path)
        else:
            with pytest.raises(release.ReleaseError, match=message):
                release.check_sdist(path)


def test_what_wheels_need_is_there(release: ModuleType) -> None:
    assert all((ROOT / "src" / name).is_file() for name in release.NEEDED)
