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


@pytest.mark.parametrize("package", ["qflash", "qflash_lab"])
def test_a_wheel_holds_the_package_and_nothing_else(package: str, release: ModuleType, tmp_path: pathlib.Path) -> None:
    names = [*release.NEEDED[package], f"{package}-1.0.0.dist-info/METADATA"]
    release.check_wheel(_wheel(tmp_path / "good.whl", names), package)
    for name in release.NEEDED[package]:
        with pytest.raises(release.ReleaseError, match=f"lacks {name}"):
            release.check_wheel(_wheel(tmp_path / "short.whl", [other for other in names if other != name]), package)
    for extra in ("tests/helpers.py", f"{package}/api.pyc"):
        with pytest.raises(release.ReleaseError, match=f"holds {extra}"):
            release.check_wheel(_wheel(tmp_path / "long.whl", [*names, extra]), package)


def test_users_do_not_download_what_measures(release: ModuleType, tmp_path: pathlib.Path) -> None:
    path = _wheel(tmp_path / "large.whl", [*release.NEEDED["qflash"]])
    with zipfile.ZipFile(path, "a") as wheel:
        wheel.writestr("qflash/weights.safetensors", bytes(1_500_000))
    with pytest.raises(release.ReleaseError, match="at most 1,500,000 are allowed"):
        release.check_wheel(path, "qflash")
    # what of the lab lies in the package's folder would be in its wheel
    path = tmp_path / "sources.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file in (ROOT / "src").rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                wheel.write(file, file.relative_to(ROOT))
    assert path.stat().st_size < 1_500_000


@pytest.mark.parametrize("package", ["qflash", "qflash_lab"])
def test_a_source_archive_can_be_built_from(package: str, release: ModuleType, tmp_path: pathlib.Path) -> None:
    names = ["pyproject.toml", "README.md", *(f"src/{name}" for name in release.NEEDED[package])]
    for kept, message in ((names, None), (names[1:], "lacks pyproject.toml")):
        path = tmp_path / f"{len(kept)}.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name in kept:
                archive.addfile(tarfile.TarInfo(f"{package}-1.0.0/{name}"), io.BytesIO())
        if message is None:
            release.check_sdist(path, package)
        else:
            with pytest.raises(release.ReleaseError, match=message):
                release.check_sdist(path, package)


def test_what_wheels_need_is_there(release: ModuleType) -> None:
    for package, project in release.PROJECTS.items():
        assert all((project / "src" / name).is_file() for name in release.NEEDED[package])


def test_the_lab_is_of_the_packages_version(release: ModuleType) -> None:
    text = (ROOT / "lab" / "pyproject.toml").read_text()
    assert release.version_of(text) == qflash.__version__
    assert f'"qflash=={qflash.__version__}"' in text
