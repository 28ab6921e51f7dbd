"""Features of many images with torchrun and PyTorch's DataLoader: an integer network in each process, from files to NumPy's.

    torchrun --nproc-per-node 2 examples/features_torchrun.py vit.safetensors photos/ features/ --loaders 8

``vit.safetensors`` is what ``network.save`` or ``qflash convert`` wrote. Each process runs the network on a GPU of its own, or
on CPU cores where there is none; its loaders, processes as well, decode and resize. The files of the folder are divided into
parts of ``--part`` images, and these among the processes, which need not talk to each other. A part's file,
``part-00000.npz``, appears once all of it is there; it holds ``name``, ``embedding`` (int32, zeros of an image that could not
be decoded) and ``error`` (why it could not, or ""). The same command given again computes the parts that are missing. When a
process dies, torchrun with ``--max-restarts 3`` does that by itself.
"""

import argparse
import functools
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

import qflash
from qflash.network.graph import IntegerNetwork

ENDINGS = {".jpg", ".jpeg", ".png", ".webp"}


class Images(Dataset[Any]):
    """Pixels of files, why there are none, and the seconds that decoding and resizing took."""

    def __init__(self, root: Path, names: list[str], transform: Any) -> None:
        self.root, self.names, self.transform = root, names, transform

    def __getitem__(self, place: int) -> tuple[torch.Tensor, str, float]:
        start, error = time.perf_counter(), ""
        try:
            with Image.open(self.root / self.names[place]) as image:
                pixels = self.transform(image)
        except Exception as problem:  # of a damaged file; one image must not end the job
            pixels, error = torch.zeros(self.transform.size, dtype=torch.uint8), f"{type(problem).__name__}: {problem}"
        return pixels, error, time.perf_counter() - start


def outputs_of(network: IntegerNetwork) -> dict[str, tuple[int, ...]]:
    """Return the shape of each output for one image."""
    shapes = network.shapes()
    return {name: tuple(shapes[node]) for name, node in network.outputs.items()}


def write(path: Path, write_to: Callable[[BinaryIO], None]) -> None:
    """Write a file under another name first: one of the right name is whole."""
    unfinished = path.with_suffix(f".{uuid.uuid4().hex}")
    with unfinished.open("wb") as file:
        write_to(file)
    unfinished.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", type=Path, help="file of an integer network with one output (images, channels)")
    parser.add_argument("images", type=Path, help="folder of images; folders in it are read as well")
    parser.add_argument("output", type=Path, help="folder for the parts")
    parser.add_argument("--batch", type=int, default=64, help="images a call of the network")
    parser.add_argument("--part", type=int, default=1024, help="images a file")
    parser.add_argument("--loaders", type=int, default=1, help="processes that decode, for each one that computes")
    parser.add_argument("--report", type=Path, help="folder for a JSON file of each process, with its seconds")
    given = parser.parse_args()
    if min(given.batch, given.part, given.loaders) < 1:
        parser.error("--batch, --part and --loaders must be at least 1")
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    processes = int(os.environ.get("WORLD_SIZE", "1"))

    device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    if device != "cpu":
        torch.cuda.set_device(device)
    network = qflash.load_model(given.network, device)
    outputs = outputs_of(network)
    if [len(shape) for shape in outputs.values()] != [2]:
        parser.error(f"network must have one output (images, channels), has {outputs}")
    ((output, (_, channels)),) = outputs.items()
    plain = {"input_size": network.image, "mean": [0.5], "std": [0.5], "crop_pct": 1.0}
    transform = qflash.image_transform(network.about.get("images") or plain, network.image[1:])
    found = (path for path in given.images.rglob("*") if path.suffix.lower() in ENDINGS)
    names = sorted(path.relative_to(given.images).as_posix() for path in found)
    if not names:
        parser.error(f"{given.images} holds no images: files that end in {', '.join(sorted(ENDINGS))}")
    identity = hashlib.sha256(given.network.read_bytes() + "\n".join(names).encode()).hexdigest()
    about = {
        "network": given.network.name, "output": output, "unit": network.scales[output], "images": len(names),
        "part": given.part, "sha256": identity,
    }  # fmt: skip
    note = given.output / "_network.json"
    if note.exists() and json.loads(note.read_text()) != about:
        parser.error(f"{given.output} holds features of another network, other images or other parts: see {note.name}")
    given.output.mkdir(parents=True, exist_ok=True)

    places = [range(start, min(start + given.part, len(names))) for start in range(0, len(names), given.part)]
    paths = [given.output / f"part-{number:05}.npz" for number in range(len(places))]
    mine = [number for number in range(rank, len(paths), processes) if not paths[number].exists()]
    run = network.graph(given.batch)
    run(torch.zeros(given.batch, *network.image, dtype=torch.uint8))  # kernels are compiled before the clock starts
    if not note.exists():
        write(note, lambda file: file.write(json.dumps(about).encode()))

    parts = [places[number] for number in mine]
    batches = [part[at : at + given.batch] for part in parts for at in range(0, len(part), given.batch)]
    loader = DataLoader(Images(given.images, names, transform), batch_sampler=batches, num_workers=given.loaders)
    seconds = {"decode": 0.0, "network": 0.0}
    start, stream = time.time(), iter(loader)
    for number, part in zip(mine, parts, strict=True):
        rows, errors = [], []
        while len(errors) < len(part):
            pixels, problems, decoding = next(stream)
            begun = time.perf_counter()
            padded = nn.functional.pad(pixels, (0, 0) * 3 + (0, given.batch - len(pixels)))  # of the captured size
            rows.append(run(padded)[: len(pixels)].cpu())
            seconds["network"] += time.perf_counter() - begun
            seconds["decode"] += float(decoding.sum())
            errors += problems
        embedding, failed = torch.cat(rows).numpy(), np.array([bool(error) for error in errors])
        embedding[failed] = 0
        columns = {"name": [names[place] for place in part], "embedding": embedding, "error": errors}
        write(paths[number], functools.partial(np.savez, **columns))
    end = time.time()
    images = sum(map(len, parts))
    report = {
        "images": images, "channels": channels, "device": torch.device(device).type, "batch": given.batch,
        "loaders": given.loaders, "start": start, "end": end, **seconds,
    }  # fmt: skip
    if given.report is not None:
        given.report.mkdir(parents=True, exist_ok=True)
        write(given.report / f"{rank}.json", lambda file: file.write(json.dumps(report, indent=1).encode()))
    print(
        f"process {rank}: {images} images in {end - start:.1f} s, of which the network {seconds['network']:.1f} s; "
        f"its loaders decoded for {seconds['decode']:.1f} s"
    )


if __name__ == "__main__":
    main()
