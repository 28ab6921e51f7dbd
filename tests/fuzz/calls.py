"""Draws calls of the public operators. A call is a small frozen value, which shrinks; its numbers come from a seed."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import torch
from hypothesis import strategies as st

import qflash
from helpers import LAYOUTS, lay_out, move_far
from qflash.specification.fixed_point import SECTION_KEYS
from qflash.specification.recipe import _CHOICES, PRESETS, Recipe

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KINDS = (
    "normal", "uniform", "loud channel", "outlier", "constant", "zeros", "zero tokens", "huge", "tiny", "offset",
    "large offset", "steps", "loud",
)  # fmt: skip
MASKS = ("none", "causal", "padding", "bool", "bias", "padding bias", "far")
_EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 49, 63, 64, 65, 127, 128, 129, 197, 255, 256, 257, 300)
_CHANNELS = (1, 3, 8, 15, 16, 17, 32, 33, 48, 63, 64, 65, 72, 80, 96, 128, 160, 255, 256)
MOST_WORK = 1 << 21
"""Multiply-adds of a call, at most."""
INTERPRETED_WORK = 1 << 16
"""The same in Triton's interpreter."""


def numbers(kind: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Draw a tensor (batch, heads, tokens, channels) of one of :data:`KINDS`; finite in every dtype."""
    x = torch.randn(shape, generator=generator)
    spot = [int(torch.randint(size, (), generator=generator)) for size in shape]
    if kind == "uniform":
        x = torch.rand(shape, generator=generator) * 8 - 4
    elif kind == "loud channel":
        x[..., spot[-1]] *= 100
    elif kind == "outlier":
        x[tuple(spot)] = 1000
    elif kind == "constant":
        x = torch.full(shape, 7.3)
    elif kind == "zeros":
        x = torch.zeros(shape)
    elif kind == "zero tokens":
        x[torch.rand(shape[:-1], generator=generator) < 0.2] = 0
    elif kind == "huge":
        x = x.sign() * (torch.rand(shape, generator=generator) * 5e4 + 1e4)
    elif kind == "tiny":
        x = x * 1e-6
    elif kind == "offset":
        x = x + torch.randn((1, 1, 1, shape[-1]), generator=generator) * 10
    elif kind == "large offset":
        x = x + 1000
    elif kind == "steps":
        x = (x * 4).round() / 4
    elif kind == "loud":
        x = x * 2.0 ** int(torch.randint(1, 12, (), generator=generator))
    return x.to(dtype)


def place(x: torch.Tensor, layout: str, offset: int) -> torch.Tensor:
    """Return ``x`` in other strides, ``offset`` elements into its memory; see :func:`helpers.lay_out`."""
    if layout == "expanded":
        return place(x[:1], "contiguous", offset).expand(x.shape)
    x = lay_out(x, layout)
    last = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    memory = torch.ones(last + offset, dtype=x.dtype)
    return memory.as_strided(x.shape, x.stride(), offset).copy_(x)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of :func:`qflash.attention`."""

    batch: int
    key_heads: int
    group: int
    """Query heads of a key head."""
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    recipe: Recipe
    mask: str
    mask_dims: tuple[bool, bool]
    """Whether a mask differs between batch elements, and between heads."""
    layouts: tuple[str, str, str, str]
    """Of query, key, value and mask."""
    offsets: tuple[int, int, int, int]
    kinds: tuple[str, str, str]
    scale: float | None
    seed: int

    @property
    def heads(self) -> int:
        """Heads of query."""
        return self.key_heads * self.group

    @property
    def factor(self) -> float:
        """The softmax scale."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments besides mask and back end."""
        return {"is_causal": self.mask == "causal", "scale": self.scale, "enable_gqa": True, "recipe": self.recipe}

    def tensors(self, more: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return query, key, value and mask; ``more`` picks other numbers of the same kinds."""
        generator = torch.Generator().manual_seed(self.seed + more)
        shapes = (
            (self.batch, self.heads, self.queries, self.head_dim),
            (self.batch, self.key_heads, self.keys, self.head_dim),
            (self.batch, self.key_heads, self.keys, self.value_dim),
        )
        query, key, value = (
            place(numbers(kind, shape, self.dtype, generator), layout, offset)
            for kind, shape, layout, offset in zip(self.kinds, shapes, self.layouts, self.offsets, strict=False)
        )
        return query, key, value, self._mask(generator)

    def _mask(self, generator: torch.Generator) -> torch.Tensor | None:
        if self.mask in ("none", "causal"):
            return None
        rows = 1 if self.mask.startswith("padding") else self.queries
        batch, heads = self.mask_dims
        shape = (self.batch if batch else 1, self.heads if heads else 1, rows, self.keys)
        keep = torch.rand(shape, generator=generator) < (0.1, 0.6, 0.95)[int(torch.randint(3, (), generator=generator))]
        mask = keep
        if self.mask not in ("padding", "bool"):
            bias = torch.randn(shape, generator=generator) * 3
            if self.mask == "far":
                poison = torch.rand(shape, generator=generator) < 0.005
                bias = torch.where(poison, math.nan, move_far(bias, generator))
                bias = bias.clamp(torch.finfo(self.dtype).min, torch.finfo(self.dtype).max)
            mask = torch.where(keep, bias, -math.inf).to(self.dtype)
        return place(mask, self.layouts[3], self.offsets[3])

    def run(self, backend: str, tensors: tuple[torch.Tensor | None, ...] | None = None) -> torch.Tensor:
        """Make the call, on other tensors if they are given."""
        query, key, value, mask = self.tensors() if tensors is None else tensors
        return qflash.attention(query, key, value, mask, **self.options, backend=backend)


def sizes(edges: tuple[int, ...], most: int) -> st.SearchStrategy[int]:
    """Draw a size, mostly next to the edges of blocks."""
    near = st.sampled_from([edge for edge in edges if edge <= most])
    return st.one_of(near, near, st.integers(1, most))


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Draw a preset, or every field."""
    if draw(st.integers(0, 2)) == 0:
        return draw(st.sampled_from([PRESETS["default"], PRESETS["accurate"], PRESETS["paper"]]))
    fields = {name: draw(st.sampled_from(allowed)) for name, allowed in _CHOICES.items()}
    if fields["normalization"] == "online" and draw(st.booleans()):
        # few drawn fields would go together with it
        fields["normalization"] = "two_pass"
    if fields["normalization"] == "online":
        fields |= {"exponential": "linear", "probability_bits": 7}
    if fields["output"] == "value_scale" and fields["probability_bits"] == 15:
        fields["output"] = "accumulator"
    return Recipe(**fields)


@st.composite
def calls(
    draw: st.DrawFn,
    masks: tuple[str, ...] = MASKS,
    kinds: tuple[str, ...] = KINDS,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    recipe: st.SearchStrategy[Recipe] | None = None,
    work: int = MOST_WORK,
) -> Call:
    """Draw a call with at most ``work`` multiply-adds.

    Args:
        masks, kinds, dtypes: of which to draw.
        recipe: draws recipes, :func:`recipes` if None.
    """
    most = 300 if work == MOST_WORK else 80
    batch, key_heads, group = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 2, 3)))
    keys = draw(sizes(_EDGES, most))
    queries = keys if draw(st.booleans()) else draw(sizes(_EDGES, most))
    head_dim = draw(sizes(_CHANNELS, 256 if work == MOST_WORK else 64))
    value_dim = head_dim if draw(st.booleans()) else draw(sizes(_CHANNELS, 256 if work == MOST_WORK else 64))

    def excess() -> bool:
        return batch * key_heads * group * queries * keys * (head_dim + value_dim) > work

    if excess():
        batch = group = 1
    if excess():
        key_heads = 1
    while excess():
        queries, keys = (queries // 2, keys) if queries > 16 else (queries, keys // 2)
    layouts = st.sampled_from(LAYOUTS)
    return Call(
        batch=batch,
        key_heads=key_heads,
        group=group,
        queries=max(queries, 1),
        keys=max(keys, 1),
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=draw(st.sampled_from(dtypes)),
        recipe=draw(recipes() if recipe is None else recipe),
        mask=draw(st.sampled_from(masks)),
        mask_dims=(draw(st.booleans()), draw(st.booleans())),
        layouts=tuple(draw(layouts) for _ in range(4)),
        offsets=tuple(draw(st.sampled_from((0, 1, 3, 8))) for _ in range(4)),
        kinds=tuple(draw(st.sampled_from(kinds)) for _ in range(3)),
        scale=draw(st.sampled_from((None, None, 0.01, 1.0, 3.7))),
        seed=draw(st.integers(0, 1 << 20)),
    )


@dataclasses.dataclass(frozen=True)
class IntegerCall:
    """A call of :func:`qflash.int8_attention`."""

    call: Call
    granularities: tuple[str, str, str]
    extreme: bool
    """All of int8 and unrelated scales, instead of quantised numbers."""
    center: bool
    """The value has an offset."""
    fixed: bool
    """A float mask is given in fixed point."""
    out_dtype: torch.dtype | None
    output_scale: str
    """Of an int8 output: the value's, a number, or one for each head and channel."""

    def tensors(self) -> tuple[tuple[qflash.QuantizedTensor, ...], torch.Tensor | None]:
        """Return query, key and value, and the mask."""
        *floats, mask = self.call.tensors()
        generator = torch.Generator().manual_seed(self.call.seed)
        found = []
        for index, (x, granularity) in enumerate(zip(floats, self.granularities, strict=True)):
            center = self.center and index == 2
            one = qflash.quantize(x, granularity, center=center, backend="reference")
            if self.extreme:
                values = torch.randint(-128, 128, x.shape, generator=generator, dtype=torch.int8)
                scale = torch.exp2(torch.randn(one.scale.shape, generator=generator) * 3 - 6)
                one = qflash.QuantizedTensor(values, scale, one.offset)
            values = place(one.values, self.call.layouts[index], self.call.offsets[index])
            found.append(qflash.QuantizedTensor.from_kernel(values, one.scale, one.offset))
        if self.fixed and mask is not None and mask.is_floating_point():
            mask = qflash.quantize_bias(mask)
        return tuple(found), mask

    def run(self, backend: str) -> tuple[torch.Tensor, ...]:
        """Make the call; return its output, or the parts of its int8 output."""
        tensors, mask = self.tensors()
        output_scale: Any = None
        if self.out_dtype is None and self.output_scale != "value":
            output_scale = float(tensors[2].scale.max()) * 0.37
            if self.output_scale == "channel":
                spread = torch.linspace(0.5, 3, self.call.heads * self.call.value_dim)
                output_scale = output_scale * spread.view(1, self.call.heads, 1, self.call.value_dim)
        options = self.call.options | {"output_scale": output_scale, "out_dtype": self.out_dtype}
        out = qflash.int8_attention(*tensors, mask, **options, backend=backend)
        if isinstance(out, torch.Tensor):
            return (out,)
        return tuple(x for x in (out.values, out.scale, out.offset) if x is not None)


@st.composite
def integer_calls(draw: st.DrawFn, masks: tuple[str, ...] = MASKS, work: int = MOST_WORK) -> IntegerCall:
    """Draw a call on int8 tensors of one of ``masks`` and with at most ``work`` multiply-adds."""
    rows = st.sampled_from(("tensor", "head", "token"))
    return IntegerCall(
        call=draw(calls(masks, work=work)),
        granularities=(draw(rows), draw(rows), draw(st.sampled_from(("tensor", "head", "channel")))),
        extreme=draw(st.booleans()),
        center=draw(st.booleans()),
        fixed=draw(st.booleans()),
        out_dtype=draw(st.sampled_from((None, None, *DTYPES))),
        output_scale=draw(st.sampled_from(("value", "number", "channel"))),
    )


@dataclasses.dataclass(frozen=True)
class PackedCall:
    """A call of :func:`qflash.varlen_attention`; sequences have lengths of their own, and all else is ``call``'s."""

    call: Call
    lengths: tuple[tuple[int, int], ...]
    """Queries and keys of each sequence."""
    slack: tuple[int, int]
    """By how much more than the longest sequence the arguments say there may be."""
    wide: bool
    """Cumulative lengths are int64."""

    def arguments(self) -> tuple[Any, ...]:
        """Return the seven arguments by position."""
        generator = torch.Generator().manual_seed(self.call.seed)
        queries, keys = zip(*self.lengths, strict=True)
        heads = self.call.heads, self.call.key_heads, self.call.key_heads
        channels = self.call.head_dim, self.call.head_dim, self.call.value_dim
        tensors = []
        for index, (tokens, count, width) in enumerate(zip((sum(queries), sum(keys), sum(keys)), heads, channels, strict=True)):
            shape = (1, count, max(tokens, 1), width)
            x = numbers(self.call.kinds[index], shape, self.call.dtype, generator)
            tensors.append(place(x, self.call.layouts[index], self.call.offsets[index])[0, :, :tokens].transpose(0, 1))
        cumulative = [torch.tensor([0, *itertools.accumulate(each)]) for each in (queries, keys)]
        if not self.wide:
            cumulative = [x.to(torch.int32) for x in cumulative]
        return *tensors, *cumulative, max(queries) + self.slack[0], max(keys) + self.slack[1]

    def run(self, backend: str) -> torch.Tensor:
        """Make the call."""
        return qflash.varlen_attention(*self.arguments(), **self.call.options, backend=backend)

    def separately(self) -> torch.Tensor:
        """Return what calls of the reference give, one for each sequence."""
        query, key, value, cu_q, cu_k, *_ = self.arguments()
        outputs = []
        for i in range(len(self.lengths)):
            parts = [x[c[i] : c[i + 1]].transpose(0, 1)[None] for x, c in ((query, cu_q), (key, cu_k), (value, cu_k))]
            out = qflash.attention(*parts, **self.call.options, backend="reference")
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)


@st.composite
def packed_calls(draw: st.DrawFn, work: int = MOST_WORK) -> PackedCall:
    """Draw packed sequences, with none, one or many tokens beside one another.

    What a back end chooses for all of them has to be right for each. So in every second call there is a scale for each key,
    scores so large that their exponents have few fraction bits, and outputs of full precision: there what one sequence has to
    do with another shows. The longest sequence may be said to be longer than it is.
    """
    length = st.one_of(st.sampled_from((0, 1, 1, 2)), sizes(_EDGES, 70 if work == MOST_WORK else 20))
    masks, fine = ("none", "causal"), recipes().map(lambda recipe: recipe.replace(key_granularity="token"))
    shown = calls(masks, ("loud",), (torch.float32,), fine, work)
    return PackedCall(
        call=draw(st.one_of(calls(masks, work=work), shown)),
        lengths=tuple(draw(st.lists(st.tuples(length, length), min_size=1, max_size=5))),
        slack=(draw(st.sampled_from((0, 0, 1, 64))), draw(st.sampled_from((0, 0, 1, 64, SECTION_KEYS)))),
        wide=draw(st.booleans()),
    )
