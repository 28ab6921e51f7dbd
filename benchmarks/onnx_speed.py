"""Time integer networks in onnxruntime beside the same models in float32, as docs/onnx.md reports them.

    python benchmarks/onnx_speed.py benchmarks/results/onnx_speed.json

Weights are random: the time does not depend on them. One thread; the models take turns in every round, so that other load on
the machine meets both. Before that the integer model's logits are compared with the reference's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import statistics
import tempfile
import time
import warnings
from typing import Any

import onnx
import onnxruntime
import timm
import torch

import qflash
from qflash_lab.bench import onnx_models, records

MODELS = ("deit_tiny_patch16_224",)
BATCHES = (1, 8)
ROUNDS = 9
THREADS = 1


def measure(name: str, folder: pathlib.Path) -> dict[str, Any]:
    """Export a model of timm's twice, compare and time."""
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    parameters = sum(x.numel() for x in model.parameters())
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (max(BATCHES), 3, 224, 224), generator=generator, dtype=torch.uint8)
    network = qflash.quantize_model(model, [images], progress=False)
    network.backend = "reference"
    paths = {kind: folder / f"{name}_{kind}.onnx" for kind in ("integer", "float32")}
    qflash.export_onnx(network, paths["integer"])
    with warnings.catch_warnings():
        # what the tracer says about timm's own code
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, (torch.zeros(1, 3, 224, 224, dtype=torch.float32, device="cpu"),), str(paths["float32"]),
            input_names=["images"], dynamic_axes={"images": {0: "batch"}}, dynamo=False,
        )  # fmt: skip
    sessions = {kind: onnx_models.load(path, THREADS) for kind, path in paths.items()}
    if not torch.equal(sessions["integer"](images[:2]), network(images[:2])):
        raise SystemExit(f"{name}: onnxruntime's logits are not the reference's")
    row: dict[str, Any] = {"bytes_per_parameter": round(paths["integer"].stat().st_size / parameters, 3)}
    for batch in BATCHES:
        inputs = {"integer": images[:batch], "float32": images[:batch].float() / 255}
        times: dict[str, list[float]] = {kind: [] for kind in sessions}
        for _ in range(ROUNDS + 1):
            for kind, session in sessions.items():
                start = time.perf_counter()
                session(inputs[kind])
                times[kind].append((time.perf_counter() - start) * 1e3)
        # the first round allocates
        row[f"batch {batch}"] = {
            kind: {"lowest_ms": round(min(got[1:]), 1), "median_ms": round(statistics.median(got[1:]), 1)}
            for kind, got in times.items()
        }
    return row


def main() -> None:
    """Measure every model and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=pathlib.Path, metavar="OUT.json", help="where the results go")
    output = parser.parse_args().output
    conditions = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        **records.cpu(),
        "threads": THREADS,
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
        "torch": torch.__version__,
    }
    with tempfile.TemporaryDirectory() as folder:
        results = {name: measure(name, pathlib.Path(folder)) for name in MODELS}
    text = json.dumps({"conditions": conditions, "results": results}, indent=1)
    print(text)
    output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
