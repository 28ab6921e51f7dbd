"""Constants and groups of arguments that the portable attention kernels take (nothing of Triton)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..launch_arguments import CONSTANT
from ..launch_recorder import kernel_arguments


@dataclasses.dataclass(frozen=True)
class Heads:
    """Sizes of a head, which a kernel pads to powers of two.

    Attributes:
        GROUP: heads of query that share those of key and value.
        HEAD_DIM, VALUE_DIM: channels of query and key, and of value.
        BLOCK_D, BLOCK_DV: these, padded.
    """

    GROUP: int
    HEAD_DIM: int
    VALUE_DIM: int
    BLOCK_D: int
    BLOCK_DV: int


@dataclasses.dataclass(frozen=True)
class Masking:
    """Which keys take part.

    Attributes:
        MASK: its kind, see :attr:`qflash.specification.attention_call.AttentionCall.mask_kind`.
        MASK_PERIOD: batch elements after which it repeats; 0 if it does not.
        CAUSAL: keys behind a query take no part.
        CHECK: some key may take no part.
    """

    MASK: str
    MASK_PERIOD: int
    CAUSAL: bool
    CHECK: bool


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """What a recipe and the sizes say of the arithmetic (:func:`..launch_arguments.kernel_constants`).

    Attributes:
        QUADRATIC, BITS, NEAREST, OFFSET: the exponential, bits of probabilities, their rounding, and the offset t0.
        ONLINE: one pass over the keys (``normalization="online"``).
        EXACT: the row sum is that of probabilities before rounding.
        FLOOR_OUTPUT: outputs are rounded down to the unit of the values.
        COLUMN_BITS, MOST, MOST_BITS: of multipliers: bits of one for each key, the largest, and its bits.
    """

    QUADRATIC: bool
    BITS: int
    NEAREST: bool
    OFFSET: int
    ONLINE: bool
    EXACT: bool
    FLOOR_OUTPUT: bool
    COLUMN_BITS: int
    MOST: int
    MOST_BITS: int


@dataclasses.dataclass(frozen=True)
class Given:
    """How tensors and their scales are given.

    Attributes:
        QUANTIZE: query, key and value are float, their scales are found by the kernel and the output is float.
        CENTER: with QUANTIZE keys are centred.
        PLACES: with QUANTIZE tokens of key and value are taken from places (:mod:`.triton.unseen_tokens`).
        QUERY_TOKEN, KEY_TOKEN, VALUE_CHANNEL, OUTPUT_CHANNEL: a scale for each token or channel, instead of one for all.
        VALUE_OFFSET: float outputs get an offset per channel; with QUANTIZE the values are centred.
        VALUE_ROWS: channels of V are neighbours, not its keys.
    """

    QUANTIZE: bool
    CENTER: bool
    PLACES: bool
    QUERY_TOKEN: bool
    KEY_TOKEN: bool
    VALUE_CHANNEL: bool
    OUTPUT_CHANNEL: bool
    VALUE_OFFSET: bool
    VALUE_ROWS: bool


@dataclasses.dataclass(frozen=True)
class Reach:
    """What long rows take (:func:`.triton.attention_streaming.long_kernel`).

    Attributes:
        VALUE_SUMS: the sums of V's channels are given.
        WIDE_SUMS: rows are added up in sections.
        WIDE_OFFSETS: tensors reach further than 32-bit offsets.
        VARLEN: sequences are packed.
    """

    VALUE_SUMS: bool
    WIDE_SUMS: bool
    WIDE_OFFSETS: bool
    VARLEN: bool


_CONSTANTS = {"HEADS": Heads, "MASKING": Masking, "ARITHMETIC": Arithmetic, "GIVEN": Given, "REACH": Reach}
_STRIDES = (
    *(f"{name}_stride_{axis}" for name in "qkvo" for axis in "zhnd"),
    *(f"{name}_stride_{axis}" for name in ("qs", "ks") for axis in "zhn"),
    *(f"{name}_stride_{axis}" for name in ("vs", "os", "vo") for axis in "zhd"),
    *(f"mask_stride_{axis}" for axis in "zhmn"),
)
RESIDENT_GROUPS = {"strides": _STRIDES, "numbers": ("place_stride_z", "place_stride_h", "queries", *CONSTANT)}
STREAMING_GROUPS = {"strides": _STRIDES, "numbers": ("queries", "keys", "parts", "inverse_count", *CONSTANT)}
"""What :mod:`.triton.attention_resident` and :mod:`.triton.attention_streaming` take as tuples."""


def attention_arguments(kernel: Any, arguments: Mapping[str, Any], groups: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return a portable attention kernel's arguments, constants as objects; those that are not there are False."""
    made = {
        name: of(**{field.name: arguments.get(field.name, False) for field in dataclasses.fields(of)})
        for name, of in _CONSTANTS.items()
    }
    return kernel_arguments(kernel, {**arguments, **made}, groups)
