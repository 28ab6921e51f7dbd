"""Run integer networks on Arm's reference model of TOSA, and count the outputs that differ from the network's own.

Weights are random, as are the images and the ids of tokens: one input a call, each from a seed of its own. The networks are
written in the integer profile without an extension; the reference model looks at every bound that TOSA sets, and says
``TOSA_VALID`` of a graph that keeps them. Needs tosa-tools, timm and transformers.

    python benchmarks/tosa_networks.py [--model DeiT-T] [--inputs 100] [--tables]

writes results/tosa_reference_model.json beside this script and the table of docs/tosa.md. Models take turns, ten inputs each,
and results are written after each turn; a run that was broken off goes on where it was, unless the file that is run has
changed. With --tables nothing is run.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import pathlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np
import torch

import declared
import qflash
from declared import Table, one
from qflash.network.graph import IntegerNetwork
from qflash_lab.bench import integer_models
from qflash_lab.bench import schema as col
from qflash_lab.bench.models import load
from qflash_lab.bench.tables import Column, names
from qflash_lab.evaluation.random_weights import randomise

RESULTS = declared.RESULTS / "tosa_reference_model.json"
CALIBRATION = 8
"""Inputs that a network is quantised on, with seeds of their own."""
STEP = 10
"""Inputs of a turn."""
TOKENS, VOCABULARY = 128, 30522
"""Of a text; no place is without a token."""

Network = tuple[IntegerNetwork, Callable[[int], torch.Tensor]]
"""A network, and what draws one input by a seed."""


def images(name: str) -> Network:
    """Return an image network of timm."""
    model, size = load(name)
    randomise(model)
    draw = functools.partial(integer_models.draw_pixels, 1, size)
    batches = [draw(seed) for seed in range(CALIBRATION)]
    config: Any = model.pretrained_cfg
    options = {"mean": config["mean"], "std": config["std"], "min_sqnr": None, "progress": False}
    return qflash.quantize_model(model, batches, **options), draw


def texts() -> Network:
    """Return a network of all-MiniLM-L6-v2's configuration."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    model = BertModel(BertConfig(vocab_size=VOCABULARY, **sizes), add_pooling_layer=False).eval()
    randomise(model)

    def draw(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, VOCABULARY, (1, TOKENS), generator=generator, dtype=torch.int32)

    batches = [{"input_ids": draw(seed).long()} for seed in range(CALIBRATION)]
    options: dict[str, Any] = {"outputs": ["last_hidden_state"], "min_sqnr": None, "progress": False}
    return qflash.quantize_model(model, batches, **options), draw


MODELS: dict[str, Callable[[], Network]] = {
    "DeiT-T": functools.partial(images, "DeiT-T"),
    "Swin-T": functools.partial(images, "Swin-T"),
    "SigLIP-B/32": functools.partial(images, "vit_base_patch32_siglip_256"),
    "MiniLM-L6": texts,
}


def run(content: bytes, x: torch.Tensor, wanted: torch.Tensor) -> tuple[int, str, float]:
    """Run a graph on one input.

    Returns:
        how many outputs differ, the model's status, and seconds of processor time.
    """
    import tosa_reference_model

    start = time.process_time()
    given = x.view(torch.int8) if x.dtype == torch.uint8 else x
    (found,), status = tosa_reference_model.run(content, [given.numpy()], tosa_level="EIGHTK")
    seconds = time.process_time() - start
    numbers = np.frombuffer(np.ascontiguousarray(found).tobytes(), np.int32)
    return int((numbers != wanted.numpy().ravel()).sum()), status.name, seconds


@functools.cache
def written(name: str) -> tuple[IntegerNetwork, Callable[[int], torch.Tensor], bytes, dict[str, Any]]:
    """Return a network, what draws its inputs, its file, and how many operators it has: in all, and by kinds of nodes."""
    network, draw = MODELS[name]()
    nodes = Counter(type(network.part(node.name)).__name__ for node in network.nodes)
    found: dict[str, Any] = {"nodes": dict(nodes)}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "network.tosa"
        # the file of the second is run
        for key, int16 in (("int16", True), ("bare", False)):
            parts: Counter[str] = Counter()
            for part, count in qflash.export_tosa(network, path, int16=int16).items():
                parts[type(network.part(part)).__name__] += sum(count.values())
            found[f"operators_{key}"], found[f"parts_{key}"] = sum(parts.values()), dict(parts)
        content = path.read_bytes()
    return network, draw, content, found


