"""Slow cases are run one day of several, the others always."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


@pytest.mark.parametrize("number", range(20))
def test_every_slow_case_has_its_day(number: int, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    # there are several modules of this name
    path = str(pytestconfig.rootpath / "tests" / "conftest.py")
    conftest: Any = next(
        plugin for plugin in pytestconfig.pluginmanager.get_plugins() if getattr(plugin, "__file__", "") == path
    )
    due = []
    for today in range(conftest.TODAY, conftest.TODAY + conftest.SHARE):
        monkeypatch.setattr(conftest, "TODAY", today)
        for keywords in ({}, {"slow"}):
            due += [keywords] * conftest.is_due(SimpleNamespace(keywords=keywords, nodeid=f"test[{number}]"))
    assert due.count({"slow"}) == 1
    assert due.count({}) == conftest.SHARE
