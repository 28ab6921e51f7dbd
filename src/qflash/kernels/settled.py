"""Whether a launch may read weights while the launch ahead of it in the stream still runs.

On Hopper a kernel begins before the one ahead of it has ended (:mod:`.common.dependent_launch`), and what that one writes may
be read only behind the wait. Weights of a network are there earlier, unless the kernel ahead writes them, as an operator of
PyTorch may do that a user calls between. So the first launch of a forward pass reads everything behind its wait. Each later
one begins when the one ahead has begun and waited, hence behind all that came before the forward pass, and no kernel of a
forward pass writes weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_launched: ContextVar[bool | None] = ContextVar("launched", default=None)
"""Whether there was a launch since weights stay as they are; None if nothing is known of them."""


@contextmanager
def weights_stay() -> Iterator[None]:
    """Promise that meanwhile nobody writes weights in this thread's stream."""
    token = _launched.set(False)
    try:
        yield
    finally:
        _launched.reset(token)


def weights_may_change() -> None:
    """Take the promise back up to the next launch: a user's code, or a copy of weights, comes before it."""
    if _launched.get():
        _launched.set(False)


def weights_are_settled() -> bool:
    """Tell whether the launch that is made next may read weights before it waits."""
    launched = _launched.get()
    if launched is False:
        _launched.set(True)
    return bool(launched)
