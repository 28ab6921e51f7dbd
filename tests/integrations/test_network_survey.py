"""The recorded survey of whole networks: how many are taken, that the rest is refused by name, and the tables."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from helpers import load_script

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def survey() -> ModuleType:
    load_script(SCRIPTS / "survey_models.py")
    return load_script(SCRIPTS / "survey_networks.py")


@pytest.fixture(scope="module")
def data(survey: ModuleType) -> dict[str, Any]:
    return json.loads(survey.RESULTS.read_text())


def test_nothing_fails_without_a_message_of_the_package(survey: ModuleType, data: dict[str, Any]) -> None:
    assert not [result for _, _, result in survey.all_runs(data) if "error" in result]


def test_most_of_timm_is_taken(survey: ModuleType, data: dict[str, Any]) -> None:
    results = [result for library, _, result in survey.all_runs(data) if library == "timm"]
    assert sum("sqnr_db" in result for result in results) >= 300
    assert all(result["sqnr_db"] > 20 for result in results if "sqnr_db" in result)


def test_no_path_of_a_machine_is_recorded(survey: ModuleType) -> None:
    assert "site-packages" not in survey.RESULTS.read_text()


def test_the_page_has_the_tables(survey: ModuleType, data: dict[str, Any]) -> None:
    page = (SCRIPTS.parent / "docs" / "models.md").read_text()
    for name, table in survey.tables(data).items():
        assert f"<!-- survey:{name} -->\n{table}\n<!-- end -->" in page, "python scripts/survey_networks.py --table"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ('aten.tanh in a.b (File "x.py", line 3, in forward return torch.tanh(x)) has no integer form', "aten.tanh"),
        ("linear of blocks.0.fc has no integer form: it stands before add, gelu", "linear: it stands before add, gelu"),
        (
            "linear of fc has no integer form: it takes what mean of pool.1 computes, not a normalisation",
            "linear: it takes what mean computes, not a normalisation",
        ),
        ("weights: NaN or infinity is in a.0.input_min", "weights: NaN or infinity is in one"),
        ('mean over dimensions [2] of (2, 3) in a (File "x", line 3) has no integer form', "mean over dimensions ... of ..."),
    ],
)  # fmt: skip
def test_reasons_leave_out_names(survey: ModuleType, message: str, reason: str) -> None:
    assert survey.reason(message) == reason


class Small(nn.Module):
    """Patches, perhaps an activation, and a head."""

    def __init__(self, activation: nn.Module, size: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, size, 8, 8)
        self.norm, self.activation, self.head = nn.LayerNorm(size), activation, nn.Linear(size, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.activation(self.norm(x)).mean(dim=1))


class Fails(nn.Module):
    """Takes batches of two alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert len(x) == 2
        raise KeyError("x")


def test_what_a_run_records(survey: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert survey.quantised(lambda: Small(nn.Identity()), 16)["sqnr_db"] > 20
    refused = survey.quantised(lambda: Small(nn.Tanh()), 16)
    assert refused.keys() == {"refused", "at"} and refused["refused"].startswith("aten.tanh in activation")
    assert survey.quantised(lambda: Fails(), 16) == {"not_run": "KeyError: 'x'"}

    def breaks(*_: Any, **__: Any) -> None:
        raise IndexError("out of range")

    monkeypatch.setattr(survey.qflash, "quantize_model", breaks)
    failed = survey.quantised(lambda: Small(nn.Identity()), 16)
    assert failed["error"] == "IndexError: out of range"


def test_alike_is_what_computes_the_same(survey: ModuleType) -> None:
    key = survey.key_of(Small(nn.Identity()), 16)
    assert key == survey.key_of(Small(nn.Identity()), 16)
    others = [(Small(nn.Tanh()), 16), (Small(nn.Identity(), 4), 16), (Small(nn.Identity()), 32)]
    assert key not in {survey.key_of(*other) for other in others}
