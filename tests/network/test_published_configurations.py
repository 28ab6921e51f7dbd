"""Published models at full width, from the configurations in benchmarks/configurations, with random weights and few blocks."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import qflash
from qflash.cli import app
from qflash.network.onnx_check import check_onnx
from small_networks import draw_images

transformers = pytest.importorskip("transformers")
pytest.importorskip("timm")
pytest.importorskip("onnxruntime")

Record = Callable[[str, object], None]
FOLDER = Path(__file__).parents[2] / "benchmarks" / "configurations"
SIZES: dict[str, tuple[int | None, ...]] = {
    "clip-vit-base-patch32": (None,),
    "clip-vit-large-patch14": (None,),
    "deit-base-distilled-patch16-224": (None,),
    "dinov2-base": (None, 518),
    "dinov2-with-registers-base": (None, 518),
    "dinov3-vitb16": (None,),
    "eva02_base_patch14_448": (224, None),
    "siglip-base-patch16-224": (None,),
    "siglip2-so400m-patch14-384": (None,),
    "swin-tiny-patch4-window7-224": (None,),
    "swinv2-tiny-patch4-window8-256": (None,),
    "vit-base-patch16-224": (None,),
}
"""Pixels of a side that each is converted for; None for those that its processor or ``pretrained_cfg`` says."""
TEXTS = ("all-minilm-l6-v2", "clip-vit-base-patch32", "clip-vit-large-patch14")


def shortened(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with two blocks, or one a stage, and as much width as it had."""
    short = dict(config)
    if "architecture" in config:
        short["model_args"] = {**config["model_args"], "depth": 2}
    elif "depths" in config:
        # two blocks where windows are shifted, one where a window is the whole image
        short["depths"] = [2, *[1] * (len(config["depths"]) - 1)]
    elif "vision_config" in config:
        short |= {name: shortened(config[name]) for name in ("text_config", "vision_config")}
    else:
        short["num_hidden_layers"] = 2
    return short


def write_folder(name: str, folder: Path) -> dict[str, Any]:
    """Write a model's configuration as a hub has it; return it as it is kept."""
    kept: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    (folder / "config.json").write_text(json.dumps(shortened(kept["config"])))
    if "preprocessor_config" in kept:
        (folder / "preprocessor_config.json").write_text(json.dumps(kept["preprocessor_config"]))
    return kept


def test_every_configuration_is_tested_and_names_its_source() -> None:
    kept = {path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
    assert set(kept) == {*SIZES, *TEXTS}
    assert all(len(each["source"]) > 40 and each["config"] for each in kept.values())


def side_of(kept: dict[str, Any]) -> int:
    """Return the pixels of a side that a model's processor, or timm's configuration, makes of an image."""
    if "preprocessor_config" not in kept:
        return int(kept["config"]["pretrained_cfg"]["input_size"][-1])
    processor = kept["preprocessor_config"]
    return int(processor.get("crop_size", processor["size"])["height"])


def record(record_property: Record, report: dict[str, Any], network: Any, file: Path, exported: Path) -> None:
    """Note what a conversion gave; pytest writes it to the file of ``--junitxml``."""
    outputs = {name: row["sqnr_db"] for name, row in report["outputs"].items()}
    sizes = {"input": list(network.image), "file_bytes": file.stat().st_size, "onnx_bytes": exported.stat().st_size}
    record_property("report", json.dumps({"sqnr_db": outputs, "float_mb": report["float_weights_mb"], **sizes}))


def same_bits(network: Any, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a network's outputs, which the reference, the C kernels and a GPU, where there is one, must agree on."""
    found = {}
    for backend in ("reference", "cpu", *(("auto",) if torch.cuda.is_available() else ())):
        twin = copy.deepcopy(network).cuda() if backend == "auto" else copy.copy(network)
        twin.backend = backend
        with torch.inference_mode():
            outputs = twin.run(inputs.cuda() if backend == "auto" else inputs)
        found[backend] = {name: each.cpu() for name, each in outputs.items()}
    different = {
        (kind, name)
        for kind, got in found.items()
        for name in network.outputs
        if not torch.equal(got[name], found["cpu"][name])
    }
    assert not different
    return found["cpu"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, id=name if size is None else f"{name}-{size}")
        for name, sizes in SIZES.items()
        for size in sizes
    ],
)
def test_the_command_converts_it(name: str, size: int | None, tmp_path: Path, record_property: Record) -> None:
    """Bits of the reference, the C kernels and onnxruntime agree. By their names none is in the part that always runs."""
    kept = write_folder(name, tmp_path)
    side = size or side_of(kept)
    np.save(tmp_path / "images.npy", draw_images(10, 3, side).numpy())
    file, exported = tmp_path / "network.qf", tmp_path / "network.onnx"
    words = ["convert", str(tmp_path), str(tmp_path / "images.npy"), "-o", str(file), "--onnx", str(exported)]
    words += ["--random-weights", "--calibrate", "8", "--format", "json", "--device", "cpu"]
    result = CliRunner().invoke(app, words + ([] if size is None else ["--size", str(size)]))
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["image"] == [3, side, side]
    assert min(row["sqnr_db"] for row in report["outputs"].values()) > 20, report["outputs"]
    network = qflash.load_model(file)
    same_bits(network, draw_images(1, 3, side, 5))
    # the file holds what the C kernels made of images of its own
    assert {outcome.problem for outcome in check_onnx(exported, ["onnxruntime"])} == {None}
    record(record_property, report, network, file, exported)


