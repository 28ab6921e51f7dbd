"""Which kernel takes a call of attention: the families of kernels, in the order in which they are asked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

from . import lengths
from .device import STAND_IN
from .gluon.sm90 import launch as sm90
from .gluon.sm90 import rules as sm90_rules
from .gluon.windows import launch as windows
from .gluon.windows import rules as windows_rules
from .launch_arguments import KernelRequest
from .launch_recorder import KernelLaunch, LaunchRecorder
from .tiles import SM90_RESIDENT, SM90_STREAMING, WINDOWS, AttentionShape, Tiles, row_fits_registers
from .triton import launch as portable
from .triton import rules as portable_rules


class Family(NamedTuple):
    """Kernels of one kind.

    Attributes:
        name: as launches have it.
        misfit: tells why they are not chosen for shapes and a recipe on an architecture, or returns None.
        plan: chooses the tiles where they are.
        refusal: tells why they do not take a call with these tiles, memory format included, or returns None.
        launches: spells out the launches that fill the output, in order.
    """

    name: str
    misfit: Callable[[AttentionShape, tuple[int, int]], str | None]
    plan: Callable[[AttentionShape, tuple[int, int]], Tiles]
    refusal: Callable[[KernelRequest, Tiles], str | None]
    launches: Callable[[KernelRequest, Tiles], list[KernelLaunch]]


FAMILIES = (
    Family(
        SM90_RESIDENT, sm90_rules.resident_misfit, sm90_rules.resident_plan, sm90.resident_refusal, sm90.resident_launches
    ),
    Family(WINDOWS, windows_rules.misfit, windows_rules.plan, windows.refusal, windows.launches),
    Family(
        "triton.resident", portable_rules.resident_misfit, portable_rules.resident_plan, portable.resident_refusal,
        portable.resident_launches,
    ),
    Family(
        SM90_STREAMING, sm90_rules.streaming_misfit, sm90_rules.streaming_plan, sm90.streaming_refusal, sm90.streaming_launches
    ),
    Family(
        "triton.streaming", portable_rules.streaming_misfit, portable_rules.streaming_plan, portable.streaming_refusal,
        portable.streaming_launches,
    ),
)  # fmt: skip
"""In the order in which they are asked; the last takes whatever is quantised.

:func:`choose_tiles` asks by shapes (``misfit``, in each family's ``rules.py``), :func:`choose_family` again by the tensors
(``refusal``, in its ``launch.py``). A table of measured tiles comes before the rules (:mod:`.tuning_table`).
"""


def choose_tiles(shape: AttentionShape, capability: tuple[int, int], *, reread: bool = True) -> Tiles:
    """Return the tiles for an architecture, and with them the family that they are for.

    Args:
        reread: whether :mod:`.sm90.attention_resident` may read keys twice where registers do not hold a row's scores; it is
            compiled for every such length.
    """
    resident = reread or row_fits_registers(shape.keys)
    asked = FAMILIES if resident else [family for family in FAMILIES if family.name != SM90_RESIDENT]
    return next(family.plan(shape, capability) for family in asked if family.misfit(shape, capability) is None)


class Choice(NamedTuple):
    """What :func:`choose_family` found.

    Attributes:
        family: that takes the call, or None.
        tiles: that it is to take.
        refusals: why the families that were asked before do not, by name.
        fused: whether the kernels quantise, too.
    """

    family: Family | None
    tiles: Tiles
    refusals: dict[str, str]
    fused: bool = False

    def launches(self, request: KernelRequest) -> list[KernelLaunch]:
        """Spell out the launches.

        Raises:
            ValueError: no family takes the call, or the tiles do not fit it.
        """
        if self.family is None:
            raise ValueError(f"one launch cannot quantise and attend to {request.call.keys} keys with {self.tiles}")
        return [] if _heard.get() is not None else self.family.launches(request, self.tiles)


_heard: ContextVar[list[Choice] | None] = ContextVar("heard", default=None)


def choose_family(request: KernelRequest, tiles: Tiles) -> Choice:
    """Ask the families in order."""
    refusals: dict[str, str] = {}
    found = None
    for family in FAMILIES:
        reason = family.refusal(request, tiles)
        if reason is None:
            found = family
            break
        refusals[family.name] = reason
    choice, heard = Choice(found, tiles, refusals, request.fused), _heard.get()
    if heard is not None:
        heard.append(choice)
    return choice


@contextlib.contextmanager
def listen(capability: tuple[int, int] | None) -> Iterator[list[Choice]]:
    """Note what is chosen meanwhile, and launch nothing.

    Args:
        capability: of the architecture that tensors without a GPU stand for; None for the usual one.
    """
    heard: list[Choice] = []
    tokens = _heard.set(heard), STAND_IN.set(capability or STAND_IN.get())
    try:
        with lengths.unchanged(), LaunchRecorder(launching=False):
            yield heard
    finally:
        _heard.reset(tokens[0])
        STAND_IN.reset(tokens[1])
