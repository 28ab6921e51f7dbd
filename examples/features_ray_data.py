"""Features of many images with Ray Data: an integer network in each worker, from files to Parquet.

    python examples/features_ray_data.py vit.safetensors photos/ features/ --workers 2

``vit.safetensors`` is what ``network.save`` or ``qflash convert`` wrote. Images are read from a folder, from Parquet files that
hold them as bytes, or from tar files of WebDataset. CPU cores decode and resize them as the network's file says; each worker
runs the network on a GPU of its own, or on CPU cores where there is none. The output has three columns: ``name``,
``embedding`` (int32; ``_network.json`` beside it says what a unit stands for) and ``error``: an image that cannot be decoded
gets its message there, and no embedding. A worker that dies is replaced, and its images are computed again: every image is
written once, with the same integers.
"""

import argparse
import io
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import ray
import torch
from PIL import Image

import qflash

ENDINGS = ["jpg", "jpeg", "png", "webp"]
CPU_SHARE = 0.5
"""Of a core that Ray reserves for a task: reading, decoding and the network share the cores of a machine without GPUs."""


@ray.remote(num_cpus=0)
class Clock:
    """Adds up what the workers report: seconds of each stage, when the work began and ended, and who ran the network."""

    def __init__(self) -> None:
        self.seconds = {"decode": 0.0, "network": 0.0}
        self.first, self.last = math.inf, -math.inf
        self.processes: set[int] = set()

    def add(self, stage: str, start: float, end: float, process: int) -> None:
        self.seconds[stage] += end - start
        self.first, self.last = min(self.first, start), max(self.last, end)
        if stage == "network":
            self.processes.add(process)

    def read(self) -> tuple[dict[str, float], float, int]:
        return self.seconds, self.last - self.first, len(self.processes)


def decode(rows: dict[str, np.ndarray], source: Any, clock: Any) -> dict[str, np.ndarray]:
    """Decode and resize images.

    Args:
        rows: ``name`` and ``bytes``.
        source: arguments of :func:`qflash.image_transform`.
        clock: that is told how long it took.

    Returns:
        ``name``; ``pixels``, uint8 (images, channels, height, width), zeros of a damaged file; ``error``, why it failed, or "".
    """
    transform = qflash.image_transform(*source)  # imports timm or transformers when a process is new
    start = time.time()
    pixels, errors = np.zeros((len(rows["bytes"]), *transform.size), np.uint8), []
    for place, content in enumerate(rows["bytes"]):
        try:
            pixels[place] = transform(Image.open(io.BytesIO(content))).numpy()
            errors.append("")
        except Exception as error:  # of a damaged file; one image must not end the job
            errors.append(f"{type(error).__name__}: {error}")
    clock.add.remote("decode", start, time.time(), os.getpid())
    return {"name": rows["name"], "pixels": pixels, "error": np.array(errors, dtype=object)}


class Embed:
    """A worker: the network, captured for one batch size."""

    def __init__(self, file: str, batch: int, on_gpu: bool, clock: Any) -> None:
        network = qflash.load_model(file, "cuda" if on_gpu else "cpu")
        self.batch, self.clock, self.run = batch, clock, network.graph(batch)

    def __call__(self, rows: dict[str, np.ndarray]) -> pa.Table:
        start = time.time()
        pixels = np.zeros((self.batch, *rows["pixels"].shape[1:]), np.uint8)
        count = len(rows["name"])
        pixels[:count] = rows["pixels"]  # the last batch may be smaller than the captured one
        out = self.run(torch.from_numpy(pixels))[:count].cpu().numpy()
        self.clock.add.remote("network", start, time.time(), os.getpid())
        failed = np.array([bool(error) for error in rows["error"]])
        flat = pa.array(out.reshape(-1), pa.int32())
        embedding = pa.FixedSizeListArray.from_arrays(flat, out.shape[1], mask=pa.array(failed))
        names, errors = (pa.array(list(map(str, rows[column]))) for column in ("name", "error"))
        return pa.table({"name": names, "embedding": embedding, "error": errors})


