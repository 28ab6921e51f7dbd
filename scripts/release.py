"""Build a release of both packages, try it in bare environments, and tag it.

    python scripts/release.py                 # build into dist/, look at the files, install and run both in bare environments
    python scripts/release.py --tag           # the same from a clean tree, then the tag vVERSION; pushing is left to you

Needs the package ``build``. The bare environments download the dependencies, PyTorch among them, and use a C compiler.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
NEEDED = {
    "qflash": (
        "qflash/__init__.py", "qflash/py.typed", "qflash/kernels/cpu/attention.c", "qflash/kernels/cpu/network.c",
        "qflash/kernels/cpu/products.h", "qflash/kernels/cpu/threads.c", "qflash/kernels/cpu/threads.h",
    ),
    "qflash_lab": (
        "qflash_lab/__init__.py", "qflash_lab/baselines/tuned.json", "qflash_lab/weights/fashion-images.safetensors",
        *(f"qflash_lab/weights/{data}-{kind}.safetensors" for data in ("digits", "fashion") for kind in ("vit", "swin")),
    ),
}  # fmt: skip
"""By package, what its wheel would be broken without and a packaging mistake could leave out."""
PROJECTS = {"qflash": ROOT, "qflash_lab": ROOT / "lab"}
"""By package, the folder of its pyproject.toml."""
MOST_BYTES = {"qflash": 1_500_000}
"""The largest wheel that is allowed: users should not download what only measures."""

SMOKE = """
import torch, qflash
query, key, value = (torch.randn(2, 3, 50, 32) for _ in range(3))
outs = [qflash.attention(query, key, value, backend=name) for name in ("auto", "cpu", "reference")]
assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[2])
print("qflash", qflash.__version__, "attends")
"""


class ReleaseError(Exception):
    """The release is not ready; the message says why."""


def version_of(text: str) -> str:
    """Return the version in pyproject.toml's text."""
    found = re.search(r'^version = "(\d+\.\d+\.\d+)"$', text, re.MULTILINE)
    if found is None:
        raise ReleaseError("pyproject.toml must have a version of three numbers")
    return found[1]


def check_changes(text: str, version: str) -> None:
    """Require a section of a version, with a date, in CHANGELOG.md's text."""
    if not re.search(rf"^## {re.escape(version)}, \d{{4}}-\d{{2}}-\d{{2}}$", text, re.MULTILINE):
        raise ReleaseError(f"CHANGELOG.md must have a section '## {version}, YYYY-MM-DD'")


def check_wheel(path: pathlib.Path, package: str) -> None:
    """Require what must be in a wheel, and nothing that belongs to the repository alone."""
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
    missing = [name for name in NEEDED[package] if name not in names]
    if missing:
        raise ReleaseError(f"{path.name} lacks {', '.join(missing)}")
    strange = sorted(name for name in names if not re.match(rf"{package}(/|-\d)", name) or name.endswith(".pyc"))
    if strange:
        raise ReleaseError(f"{path.name} holds {', '.join(strange[:5])}")
    size = path.stat().st_size
    if size > MOST_BYTES.get(package, size):
        raise ReleaseError(f"{path.name} has {size:,} bytes, at most {MOST_BYTES[package]:,} are allowed")


def check_sdist(path: pathlib.Path, package: str) -> None:
    """Require that the package can be built from a source archive."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = ("pyproject.toml", "README.md", *(f"src/{name}" for name in NEEDED[package]))
    missing = [name for name in wanted if name not in names]
    if missing:
        raise ReleaseError(f"{path.name} lacks {', '.join(missing)}")


def build(project: pathlib.Path, folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Build into an empty folder; return (wheel, source archive)."""
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(folder), str(project)], check=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def try_out(package: pathlib.Path, lab: pathlib.Path) -> None:
    """Install a wheel or source archive with its dependencies in a bare environment, attend there, then add the lab."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(pathlib.Path(folder, "bin", "python"))
        subprocess.run([python, "-m", "pip", "install", "--quiet", str(package)], check=True)
        subprocess.run([python, "-c", SMOKE], check=True, cwd=folder)
        subprocess.run([python, "-m", "qflash", "info"], check=True, cwd=folder)
        subprocess.run([python, "-m", "pip", "install", "--quiet", str(lab)], check=True)
        subprocess.run([python, "-m", "qflash_lab", "demo", "--limit", "8"], check=True, cwd=folder)


def check_tree() -> None:
    """Require that everything is committed."""
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    if changed:
        raise ReleaseError(f"commit first:\n{changed}")


def main() -> None:
    """Build, check, try, and tag if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tag", action="store_true", help="tag the commit behind a clean tree")
    given = parser.parse_args()
    version = version_of((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if given.tag:
        check_tree()
        check_changes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    folder = ROOT / "dist"
    if folder.exists() and any(folder.iterdir()):
        raise ReleaseError("dist/ must be empty")
    files = {}
    for package, project in PROJECTS.items():
        files[package] = build(project, folder / package)
        check_wheel(files[package][0], package)
        check_sdist(files[package][1], package)
    for ours, lab in zip(files["qflash"], files["qflash_lab"], strict=True):
        try_out(ours, lab)
    if given.tag:
        subprocess.run(["git", "tag", "--annotate", f"v{version}", "--message", f"QFlash {version}"], cwd=ROOT, check=True)
    print(f"{'tagged' if given.tag else 'ready'}: {', '.join(path.name for pair in files.values() for path in pair)}")


if __name__ == "__main__":
    try:
        main()
    except ReleaseError as error:
        sys.exit(f"release: {error}")
