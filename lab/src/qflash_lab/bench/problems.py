"""What is measured: attention problems and their inputs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from qflash.api import align_bias
from qflash.kernels import lengths
from qflash.specification.quantization import QuantizedTensor

from .workloads import WORKLOADS, get_workload

INPUTS = ("uniform", "normal")

LONG = ((4, 32, 1024, 64), (4, 32, 4096, 64), (2, 32, 16384, 64), (4, 16, 1024, 128), (4, 16, 4096, 128), (2, 16, 16384, 128))
"""The shapes that ``--workload long`` stands for."""

_EXACT_SCORES = 1 << 24
"""Scores that the float64 reference may hold at once (128 MiB); beyond that it is computed on a part."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention to time.

    Attributes:
        workload: ``"A1"`` to ``"A7"``, or the shape as text.
        batch: images, for a workload; None for a plain shape.
        shape: of the query, ``(batch, heads, queries, head_dim)``.
        keys: tokens of key and value.
        windows: windows an image has (a factor of ``shape[0]``): the period of the bias over the batch.
        causal: query i sees keys 0 to i.
        bias: an additive ``(windows, heads, queries, keys)`` bias.
    """

    workload: str
    batch: int | None
    shape: tuple[int, int, int, int]
    keys: int
    windows: int = 1
    causal: bool = False
    bias: bool = False

    @property
    def label(self) -> str:
        """Name for tables and plots, without the batch."""
        return self.workload + " causal" * self.causal + " bias" * self.bias

    @property
    def operations(self) -> int:
        """Multiply and add operations of both products, ``4 * batch * heads * head_dim`` a score; masked ones not counted."""
        batch, heads, queries, head_dim = self.shape
        scores = sum(min(i + 1, self.keys) for i in range(queries)) if self.causal else queries * self.keys
        return 4 * batch * heads * head_dim * scores


def parse_shape(text: str) -> tuple[tuple[int, int, int, int], int]:
    """Read ``"Z,H,N,D"`` or ``"Z,H,N,D,Nk"`` (commas or x); return ((batch, heads, queries, head_dim), keys).

    Raises:
        ValueError: not four or five positive integers.
    """
    try:
        numbers = [int(part) for part in text.replace("x", ",").split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (4, 5) or min(numbers) < 1:
        raise ValueError(f"shape must be Z,H,N,D or Z,H,N,D,Nk with positive integers, got {text!r}")
    batch, heads, queries, head_dim = numbers[:4]
    return (batch, heads, queries, head_dim), numbers[4] if len(numbers) == 5 else queries


def make_problems(
    workloads: Sequence[str], shapes: Sequence[str], batches: Sequence[int], *, causal: bool = False, bias: bool = False
) -> list[Problem]:
    """Return the problems to time: workloads at every batch, then fixed shapes; with ``bias`` each without and with it.

    Args:
        workloads: names of Table 1, ``"all"`` of them, or ``"long"``; all if neither these nor ``shapes`` are given.
        shapes: see :func:`parse_shape`.
        batches: images, for the workloads.
        causal: a causal mask in every problem.
        bias: excludes ``causal``.

    Raises:
        ValueError: an unknown workload, a bad shape or batch, or causal with bias.
    """
    if causal and bias:
        raise ValueError("causal and bias exclude each other: scaled_dot_product_attention takes one of them")
    names: list[str] = []
    fixed: list[tuple[tuple[int, int, int, int], int]] = []
    for name in workloads or (() if shapes else ("all",)):
        if name == "long":
            fixed += [(shape, shape[2]) for shape in LONG]
        elif name == "all":
            names += [workload.name for workload in WORKLOADS]
        else:
            try:
                names.append(get_workload(name).name)
            except ValueError:
                known = ", ".join(w.name for w in WORKLOADS)
                raise ValueError(f"workload must be one of {known}, all or long, got {name!r}") from None
    fixed += [parse_shape(text) for text in shapes]
    found = []
    for batch in batches:
        for name in names:
            workload = get_workload(name)
            found.append(Problem(name, batch, workload.shape(batch), workload.tokens, workload.windows, causal))
    for shape, keys in fixed:
        text = "x".join(map(str, shape)) + ("" if keys == shape[2] else f"x{keys}")
        found.append(Problem(text, None, shape, keys, 1, causal))
    if bias:
        found = [dataclasses.replace(problem, bias=with_bias) for problem in found for with_bias in (False, True)]
    return list(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A problem's query, key and value ``(batch, heads, tokens, head_dim)`` and bias ``(windows, heads, queries, keys)``.

    The bias has aligned rows (:func:`qflash.align_bias`), which every method gets.
    """

    problem: Problem
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None

    def folded(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return query, key, value and mask in four dimensions, as SDPA takes them.

        With a bias the windows of an image become heads (a view), so that the mask repeats over images by
        broadcasting. That favours SDPA, and so do its aligned rows, which spare the memory-efficient back end a copy in
        every call.
        """
        if self.bias is None:
            return self.query, self.key, self.value, None
        windows, heads, queries, keys = self.bias.shape
        mask = self.bias.reshape(1, windows * heads, queries, keys)
        query, key, value = (x.reshape(-1, windows * heads, *x.shape[2:]) for x in (self.query, self.key, self.value))
        return query, key, value, mask

    def nested(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, key and value; with a bias the windows are a dimension of their own, as in ``qflash.patch``."""
        if self.bias is None:
            return self.query, self.key, self.value
        query, key, value = (x.unflatten(0, (-1, len(self.bias))) for x in (self.query, self.key, self.value))
        return query, key, value


def swin_bias(windows: int, heads: int, queries: int, keys: int, generator: torch.Generator) -> torch.Tensor:
    """Draw the additive bias of a Swin layer: relative position bias and, between regions of shifted windows, -100.

    The table's entries are N(0, 1): trained ones reach a few units, fresh ones (0.02) would be no test. One
    window an image is not shifted, as in Swin's last stage. Where tokens and windows are no squares (ViT, plain
    shapes) every entry of the bias is N(0, 1).

    Returns:
        float32 ``(windows, heads, queries, keys)``, in nats.
    """
    side, across = math.isqrt(keys), math.isqrt(windows)
    if queries != keys or side * side != keys or across * across != windows:
        return torch.randn((windows, heads, queries, keys), generator=generator, dtype=torch.float32, device="cpu")
    table = torch.randn(((2 * side - 1) ** 2, heads), generator=generator, dtype=torch.float32, device="cpu")
    token = torch.arange(keys, dtype=torch.int64, device="cpu")
    rows, columns = token // side, token % side
    index = (rows[:, None] - rows + side - 1) * (2 * side - 1) + columns[:, None] - columns + side - 1
    bias = table[index].permute(2, 0, 1).repeat(windows, 1, 1, 1)
    if across > 1:
        size, shift = side * across, side // 2
        line = torch.arange(size, dtype=torch.int64, device="cpu")
        region = (line >= size - side).int() + (line >= size - shift).int()
        image = (3 * region[:, None] + region).reshape(across, side, across, side)
        parts = image.transpose(1, 2).reshape(windows, keys)
        bias += torch.where(parts[:, :, None] == parts[:, None, :], 0.0, -100.0)[:, None]
    return bias


def check_input(kind: str) -> None:
    """Require one of :data:`INPUTS`.

    Raises:
        ValueError: another value.
    """
    if kind not in INPUTS:
        raise ValueError(f"input must be one of {INPUTS}, got {kind!r}")


def make_inputs(problem: Problem, kind: str, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Inputs:
    """Draw a problem's tensors on the CPU (the same on every device).

    Args:
        problem: the shapes.
        kind: ``"uniform"`` in [-4, 4), as the paper's operator experiments, or ``"normal"``, N(0, 1).
        dtype: of all tensors.
        device: where they go.
        seed: of a generator of this call's own.

    Every length gets a kernel of its own from now on, as the one length of a model would.

    Raises:
        ValueError: another ``kind``.
    """
    check_input(kind)
    lengths.expect_all()
    generator = torch.Generator().manual_seed(seed)
    batch, heads, queries, head_dim = problem.shape

    def draw(tokens: int) -> torch.Tensor:
        shape = (batch, heads, tokens, head_dim)
        if kind == "normal":
            return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)
        return (torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu") * 8.0 - 4.0).to(device, dtype)

    query, key, value = draw(queries), draw(problem.keys), draw(problem.keys)
    bias = None
    if problem.bias:
        bias = align_bias(swin_bias(problem.windows, heads, queries, problem.keys, generator).to(device, dtype))
    return Inputs(problem, query, key, value, bias)


def exact_part(inputs: Inputs, most_scores: int = _EXACT_SCORES) -> tuple[torch.Tensor, tuple[slice, slice, slice], str]:
    """Return float64 softmax attention on as much of a problem as ``most_scores`` scores allow.

    Whole batch elements are dropped first, then heads, then query rows (every so many, over the whole length).

    Returns:
        the reference ``(batch, heads, queries, value_dim)`` of that part, the slices of the first three
        dimensions that it covers, and the part in words.
    """
    batch, heads, queries, _ = inputs.query.shape
    keys = inputs.key.shape[2]
    fitting = max(1, most_scores // (queries * keys))
    some_batch = min(batch, max(1, fitting // heads))
    some_heads = min(heads, fitting)
    step = max(1, -(-queries * keys // most_scores))
    part = slice(0, some_batch), slice(0, some_heads), slice(0, None, step)
    query = inputs.query[part].double()
    key, value = (x[part[:2]].double() for x in (inputs.key, inputs.value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if inputs.bias is not None:
        window = torch.arange(some_batch, dtype=torch.int64, device=query.device) % len(inputs.bias)
        scores += inputs.bias[window][:, part[1], part[2]].double()
    if inputs.problem.causal:
        row = torch.arange(queries, dtype=torch.int64, device=query.device)[part[2]]
        scores.masked_fill_(torch.arange(keys, dtype=torch.int64, device=query.device) > row[:, None], -math.inf)
    words = "whole"
    if (some_batch, some_heads, step) != (batch, heads, 1):
        words = f"batch {some_batch}/{batch}, heads {some_heads}/{heads}, every row" + (f" in {step}" if step > 1 else "")
    return torch.softmax(scores, dim=-1) @ value, part, words


class Scaled(NamedTuple):
    """An output in float8: what it stands for is ``values * scale``."""

    values: torch.Tensor
    scale: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """Return what it stands for, in float32."""
        return self.values.float() * self.scale


def as_tensor(out: object, problem: Problem) -> torch.Tensor:
    """Return a method's output as ``(batch, heads, queries, value_dim)``, dequantised.

    Raises:
        TypeError: not a tensor.
        ValueError: of another size.
    """
    if isinstance(out, QuantizedTensor | Scaled):
        out = out.dequantize()
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"the method returned {type(out).__name__}, a tensor is needed")
    if out.numel() != math.prod(problem.shape):
        raise ValueError(f"the method returned shape {tuple(out.shape)} for query {problem.shape}")
    return out.reshape(problem.shape)
