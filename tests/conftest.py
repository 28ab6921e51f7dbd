"""Without a CUDA device the kernels run in Triton's interpreter, which has to be chosen before Triton is imported.

With ``TRITON_INTERPRET=0`` they are compiled, and tests/kernels/test_gluon_on_ptx.py runs what comes out (``make test`` does
both).
"""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import random
import zlib

import numpy as np
import pytest
import torch

with contextlib.suppress(ModuleNotFoundError):  # the tests of the GPU need none
    import hypothesis

    # the same examples in every run, and none that an earlier run kept; what a busy machine takes for one says nothing
    repeatable = hypothesis.settings(
        derandomize=True, database=None, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.register_profile("repeatable", repeatable)
    hypothesis.settings.load_profile("repeatable")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


SHARE = 16
"""Without ``--all`` one of so many of the slow cases is run, always the same one, unless ``slow(n)`` gives another number."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"slow: takes long, alone or with its many cases; one of {SHARE} is run, all with --all")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run all slow cases instead of a fixed part of them")


def is_chosen(item: pytest.Item) -> bool:
    """Tell whether a case is run without ``--all``: by its name alone, so that a commit passes or fails whenever it is run."""
    slow = item.get_closest_marker("slow")
    return slow is None or zlib.crc32(item.nodeid.encode()) % (*slow.args, SHARE)[0] == 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed what draws without a seed of its own, so that no test depends on those that ran before it in its process."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # tests that are named are run
    if not (config.getoption("--all") or any("::" in name for name in config.args)):
        left = [item for item in items if not is_chosen(item)]
        items[:] = [item for item in items if is_chosen(item)]
        config.hook.pytest_deselected(items=left)
    if torch.cuda.is_available():
        from qflash.kernels import lengths

        lengths.expect_all()  # tests of one kernel have many lengths
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    # PyTorch, the tests and all they import stay: a third of a conversion's time would go into looking for garbage in them
    gc.collect()
    gc.freeze()


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> collections.OrderedDict[object, object]:
    """No call has been made yet; returns those that are kept from now on."""
    from qflash import plan_cache

    kept: collections.OrderedDict[object, object] = collections.OrderedDict()
    monkeypatch.setattr(plan_cache, "_plans", kept)
    monkeypatch.setattr(plan_cache, "_unrepeatable", collections.OrderedDict())
    return kept
