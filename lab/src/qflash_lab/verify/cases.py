"""What is compiled and read: named cases, and whatever the operators launch."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import itertools
import re
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from qflash.kernels.launch_recorder import KernelLaunch, each_argument
from qflash.specification.attention_call import float_call, int8_call
from qflash.specification.layers import ACTIVATIONS
from qflash.specification.memory_format import empty_bias
from qflash.specification.quantization import scale_shape
from qflash.specification.recipe import PAPER, PRESETS, Recipe, resolve_recipe

FLOATS = ("float16", "bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class Case:
    """One launch of an attention call, which is compiled and read.

    Attributes:
        name: what ``--case`` takes.
        tokens: keys, and queries unless ``queries`` says otherwise.
        head_dim: channels of query and key, and of value unless ``value_dim`` says otherwise.
        recipe: a preset's name or a recipe; it also sets the granularity of the scales.
        mask: ``"none"``, ``"causal"``, ``"bool"`` (batch, 1, N, N), ``"bias"`` (1, heads, N, N) or ``"windows"``: a bias of
            (windows, heads, N, N) that repeats over the batch, as Swin's, with aligned rows. A bias is in fixed point where
            the input is int8.
        granularity: one granularity for all scales instead of the recipe's.
        key_heads: heads of key and value, fewer than query's 4 for grouped queries.
        batch: batch elements; the tiles depend on it.
        queries: their number if it is not that of the keys.
        value_dim: channels of value if they are not query's.
        input: ``"int8"`` or the name of a float dtype: then the call quantises, too.
        output: the same of the output.
        layout: ``"contiguous"``, ``"packed"`` (views of one projection) or ``"misaligned"`` (rows that begin anywhere), or
            ``"varlen"``: sequences of up to so many tokens, packed, of which all but attention is PyTorch's.
        launch: which of the call's launches.
    """

    name: str
    tokens: int
    head_dim: int
    recipe: str | Recipe = "default"
    mask: str = "none"
    granularity: str | None = None
    key_heads: int = 4
    batch: int = 8
    queries: int | None = None
    value_dim: int | None = None
    input: str = "int8"
    output: str = "int8"
    layout: str = "contiguous"
    launch: int = -1


@dataclasses.dataclass(frozen=True)
class LayerCase:
    """One launch of a layer of an integer network.

    Attributes:
        name: what ``--case`` takes.
        tokens: rows.
        inputs: channels of a row.
        outputs: of a linear layer; 0 for a normalisation.
        epilogue: of a linear layer: ``"none"``, ``"residual"`` or an activation.
        output: dtype of the output.
        input: of a linear layer's input, ``"int8"`` or ``"int16"``.
        layout: ``"contiguous"`` or ``"misaligned"`` (the activations begin anywhere).
        moved: of linear layers ``"windows"``, whose tokens go to other places, ``"patches"``, of images, or ``"gated"``, whose
            outputs' halves are multiplied; of a normalisation the tokens that a row is joined of; ``"mean"`` is the mean over
            49 tokens, ``"gated"`` without outputs a product of the inputs' halves, ``"rotary"`` rotary positions of 201 tokens
            with heads of 64 channels.
        launch: which of the call's launches.
        settled: the weights are, see :mod:`qflash.kernels.settled`.
    """

    name: str
    tokens: int
    inputs: int
    outputs: int = 0
    epilogue: str = "none"
    output: str = "int8"
    layout: str = "contiguous"
    moved: str | int | None = None
    launch: int = -1
    input: str = "int8"
    settled: bool = False


AnyCase: TypeAlias = Case | LayerCase

CASES: tuple[AnyCase, ...] = (
    Case("vit", 197, 64),  # A1-A3: DeiT-T/S/B differ only in the number of heads, which is no constant of the kernel
    Case("vit-hundreds", 197, 64, batch=128),  # of heads: one program each, with a tail of a few queries on Hopper
    Case("vit-257", 257, 64, batch=128),  # CLIP, DINOv2: a whole row in registers, on Hopper alone
    Case("class-token", 197, 64, batch=8, queries=1),  # of the last block
    Case("vit-577", 577, 64, batch=128),  # 384 pixels: every score is computed twice there
    Case("vit-1370", 1370, 64, batch=24),  # DINOv2, 518 pixels: programs there go from head to head
    Case("vit-785-few", 785, 64, batch=1, input="float16", output="float16"),  # one image: two warps share sixteen queries
    Case("vit-bool-tensor", 197, 64, mask="bool", granularity="tensor"),
    Case("vit-bias", 197, 64, mask="bias"),
    Case("vit-80", 197, 80),
    Case("vae-512", 4096, 512, batch=1),  # one head of all channels, as in autoencoders of diffusion models
    Case("vit-257-80", 257, 80, batch=128),  # ViT-H: channels in two spans on Hopper
    Case("vit-729-72", 729, 72, batch=256),  # SigLIP, 384 pixels: both, and rows that are read twice
    Case("vit-paper", 197, 64, recipe="paper"),
    Case("vit-accurate", 197, 64, recipe="accurate"),
    Case("swin", 49, 32),  # A4-A7: the four stages differ only in windows and heads
    Case("swin-bool", 49, 32, mask="bool"),
    Case("swin-windows", 49, 32, mask="windows"),
    Case("swin-thousands", 49, 32, mask="windows", batch=1024),  # a program takes several windows with the same bias
    Case("swin-causal", 49, 32, mask="causal"),
    Case("long-64", 4096, 64),
    Case("long-128", 4096, 128),
    Case("long-causal-gqa", 4096, 64, mask="causal", key_heads=1),
    Case("long-accurate", 4096, 64, recipe="accurate"),
    Case("longest", 1 << 20, 64, batch=1, queries=1024),  # sums in 64 bits
    Case("varlen", 1024, 64, input="float16", output="float16", layout="varlen"),
    Case("varlen-short", 200, 64, input="float16", output="float16", layout="varlen"),
    Case("varlen-accurate", 1024, 64, recipe="accurate", input="float16", output="float16", layout="varlen"),
    Case("pack-value", 4096, 64, launch=0),
    LayerCase("linear", 64 * 197, 384, 1152),  # DeiT-S, batch 64
    LayerCase("linear-few", 197, 384, 1152),  # batch 1: smaller blocks
    LayerCase("linear-early", 197, 1536, 384, "residual", "int16", settled=True),  # and inside a forward pass
    LayerCase("linear-patches", 64 * 256, 588, 384, "residual", "int16"),  # DINOv2: no whole number of blocks of inputs
    LayerCase("linear-residual", 64 * 197, 1536, 384, "residual", "int16"),
    LayerCase("linear-gelu", 64 * 197, 384, 1536, "gelu"),
    LayerCase("linear-silu", 64 * 197, 384, 1536, "silu"),
    LayerCase("linear-relu", 64 * 197, 384, 1536, "relu"),
    LayerCase("linear-logits", 64, 384, 1000, output="int32"),
    LayerCase("linear-wide", 64 * 257, 384, 384, output="int32", input="int16"),  # features leave a rotated stream
    LayerCase("linear-windows", 64 * 3136, 96, 96, "residual", "int16", moved="windows"),
    LayerCase("cut-patches", 64 * 196, 768, 384, output="int16", moved="patches", launch=0),
    LayerCase("linear-positions", 64 * 196, 768, 384, output="int16", moved="patches"),
    LayerCase("layer-norm", 64 * 197, 384),
    LayerCase("layer-norm-windows", 64 * 3136, 96, moved=1),
    LayerCase("layer-norm-merge", 64 * 3136, 96, moved=4),
    LayerCase("mean", 64 * 49, 768, moved="mean"),
    LayerCase("gated", 64 * 257, 2 * 4096, epilogue="silu", moved="gated"),
    LayerCase("linear-gated", 64 * 257, 768, 2 * 2048, "silu", "int16", moved="gated"),  # EVA-02: a normalisation is behind it
    LayerCase("rotary", 64 * 201, 768, moved="rotary"),  # query and key of a DINOv3-S side by side
)

MASKS = ("none", "causal", "bool", "bias")
TOKENS = (16, 49, 64, 197, 257, 577, 4096)
HEAD_DIMS = (16, 32, 64, 80, 128, 256)
BATCHES = (1, 4, 8, 11, 12, 16, 17, 20, 24, 25, 34, 40, 50, 75, 128, 160, 256, 300, 512, 1024)
"""Of four heads: on Hopper the launches depend on how many programs a processor has."""

VARIED_TOKENS = (49, 197, 577, 4096)
VARIED_HEAD_DIMS = (32, 64, 128)
VARIATIONS: dict[str, dict[str, Any]] = {
    "gqa": {"key_heads": 1},
    "one-query": {"queries": 1},
    "20-queries": {"queries": 20},
    "narrow-values": {"value_dim": 16},
    "wide-values": {"value_dim": 160},
    "heads": {"granularity": "head"},
    "packed": {"layout": "packed"},
    "misaligned": {"layout": "misaligned"},
    "windows": {"mask": "windows"},
    **{f"to-{name}": {"output": name} for name in FLOATS},
    **{f"from-{name}": {"input": name, "output": name} for name in FLOATS},
    **{
        f"{kind}-{bits}": {"recipe": Recipe(exponential=kind, probability_bits=bits)}
        for kind in ("linear", "quadratic")
        for bits in (7, 8, 15)
    },
    "floor": {"recipe": Recipe(probability_rounding="floor")},
    "value-scale": {"recipe": Recipe(output="value_scale")},
    "token-keys": {"recipe": Recipe(key_granularity="token")},
    **{f"online-{keys}": {"recipe": PAPER.replace(key_block=keys, output="accumulator")} for keys in (32, 64, 128, 256)},
}
"""Changes of a call with the default recipe, one at a time."""


LAYER_ROWS = (1, 197, 64 * 197)
LAYER_WIDTHS = (24, 48, 192, 384, 588, 768, 1000, 1536, 3072, 4096)
WITH_ACTIVATION = tuple((name, "int8") for name in ACTIVATIONS)
EPILOGUES = (("none", "int8"), ("none", "int16"), ("none", "int32"), ("residual", "int16"), *WITH_ACTIVATION)
NORM_OUTPUTS = ("int8", "int16", "int32")


def layer_calls() -> Iterator[LayerCase]:
    """Return calls of integer networks' layers, of usual widths and such that are no multiple of anything."""
    for rows, width, layout in itertools.product(LAYER_ROWS, LAYER_WIDTHS, ("contiguous", "misaligned")):
        tail = "" if layout == "contiguous" else f"-{layout}"
        for output in NORM_OUTPUTS:
            yield LayerCase(f"{rows}x{width}-layer-norm-{output}{tail}", rows, width, output=output, layout=layout)
            yield LayerCase(f"{rows}x{width}-joined-norm-{output}{tail}", rows, width, output=output, layout=layout, moved=1)
        for outputs, (epilogue, output) in itertools.product((1000, 1536), EPILOGUES):
            kind = output if epilogue == "none" else epilogue
            name = f"{rows}x{width}x{outputs}-linear-{kind}{tail}"
            yield LayerCase(name, rows, width, outputs, epilogue, output, layout)
            if epilogue == "residual":
                yield LayerCase(f"{name}-moved", rows, width, outputs, epilogue, output, layout, moved="windows")


