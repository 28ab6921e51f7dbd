"""Constants that attention kernels are compiled for, some to a parameter (nothing of Gluon)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is computed.

    Attributes:
        QUANTIZE: query, key and value are float, their scales are found by the kernel and the output is float.
        CENTER: with QUANTIZE keys are centred.
        QUERY_TOKEN, VALUE_CHANNEL, OUTPUT_CHANNEL: a scale for each query and each channel, instead of one for all.
        VALUE_OFFSET: float outputs get an offset per channel; with QUANTIZE the values are centred.
        EXACT: the row sum is that of probabilities before rounding.
        OFFSET, MOST, MOST_BITS: of exponents: the offset t0; the largest multiplier and its bits.
        MASK: what is added to scores: "none" or "bias".
    """

    QUANTIZE: bool
    CENTER: bool
    QUERY_TOKEN: bool
    VALUE_CHANNEL: bool
    OUTPUT_CHANNEL: bool
    VALUE_OFFSET: bool
    EXACT: bool
    OFFSET: int
    MOST: int
    MOST_BITS: int
    MASK: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """How programs of :mod:`.sm90.attention_resident` share the work, and how each does its part.

    Attributes:
        LOOPS: a program takes more than one block of queries.
        TAIL: places for tail queries past whole blocks, 8 or 16; 0 if there are none or they are a block.
        ACROSS: warps that share sixteen queries; each has a part of the keys of the scores and of the channels of the outputs.
        SUMS: how the storage offset is corrected by -127 times the sums of V's channels. Products with V "begin" at them, they
            are added at the "end", or they are "products" of V with -127 in every block.
        UNROLL: tiles of 128 keys an iteration where keys are passed over twice; 0 where registers hold the scores.
        BLOCKS, HEADS: blocks a head and heads a batch element where programs pass from head to head; else 0.
        SPREAD: the first programs of all heads come before the second ones.
        PLACES: (float) tokens of key and value are taken from the places at ``place_ptr`` (:mod:`.triton.unseen_tokens`).
        PERIOD: batch elements after which a mask and the places repeat, or 0 if there is one for each or for all.
        POLICY: the L2 eviction policy of what is read.
        DEPENDENT: see :func:`..heuristics.dependent_launch`.
    """

    LOOPS: bool
    TAIL: int
    ACROSS: int
    SUMS: str
    UNROLL: int
    BLOCKS: int
    HEADS: int
    SPREAD: bool
    PLACES: bool = False
    PERIOD: int = 0
    POLICY: str = ""
    DEPENDENT: str = ""


@dataclasses.dataclass(frozen=True)
class Ring:
    """How keys and values pass through shared memory in :mod:`.sm90.attention_streaming`.

    Attributes:
        SPAN: keys of a step.
        UNROLL: steps an iteration: 1, or 2 if their number is even.
        LEFT: columns of the last step.
        WHOLE: the last step has SPAN keys.
        VARLEN: a batch element is a sequence of packed tensors; the last step is as wide as all.
        PERIOD: batch elements after which a mask repeats, or 0 if there is one for each or for all.
    """

    SPAN: int
    UNROLL: int
    LEFT: int
    WHOLE: bool
    VARLEN: bool
    PERIOD: int = 0


@dataclasses.dataclass(frozen=True)
class WindowPlan:
    """How programs of :mod:`.windows.attention` share windows, and how each does its part.

    Attributes:
        SPLITS: programs that share a window's queries.
        SEVERAL: a program has several windows.
        STAGED: it brings their bias to shared memory once.
        TOGETHER: columns of the grid have pieces of work, ordered so that those with the same bias are neighbours.
        DIVIDED: each of four warps loads a quarter of the values, or from floats of keys and values, and they exchange them.
        ONE_SCALE: (int8) query, key, value and output have one scale each for the whole tensor.
        ALIGNED: rows of the bias begin at multiples of four elements.
        PLACES: (float) tokens of key and value are taken from the places at ``place_ptr`` (:mod:`.triton.unseen_tokens`).
        POLICY: the L2 eviction policy of query, key, value and output, unless they are DIVIDED.
        DEPENDENT: see :func:`..heuristics.dependent_launch`.
    """

    SPLITS: int
    SEVERAL: bool
    STAGED: bool
    TOGETHER: bool
    DIVIDED: bool
    ONE_SCALE: bool
    ALIGNED: bool
    PLACES: bool
    POLICY: str
    DEPENDENT: str


@dataclasses.dataclass(frozen=True)
class Strides:
    """Strides of tensors, in elements: z of batch elements, h of heads, n of tokens, d of channels.

    Attributes:
        q, k, v, o: (z, h, n).
        qs, ks: of scales of queries and of keys, (z, h, n).
        vs, os, vo: of scales of values and outputs, and of offsets, (z, h, d).
        mask: of a bias, (z, h, m, n).
        place: of the places of tokens, (z, h).

    Kernels that are compiled for the strides of rows alone have (n,) of each tensor, and (m, n) of a bias.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    o: tuple[int, ...]
    qs: tuple[int, ...] = ()
    ks: tuple[int, ...] = ()
    vs: tuple[int, ...] = ()
    os: tuple[int, ...] = ()
    vo: tuple[int, ...] = ()
    mask: tuple[int, ...] = ()
    place: tuple[int, ...] = ()


def recipe_of(arguments: Mapping[str, Any]) -> Recipe:
    """Return the constants of :class:`Recipe` among the arguments of a call; those that are not there are False."""
    return Recipe(**{field.name: arguments.get(field.name, False) for field in dataclasses.fields(Recipe)})


def row_strides_of(arguments: Mapping[str, Any]) -> Strides:
    """Return the strides of rows among a launch's arguments, those of a bias, too, if there is any."""
    rows = {name: (arguments[f"{name}_stride_n"],) for name in "qkvo"}
    return Strides(**rows, mask=tuple(arguments.get(f"mask_stride_{axis}", 0) for axis in "mn"))


def strides_of(arguments: Mapping[str, Any], scales: bool) -> Strides:
    """Return the strides among a launch's arguments, those of scales, too, if there are any."""

    def strides(name: str, axes: str) -> tuple[int, ...]:
        return tuple(arguments[f"{name}_stride_{axis}"] for axis in axes)

    tensors = {name: strides(name, "zhn") for name in "qkvo"}
    for name, axes in (("mask", "zhmn"), ("place", "zh")):
        if f"{name}_stride_z" in arguments:
            tensors[name] = strides(name, axes)
    if scales:
        tensors |= {name: strides(name, "zhn" if name in ("qs", "ks") else "zhd") for name in ("qs", "ks", "vs", "os", "vo")}
    return Strides(**tensors)
