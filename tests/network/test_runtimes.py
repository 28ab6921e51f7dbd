"""One network and the same images in everything that runs it: all logits are equal. docs/onnx.md has the table."""

from __future__ import annotations

import copy
import importlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from qflash.backends import find_backend
from qflash.network import storage
from small_networks import draw

onnx = pytest.importorskip("onnx")

FORMS: dict[str, dict[str, bool]] = {"64 bits": {}, "32 bits": {"int64": False}}
"""Of an ONNX file."""
NODE = """
const fs = require("fs");
const ort = require(process.argv[1]);
async function main() {
  const [images, files] = [process.argv[2], process.argv.slice(4)];
  const sizes = process.argv[3].split(",").map(Number);
  for (const file of files) {
    if (ort.env.wasm) ort.env.wasm.numThreads = 1;
    const session = await ort.InferenceSession.create(new Uint8Array(fs.readFileSync(file)));
    const input = new ort.Tensor("uint8", new Uint8Array(fs.readFileSync(images)), sizes);
    const { logits } = await session.run({ images: input });
    console.log(JSON.stringify(Array.from(logits.data, Number)));
  }
}
main().catch((error) => { console.error(error); process.exit(1); });
"""
"""Prints the logits of each file that is named behind the images and their sizes."""


@pytest.fixture(scope="module")
def case(made: Callable[[str], tuple[Any, Any]]) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A network, images, and the logits of the reference back end."""
    model, network = made("class token")
    network = copy.deepcopy(network)
    network.backend = "reference"
    images = draw(model, 2, seed=31)
    return network, images, network(images)


def of_back_end(name: str) -> Callable[[Any, torch.Tensor, pathlib.Path], torch.Tensor]:
    def run(network: Any, images: torch.Tensor, _: pathlib.Path) -> torch.Tensor:
        network = copy.deepcopy(network)
        network.backend = name
        find_backend(name, images.device)
        return network(images)

    return run


def cpu_graph(network: Any, images: torch.Tensor, _: pathlib.Path) -> torch.Tensor:
    network = copy.deepcopy(network)
    network.backend = "cpu"
    return network.graph(len(images))(images)


def c_program(network: Any, images: torch.Tensor, folder: pathlib.Path) -> torch.Tensor:
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None or shutil.which("make") is None:
        pytest.skip("needs make and a C compiler")
    network = copy.deepcopy(network)
    network.backend = "cpu"
    network.export_c(folder, batch=len(images))
    subprocess.run(["make", f"CC={compiler}"], cwd=folder, capture_output=True, check=True)
    (folder / "images.raw").write_bytes(images.numpy().tobytes())
    done = subprocess.run([folder / "network", "images.raw"], cwd=folder, capture_output=True, text=True, check=True)
    return torch.tensor([[int(x) for x in line.split(" ")[1:]] for line in done.stdout.splitlines()])


GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "golden"


def of_golden_model(in_c: bool) -> Callable[[Any, torch.Tensor, pathlib.Path], torch.Tensor]:
    """Return what runs a network in the checker of the golden vectors, its operators in NumPy or in ``golden/reference.c``."""

    def run(network: Any, images: torch.Tensor, folder: pathlib.Path) -> torch.Tensor:
        if not GOLDEN.is_dir() or (in_c and shutil.which(os.environ.get("CC", "cc")) is None):
            pytest.skip("needs the repository's golden model, and a C compiler for reference.c")
        header = storage.network_header(network)
        tensors = {name: x.numpy() for name, x in storage.network_tensors(network).items()}
        sys.path.insert(0, str(GOLDEN))
        try:
            model = importlib.import_module("check_reference")
            if in_c:
                model.put_in_place(model.Model(model.compile_model(folder)))
            about = header | {"recipe": json.loads(network.recipe.key)}
            found = model.checker.run_network(about, tensors | {"images": images.numpy()})
        finally:
            sys.path.remove(str(GOLDEN))
            # the model has put its functions into the checker
            for name in ("check_reference", "checker"):
                sys.modules.pop(name, None)
        (name,) = network.outputs
        return torch.from_numpy(found[name])

    return run


def files(network: Any, folder: pathlib.Path, **options: bool) -> list[str]:
    paths = [str(folder / f"{name}.onnx") for name in FORMS]
    for path, form in zip(paths, FORMS.values(), strict=True):
        network.export_onnx(path, **form, **options)
    return paths


def onnxruntime_levels(network: Any, images: torch.Tensor, folder: pathlib.Path) -> list[torch.Tensor]:
    runtime = pytest.importorskip("onnxruntime")
    found = []
    for path in files(network, folder):
        for level in runtime.GraphOptimizationLevel.__members__.values():
            options = runtime.SessionOptions()
            options.graph_optimization_level = level
            session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            found.append(torch.from_numpy(session.run(None, {"images": images.numpy()})[0]))
    return found


def reference_evaluator(network: Any, images: torch.Tensor, folder: pathlib.Path) -> list[torch.Tensor]:
    from onnx.reference import ReferenceEvaluator

    return [
        torch.from_numpy(ReferenceEvaluator(path).run(None, {"images": images.numpy()})[0]) for path in files(network, folder)
    ]


def openvino(network: Any, images: torch.Tensor, folder: pathlib.Path) -> torch.Tensor:
    runtime = pytest.importorskip("openvino")
    path = files(network, folder, inline=True)[list(FORMS).index("32 bits")]
    return torch.from_numpy(np.array(runtime.Core().compile_model(path, "CPU")([images.numpy()])[0]))


def of_node(package: str) -> Callable[[Any, torch.Tensor, pathlib.Path], list[torch.Tensor]]:
    """Return what runs both files in Node.js; packages are looked for where ``NODE_PATH`` says."""

    def run(network: Any, images: torch.Tensor, folder: pathlib.Path) -> list[torch.Tensor]:
        node = shutil.which("node")
        if (
            node is None
            or subprocess.run([node, "-e", f"require.resolve('{package}')"], capture_output=True, check=False).returncode
        ):
            pytest.skip(f"needs Node.js and {package}, in a folder of NODE_PATH")
        (folder / "images.raw").write_bytes(images.numpy().tobytes())
        sizes = ",".join(map(str, images.shape))
        command = [node, "-e", NODE, package, str(folder / "images.raw"), sizes, *files(network, folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return [torch.tensor(json.loads(line)).view(len(images), -1) for line in done.stdout.splitlines()]

    return run


def tosa(network: Any, images: torch.Tensor, folder: pathlib.Path) -> torch.Tensor:
    model = pytest.importorskip("tosa_reference_model")
    network.export_tosa(folder / "network.tosa", batch=len(images))
    content = (folder / "network.tosa").read_bytes()
    (out,), status = model.run(content, [images.view(torch.int8).numpy()], tosa_level="EIGHTK")
    assert status == model.GraphStatus.TOSA_VALID
    return torch.from_numpy(np.frombuffer(np.ascontiguousarray(out).tobytes(), np.int32).copy()).view(len(images), -1)


RUNTIMES: dict[str, Callable[[Any, torch.Tensor, pathlib.Path], torch.Tensor | list[torch.Tensor]]] = {
    "C kernels": of_back_end("cpu"),
    "CPU graph": cpu_graph,
    "exported C program": c_program,
    "reference.c": of_golden_model(in_c=True),
    "NumPy checker": of_golden_model(in_c=False),
    "Triton's interpreter": of_back_end("triton"),
    "onnxruntime": onnxruntime_levels,
    "reference evaluator": reference_evaluator,
    "OpenVINO": openvino,
    "onnxruntime-node": of_node("onnxruntime-node"),
    "onnxruntime-web": of_node("onnxruntime-web"),
    "TOSA's reference model": tosa,
}
"""What gives logits of a network and images, and a folder for files; a list where several are compared."""
LONG = ("exported C program", "Triton's interpreter", "onnxruntime-web", "OpenVINO")


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow) if x in LONG else x for x in RUNTIMES])
def test_logits_are_those_of_the_reference(
    name: str, case: tuple[Any, torch.Tensor, torch.Tensor], tmp_path: pathlib.Path
) -> None:
    network, images, wanted = case
    found = RUNTIMES[name](network, images, tmp_path)
    for each in found if isinstance(found, list) else [found]:
        assert each.shape == wanted.shape and torch.equal(each.long(), wanted.long())
    assert int(wanted.unique().numel()) > 10