def calls() -> Iterator[AnyCase]:
    """Return the calls whose launches are compiled, besides :data:`CASES`.

    Every combination of lengths, head dimensions, masks and presets, each with the preset's scales and with one a tensor; with
    the default preset every batch; from floats, too; and of it every variation, with and without a bias, at some of the sizes.
    Then :func:`layer_calls`.
    """
    for tokens, head_dim, mask, recipe in itertools.product(TOKENS, HEAD_DIMS, MASKS, PRESETS):
        case = Case("", tokens, head_dim, recipe, mask)
        yield _named(case)
        yield _named(case, "tensor", granularity="tensor")
        if recipe == "default":
            for batch in BATCHES:
                yield _named(case, f"batch-{batch}", batch=batch)
                yield _named(case, f"tensor-batch-{batch}", granularity="tensor", batch=batch)
                yield _named(case, f"from-float16-batch-{batch}", batch=batch, input="float16", output="float16")
    for tokens, head_dim, mask in itertools.product(VARIED_TOKENS, VARIED_HEAD_DIMS, ("none", "bias")):
        case = Case("", tokens, head_dim, mask=mask)
        yield from (_named(case, variation, **changes) for variation, changes in VARIATIONS.items())
    yield from layer_calls()


def _named(case: Case, *parts: str, **changes: Any) -> Case:
    about = (f"{case.tokens}x{case.head_dim}", str(case.recipe), case.mask, *parts)
    return dataclasses.replace(case, name="-".join(part for part in about if part not in ("default", "none")), **changes)


