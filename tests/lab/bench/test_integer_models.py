"""``qflash-lab models --integer``: whole networks in integers are really run beside floating point, and reported."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from qflash_lab.bench import energy, integer_models, models
from qflash_lab.bench.runner import TimedMethod
from qflash_lab.cli import app

timm = pytest.importorskip("timm")
TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 10}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is measured in no time instead of whatever is named."""
    torch.manual_seed(0)
    model = timm.models.VisionTransformer(**TINY).eval()
    model.pretrained_cfg = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.2)}
    monkeypatch.setattr(integer_models, "load", lambda name, pretrained, image_size: (model, (3, 32, 32)))


def test_rows_say_what_was_timed(tiny: None, tmp_path: Path) -> None:
    chosen = ("--method", "timm", "--method", "integer", "--rounds", "2", "--device", "cpu", "--batch", "1", "--batch", "3")
    done = CliRunner().invoke(app, ["models", "--integer", "--model", "tiny", *chosen, "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "models_integer.json").read_text())
    rows = record["rows"]
    assert [(row["batch"], row["method"], row["dtype"]) for row in rows] == [
        (1, "timm", "float32"), (1, "integer", "int8"), (3, "timm", "float32"), (3, "integer", "int8")
    ]  # fmt: skip
    for row in rows:
        assert row["error"] is None and row["samples"] == 2 and row["ratio"] is None
        assert row["images_per_s"] == pytest.approx(row["batch"] * 1e6 / row["median_us"], rel=1e-3)
        assert float(row["sqnr_db"]) > (20 if row["method"] == "integer" else 100)
    assert (tmp_path / "models_integer.csv").read_text().startswith("model,batch,dtype,method,images_per_s")


def test_a_small_model_takes_its_own_images(tmp_path: Path) -> None:
    words = "models --integer --model digits-vit --method timm --method integer --rounds 2 --device cpu --batch 1"
    done = CliRunner().invoke(app, [*words.split(), "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "models_integer.json").read_text())["rows"]
    assert [row["error"] for row in rows] == [None, None] and rows[1]["sqnr_db"] > 25


def test_ratios_refer_to_the_compiled_model(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = TimedMethod(integer_models.BASELINE, "end-to-end", integer_models._eager)
    monkeypatch.setitem(integer_models.METHODS, integer_models.BASELINE, eager)
    record = integer_models.run_integer_models(
        ["tiny"], [2], integer_models.pick_methods(("compile", "integer")), dtype=torch.float32,
        device=torch.device("cpu"), rounds=2,
    )  # fmt: skip
    base, integer = record["rows"]
    assert base["ratio"] == 1 and integer["ratio"] == pytest.approx(base["median_us"] / integer["median_us"], abs=1e-3)


def test_a_method_that_fails_is_named_and_the_rest_is_measured(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(subject: integer_models.Subject) -> None:
        raise RuntimeError("no such thing here")

    monkeypatch.setitem(integer_models.METHODS, "compile", TimedMethod("compile", "end-to-end", fails))
    record = integer_models.run_integer_models(
        ["tiny"],
        [1],
        integer_models.pick_methods(("timm", "compile")),
        dtype=torch.float32,
        device=torch.device("cpu"),
        rounds=1,
    )
    timm_row, failed = record["rows"]
    assert "no such thing here" in failed["error"] and failed["images_per_s"] is None
    assert timm_row["images_per_s"] > 0


def test_onnxruntime_has_rows_on_a_cpu(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    export, exports = integer_models.onnx_models.export_float, []
    monkeypatch.setattr(integer_models.onnx_models, "export_float", lambda *args: exports.append(args) or export(*args))
    names = ["onnxruntime float32", "onnxruntime integer", "onnxruntime int8 static", "onnxruntime int8 dynamic"]
    assert not set(names) & {method.name for method in integer_models.pick_methods((), "cuda")}
    record = integer_models.run_integer_models(
        ["tiny"], [1, 2], integer_models.pick_methods(names, "cpu"), dtype=torch.float32, device=torch.device("cpu"), rounds=1
    )
    assert set(record["packages"]) == {"onnx", "onnxruntime"}
    assert {row["error"] for row in record["rows"]} == {None}
    exact, integer, static, dynamic = (float(row["sqnr_db"]) for row in record["rows"][4:])
    assert exact > 100 and 60 > dynamic > 15 and static < 60 and 60 > integer > 20
    assert len(exports) == 1


def test_bad_choices_are_named() -> None:
    with pytest.raises(ValueError, match="'onnxruntime float32' runs on the CPU"):
        integer_models.pick_methods(("onnxruntime float32",))
    with pytest.raises(ValueError, match=r"method must be one of .*'int8'"):
        integer_models.pick_methods(("int8",))
    if importlib.util.find_spec("torchao") is None:
        assert not any(method.name.startswith("torchao") for method in integer_models.pick_methods())
        with pytest.raises(ImportError, match="torchao"):
            integer_models.pick_methods(("torchao int8 dynamic",))
    for extra in (["--base", "HEAD"], ["--recipe", "paper"], ["--peer", "a=b:c"]):
        done = CliRunner().invoke(app, ["models", "--integer", *extra])
        assert done.exit_code == 2 and "--integer compares whole networks" in done.output
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        integer_models.run_integer_models([], [], [], dtype=torch.float32, device=torch.device("cpu"), rounds=0)
    with pytest.raises(ValueError, match="energy is read from an NVIDIA GPU's counter, the device is cpu"):
        integer_models.run_integer_models([], [], [], dtype=torch.float32, device=torch.device("cpu"), energy_seconds=1.0)
    with pytest.raises(ValueError, match="readings must be at least 1, got 0"):
        integer_models.run_integer_models([], [], [], dtype=torch.float32, device=torch.device("cpu"), readings=0)


def test_energy_of_several_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    joules = iter((3.0, 1.0, 2.0))
    monkeypatch.setattr(
        integer_models.energy, "replay_energy", lambda timer, gpu, seconds: energy.Reading(next(joules), seconds, timer)
    )
    series = integer_models.Joules(None, 0.5, 3, idle_watts=1.0).series(images=4)  # type: ignore[arg-type]
    assert series.rounds == 3
    found = series.summarise([series.sample(10) for _ in range(series.rounds)])
    # ten calls of four images each; 1 W for half a second is 0.5 J
    assert found == {
        "mj_per_image": 50.0, "mj_per_image_min": 25.0, "mj_per_image_max": 75.0, "mj_per_image_above_idle": 37.5,
        "readings": 3, "watts": 4.0,
    }  # fmt: skip
    assert set(found) <= set(integer_models.FIELDS)


def test_torchao_s_options_hold_for_its_own_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config as inductor

    def quantize(model: torch.nn.Module, config: object) -> None:
        # as torchao does, for the whole process
        inductor.coordinate_descent_tuning = True
        inductor.force_fuse_int_mm_with_mul = True

    package = types.ModuleType("torchao")
    package.quantization = types.SimpleNamespace(quantize_=quantize, Config=object)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao", package)
    options = []
    monkeypatch.setattr(torch, "compile", lambda model, **given: options.append(given["options"]) or model)
    before = inductor.get_config_copy()
    images = torch.rand(2, 4)

    def unasked(*kind: str) -> Any:
        pytest.fail("not asked for")

    subject = integer_models.Subject(torch.nn.Linear(4, 3), unasked, images, images, unasked)
    assert integer_models._torchao(subject, "Config")().shape == (2, 3)
    assert options[0]["coordinate_descent_tuning"] and inductor.get_config_copy() == before


def test_pixels_are_the_same_everywhere_and_use_their_range() -> None:
    pixels = integer_models.draw_pixels(2, (3, 32, 48), seed=3)
    assert pixels.shape == (2, 3, 32, 48) and pixels.dtype == torch.uint8
    assert torch.equal(pixels, integer_models.draw_pixels(2, (3, 32, 48), seed=3))
    assert int(pixels.max()) - int(pixels.min()) > 200
    assert models.load is integer_models.load
