"""Slow cases are run one day of several, the others always."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import conftest


@pytest.mark.parametrize("number", range(20))
def test_every_slow_case_has_its_day(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    due = []
    for today in range(conftest.TODAY, conftest.TODAY + conftest.SHARE):
        monkeypatch.setattr(conftest, "TODAY", today)
        for keywords in ({}, {"slow"}):
            due += [keywords] * conftest.is_due(SimpleNamespace(keywords=keywords, nodeid=f"test[{number}]"))
    assert due.count({"slow"}) == 1
    assert due.count({}) == conftest.SHARE
