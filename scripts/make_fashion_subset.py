"""Choose the images of Fashion-MNIST that come with the package: ``python scripts/make_fashion_subset.py [FOLDER]``.

500 test images and 64 training images, as many of each class as that allows, drawn with a seed. FOLDER holds the data
set's idx files; Debian's package dataset-fashion-mnist if not given.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file

from qflash_lab.evaluation.classifiers import draw_subset
from qflash_lab.evaluation.real_data import Labelled, load_fashion
from qflash_lab.evaluation.small_models import CALIBRATION, SUBSET

WEIGHTS = Path(__file__).resolve().parents[1] / "lab" / "src" / "qflash_lab" / "weights"
TEST_IMAGES = 500


def draw(data: Labelled, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and their labels as uint8."""
    places = draw_subset(data.labels.tolist(), count)
    return data.images[places].contiguous(), data.labels[places].to(torch.uint8)


def main() -> None:
    """Read the data set and write the chosen images."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="with the idx files")
    train, test = load_fashion(parser.parse_args().folder)
    train_images, train_labels = draw(train, CALIBRATION)
    images, labels = draw(test, TEST_IMAGES)
    tensors = {"train_images": train_images, "train_labels": train_labels, "images": images, "labels": labels}
    save_file(tensors, WEIGHTS / SUBSET, metadata={"copyright": "Copyright 2017 Zalando SE, MIT licence"})


if __name__ == "__main__":
    main()
