"""Without a CUDA device the kernels run in Triton's interpreter, which has to be chosen before Triton is imported.

With ``TRITON_INTERPRET=0`` they are compiled, and tests/kernels/test_gluon_on_ptx.py runs what comes out (``make test`` does
both).
"""

from __future__ import annotations

import collections
import contextlib
import os

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
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
