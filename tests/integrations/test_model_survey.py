"""The recorded survey of model families: nothing silent, timm's share, and the tables in the documents."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers import load_script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def survey() -> ModuleType:
    return load_script(ROOT / "scripts" / "survey_models.py")


@pytest.fixture(scope="module")
def data(survey: ModuleType) -> dict[str, Any]:
    return json.loads(survey.RESULTS.read_text())


def test_nothing_is_in_floating_point_silently(data: dict[str, Any]) -> None:
    for section in ("timm_runs", "torchvision_runs", "transformers_runs", "transformers_meta"):
        assert data[section]
        for name, entry in data[section].items():
            assert not entry.get("silent"), name
            assert "silent" not in entry.get("by_name", ""), name


def test_timm_is_in_integers(survey: ModuleType, data: dict[str, Any]) -> None:
    everything, tokens, integer = survey.count_timm(data)
    assert everything > 1300
    assert integer >= 0.95 * tokens > 500


def test_every_architecture_of_timm_runs_patched(data: dict[str, Any]) -> None:
    attending = {name for name, entry in data["timm_architectures"].items() if entry.get("classes")}
    assert data["timm_patched"].keys() == attending
    assert not {name: result for name, result in data["timm_patched"].items() if not re.fullmatch(r"\d+ of \d+", result)}
    assert sum(name.startswith("levit_conv_") for name in attending) == 10


def test_the_page_has_the_tables(survey: ModuleType, data: dict[str, Any]) -> None:
    page = survey.PAGE.read_text()
    for name, table in survey.tables(data).items():
        assert f"<!-- survey:{name} -->\n{table}\n<!-- end -->" in page, "python scripts/survey_models.py --table"


def test_vision_models_run_patched_where_they_run(survey: ModuleType, data: dict[str, Any]) -> None:
    runs = data["transformers_meta"]
    errors = {name: entry["error"] for name, entry in runs.items() if entry.get("error")}
    left = {name: error for name, error in errors.items() if "holds no attention" not in error}
    assert not [name for name, error in left.items() if survey.PATCHED_ONLY in error]
    assert len(left) <= 0.05 * len(runs)
