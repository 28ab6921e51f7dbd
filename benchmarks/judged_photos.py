"""The 30 photos on which trained networks are judged, read out of packages that others publish.

pip download --no-deps --dest FOLDER scikit-image==0.26.0 ultralytics==8.4.190 imgaug==0.4.0
cd FOLDER; apt-get download opencv-doc; dpkg -x opencv-doc_*.deb .
"""

from __future__ import annotations

import hashlib
import io
import pathlib
import zipfile

import torch

from qflash_lab.evaluation import real_data

SIDE = 224
DEBIAN = "usr/share/doc/opencv-doc/examples/data"
JUDGED = (
    *(f"skimage/data/{name}" for name in (
        "astronaut.png", "camera.png", "chelsea.png", "coffee.png", "coins.png", "motorcycle_left.png", "rocket.jpg",
        "hubble_deep_field.jpg", "ihc.png", "retina.jpg",
    )),
    "ultralytics/assets/bus.jpg", "ultralytics/assets/zidane.jpg", "imgaug/quokka.jpg",
    *(f"{DEBIAN}/{name}" for name in (
        "aloeL.jpg", "apple.jpg", "baboon.jpg", "basketball1.png", "box_in_scene.png", "building.jpg", "butterfly.jpg",
        "cards.png", "fruits.jpg", "graf1.png", "HappyFish.jpg", "home.jpg", "leuvenA.jpg", "messi5.jpg", "orange.jpg",
        "rubberwhale1.png", "squirrel_cls.jpg",
    )),
)  # fmt: skip
"""Photos by their paths in wheels and in Debian's package."""
SHA256 = "2f9b1c2939ccbee9faf67bb0e2a232ea1b925000fa80e6d0f013a651dd069c08"
"""Of the photos' files, one behind the other."""


def find_photo(name: str, folder: pathlib.Path) -> bytes:
    """Return a photo's file, out of a wheel or an unpacked package in a folder, or out of the installed package of Debian.

    Raises:
        DataUnavailableError: it is in none of these.
    """
    for path in (folder / name, pathlib.Path("/") / name):
        if path.is_file():
            return path.read_bytes()
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            if name in archive.namelist():
                return archive.read(name)
    raise real_data.DataUnavailableError(
        f"{name} is in no wheel of {folder} and not unpacked there; benchmarks/judged_photos.py names the packages"
    )


def load(folder: pathlib.Path) -> torch.Tensor:
    """Return the photos that are judged, uint8 (30, 3, side, side).

    Raises:
        DataUnavailableError: one is missing, or they are other ones.
    """
    from PIL import Image

    found = [find_photo(name, folder) for name in JUDGED]
    digest = hashlib.sha256(b"".join(found)).hexdigest()
    if digest != SHA256:
        raise real_data.DataUnavailableError(f"the photos' files have SHA-256 {digest}, not {SHA256}: take the versions named")
    return real_data.square_photos([Image.open(io.BytesIO(each)).convert("RGB") for each in found], SIDE)
