"""A trained vision transformer as an integer network in a file: for testbenches, ONNX, TOSA or your own program."""

import argparse
from pathlib import Path

import numpy as np
import torch

import qflash

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("file", type=Path, nargs="?", help="to write; without it nothing is kept")
parser.add_argument("--model", help="a name of timm, with its weights; without it a ViT of digits that comes with qflash-lab")
parser.add_argument("--images", type=Path, help="for --model: .npy, uint8 (32 or more, 3, height, width), to calibrate with")
given = parser.parse_args()
if (given.model is None) != (given.images is None):
    parser.error("--model and --images go together")

if given.model is None:
    from qflash_lab.evaluation.small_models import calibration_images, load_model

    classifier = load_model("digits-vit")
    images = classifier.pixels(calibration_images("digits"))
    network = qflash.quantize_model(classifier.backbone, images.split(16), mean=(0.5,), std=(0.5,), progress=False)
else:
    import timm

    model = timm.create_model(given.model, pretrained=True).eval()
    images = torch.from_numpy(np.load(given.images))
    network = qflash.quantize_model(model, images.split(16))

print(f"{len(network.nodes)} operators, {network.quality}")
if given.file is not None:
    network.save(given.file)
    print(f"written: {given.file}")