def draw_texts(count: int, tokens: int, vocabulary: int, end: int | None) -> dict[str, torch.Tensor]:
    """Return ids and mask as a tokeniser pads them; texts end with ``end`` if there is one."""
    generator = torch.Generator().manual_seed(1)
    # the largest ids are those of a tokeniser's own
    ids = torch.randint(0, vocabulary - 2, (count, tokens), generator=generator)
    last = torch.randint(3, tokens, (count, 1), generator=generator)
    places = torch.arange(tokens)
    if end is not None:
        ids = torch.where(places == last, end, ids)
    return {"input_ids": ids, "attention_mask": (places <= last).long()}


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_an_encoder_of_texts_is_converted_and_all_have_the_same_bits(
    name: str, tmp_path: Path, record_property: Record
) -> None:
    """BERT's layers, and the text towers of CLIP, whose embedding is that of a text's end."""
    write_folder(name, tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    is_tower = hasattr(config, "text_config")
    config = getattr(config, "text_config", config)
    torch.manual_seed(0)
    model = (transformers.CLIPTextModelWithProjection if is_tower else transformers.AutoModel.from_config)(config).eval()
    label, tokens = ("text_embeds", config.max_position_embeddings) if is_tower else ("last_hidden_state", 32)
    texts = draw_texts(24, tokens, config.vocab_size, config.eos_token_id if is_tower else None)
    first, others = ({key: x[part] for key, x in texts.items()} for part in (slice(16), slice(16, None)))
    network = qflash.quantize_model(model, [first], outputs=[label], progress=False)
    file, exported = tmp_path / "network.qf", tmp_path / "network.onnx"
    network.save(file)
    loaded = qflash.load_model(file)
    made = loaded.dequantize(same_bits(loaded, loaded.prepared(others))[label])
    with torch.inference_mode():
        exact = model(**others)[label]
    if not is_tower:
        made, exact = (x[others["attention_mask"] == 1] for x in (made, exact))
    sqnr_db = float(10 * (exact.square().sum() / (made - exact).square().sum()).log10())
    assert sqnr_db > 20
    loaded.export_onnx(exported)
    assert {outcome.problem for outcome in check_onnx(exported, ["onnxruntime"])} == {None}
    weights = round(4e-6 * sum(x.numel() for x in model.parameters()), 3)
    report = {"outputs": {label: {"sqnr_db": round(sqnr_db, 2)}}, "float_weights_mb": weights}
    record(record_property, report, loaded, file, exported)
