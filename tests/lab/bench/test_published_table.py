"""What the table of published configurations is made of: reports in pytest's XML file."""

from __future__ import annotations

import json
from typing import Any
from xml.sax.saxutils import quoteattr

import pytest

from helpers import load_benchmark


@pytest.fixture
def script() -> Any:
    return load_benchmark("published_configurations")


def case(name: str, report: dict[str, Any], inside: str = "") -> str:
    """Return a test as pytest writes it."""
    told = f'<properties><property name="report" value={quoteattr(json.dumps(report))} /></properties>'
    return f'<testcase name="test_it[{name}]">{told}{inside}</testcase>'


def test_reports_of_tests_that_passed_become_rows(script: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    report = {
        "sqnr_db": {"logits": 34.56},
        "float_mb": 12.5,
        "input": [3, 224, 448],
        "file_bytes": 3_240_000,
        "onnx_bytes": 3e6,
    }
    text = {**report, "input": [77, 49408]}
    cases = case("a-16-224", report) + case("a", text) + case("b", report, "<failure />") + '<testcase name="test_other" />'
    found = script.read_reports(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert found == {"a-16-224": report, "a, texts": text}
    monkeypatch.setattr(script, "RESULTS", tmp_path / "found.json")
    (tmp_path / "found.json").write_text(json.dumps({"configurations": found}))
    assert script.PARTS.blocks()["published:configurations"][2:] == [
        "| a, texts | 77 tokens | logits: 34.6 | 12.5 | 3.2 | 3.0 |",
        "| a-16-224 | 224 x 448 | logits: 34.6 | 12.5 | 3.2 | 3.0 |",
    ]
