"""Calls of the GPU kernels for NVIDIA's compute-sanitizer, zones around what a call allocates, and what the tools say."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

ZONE = 512
"""Bytes before and behind an allocation; a multiple of the alignment that PyTorch's own allocations have."""
_MARK = 0xA5


class Zones:
    """What a call allocated meanwhile, each with bytes around it that nobody may touch.

    Allocations lie in larger ones then, so that no call is repeated from what an earlier one left (:mod:`qflash.plan_cache`).
    """

    def __init__(self) -> None:
        self._memory: list[tuple[torch.Tensor, int]] = []

    def allocate(self, empty: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor between two zones."""
        count = math.prod(shape) * dtype.itemsize
        memory = empty(ZONE + count + ZONE, dtype=torch.uint8, device=device)
        memory[:ZONE].fill_(_MARK)
        memory[ZONE + count :].fill_(_MARK)
        self._memory.append((memory, count))
        return memory[ZONE : ZONE + count].view(dtype).view(shape)

    def take(self) -> tuple[int, int]:
        """Return how many allocations there were and how many have other bytes around them; forget them."""
        found = [(memory.cpu(), count) for memory, count in self._memory]
        self._memory.clear()
        damaged = sum(
            not bool((memory[:ZONE] == _MARK).all() and (memory[ZONE + count :] == _MARK).all()) for memory, count in found
        )
        return len(found), damaged


@contextlib.contextmanager
def zones_on(device: torch.device) -> Iterator[Zones]:
    """Put zones around whatever ``torch.empty`` and its relatives allocate on a device."""
    zones = Zones()
    empty, empty_like, new_empty = torch.empty, torch.empty_like, torch.Tensor.new_empty

    def shape_of(size: tuple[Any, ...]) -> tuple[int, ...]:
        # PyTorch takes a shape as one argument or as several
        return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size

    def guarded_empty(*size: Any, **options: Any) -> torch.Tensor:
        place = options.get("device")
        if place is None or torch.device(place).type != device.type or options.keys() != {"dtype", "device"}:
            return empty(*size, **options)
        return zones.allocate(empty, shape_of(size), options["dtype"], torch.device(place))

    def guarded_new_empty(x: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        if x.device.type != device.type or options.keys() - {"dtype"}:
            return new_empty(x, *size, **options)
        return zones.allocate(empty, shape_of(size), options.get("dtype", x.dtype), x.device)

    def guarded_empty_like(x: torch.Tensor, **options: Any) -> torch.Tensor:
        if options or x.device.type != device.type or not x.is_contiguous():
            return empty_like(x, **options)
        return zones.allocate(empty, tuple(x.shape), x.dtype, x.device)

    with (
        mock.patch.object(torch, "empty", guarded_empty),
        mock.patch.object(torch, "empty_like", guarded_empty_like),
        mock.patch.object(torch.Tensor, "new_empty", guarded_new_empty),
    ):
        yield zones


@dataclasses.dataclass
class Findings:
    """What a tool of compute-sanitizer said.

    Attributes:
        errors: that it counted; of racecheck hazards of that kind.
        warnings: of racecheck, hazards that it is not sure of.
        ended: whether it said how many there were, which it does at the end.
        reports: the first lines of each thing reported, of the first few; one a call.
        by_call: how many things were reported while each call was made, by call.
    """

    errors: int = 0
    warnings: int = 0
    ended: bool = False
    reports: list[list[str]] = dataclasses.field(default_factory=list)
    by_call: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def faults(self) -> int:
        """Of any kind; one if the tool did not come to its end."""
        return self.errors + self.warnings + (not self.ended)


PREFIX = "========="
CALL = "call: "
"""Before what a worker prints of a call that it is about to make."""
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?$")
_RACES = re.compile(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)")
_UNTOLD = re.compile(r"(ERROR SUMMARY: \d+ errors? (was|were) not printed|COMPUTE-SANITIZER|LEAK SUMMARY)")


def read_findings(text: str, most: int = 8, lines: int = 6) -> Findings:
    """Read the output of compute-sanitizer, with that of the program between.

    Args:
        text: standard output of both.
        most: reports that are kept.
        lines: of a report.
    """
    found = Findings()
    call, report = "", None
    for line in map(str.rstrip, text.splitlines()):
        if line.startswith(CALL):
            call = line
        if not line.startswith(PREFIX):
            continue
        said = line[len(PREFIX) :]
        if summary := _SUMMARY.search(said):
            found.errors, found.ended = found.errors + int(summary[1]), True
        elif races := _RACES.search(said):
            found.errors, found.warnings = found.errors + int(races[1]), found.warnings + int(races[2])
            found.ended = True
        elif not said.strip() or _UNTOLD.search(said):
            report = None
        elif not said.startswith("  "):
            # a report begins without indentation
            report = None
            if "Internal Sanitizer Error" in said:
                found.errors += 1
            found.by_call[call] = found.by_call.get(call, 0) + 1
            if len(found.reports) < most and (not call or found.by_call[call] == 1):
                report = [*([call] if call else []), said.strip()]
                found.reports.append(report)
        elif report is not None and len(report) < lines + 1 and "Host Frame" not in said:
            report.append(said.strip())
    return found
