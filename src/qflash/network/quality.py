"""How close an integer network is to its float model: :class:`Quality`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from ..specification.texts import is_token

MOST_DB = 200.0
"""Stands for no error at all, and less it for nothing but error."""


def sqnr_db(want: torch.Tensor, got: torch.Tensor) -> float:
    """Return the signal-to-quantisation-noise ratio in dB, from -200 to 200; NaN and infinity in ``got`` give -200.

    Args:
        want: exact.
        got: of the same number of elements.
    """
    want = want.to(torch.float64)
    noise = float(((got.reshape(want.shape).to(want) - want) ** 2).sum())
    signal = float((want**2).sum())
    if noise == 0:
        return MOST_DB
    if signal == 0 or not math.isfinite(noise):
        return -MOST_DB
    return min(MOST_DB, max(-MOST_DB, 10 * math.log10(signal / noise)))


def of_tokens(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return x with zeros in the places of texts that hold no token, if it has rows of places.

    Args:
        x: (batch, tokens, ...), or something else, which stays.
        ids: of tokens, (batch, tokens), negative where there is none; or images, with which all stays.
    """
    if ids.dim() != 2 or x.dim() < 3 or x.shape[:2] != ids.shape:
        return x
    return x.masked_fill(~is_token(ids).to(x.device).view(*ids.shape, *[1] * (x.dim() - 2)), 0)


@dataclasses.dataclass(frozen=True)
class Quality:
    """An integer network's output beside its float model's, on calibration images.

    Attributes:
        sqnr_db: signal-to-quantisation-noise ratio of the output over all images, in dB; 200 where it is exact.
        worst_image_db: the least of any one image.
        saturated_share: of the int8 activations of these images, those that lay beyond int8 and were clipped, 0 to 1.
        images: how many there were.
        held_out: whether the ranges of activations were found on other images.
        float_parts: names of parts that are kept in floating point.

    Raises:
        ValueError: a number is out of its range.
        TypeError: an attribute is of another type.
    """

    sqnr_db: float
    worst_image_db: float
    saturated_share: float
    images: int
    held_out: bool
    float_parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least, most in (
            ("sqnr_db", -MOST_DB, MOST_DB), ("worst_image_db", -MOST_DB, MOST_DB), ("saturated_share", 0.0, 1.0),
            ("images", 1, 1 << 53),
        ):  # fmt: skip
            number = getattr(self, name)
            if type(number) is not (int if name == "images" else float):
                raise TypeError(f"{name} of quality must be a number, got {number!r}")
            if not least <= number <= most:
                raise ValueError(f"{name} of quality must be from {least} to {most}, got {number}")
        if type(self.held_out) is not bool:
            raise TypeError(f"held_out of quality must be True or False, got {self.held_out!r}")
        if not isinstance(self.float_parts, tuple) or not all(isinstance(name, str) for name in self.float_parts):
            raise TypeError(f"float_parts of quality must be names, got {self.float_parts!r}")

    @classmethod
    def from_header(cls, entry: Any) -> Quality:
        """Return what ``dataclasses.asdict`` made of one, as JSON gives it back.

        Raises:
            ValueError: it is not such a dictionary.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(entry, dict) or entry.keys() != names or not isinstance(entry["float_parts"], list):
            raise ValueError(f"quality must have the entries {sorted(names)}, is {str(entry)[:80]}")
        try:
            return cls(**{**entry, "float_parts": tuple(entry["float_parts"])})
        except TypeError as error:
            raise ValueError(str(error)) from error

    def __str__(self) -> str:
        which = "that the ranges did not see" if self.held_out else "that the ranges saw"
        return (
            f"{self.sqnr_db:.1f} dB on {self.images} images {which} (the worst {self.worst_image_db:.1f} dB), "
            f"{100 * self.saturated_share:.2g} % of int8 activations saturated"
            + f", in floating point: {', '.join(self.float_parts)}"
            * bool(self.float_parts)
        )