def measure(name: str, inputs: int) -> None:
    """Run a model on inputs that were not run yet, up to a number of them, and write its row."""
    network, draw, content, counts = written(name)
    digest = hashlib.sha256(content).hexdigest()
    row = next((row for row in declared.recorded(RESULTS) if row[col.MODEL] == name and row["sha256"] == digest), None)
    row = row or {col.MODEL: name, "sha256": digest, "inputs": 0, "outputs": 0, "differ": 0, "status": {}, "cpu_s": 0.0}
    if row["inputs"] >= inputs and row.keys() >= counts.keys():
        return
    row |= {
        "bytes": len(content), **counts, "weights": "random",
        "versions": {each: metadata.version(each) for each in ("tosa-tools", "numpy", "torch", "timm", "transformers")},
        "qflash": qflash.__version__, "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }  # fmt: skip
    for number in range(row["inputs"], inputs):
        x = draw(CALIBRATION + number)
        wanted = network(x)
        differ, status, seconds = run(content, x, wanted)
        row["status"][status] = row["status"].get(status, 0) + 1
        row |= {"inputs": number + 1, "outputs": row["outputs"] + wanted.numel(), "differ": row["differ"] + differ}
        row["cpu_s"] += seconds
    write(row)
    print({key: row[key] for key in (col.MODEL, "inputs", "outputs", "differ", "status", "cpu_s")}, flush=True)


def write(row: dict[str, Any]) -> None:
    """Put a row into the results, in place of the model's."""
    declared.keep(RESULTS, [row], col.MODEL, order=lambda row: list(MODELS).index(row[col.MODEL]))


KINDS = {
    "Norms": ("LayerNorm", "RmsNorm"), "Attention": ("Attention",),
    "Linear": ("Linear", "WideLinear", "LinearGelu", "LinearSilu", "LinearRelu", "PatchEmbedding"),
}  # fmt: skip
"""Columns of the table of operators, and the nodes that each counts."""


def _of(heading: str, row: dict[str, Any]) -> str:
    """Return the operators of a column, and how many nodes have them."""
    found = {
        key: sum(row[key].get(each, 0) for each in KINDS[heading])
        if heading in KINDS
        else sum(count for each, count in row[key].items() if not any(each in kinds for kinds in KINDS.values()))
        for key in ("parts_bare", "nodes")
    }
    return f"{found['parts_bare']} ({found['nodes']})"


def _rows() -> list[dict[str, Any]]:
    return declared.rows(RESULTS.stem)


TABLES = {
    "tosa:operators": Table(
        lambda: [row for row in _rows() if "nodes" in row],
        (
            names("Model", one(col.MODEL)),
            *(Column(heading, functools.partial(_of, heading)) for heading in (*KINDS, "Rest")),
            Column("All", "operators_bare", str),
            Column("All with EXT-INT16", "operators_int16", str),
        ),
    ),
    "tosa:reference": Table(
        _rows,
        (
            names("Model", one(col.MODEL)),
            Column("Bytes", "bytes", "{:,}".format),
            Column("Inputs", "inputs", str),
            Column("Outputs", "outputs", "{:,}".format),
            Column("Differ", "differ", str),
            Column("Status", "status", lambda found: ", ".join(f"{name} ({count})" for name, count in found.items())),
            Column("CPU seconds an input", lambda row: row["cpu_s"] / row["inputs"], "{:.1f}".format),
        ),
    ),
}
"""Between markers of the page."""


PARTS = declared.Parts(TABLES)


def main() -> None:
    """Run, and write results and tables."""
    parser = declared.parser(__doc__)
    parser.add_argument("--model", choices=MODELS, action="append", help="these models; all if none is named")
    parser.add_argument("--inputs", type=int, default=100, help="images or texts of each")
    given = parser.parse_args()
    if not given.tables:
        torch.set_num_threads(1)
        for turn in range(STEP, given.inputs + STEP, STEP):
            for name in given.model or MODELS:
                with torch.no_grad():
                    measure(name, min(turn, given.inputs))
    PARTS.write()


if __name__ == "__main__":
    main()
