"""Whether a launch may read weights while the launch ahead of it in the stream still runs.

On Hopper a kernel begins before the one ahead of it has ended (:mod:`.common.dependent_launch`), and what that one writes may
be read only behind the wait. Weights of a network are there earlier, unless the kernel ahead writes them, as an operator of
PyTorch may do that a user calls between. So the first launch of a forward pass that asks here reads everything behind its
wait. Each later one begins when the one ahead has begun and waited, hence behind all that came before the forward pass, and
no kernel of a forward pass writes weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_counted: ContextVar[bool | None] = ContextVar("counted", default=None)
"""Whether a launch was counted since weights were last written; None while they may be written at any time."""


@contextmanager
def _while_it_is(state: bool | None) -> Iterator[None]:
    token = _counted.set(state)
    try:
        yield
    finally:
        _counted.reset(token)


@contextmanager
def weights_stay() -> Iterator[None]:
    """Promise that nobody writes weights in this thread's stream meanwhile."""
    with _while_it_is(False):
        yield


@contextmanager
def weights_may_change() -> Iterator[None]:
    """Suspend the promise while code of a user runs, and begin again behind it."""
    with _while_it_is(None):
        yield
    weights_were_written()


def weights_were_written() -> None:
    """Begin again: the next launch has one ahead of it that writes weights."""
    if _counted.get():
        _counted.set(False)


def count_launch() -> bool:
    """Count the launch that is made next, and tell whether it may read weights before it waits."""
    counted = _counted.get()
    if counted is False:
        _counted.set(True)
    return bool(counted)