def read(source: Path, kind: str, columns: tuple[str, str]) -> ray.data.Dataset:
    """Return a data set with ``name`` and ``bytes`` of every image."""
    options = {"ray_remote_args": {"num_cpus": CPU_SHARE}}
    if kind == "folder":
        files = ray.data.read_binary_files(str(source), include_paths=True, file_extensions=ENDINGS, **options)
        root = str(source.resolve()) + os.sep
        return files.map_batches(
            lambda rows: {"name": np.array([str(x).removeprefix(root) for x in rows["path"]], object), "bytes": rows["bytes"]},
            num_cpus=CPU_SHARE,
        )
    if kind == "parquet":
        table = ray.data.read_parquet(str(source), columns=list(columns), **options)
        return table.rename_columns(dict(zip(columns, ("name", "bytes"), strict=True)))
    samples = ray.data.read_webdataset(str(source), decoder=None, **options)

    def first_image(row: dict[str, Any]) -> dict[str, Any]:
        found = next((name for name in row if name.lower() in ENDINGS), None)
        if found is None:
            raise ValueError(f"sample {row['__key__']} holds no image: its files end in {', '.join(sorted(row))}")
        return {"name": f"{row['__key__']}.{found}", "bytes": row[found]}

    return samples.map(first_image, num_cpus=CPU_SHARE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", type=Path, help="file of an integer network with one output (images, channels)")
    parser.add_argument("images", type=Path, help="folder of images, of Parquet files or of tar files")
    parser.add_argument("output", type=Path, help="folder for Parquet files")
    parser.add_argument("--format", choices=("folder", "parquet", "webdataset"), default="folder")
    parser.add_argument("--columns", nargs=2, default=("name", "bytes"), help="of Parquet: name and bytes of an image")
    parser.add_argument("--workers", type=int, help="that run the network; one for each GPU, or for each core, if left out")
    parser.add_argument("--batch", type=int, default=16, help="images a call of the network")
    parser.add_argument("--report", type=Path, help="JSON file for images a second and the share of decoding")
    given = parser.parse_args()
    network = qflash.load_model(given.network)
    shapes = [network.shapes()[node] for node in network.outputs.values()]
    if len(shapes) != 1 or len(shapes[0]) != 2:
        parser.error(f"network must have one output (images, channels), has {dict(zip(network.outputs, shapes, strict=True))}")
    if given.output.exists() and any(given.output.iterdir()):
        parser.error(f"output must be an empty folder, {given.output} is not")
    if given.batch < 1 or (given.workers or 1) < 1:
        parser.error("--batch and --workers must be at least 1")
    plain = {"input_size": network.image, "mean": [0.5], "std": [0.5], "crop_pct": 1.0}
    source = (network.about.get("images") or plain, network.image[1:])

    ray.init(include_dashboard=False, log_to_driver=False, logging_level="WARNING")
    on_gpu = ray.cluster_resources().get("GPU", 0) >= 1
    workers = given.workers or int(ray.cluster_resources()["GPU" if on_gpu else "CPU"])
    clock = Clock.remote()
    start = time.perf_counter()
    pixels = read(given.images, given.format, tuple(given.columns)).map_batches(
        decode, batch_size=given.batch, num_cpus=1 if on_gpu else CPU_SHARE, fn_kwargs={"source": source, "clock": clock}
    )
    features = pixels.map_batches(
        Embed,
        batch_size=given.batch,
        compute=ray.data.ActorPoolStrategy(size=workers),
        fn_constructor_args=(str(given.network.resolve()), given.batch, on_gpu, clock),
        **({"num_gpus": 1} if on_gpu else {"num_cpus": CPU_SHARE}),
    )
    features.write_parquet(str(given.output), ray_remote_args={"num_cpus": CPU_SHARE})
    seconds = time.perf_counter() - start

    (name,) = network.outputs
    about = {"network": given.network.name, "output": name, "unit": network.scales[name]}
    (given.output / "_network.json").write_text(json.dumps(about) + "\n")
    written = pyarrow.dataset.dataset(given.output, format="parquet").to_table(columns=["name", "error"])
    failed = sum(bool(error) for error in written["error"].to_pylist())
    stages, busy, processes = ray.get(clock.read.remote())
    report = {
        "images": len(written), "names": len(set(written["name"].to_pylist())), "failed": failed, "workers": workers,
        "processes": processes, "device": "gpu" if on_gpu else "cpu", "batch": given.batch, "seconds": round(seconds, 1),
        "busy_seconds": round(busy, 1), "images_per_second": round(len(written) / busy, 1),
        "decode_percent": round(100 * stages["decode"] / sum(stages.values()), 1),
    }  # fmt: skip
    if given.report is not None:
        given.report.write_text(json.dumps(report, indent=1) + "\n")
    print(
        f"{report['images']} images ({failed} could not be decoded) in {seconds:.1f} s; {report['images_per_second']} a second "
        f"with {workers} workers, once they had started; {report['decode_percent']} % of their time is decoding and resizing"
    )


if __name__ == "__main__":
    main()
