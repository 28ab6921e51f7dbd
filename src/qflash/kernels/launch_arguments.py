"""Arguments that the attention kernels of every family share."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton

from ..specification import fixed_point as fp
from ..specification.attention_call import AttentionCall
from ..specification.layers import Activation
from ..specification.memory_format import empty_output
from .device import capability_of, processors_of
from .heuristics import Work, dependent_launch
from .tiles import AttentionShape, Tiles

MOST_BLOCKS = 65535
"""Most programs in the second and third dimension of a grid."""


SCALE_POINTERS = ("qs_ptr", "ks_ptr", "vs_ptr", "os_ptr", "vo_ptr")
"""Arguments that kernels take as one tuple (:func:`.launch_recorder.kernel_arguments`): scales, and offsets of outputs."""
SCALE_STRIDES = (
    "qs_stride_z", "qs_stride_h", "qs_stride_n", "ks_stride_z", "ks_stride_h", "vs_stride_z", "vs_stride_h", "vs_stride_d",
    "os_stride_z", "os_stride_h", "os_stride_d", "vo_stride_z", "vo_stride_h", "vo_stride_d",
)  # fmt: skip
"""The same: their strides, where the keys of a head have one scale."""
CONSTANT = ("constant_mantissa", "constant_exponent")
"""The same: ``softmax_scale * log2(e)``."""


@dataclasses.dataclass(frozen=True)
class KernelRequest:
    """What a family of kernels is asked for.

    Attributes:
        call: int8 tensors with their scales, or float tensors to be quantised in the same launch.
        out: the tensor to fill; None while a family is looked for.
        guard: compile for Triton's interpreter, without inline assembly.
        value_sums: of the channels of chunks of V (batch, heads, chunks, channels), if its tokens are neighbours in memory
            already, as :func:`.triton.quantize_streaming.launch_quantize_long` leaves them.
        fragment_order: V's tokens are permuted, so that what a thread holds of an operand lies side by side, as
            :mod:`.sm90.attention_streaming` wants it, which is then the kernel. Query may be float
            then, without a scale: it is quantised on the way, with a scale a token.
    """

    call: AttentionCall
    out: torch.Tensor | None = None
    guard: bool = False
    value_sums: torch.Tensor | None = None
    fragment_order: bool = False

    @property
    def fused(self) -> bool:
        """Whether the kernel quantises all three tensors."""
        return self.call.scales is None

    @property
    def output(self) -> torch.Tensor:
        """The tensor to fill."""
        assert self.out is not None
        return self.out

    @functools.cached_property
    def capability(self) -> tuple[int, int]:
        """The architecture of the device that the tensors are on."""
        return capability_of(self.call.query.device)

    @functools.cached_property
    def unquantisable(self) -> str | None:
        """Why no kernel that attends can quantise the tensors of the call, or None where one can or need not."""
        recipe = self.call.recipe
        if not self.fused:
            return None
        if self.too_wide:
            return self.too_wide
        finds = (
            recipe.query_granularity in ("head", "token")
            and recipe.key_granularity == "head"
            and recipe.value_granularity in ("head", "channel")
        )
        if finds and not (recipe.balance or recipe.rotate):
            return None
        return "on the way it finds scales of heads, of a query's tokens and a value's channels alone"

    @functools.cached_property
    def wide_offsets(self) -> bool:
        """Whether tensors reach further than the 32-bit offsets of all kernels but :mod:`.triton.attention_streaming`."""
        call, scales = self.call, self.call.scales
        given = () if scales is None else (scales.query, scales.key)
        return needs_wide_offsets(call.query, call.key, call.value, self.out, call.mask, *given)

    @property
    def too_wide(self) -> str | None:
        """Why kernels with 32-bit offsets do not take the call, or None."""
        return "elements of an image lie further apart than 32-bit offsets reach" if self.wide_offsets else None

    @property
    def has_channel_values(self) -> bool:
        """Whether there is a scale for each of V's channels."""
        scales = self.call.scales
        return self.call.recipe.value_granularity == "channel" if scales is None else scales.value.shape[3] > 1

    @property
    def has_channel_output(self) -> bool:
        """Whether there is a scale for each channel of an int8 output."""
        scales = self.call.scales
        return scales is not None and scales.output is not None and scales.output.shape[3] > 1

    @property
    def has_offset(self) -> bool:
        """Whether float outputs get an offset."""
        scales = self.call.scales
        if scales is None:
            return self.call.recipe.smooth_value
        return scales.offset is not None and self.call.out_dtype != torch.int8

    @functools.cached_property
    def shape(self) -> AttentionShape:
        """What the rules for tiles look at."""
        return shape_of(self.call, self.fused)

    @property
    def work(self) -> Work:
        """What the rules for sharing a call out among programs look at."""
        call = self.call
        return Work(
            call.queries, call.keys, call.batch * call.heads, max(call.head_dim, call.value_dim), self.fused,
            call.mask is not None, call.mask_kind == "bias", self.has_channel_values or self.has_channel_output,
            processors_of(call.query.device),
        )  # fmt: skip


