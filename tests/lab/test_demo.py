"""The demo on a few images: what it returns, prints and writes. Also its measures."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from qflash.optional_packages import require_packages
from qflash_lab.bench.metrics import mse, sqnr
from qflash_lab.bench.workloads import WORKLOADS, get_workload, paper_inputs

pytest.importorskip("timm")
pytest.importorskip("matplotlib")
from qflash_lab import demo
from qflash_lab.bench.html import INK, plot

IMAGES = 32


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    folder = tmp_path_factory.mktemp("demo") / "new" / "report"
    console = Console(file=io.StringIO(), width=120)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(demo, "_ROUNDS", 1)  # what a median of times is does not matter here
        report = demo.run_demo(folder, IMAGES, device="cpu", console=console)
    return report, console.file.getvalue(), folder  # type: ignore[attr-defined]


def test_report_holds_every_measure(outcome: tuple[dict[str, Any], str, Path]) -> None:
    report, _, _ = outcome
    assert report["images"] == IMAGES
    assert report["shipped"] == 500
    assert report["device"]["type"] == "cpu"
    assert tuple(report["models"]) == demo.NETWORKS
    layers = {"fashion-vit": 4, "fashion-swin": 5}
    for name, model in report["models"].items():
        assert model["float"]["top1_percent"] > 85.0
        assert set(model["recipes"]) == set(demo.RECIPES)
        for got in model["recipes"].values():
            assert got["agreement_percent"] > 90.0
            assert len(got["layers_sqnr_db"]) == layers[name]
            assert min(got["layers_sqnr_db"].values()) > 20.0
        quality = [model["recipes"][recipe]["logits_sqnr_db"] for recipe in demo.RECIPES]
        assert quality == sorted(quality)
        runs = model["runs"]
        assert tuple(runs) == demo.RUNS and runs["float"]["agreement_percent"] == 100.0
        assert all(run["top1_percent"] > 85.0 and run["agreement_percent"] > 90.0 for run in runs.values())
        assert runs["integer attention"]["logits_sqnr_db"] == pytest.approx(
            model["recipes"]["default"]["logits_sqnr_db"], abs=0.1
        )
        assert runs["integer network"]["logits_sqnr_db"] > 15.0
        assert runs["integer network"]["size_mb"] < 0.6 * runs["float"]["size_mb"]
        if report["device"]["backend"] == "cpu":
            assert all(run["ms_per_image"] > 0 for run in runs.values())
        assert len(model["differ"]) == demo.MOST_DIFFERENT
        differ = [len(set(item["says"])) > 1 for item in model["differ"]]
        assert sum(differ) == min(model["different"], demo.MOST_DIFFERENT) and differ == sorted(differ, reverse=True)
        moved = [max(abs(x - item["percent"][0]) for x in item["percent"]) for item in model["differ"]]
        assert all(moved[i] >= moved[i + 1] - 1e-3 or differ[i] > differ[i + 1] for i in range(len(moved) - 1))
    assert [row["name"] for row in report["workloads"]] == [w.name for w in WORKLOADS]
    for row in report["workloads"]:
        quality = [row["recipes"][recipe]["sqnr_db"] for recipe in demo.RECIPES]
        assert 28.0 < quality[0] < quality[1] < quality[2] < row["ceiling"]["sqnr_db"] + 0.1
        if report["device"]["backend"] == "cpu":
            assert list(row["timings_us"]) == ["sdpa_float32", "qflash_float32_in", "qflash_int8_in"]
            assert all(us > 0 for us in row["timings_us"].values())
        else:
            assert row["timings_us"] is None
    assert {row["name"]: row["paper_sqnr_db"] for row in report["workloads"] if row["paper_sqnr_db"]} == demo.PAPER_SQNR_DB


def test_images_are_shown_float_beside_integer(outcome: tuple[dict[str, Any], str, Path]) -> None:
    report, _, folder = outcome
    shown = report["shown"]
    assert len(shown) == demo.SHOWN_IMAGES
    for item in shown:
        assert item["float"] == item["integer"]
        wanted, got = torch.tensor(item["float_map"]), torch.tensor(item["integer_map"])
        assert wanted.shape == got.shape == (14, 14)
        assert 0.5 < float(wanted.sum()) <= 1.0  # the class token's weights over the patches: its own is missing
        assert item["map_sqnr_db"] == pytest.approx(sqnr(wanted, got), abs=0.01)
        assert item["map_sqnr_db"] > 25.0
    page = (folder / "report.html").read_text()
    differ = sum(len(model["differ"]) for model in report["models"].values())
    assert page.count("<figcaption>") == demo.SHOWN_IMAGES + len(demo.NOISES_DB) + differ
    assert page.count("integer network ") >= demo.SHOWN_IMAGES
    for decibels in demo.NOISES_DB:
        assert f"<b>{decibels} dB</b>" in page


def test_images_that_differ_name_the_right_class_in_bold() -> None:
    names = demo.CLASSES["fashion"]
    card = demo._different_cards(
        [{"image": [[0.0, 1.0], [1.0, 0.0]], "label": 2, "says": [2, 2, 4], "percent": [60, 55.5, 40]}]
    )
    assert card.count(f"<b>{names[2]}</b>") == 2 and card.count("<figure>") == 1
    assert f"integer network: {names[4]}, {names[2]} 40.0 %" in card and f"<b>{names[2]}</b>, {names[2]} 55.5 %" in card


def test_colours_of_plots_survive_their_own_names() -> None:
    def draw() -> Any:
        from matplotlib.figure import Figure

        figure = Figure()
        figure.add_subplot().plot([0, 1], [0, 1], "x", color="#d0573b")
        return figure

    drawn = plot(draw)
    assert drawn.count("#d0573b") >= 1
    assert set(re.findall(r'(?:href="|url\()#([\w-]+)', drawn)) == set(re.findall(r' id="([^"]+)"', drawn))


def test_files_and_print(outcome: tuple[dict[str, Any], str, Path]) -> None:
    report, printed, folder = outcome
    assert json.loads((folder / "demo.json").read_text()) == report
    page = (folder / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "<svg" in page
    assert "currentColor" in page
    assert "prefers-color-scheme: dark" in page
    assert not any(word in page for word in ("<script", "<link", "src=", "@import", "url(http", INK))
    for text in (page, printed):
        assert "no GPU ran" in text
        assert "accurate" in text
        assert "A7" in text


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'timm, matplotlib: pip install "timm>=[\d.]+" matplotlib$'):
        demo.run_demo(tmp_path)


def test_limit_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="limit"):
        demo.run_demo(tmp_path, 0)


def test_what_is_not_finite_becomes_none() -> None:
    assert demo._finite({"a": [math.nan, 1.0], "b": math.inf, "c": "x"}) == {"a": [None, 1.0], "b": None, "c": "x"}


def test_metrics() -> None:
    x = torch.tensor([3.0, 4.0])
    assert sqnr(x, x) == math.inf
    assert sqnr(x, x + torch.tensor([0.5, 0.0])) == pytest.approx(20.0)
    assert sqnr(torch.zeros(2), x) == -math.inf
    assert math.isnan(sqnr(x, torch.tensor([math.nan, 0.0])))
    assert math.isnan(sqnr(torch.tensor([math.inf, 0.0]), x))
    assert math.isnan(sqnr(x, torch.tensor([math.inf, 0.0])))
    assert mse(x, x.half() + 1) == pytest.approx(1.0)
    for measure in (sqnr, mse):
        with pytest.raises(ValueError, match="shape"):
            measure(x, x[:1])


def test_workloads() -> None:
    assert get_workload("A4").shape(2) == (128, 3, 49, 32)
    assert get_workload("A3").shape(1) == (1, 12, 197, 64)
    with pytest.raises(ValueError, match="A7"):
        get_workload("A8")
    with pytest.raises(ValueError, match="batch"):
        get_workload("A1").shape(0)


def test_paper_inputs() -> None:
    state = torch.get_rng_state()
    inputs = paper_inputs(get_workload("A7"), 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(x.shape == (2, 24, 49, 32) and x.dtype == torch.float16 for x in inputs)
    assert all(-4.0 <= x.min() < -3.9 and 3.9 < x.max() <= 4.0 for x in inputs)
    assert not torch.equal(inputs[0], inputs[1])
    assert torch.equal(inputs[2], paper_inputs(get_workload("A7"), 2)[2])
    assert not torch.equal(inputs[2], paper_inputs(get_workload("A7"), 2, seed=1)[2])


def test_missing_packages_are_named() -> None:
    require_packages("this", "json")
    with pytest.raises(ImportError, match=r"this also needs no_such_package, nor_this: pip install"):
        require_packages("this", "no_such_package", "json", "nor_this")