def launches(case: AnyCase, target: str) -> list[KernelLaunch]:
    """Return the launches of a case's call, spelt out by the operator itself, on tensors without memory."""
    from qflash.kernels.device import STAND_IN
    from qflash.kernels.launch_recorder import LaunchRecorder
    from qflash.kernels.settled import count_launch, weights_stay

    number = int(target.removeprefix("sm_"))
    token = STAND_IN.set((number // 10, number % 10))
    try:
        settled = isinstance(case, LayerCase) and case.settled
        with LaunchRecorder(launching=False) as recording, weights_stay() if settled else contextlib.nullcontext():
            count_launch()  # one ahead of it
            if isinstance(case, Case):
                _attend(case)
            else:
                _run_layer(case)
    finally:
        STAND_IN.reset(token)
    return recording.launches


def _run_layer(case: LayerCase) -> None:
    """Call the operator of a layer."""
    from qflash.network import execution
    from qflash.network.operators.gated import gated, int8_linear_gated
    from qflash.network.operators.rotary import rotary

    def tensor(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def activations(dtype: torch.dtype) -> torch.Tensor:
        spare = 0 if case.layout == "contiguous" else 1
        return tensor(case.tokens * case.inputs + spare, dtype=dtype)[spare:].view(case.tokens, case.inputs)

    output = getattr(torch, case.output)
    if case.moved == "mean":
        h = activations(torch.int16).view(-1, 49, case.inputs)
        execution.integer_mean(h, tensor(case.inputs), 4, tensor(case.inputs), output, "triton")
        return
    if case.moved == "gated" and not case.outputs:
        halves = tensor(case.inputs // 2), tensor(case.inputs // 2)
        gated(activations(torch.int16), 1 << 28, *halves, case.epilogue, output, "triton")
        return
    if case.moved == "rotary":
        x = activations(torch.int16).view(-1, 201, case.inputs)
        rotary(x, tensor(1, 201, 32), tensor(case.inputs), tensor(case.inputs), output, "triton")
        return
    if not case.outputs:
        h, channels, gather = activations(torch.int16), case.inputs, None
        if case.moved is not None:
            pieces = int(case.moved)
            h, channels, gather = h[None], pieces * channels, tensor(case.tokens // pieces, pieces)
        execution.integer_layer_norm(h, 1, tensor(channels), tensor(channels), 18, gather, output, "triton")
        return
    outputs = tensor(case.outputs), tensor(case.outputs)
    linear = (activations(getattr(torch, case.input)), tensor(case.outputs, case.inputs, dtype=torch.int8), *outputs, 2)
    if case.moved == "gated":
        halves = tensor(case.outputs // 2), tensor(case.outputs // 2)
        int8_linear_gated(*linear, 1 << 28, *halves, case.epilogue, output, "triton")
    elif case.moved == "patches":
        images = tensor(case.tokens // 196, case.inputs // 256, 224, 224, dtype=torch.uint8)
        position, prefix = (tensor(1, tokens, case.outputs, dtype=torch.int16) for tokens in (196, 1))
        execution.patch_embedding(images, (16, 16), *linear[1:], position, prefix, "triton")
    elif case.moved == "windows":
        stream = tensor(1, case.tokens, case.outputs, dtype=torch.int16)
        execution.int8_linear(linear[0][None], *linear[1:], stream, tensor(case.tokens), output, "triton")
    elif case.epilogue in ACTIVATIONS:
        getattr(execution, f"int8_linear_{case.epilogue}")(*linear, *outputs, 12, "triton")
    else:
        residual = tensor(case.tokens, case.outputs, dtype=torch.int16) if case.epilogue == "residual" else None
        execution.int8_linear(*linear, residual, None, output, "triton")


def _attend_packed(case: Case, recipe: Recipe) -> None:
    """Call the operator of attention of packed sequences."""
    from qflash import varlen

    shape, dtype = (case.batch * case.tokens, 4, case.head_dim), getattr(torch, case.input)
    query, key, value = (torch.empty(shape, dtype=dtype, device="meta") for _ in range(3))
    cumulative = torch.empty(case.batch + 1, dtype=torch.int32, device="meta")
    options = case.mask == "causal", case.head_dim**-0.5, recipe.key, "triton"
    varlen.varlen_attention(query, key, value, cumulative, cumulative, case.tokens, case.tokens, *options)


def _attend(case: Case) -> None:
    """Call the operator of attention."""
    from qflash import execution

    recipe = resolve_recipe(case.recipe)
    if case.layout == "varlen":
        _attend_packed(case, recipe)
        return
    batch, heads, keys, head_dim = case.batch, 4, case.tokens, case.head_dim
    queries, value_dim = case.queries or keys, case.value_dim or head_dim
    dtype = getattr(torch, case.input)

    def values(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def tensor(heads: int, tokens: int, channels: int) -> torch.Tensor:
        if case.layout == "packed":
            return values(batch, tokens, 3, heads, channels)[:, :, 1].transpose(1, 2)
        if case.layout == "misaligned":
            return values(batch, heads, tokens, channels + 1)[..., 1:]
        return values(batch, heads, tokens, channels)

    query, key, value = (
        tensor(heads, queries, head_dim),
        tensor(case.key_heads, keys, head_dim),
        tensor(case.key_heads, keys, value_dim),
    )

    def scale(x: torch.Tensor, granularity: str) -> torch.Tensor:
        return values(*scale_shape(x.shape, case.granularity or granularity), dtype=torch.float32)

    bias = torch.int32 if case.input == "int8" else dtype
    mask = {
        "bool": values(batch, 1, queries, keys, dtype=torch.bool),
        "bias": values(1, heads, queries, keys, dtype=bias),
        "windows": empty_bias(query, (max(1, batch // 2), heads, queries, keys), bias),
    }.get(case.mask)
    options = case.mask == "causal", head_dim**-0.5
    if case.input != "int8":
        call = float_call(query, key, value, mask, *options, recipe)
    else:
        output = tensor(heads, queries, value_dim) if case.output == "int8" else None
        offset = None
        if recipe.smooth_value and case.output != "int8":
            offset = values(batch, case.key_heads, 1, value_dim, dtype=torch.float32)
        call = int8_call(
            query, scale(query, recipe.query_granularity), key, scale(key, recipe.key_granularity), value,
            scale(value, recipe.value_granularity), mask, *options,
            None if output is None else scale(output, recipe.value_granularity), getattr(torch, case.output), recipe,
            value_offset=offset,
        )  # fmt: skip
    execution.attend(call, "triton")


def kernel_call(case: AnyCase, target: str) -> KernelLaunch:
    """Return a case's launch; see :func:`launches`."""
    return launches(case, target)[case.launch]


def signature(call: KernelLaunch) -> Hashable:
    """Return what Triton compiles a launch for, besides the target: as little as its JIT tells apart.

    That is constants and options as they are, types, which numbers are 1 or multiples of 16 and which addresses are; of
    numbers that the kernel does not want told apart only the width.
    """
    about: list[Hashable] = [call.kernel.__name__, tuple(sorted(call.options.items()))]
    # what the interpreter runs has no such parameters: it compiles nothing
    alike = {parameter.name for parameter in getattr(call.kernel, "params", ()) if parameter.do_not_specialize}
    for name, x in each_argument(call.arguments):
        if isinstance(x, torch.Tensor):
            about.append((name, x.dtype, x.data_ptr() % 16 == 0))
        elif isinstance(x, float) and not name.isupper():
            about.append((name, float))
        elif x is None:
            about.append((name, None))
        elif name.isupper() or not isinstance(x, int):
            # a constant, or a matrix for the copy engine, of which only the place may differ
            about.append((name, x if name.isupper() else (x.base.dtype, *x.block_shape, repr(x.layout))))
        elif name in alike:
            about.append((name, x.bit_length() > 31))
        else:
            about.append((name, x == 1, x % 16 == 0, x.bit_length() > 31))
    return tuple(about)


def distinct(target: str, patterns: Sequence[str] = ()) -> dict[Hashable, AnyCase]:
    """Return, by :func:`signature`, a case for everything that is compiled for a target: of :data:`CASES`, else of a call.

    With ``patterns`` only of what has a name that one of them fits.
    """
    found = {signature(kernel_call(case, target)): case for case in reversed(CASES) if fits_pattern(case.name, patterns)}
    for case in calls():
        if not may_fit_pattern(case.name, patterns):
            continue
        every = launches(case, target)
        for index, call in enumerate(every):
            kind = "" if index == len(every) - 1 else f":{index}-{call.kernel.__name__.removesuffix('_kernel')}"
            about, name = signature(call), case.name + kind
            if about not in found and fits_pattern(name, patterns):
                found[about] = dataclasses.replace(case, name=name, launch=index)
    return found


def fits_pattern(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@functools.cache
def _head(pattern: str) -> tuple[str, ...]:
    """Return what a pattern has for each character up to its first ``*``."""
    return tuple(itertools.takewhile(lambda part: part != "*", re.findall(r"\[!?\]?[^]]*\]|.", pattern)))


def may_fit_pattern(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether a pattern may fit the call's name or one of its launches', which is that, a colon and more."""
    known = f"{name}:"
    return not patterns or any(fits_pattern(known, ["".join(_head(each)[: len(known)]) + "*"]) for each in patterns)


def distinct_cases(target: str, patterns: Sequence[str]) -> list[AnyCase]:
    named = [case for case in CASES if fits_pattern(case.name, patterns)]
    return [*named, *(case for case in distinct(target, patterns).values() if case not in CASES)]
