"""JPEG files of real content, as many as wanted: crops of photos that packages ship. For tests and benchmarks of file reading.

python -m qflash_lab.evaluation.photo_files photos/ --count 1000
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .real_data import find_wheel, load_photos, sample_photos


def write_crops(folder: Path, count: int, photos: Sequence[Any], seed: int = 0) -> list[str]:
    """Write JPEG files of random crops: 40 to 100 % of a photo's sides, quality 75 to 95, some mirrored.

    Args:
        folder: made if it is not there.
        count: of files.
        photos: PIL images in RGB, taken in turns.
        seed: of what is drawn.

    Returns:
        the files' names.
    """
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for place in range(count):
        photo = photos[place % len(photos)]
        width, height = (round(side * draw.uniform(0.4, 1)) for side in photo.size)
        left, top = draw.randint(0, photo.width - width), draw.randint(0, photo.height - height)
        crop = photo.crop((left, top, left + width, top + height))
        if draw.random() < 0.5:
            crop = crop.transpose(0)  # PIL's FLIP_LEFT_RIGHT
        names.append(f"{place:06}.jpg")
        crop.save(folder / names[-1], quality=draw.randint(75, 95))
    return names


def main() -> None:
    """Write the files, of scikit-learn's two photos; with ``--foolbox`` of its 20 photos as well, which pip downloads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--foolbox", action="store_true", help="crops of foolbox's 20 photos, too (a download of 2 MB)")
    given = parser.parse_args()
    photos = sample_photos()
    if given.foolbox:
        photos += load_photos(find_wheel("foolbox", None, print))
    print(f"{len(write_crops(given.folder, given.count, photos))} files of {len(photos)} photos in {given.folder}")


if __name__ == "__main__":
    main()
