"""Fuzzing of the public operators: a few examples in the test suite, always the same; more and random ones by ``make fuzz``."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("QFLASH_FUZZ", "0"))
"""How many times as many examples as the test suite has, random ones; 0 for the test suite's own."""


def examples(few: int) -> settings:
    """Return hypothesis' settings of a test with ``few`` examples in the test suite.

    Nothing is kept between runs, and no example is ever too slow: a busy machine is no fault.
    """
    return settings(
        max_examples=few * max(TIMES, 1),
        derandomize=TIMES == 0,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
