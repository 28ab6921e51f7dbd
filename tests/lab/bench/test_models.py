"""``qflash-lab models``: whole models are really run, compared and reported."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from typer.testing import CliRunner

import qflash
from qflash_lab.bench import models
from qflash_lab.bench.methods import TimedMethod
from qflash_lab.bench.timers import TimedCall
from qflash_lab.cli import app

CPU = torch.device("cpu")
pytest.importorskip("timm")


def twice_too_large(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """Attend, wrongly."""
    return 2.0 * scaled_dot_product_attention(query, key, value, attn_mask, scale=scale)


def test_names_of_methods() -> None:
    on_gpu = [method.name for method in models.make_methods(torch.device("cuda"), ("default", "accurate"))]
    assert on_gpu[:5] == ["timm", "sdpa", "sdpa flash", "sdpa cudnn", "sdpa efficient"]
    compiled = ["compile", "compile sdpa", "compile qflash", "compile qflash kept bias"]
    assert on_gpu[-7:] == ["qflash", "qflash accurate", "qflash kept bias", *compiled]
    assert {"qattn", "int-flash-full", "int-flash-half"} < set(on_gpu)
    assert [method.name for method in models.make_methods(CPU)] == ["timm", "sdpa", "qflash", "qflash kept bias"]
    assert [method.name for method in models.make_methods(CPU, ("paper",))] == ["timm", "sdpa", "qflash paper"]
    assert [method.name for method in models.make_methods(CPU, only=("qflash",))] == ["qflash"]
    for arguments, message in (
        ({"only": ("flash",)}, "method must be one of"),
        ({"recipes": ("best",)}, "recipe must be one of"),
        ({"peers": ("mine",)}, "NAME=module:callable"),
    ):
        with pytest.raises(ValueError, match=message):
            models.make_methods(CPU, **arguments)


def test_compiled_methods_compile_what_they_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, kept = [], []

    def compile_nothing(model: torch.nn.Module) -> torch.nn.Module:
        layers.append(len(qflash.coverage(model).integer))
        kept.append(sum(getattr(module, "_qflash_kept", None) is not None for module in model.modules()))
        return model

    monkeypatch.setattr(torch, "compile", compile_nothing)
    model, size = models.load("digits-swin")
    images = models.draw_images(2, size, CPU)
    names = ("qflash", "compile", "compile sdpa", "compile qflash", "compile qflash kept bias")
    methods = models.make_methods(torch.device("cuda"), only=names)
    with torch.no_grad():
        rows = models.measure("digits", model, images, methods, dtype=torch.float32, rounds=1)
    assert layers == [0, 0, 3, 3]
    assert kept == [0, 0, 0, 3]
    by = {row["method"]: row["sqnr_db"] for row in rows}
    assert by["compile qflash kept bias"] == by["compile qflash"] == by["qflash"] < 60 < min(by["compile"], by["compile sdpa"])


@pytest.mark.parametrize("name", ["digits-vit", "digits-swin"])
def test_every_attention_runs_in_the_model(name: str) -> None:
    model, size = models.load(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    images = torch.rand(2, *size)
    methods = models.make_methods(CPU, peers=(f"wrong={__name__}:twice_too_large",))
    with torch.inference_mode():
        rows = models.measure(name, model, images, methods, dtype=torch.float32, rounds=2)
    found = {row["method"]: row for row in rows}
    # a ViT has no bias
    kept = ["qflash kept bias"] if name == "digits-swin" else []
    assert list(found) == ["timm", "sdpa", "qflash", *kept, "wrong"]
    assert all(found[name]["sqnr_db"] == found["qflash"]["sqnr_db"] for name in kept)
    assert all(row["error"] is None and row["samples"] == 2 and row["model"] == name for row in rows)
    for row in rows:
        assert row["images_per_s"] == pytest.approx(2e6 / row["median_us"], abs=0.006)
        assert row["ratio"] == pytest.approx(found["sdpa"]["median_us"] / row["median_us"], abs=2e-3)
    assert found["timm"]["sqnr_db"] > 80
    assert found["sdpa"]["sqnr_db"] > 80
    assert 20 < found["qflash"]["sqnr_db"] < 70
    assert found["wrong"]["sqnr_db"] < 20
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any("QFlash" in type(module).__name__ for module in model.modules())


def test_swin_is_made_to_call_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    model, size = models.load("digits-swin")
    called = []
    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *a, **b: called.append(1) or real(*a, **b))
    (method,) = models.make_methods(CPU, only=("sdpa",))
    method.prepare(models.ModelInputs(model, torch.rand(1, *size)))
    with torch.inference_mode():
        model(torch.rand(1, *size))
    assert called


def test_a_method_that_fails_has_a_row_with_the_error() -> None:
    model, size = models.load("digits-vit")

    def refuse(_: models.ModelInputs) -> TimedCall:
        raise RuntimeError("no kernel")

    methods = [*models.make_methods(CPU, only=("sdpa",)), TimedMethod("broken", "end-to-end", refuse)]
    with torch.inference_mode():
        rows = models.measure("digits-vit", model, torch.rand(1, *size), methods, dtype=torch.float32, rounds=1)
    assert rows[1]["error"] == "RuntimeError: no kernel"
    assert rows[1]["median_us"] is None and rows[1]["ratio"] is None
    assert rows[0]["ratio"] == 1.0
    assert "failed" in "".join(map(str, models.render(rows, "").columns[3].cells))
    with pytest.raises(ValueError, match="no method was timed"):
        models.draw(rows[1:], "")


def test_weights_are_always_the_same() -> None:
    first, size = models.load("vit_tiny_patch16_224")
    torch.manual_seed(1)
    second, _ = models.load("vit_tiny_patch16_224")
    assert size == (3, 224, 224)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_models_that_call_sdpa_anyway_are_compiled_once() -> None:
    vit, _ = models.load("digits-vit")
    swin, _ = models.load("digits-swin")
    assert not models.applies("compile sdpa", vit)
    assert models.applies("compile sdpa", swin)
    assert models.applies("compile", vit)


def test_a_model_is_built_for_another_image_size() -> None:
    with torch.inference_mode():
        model, size = models.load("vit_tiny_patch16_224", image_size=64)
        assert size == (3, 64, 64)
        assert model(models.draw_images(1, size, torch.device("cpu"))).shape == (1, 1000)
    assert list(models.load_patchable(["vit_tiny_patch16_224"], image_size=64)) == ["vit_tiny_patch16_224 64 px"]


def test_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["models", "--model", "digits-vit", "--batch", "1", "--batch", "3", "--rounds", "1", "--device", "cpu"]
    result = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "models.json").read_text())
    assert [(row["batch"], row["method"]) for row in record["rows"]] == [
        (batch, method) for batch in (1, 3) for method in ("timm", "sdpa", "qflash")
    ]
    assert record["environment"]["device_type"] == "cpu"
    with (tmp_path / "models.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == models.FIELDS
    assert float(rows[-1]["images_per_s"]) > 0
    assert (tmp_path / "models.png").stat().st_size > 1000
    assert "images/s" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no_such_model"], "model must be one of"),
        (["--method", "none"], "method must be one of"),
        (["--dtype", "int8"], "dtype must be one of"),
        (["--model", "resnet18", "--image-size", "64"], "cannot be built for an image_size of 64"),
        (["--model", "digits-vit", "--image-size", "64"], "image_size is for timm's models"),
    ],
)
def test_command_refuses(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["models", "--device", "cpu", *arguments])
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.gpu
def test_measure_on_the_gpu() -> None:
    model, size = models.load("digits-swin")
    device = torch.device("cuda")
    methods = models.make_methods(device, only=("sdpa", "sdpa flash", "sdpa efficient", "qflash"))
    with torch.inference_mode():
        rows = models.measure("digits-swin", model, torch.rand(4, *size, device=device), methods, dtype=torch.float16, rounds=3)
    found = {row["method"]: row for row in rows}
    assert "attn_mask" in found["sdpa flash"]["error"]  # it takes no bias
    assert found["qflash"]["median_us"] > 0
    assert found["qflash"]["sqnr_db"] > 20
    assert found["qflash"]["best_sdpa"] in ("sdpa", "sdpa efficient")
    assert found["qflash"]["ratio"] is not None