def shape_of(call: AttentionCall, fused: bool) -> AttentionShape:
    """Return what the rules for tiles look at; ``fused`` if one launch is to quantise, too."""
    kinds = {torch.bool: "bool", torch.float16: "bias", torch.bfloat16: "bias"}
    kind = "" if call.mask is None or call.is_causal else kinds.get(call.mask.dtype, "")
    return AttentionShape(
        call.recipe, call.head_dim, call.value_dim, call.queries, call.keys, call.batch * call.heads, fused, call.is_masked,
        kind,
    )  # fmt: skip


def needs_wide_offsets(*tensors: torch.Tensor | None) -> bool:
    """Tell whether elements of a batch element of one of the tensors lie further apart than 32-bit offsets reach."""
    return any(
        sum((x.shape[dim] - 1) * x.stride(dim) for dim in (1, 2, 3) if x.shape[dim] > 1) >= 1 << 31
        for x in tensors
        if x is not None
    )


def side_by_side(x: torch.Tensor, piece: int = 16) -> bool:
    """Tell whether channels are neighbours and every row can be copied ``piece`` bytes at a time."""
    whole = piece // x.element_size()
    return (
        x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(x.stride(dim) % whole == 0 for dim in range(3) if x.shape[dim] > 1)
    )


def broadcast_strides(x: torch.Tensor, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides, 0 along dimensions of size 1."""
    return tuple(0 if x.shape[dim] == 1 else x.stride(dim) for dim in dims)


def launch_options(tiles: Tiles) -> dict[str, Any]:
    """Return Triton's own options of a launch."""
    # a product and a sum fused by the compiler would round differently; where one is meant it is spelt out
    options: dict[str, Any] = {"num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": False}
    if tiles.registers:
        options["maxnreg"] = tiles.registers
    return options


def dependent_attention(request: KernelRequest) -> str:
    """Return :func:`.heuristics.dependent_launch` for attention from int8 to int8, as in integer networks; "" for others.

    Measured in float networks, where PyTorch's kernels come before and after, it makes no difference.
    """
    out = request.output
    return dependent_launch(out.device, out.numel()) if out.dtype == torch.int8 and not request.fused else ""


def kernel_constants(request: KernelRequest) -> dict[str, Any]:
    """Return the constexpr arguments that follow from the recipe and the shapes (tiles excepted)."""
    call, recipe = request.call, request.call.recipe
    offset, _, _ = fp.probability_constants(recipe.exponential, recipe.probability_bits)
    most = fp.most_multiplier(call.head_dim, call.mask_kind == "bias")
    return {
        "HEAD_DIM": call.head_dim,
        "VALUE_DIM": call.value_dim,
        "BLOCK_D": max(32, triton.next_power_of_2(call.head_dim)),
        "BLOCK_DV": max(16, triton.next_power_of_2(call.value_dim)),
        "MASK": call.mask_kind,
        "CAUSAL": call.is_causal,
        "KEY_TOKEN": call.has_token_keys,
        "QUADRATIC": recipe.exponential == "quadratic",
        "BITS": recipe.probability_bits,
        "NEAREST": recipe.probability_rounding == "nearest",
        "OFFSET": offset,
        "FLOOR_OUTPUT": recipe.output == "value_scale",
        "COLUMN_BITS": fp.column_bits(call.head_dim),
        "MOST": most,
        "MOST_BITS": most.bit_length(),
        "EXACT": call.exact_sum,
        "VALUE_OFFSET": request.has_offset,
        "CHECK": call.is_masked,
        "GUARD": request.guard,
    }


def mask_period(call: AttentionCall) -> int:
    """Return after how many batch elements a mask repeats; 0 without one, or where it is given for each or for all."""
    return 0 if call.mask is None or call.mask.shape[0] in (1, call.batch) else call.mask.shape[0]


def call_arguments(request: KernelRequest, tiles: Tiles) -> dict[str, Any]:
    """Return the numbers and constants that all launches of a call have in common, of every family."""
    call = request.call
    mantissa, exponent = fp.split_float(call.softmax_scale * math.log2(math.e))
    if call.scales is None:
        query_token = call.recipe.query_granularity == "token"
    else:
        query_token = call.scales.query is None or call.scales.query.shape[2] > 1
    return {
        "queries": call.queries,
        "constant_mantissa": mantissa,
        "constant_exponent": exponent,
        "GROUP": call.heads // call.key.shape[1],
        "MASK_PERIOD": mask_period(call),
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "VALUE_ROWS": call.value.stride(2) != 1 or call.value.shape[2] == 1,
        "QUERY_TOKEN": query_token,
        "VALUE_CHANNEL": request.has_channel_values,
        "OUTPUT_CHANNEL": request.has_channel_output,
        **kernel_constants(request),
    }


def row_arguments(request: KernelRequest, tiles: Tiles) -> dict[str, Any]:
    """Return :func:`call_arguments`, and those of kernels that have a whole row of keys and may quantise it."""
    return call_arguments(request, tiles) | {
        "TILES": triton.cdiv(request.call.keys, tiles.block_n),
        "KEYS": request.call.keys,
        "INVERSE_COUNT": fp.inverse_count(request.call.keys),
        "QUANTIZE": request.fused,
        "CENTER": request.fused and request.call.recipe.smooth_key,
    }


class Part(NamedTuple):
    """Batch elements that one launch takes.

    Attributes:
        start, batch: the first, and how many.
        arguments: pointers and strides.
    """

    start: int
    batch: int
    arguments: dict[str, Any]

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor from this part's first batch element on."""
        return x if self.start == 0 or x.shape[0] == 1 else x[self.start :]


def parts(request: KernelRequest) -> Iterator[Part]:
    """Return the parts of a call that grids have room for, of up to 65535 batch elements."""
    call, query = request.call, request.call.query
    mask = query if call.mask is None else call.mask.view(torch.uint8) if call.mask.dtype == torch.bool else call.mask
    mask_strides = (0, 0, 0, 0) if call.mask is None else broadcast_strides(mask, (0, 1, 2, 3))
    scales = call.scales
    if scales is None:
        # the kernel finds the scales and reads none; any tensor fills the places
        given = dict.fromkeys(("qs", "ks", "vs", "os", "vo"), query)
    else:
        given = {"qs": query if scales.query is None else scales.query, "ks": scales.key, "vs": scales.value}
        given["os"] = scales.value if scales.output is None else scales.output
        given["vo"] = query if scales.offset is None else scales.offset
    # a mask of one image's windows repeats over the batch; one that is given for every batch element is sliced with it
    period = mask_period(call)
    step = MOST_BLOCKS // max(period, 1) * max(period, 1)
    for start in range(0, call.batch, step):
        part = Part(start, min(step, call.batch - start), {})
        arguments = part.arguments
        for name, x in (("q", query), ("k", call.key), ("v", call.value), ("o", request.output)):
            arguments[f"{name}_ptr"] = part.of(x)
            arguments.update({f"{name}_stride_{axis}": x.stride(dim) for dim, axis in enumerate("zhnd")})
        for name, x in given.items():
            arguments[f"{name}_ptr"] = part.of(x)
            axes = ((0, "z"), (1, "h"), (2, "n")) if name in ("qs", "ks") else ((0, "z"), (1, "h"), (3, "d"))
            strides = (0, 0, 0) if x is query else broadcast_strides(x, tuple(dim for dim, _ in axes))
            arguments.update({f"{name}_stride_{axis}": stride for (_, axis), stride in zip(axes, strides, strict=True)})
        arguments["mask_ptr"] = mask if period else part.of(mask)
        arguments.update({f"mask_stride_{axis}": stride for axis, stride in zip("zhmn", mask_strides, strict=True)})
        yield part


def place_arguments(request: KernelRequest, part: Part) -> dict[str, Any]:
    """Return what tells a kernel that quantises from where it takes tokens; their period is the mask's."""
    places, query = request.call.places, request.call.query
    if places is None:
        # a pointer that is not read; any tensor will do
        return {"place_ptr": query, "place_stride_z": 0, "place_stride_h": 0, "PLACES": False}
    stride_z, stride_h = broadcast_strides(places, (0, 1))
    pointer = places if mask_period(request.call) else part.of(places)
    return {"place_ptr": pointer, "place_stride_z": stride_z, "place_stride_h": stride_h, "PLACES": True}


def new_output(call: AttentionCall) -> torch.Tensor:
    """Return the output that kernels fill: of the call's type, but for bfloat16 in the interpreter.

    That truncates where bfloat16 must round, so there PyTorch does that one conversion.
    """
    narrow = call.query.device.type == "cpu" and call.out_dtype == torch.bfloat16
    return empty_output(call.order, call.value_dim, torch.float32 if narrow else call.out_dtype)


@dataclasses.dataclass(frozen=True)
class Places:
    """Where the output of a linear layer has the tokens of each image, and the residual.

    Token i is at place ``table[i]``, or i itself. That place of an image is row ``image * out_tokens + first + place`` of the
    output and row ``image * residual_tokens + place`` of the residual.

    Attributes:
        table: int32 (tokens,), or None.
        tokens: of an image.
        out_tokens, first: as above.
        residual_tokens: 0 if all images share the residual.
    """

    table: torch.Tensor | None
    tokens: int
    out_tokens: int
    first: int
    residual_tokens: int


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What is behind the products of a linear layer: constants of a kernel.

    Attributes:
        PLACES: where residual and output have the rows: "table" or "images", see :class:`Places`; "" in the order of x.
        RESIDUAL: one is added.
        ACTIVATION: its name, or "".
        GATED: the first half of the outputs gate the second.
    """

    PLACES: str
    RESIDUAL: bool
    ACTIVATION: str
    GATED: bool


@dataclasses.dataclass(frozen=True)
class LinearPlan:
    """How a kernel divides a linear layer: its constants.

    Attributes:
        BLOCK_M, BLOCK_N, BLOCK_K: rows, outputs and inputs of a step.
        WHOLE: the outputs (:mod:`.gluon.sm90.linear`), or the inputs (:mod:`.triton.network`), are a multiple of a block's.
        GROUP, STAGES, DEPENDENT: of :mod:`.gluon.sm90.linear`: outputs whose columns change places, slots of its ring, and
            :func:`.heuristics.dependent_launch`.
        EARLY: it reads weights while the kernel ahead may still run.
        AHEAD: it reads residual and constants of a tile before the products, not behind them; not of gated products.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    WHOLE: bool
    GROUP: int = 0
    STAGES: int = 0
    DEPENDENT: str = ""
    EARLY: bool = False
    AHEAD: bool = False


@dataclasses.dataclass(frozen=True)
class LinearCall:
    """A linear layer of an integer network with everything fused behind it, and where its output goes.

    The other names are those of :func:`qflash.network.execution.int8_linear`.

    Attributes:
        x: int8 or int16 (rows, inputs), contiguous, as are all others.
        residual: int16 (rows, outputs), or None.
        activation: behind the change of unit, for int8 outputs; or None.
        out: (rows, outputs).
        places: where residual and output have the rows; None: in the order of x.
        gated: whether the first half of the outputs gate the second, as in :func:`qflash.specification.gated.gated`; the
            activation is then its f, R, B and A, and the output has half as many channels.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    multiplier: torch.Tensor
    left: int
    residual: torch.Tensor | None
    activation: Activation | None
    out: torch.Tensor
    places: Places | None = None
    gated: bool = False

    def epilogue(self) -> dict[str, Any]:
        """Return a kernel's arguments behind the products, by name."""
        made = self.activation or Activation("", self.bias, self.bias, 0)
        places = self.places or Places(None, 1, 1, 0, 1)
        return {
            "bias_ptr": self.bias,
            "multiplier_ptr": self.multiplier,
            # a pointer that is not read; any tensor will do
            "residual_ptr": self.out if self.residual is None else self.residual,
            "activation_multiplier_ptr": made.multiplier,
            "activation_offset_ptr": made.offset,
            "o_ptr": self.out,
            "rows": self.x.shape[0],
            "outputs": self.weight.shape[0],
            "places_ptr": self.bias if places.table is None else places.table,
            "tokens": places.tokens,
            **image_divisor(self.x.shape[0], places.tokens),
            "out_tokens": places.out_tokens,
            "first": places.first,
            "residual_tokens": places.residual_tokens,
            "left": self.left,
            "activation_constant": made.shift,
            "EPILOGUE": Epilogue(
                PLACES="" if self.places is None else "images" if places.table is None else "table",
                RESIDUAL=self.residual is not None,
                ACTIVATION=made.name,
                GATED=self.gated,
            ),
        }


def image_divisor(rows: int, tokens: int) -> dict[str, int]:
    """Return with what kernels find the image of a row, ``row // tokens``, without a division, for ``rows < 2**31``.

    That is ``(row * inverse) >> bits``: the inverse is too large by less than 1 / tokens, which adds to a row's quotient less
    than ``rows * tokens / 2**bits / tokens``, and so less than it lacks of the next.
    """
    bits = (rows * tokens).bit_length()
    return {"image_inverse": -(-(1 << bits) // tokens), "image_bits": bits}
