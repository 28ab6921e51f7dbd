"""Types and widths of what PTX computes with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

LANES = 32

SHARED = 0x1000
"""Where shared memory begins."""

Bits = np.ndarray

Step = Callable[[Any], str | None]
"""What an instruction does to a warp; returns why the warp stops, if it does."""

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}

SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}

WIDTH = {
    "pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32, "u32": 32,
    "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "b64": 64, "u64": 64, "s64": 64, "f32x2": 64,
    "s16x2": 32, "u16x2": 32,
}  # fmt: skip
