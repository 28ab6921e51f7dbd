"""The comparison of integer networks on a CPU: how methods are judged, what rows replace each other, and what tables show."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers import load_benchmark

XEON = "model name Intel(R) Xeon(R) Processor cpu family 6 model 167 stepping 1"
EPYC = "model name AMD EPYC cpu family 25 model 17 stepping 1"


@pytest.fixture(scope="module")
def networks() -> Any:
    return load_benchmark("openvino_networks")


@pytest.fixture
def subject(networks: Any) -> Any:
    pixels = torch.randint(0, 256, (7, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return networks.Subject(nn.Flatten(), None, pixels, pixels, (0.5,) * 3, (0.5,) * 3)


def test_a_method_is_judged_on_each_whole_call(networks: Any, subject: Any) -> None:
    """Ours takes pixels, the others what the float model takes. A result that is a tenth too large has 20 dB."""
    runs = {
        networks.OURS: lambda pixels, images: 1.1 * subject.model(subject.normalised(pixels)),
        "OpenVINO": lambda pixels, images: 1.01 * subject.model(images),
    }
    found = networks.errors(subject, runs, 3)
    assert found[networks.OURS] == pytest.approx([20.0] * 2, abs=0.01)
    assert found["OpenVINO"] == pytest.approx([40.0] * 2, abs=0.01)


def test_more_images_than_judge_are_refused(networks: Any, subject: Any) -> None:
    with pytest.raises(ValueError, match="batch must be at most 7, the judged images of some, got 8"):
        networks.measure("some", subject, 8, 1, 0.0)


def test_photos_are_needed(networks: Any) -> None:
    with pytest.raises(ValueError, match="photos must be a folder for DINOv2-S 224 px, got None"):
        networks.trained_subject(networks.PHOTOS, None, None)


def test_rows_of_another_processor_stay(networks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "RESULTS", tmp_path / "openvino.json")
    monkeypatch.setattr(networks.metadata, "version", lambda name: "1")
    row = {"model": "DeiT-S", "batch": 1, "threads": 1, "method": networks.OURS, "cpu_us": 1.0}
    for cpu, time in ((XEON, 1.0), (EPYC, 2.0), (EPYC, 3.0)):
        monkeypatch.setattr(networks, "cpu", lambda cpu=cpu: {"cpu": cpu, "instructions": []})
        networks.write([row | {"cpu_us": time}], networks.WITHOUT)
    rows = json.loads((tmp_path / "openvino.json").read_text())["rows"]
    assert [(each["cpu"], each["cpu_us"]) for each in rows] == [(XEON, 1.0), (EPYC, 3.0)]


@pytest.mark.parametrize(
    ("cpu", "amx", "shown"),
    [(XEON, "yes", "Xeon 6-167, AMX"), (XEON, "no", "Xeon 6-167, AVX-512 VNNI"), (EPYC, "no", "EPYC 25-17, AVX-512 VNNI")],
)
def test_processors_are_named(networks: Any, cpu: str, amx: str, shown: str) -> None:
    assert networks.processor({"cpu": cpu, "amx": amx}) == shown


def test_trained_networks_have_a_table_of_their_own(networks: Any) -> None:
    """A line a method there; the other tables have none of them."""
    lines = networks.TABLES["openvino:trained"].markdown()
    for method in (networks.OURS, *networks.OTHERS):
        assert any(f"| {networks.PHOTOS} | 1 | 1 | " in line and f"| {method} |" in line for line in lines)
    for name in ("openvino:times", "openvino:errors"):
        shown = {re.split(r" *\| *", line)[1] for line in networks.TABLES[name].markdown()[2:]}
        assert shown and not shown & set(networks.TRAINED)
