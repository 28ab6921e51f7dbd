"""From a call to kernel launches: which family of kernels takes it, with which tiles; and the launches themselves."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .. import segments
from ..specification.attention_call import AttentionCall, Scales, VarlenCall, int8_call
from .device import capability_of, processors_of
from .families import Choice, choose_family
from .gluon.sm90 import launch as sm90
from .gluon.sm90.rules import quantises_apart, streams
from .launch_arguments import KernelRequest, new_output, shape_of, side_by_side
from .lengths import worth_compiling
from .tiles import SM90_RESIDENT, Tiles, is_short, row_fits_registers
from .triton import launch as portable
from .triton.quantize import launch_quantize_bias
from .triton.quantize_streaming import launch_quantize_long, quantizes_long
from .tuning_table import tiles_for


def tiles_of(call: AttentionCall, fused: bool) -> Tiles:
    """Return the tiles of a call on its device, if one launch is to quantise, too, or not."""
    shape, device = shape_of(call, fused), call.query.device
    tiles = tiles_for(shape, device)
    rereads = call.query.is_cuda and tiles.family == SM90_RESIDENT and not row_fits_registers(call.keys)
    if rereads and not worth_compiling(call.keys):
        return tiles_for(shape, device, reread=False)
    return tiles


def one_launch(call: AttentionCall, tiles: tuple[Any, ...] | None = None) -> Choice:
    """Return the family that quantises float tensors and attends in one launch, if there is one."""
    request = KernelRequest(call, guard=_is_interpreted(call))
    return choose_family(request, Tiles(*tiles) if tiles else tiles_of(call, True))


def is_faster_apart(call: AttentionCall) -> bool:
    """Tell whether launches of their own should quantise float tensors, whatever :func:`one_launch` finds."""
    heads, head_dim = call.batch * call.heads, max(call.head_dim, call.value_dim)
    apart = quantises_apart(call.queries, call.keys, heads, head_dim, processors_of(call.query.device))
    return (apart or streams_masked(call)) and can_quantize_apart(call)


def streams_masked(call: AttentionCall) -> bool:
    """Tell whether :mod:`.sm90.attention_streaming` takes a float call with a mask once keys and values are quantised."""
    shape = shape_of(call, False)
    return shape.masked and not _is_interpreted(call) and streams(shape, capability_of(call.query.device)) is None


def can_quantize_apart(call: AttentionCall) -> bool:
    """Tell whether launches of their own can quantise: :func:`launch_long` knows the scales, and rows are long or masked."""
    long = not is_short(shape_of(call, False)) or streams_masked(call)
    return long and quantizes_long(call.recipe, call.batch)


def _is_interpreted(call: AttentionCall | VarlenCall) -> bool:
    return call.query.device.type == "cpu"


def _run(choice: Choice, request: KernelRequest) -> torch.Tensor:
    """Launch what fills the output; return it in the call's type."""
    for launch in choice.launches(request):
        launch.run()
    return request.output.to(request.call.out_dtype)


def launch_attention(call: AttentionCall, *, tiles: tuple[Any, ...] | None = None) -> torch.Tensor:
    """Run :func:`qflash.specification.reference.int8_attention` on the GPU: same arguments, same bits."""
    out = new_output(call)
    if out.numel() == 0 or call.keys == 0:
        return out.zero_().to(call.out_dtype)
    request = KernelRequest(call, out, _is_interpreted(call))
    return _run(choose_family(request, Tiles(*tiles) if tiles else tiles_of(call, False)), request)


def launch_fused(call: AttentionCall, choice: Choice | None = None) -> torch.Tensor:
    """Quantise float tensors and attend in one launch; the mask is bool or float.

    Args:
        choice: of :func:`one_launch` for such a call, if it was asked before.

    Raises:
        ValueError: no family does so for the recipe and shapes.
    """
    choice = choice or one_launch(call)
    if choice.family is None:
        raise ValueError(
            f"one launch cannot quantise and attend here: {call.recipe}, {call.keys} keys of {call.head_dim} channels"
        )
    out = new_output(call)
    return out.to(call.out_dtype) if out.numel() == 0 else _run(choice, KernelRequest(call, out, _is_interpreted(call)))


