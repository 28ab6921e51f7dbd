"""Without a CUDA device the kernels run in Triton's interpreter, which has to be chosen before Triton is imported.

With ``TRITON_INTERPRET=0`` they are compiled, and tests/kernels/test_gluon_on_ptx.py runs what comes out (``make test`` does
both).
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import os
import zlib

import pytest
import torch

with contextlib.suppress(ModuleNotFoundError):  # the tests of the GPU need none
    import hypothesis

    # what a busy machine takes for an example says nothing; the rest is hypothesis' own choice, which differs in CI
    unhurried = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
    hypothesis.settings.register_profile("unhurried", unhurried)
    hypothesis.settings.load_profile("unhurried")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


SHARE = 8
"""One of so many of the slow cases is run a day."""
# workers begin with the environment of the process that started them, perhaps on the next day
TODAY = int(os.environ.setdefault("QFLASH_TEST_DAY", str(datetime.date.today().toordinal())))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also the slow cases that are another day's")


def is_due(item: pytest.Item) -> bool:
    """Tell whether a case is to be run today: a slow one in :data:`SHARE` days, the others always."""
    return "slow" not in item.keywords or (zlib.crc32(item.nodeid.encode()) + TODAY) % SHARE == 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # tests that are named are run
    if not (config.getoption("--all") or any("::" in name for name in config.args)):
        late = [item for item in items if not is_due(item)]
        items[:] = [item for item in items if is_due(item)]
        config.hook.pytest_deselected(items=late)
    if torch.cuda.is_available():
        from qflash.kernels import lengths

        lengths.expect_all()  # tests of one kernel have many lengths
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> collections.OrderedDict[object, object]:
    """No call has been made yet; returns those that are kept from now on."""
    from qflash import plan_cache

    kept: collections.OrderedDict[object, object] = collections.OrderedDict()
    monkeypatch.setattr(plan_cache, "_plans", kept)
    monkeypatch.setattr(plan_cache, "_unrepeatable", collections.OrderedDict())
    return kept