def launch_long(call: AttentionCall) -> torch.Tensor:
    """Quantise float tensors in one launch or two and attend in another, which may quantise query, too.

    The mask is bool, fixed point or float. For what :func:`can_quantize_apart` accepts.
    """
    query, recipe = call.query, call.recipe
    out = new_output(call)
    if out.numel() == 0 or call.keys == 0:
        return out.zero_().to(call.out_dtype)
    guard, tiles = _is_interpreted(call), tiles_of(call, False)
    fragment_order = sm90.takes_fragment_order(KernelRequest(call, out, guard), tiles)
    if call.mask is not None and call.mask.is_floating_point() and not fragment_order:
        call = dataclasses.replace(call, mask=launch_quantize_bias(call.mask))
        tiles = tiles_of(call, False)
    late = fragment_order and query.element_size() == 2 and side_by_side(query)
    if late and sm90.quantizes_in_clusters(call):
        found = sm90.quantize_in_clusters(call)
    else:
        found = launch_quantize_long(
            None if late else query, call.key, call.value, recipe, fragment_order, places=call.places
        )  # fmt: skip
    quantised = int8_call(
        query if found.query is None else found.query, found.query_scale, found.key, found.key_scale, found.value,
        found.value_scale, call.mask, call.is_causal, call.softmax_scale, None, call.out_dtype, recipe,
        value_offset=found.value_offset,
    )  # fmt: skip
    request = KernelRequest(quantised, out, guard, found.value_sums, fragment_order)
    return _run(choose_family(request, tiles), request)


def _quantized_varlen(call: VarlenCall, fragment_order: bool) -> VarlenCall:
    """Quantise packed sequences by :func:`launch_quantize_long`; with ``fragment_order`` query is left to the next kernel."""
    query, key, value = (x[None].transpose(1, 2) for x in (call.query, call.key, call.value))
    found = launch_quantize_long(
        None if fragment_order else query, key, value, call.recipe, fragment_order, call.lengths, call.is_causal
    )  # fmt: skip

    def tokens_first(x: torch.Tensor) -> torch.Tensor:
        return x[0].transpose(0, 1)

    def of_sequences(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x[:, :, 0]

    scales = Scales(
        None if found.query_scale is None else tokens_first(found.query_scale), found.key_scale[:, :, 0],
        found.value_scale[:, :, 0], None, of_sequences(found.value_offset),
    )  # fmt: skip
    return dataclasses.replace(
        call, query=call.query if found.query is None else tokens_first(found.query), key=tokens_first(found.key),
        value=tokens_first(found.value), scales=scales, value_sums=found.value_sums, packed_value=True,
    )  # fmt: skip


def _quantizes_varlen(call: VarlenCall) -> bool:
    """Tell whether kernels quantise packed sequences: scales that they find, and packed V within 32-bit offsets."""
    tokens, heads, channels = call.value.shape
    # V has places for each sequence's keys up to a multiple of 128, and up to 128 channels or what it has
    places = tokens + 128 * (call.lengths.sequences + 1)
    fits = places * max(128, heads, channels) < 1 << 31
    return tokens > 0 and fits and quantizes_long(call.recipe, call.lengths.sequences)


def launch_varlen(call: VarlenCall) -> torch.Tensor:
    """Quantise packed float sequences and attend to them.

    On Hopper short ones are one launch; for long ones keys and values are quantised before, and query on the way. Elsewhere all
    three are quantised before; by PyTorch (:mod:`.segments`) for recipes that the kernels do not know.
    """
    guard = _is_interpreted(call)
    # the interpreter truncates to bfloat16 where that must round
    dtype = torch.float32 if guard and call.out_dtype == torch.bfloat16 else call.out_dtype
    out = torch.empty((*call.query.shape[:2], call.value.shape[2]), dtype=dtype, device=call.query.device)
    if not _quantizes_varlen(call):
        launches = portable.varlen_launches(segments.quantize(segments.prepare(call)), out, guard)
    elif sm90.packed_refusal(call) is None:
        launches = [sm90.packed_launch(call, out)]
    elif sm90.varlen_refusal(call) is None:
        launches = [sm90.varlen_launch(_quantized_varlen(call, True), out)]
    else:
        launches = portable.varlen_launches(_quantized_varlen(call, False), out, guard)
    for launch in launches:
        launch.run()
    return out.to(call.out_dtype)
