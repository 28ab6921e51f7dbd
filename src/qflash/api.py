"""What a caller sees: :func:`attention`, :func:`quantize` and :func:`int8_attention`.

This module checks arguments and brings them to the four-dimensional form the operators take. No arithmetic.

As in ``torch.nn.functional``, what has ``__torch_function__`` is asked first: a proxy of ``torch.fx`` notes the call as one
node, a function mode sees it, and a subclass of tensors may have a way of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch.overrides import handle_torch_function, has_torch_function

from . import execution, ops, plan_cache, sharding, varlen  # noqa: F401 - ops registers torch.ops.qflash
from .scalars import unboxed
from .specification.memory_format import as_four, as_four_mask, broadcast_heads, empty_bias, has_aligned_rows
from .specification.quantization import GRANULARITIES, QuantizedTensor, check_scale_values
from .specification.recipe import Recipe, resolve_recipe
from .validation import (
    FLOAT_DTYPES,
    autocast,
    check_attention,
    check_attention_shapes,
    check_backend,
    check_flags,
    check_jagged,
    check_mask,
    check_no_derivative,
    check_tensor,
    check_varlen_attention,
    is_jagged,
    is_number,
    resolve_causal_bias,
    resolve_softmax_scale,
    unpack_jagged,
)


def _four_scale(scale: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Bring a broadcastable scale to the four dimensions of ``as_four(values)``."""
    scale = scale.reshape((1,) * (values.dim() - scale.dim()) + tuple(scale.shape))
    if scale.dim() > 4 and scale.shape[:-3] != values.shape[:-3]:
        lead = (1,) * len(values.shape[:-3]) if scale[..., :1, :1, :1].numel() == 1 else tuple(values.shape[:-3])
        scale = scale.expand(*lead, *scale.shape[-3:])
    return as_four(scale)


def _shaped(run: Callable[..., torch.Tensor] | None, shape: tuple[int, ...]) -> Callable[..., torch.Tensor] | None:
    """Return ``run``, whose output has four dimensions, with outputs of a shape."""
    if run is None or len(shape) == 4:
        return run
    return lambda *tensors: run(*tensors).view(shape)


def causal_mask(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return what ``is_causal`` stands for as a bool mask (queries, keys): query i sees keys 0 to i."""
    return torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    recipe: Recipe | str | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Attention whose two matrix products and softmax run in integers; a drop-in for SDPA at inference.

    The arguments up to ``enable_gqa`` are those of ``torch.nn.functional.scaled_dot_product_attention``, in its order.

    Query, key and value are quantised on the fly (Equations 1-2) at the recipe's granularities. Nothing waits
    for the device, so the call can be captured in a CUDA graph.

    Args:
        query: ``(..., heads, queries, head_dim)``, float16, bfloat16 or float32; any strides. Batch and heads of query, key
            and value broadcast. Under autocast all three are converted to its dtype, which the output then has as well. If
            all three are jagged nested tensors ``(batch, heads, jagged, channels)``, :func:`varlen_attention` computes them
            and the output is jagged, too; the longest length is read once for each nested tensor, which waits for a GPU.
        key: ``(..., heads, keys, head_dim)``, the same dtype and device.
        value: ``(..., heads, keys, value_dim)``, the same dtype and device.
        attn_mask: bool (True takes part) or float (added to the scaled scores, in nats), broadcastable to
            ``(..., heads, queries, keys)`` and never expanded in memory; or a causal bias of ``torch.nn.attention.bias``:
            ``causal_lower_right`` lets the last query see all keys, whatever their numbers.
        dropout_p: must be 0.
        is_causal: query i sees keys 0 to i; excludes ``attn_mask``.
        scale: factor of the scores, ``head_dim ** -0.5`` if None; positive.
        enable_gqa: key and value may have fewer heads, a divisor of query's.
        recipe: the numerical choices: a :class:`qflash.Recipe`, a preset's name or None for
            :data:`qflash.DEFAULT`.
        backend: ``"auto"``, ``"reference"``, ``"cpu"`` or ``"triton"``; all give the same integers.

    Returns:
        ``(..., heads, queries, value_dim)`` in query's dtype; heads and queries lie in memory in query's order, as SDPA's fused
        kernels leave them (:class:`qflash.sdpa` gives all strides of SDPA). A row with no key is zero. NaN or infinity in an
        input comes out as NaN wherever a shared scale spreads it.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind; the message names it.
        NotImplementedError: from ``backward()``, and where forward mode or ``torch.func`` takes a derivative; integer
            attention has none.
    """
    options = dropout_p, is_causal, scale, enable_gqa, recipe, backend
    run = plan_cache.find_given((query, key, value, attn_mask), options)
    if run is not None:
        return run(query, key, value, attn_mask)
    attn_mask, is_causal = resolve_causal_bias(attn_mask, is_causal, query, key)
    tensors = query, key, value, attn_mask
    if has_torch_function(tensors):
        return handle_torch_function(
            attention, tensors, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, recipe=recipe,
            backend=backend,
        )  # fmt: skip
    if is_jagged(query, key, value):
        check_jagged(query, key, value, attn_mask, dropout_p)
        return _jagged_attention(
            query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, recipe=recipe, backend=backend
        )  # fmt: skip
    query, key, value = autocast(query, key, value)
    tensors = query, key, value, attn_mask
    options = dropout_p, is_causal, scale, enable_gqa, recipe, backend
    run = plan_cache.find(tensors, options)
    if run is not None:
        return run(*tensors)
    factor = check_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    check_backend(backend)
    choices = resolve_recipe(recipe)
    query, key, value = broadcast_heads(query, key, value)
    views = as_four(query), as_four(key), as_four(value), as_four_mask(attn_mask, query)
    given = is_causal, factor, choices.key, backend
    out = (sharding.attention if sharding.prepare(query) else torch.ops.qflash.attention)(*views, *given)
    shape = (*query.shape[:-1], value.shape[-1])
    plan_cache.remember(
        tensors, options, views, shape, lambda: _shaped(execution.kept(execution.attention, views, given), shape)
    )
    return out.view(shape)


def _jagged_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    """:func:`attention` of nested tensors: :func:`varlen_attention` of their tokens, with these options."""
    queries, offsets, longest = unpack_jagged(query)
    keys, key_offsets, longest_key = unpack_jagged(key)
    values, value_offsets, _ = unpack_jagged(value)
    # on a GPU the lengths are not looked at
    differ = values.shape[0] != keys.shape[0] or value_offsets.shape != key_offsets.shape
    if differ or (value_offsets is not key_offsets and not keys.is_cuda and not torch.equal(value_offsets, key_offsets)):
        raise ValueError("value must have sequences of the same lengths as key")
    out = varlen_attention(queries, keys, values, offsets, key_offsets, longest, longest_key, **options)
    return torch.nested.nested_tensor_from_jagged(out, offsets=offsets, max_seqlen=longest).transpose(1, 2)


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    recipe: Recipe | str | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Integer attention of sequences of several lengths, packed one behind the other: a batch without padding.

    The bits are those of :func:`attention` for each sequence alone: scales, midranges and means are found sequence by
    sequence, and what the recipe shares over a tensor is shared over a sequence. The first seven arguments are those of
    ``flash_attn_varlen_func`` and of ``torch.nn.attention.varlen.varlen_attn`` by position. Lengths stay on the device:
    nothing waits for a GPU.

    Args:
        query: ``(queries, heads, head_dim)`` of all sequences, float16, bfloat16 or float32; any strides.
        key: ``(keys, heads, head_dim)``, the same dtype and device.
        value: ``(keys, heads, value_dim)``, the same dtype and device.
        cu_seqlens_q: cumulative numbers of queries, ``(sequences + 1,)``, int32 or int64 on query's device: sequence i has
            the queries ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1] - 1``. It begins with 0, ends with the number of
            queries, and never decreases, which is checked only on a CPU. Sequences may be empty.
        cu_seqlens_k: the same of keys, of as many sequences.
        max_seqlen_q: upper bound of the queries of a sequence; checked only on a CPU. On a GPU outputs beyond it are not
            written. It may also be an integer of NumPy or a tensor of one integer, but reading a tensor on a GPU waits for the
            GPU, and ``torch.compile`` takes no tensor here.
        max_seqlen_k: upper bound of the keys of a sequence; checked only on a CPU. On a GPU a longer sequence's output is NaN.
        is_causal: query i of a sequence sees its keys 0 to i, as in :func:`attention`. FlashAttention aligns the last query
            with the last key instead; the two differ where a sequence has not as many queries as keys.
        scale, enable_gqa, recipe, backend: see :func:`attention`.

    Returns:
        ``(queries, heads, value_dim)`` in query's dtype, contiguous. Queries of a sequence without keys are zero.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind; the message names it.
        NotImplementedError: from ``backward()``, and where forward mode or ``torch.func`` takes a derivative.
    """
    given = varlen.given_tensors(query, key, value, cu_seqlens_q, cu_seqlens_k)
    # plans are kept by numbers: what a tensor holds may change
    max_seqlen_q, max_seqlen_k = unboxed(max_seqlen_q), unboxed(max_seqlen_k)
    options = "varlen", max_seqlen_q, max_seqlen_k, is_causal, scale, enable_gqa, recipe, backend
    run = plan_cache.find_given(given, options)
    if run is not None:
        return run(*given)
    tensors = query, key, value, cu_seqlens_q, cu_seqlens_k
    if has_torch_function(tensors):
        return handle_torch_function(
            varlen_attention, tensors, *tensors, max_seqlen_q, max_seqlen_k, is_causal=is_causal, scale=scale,
            enable_gqa=enable_gqa, recipe=recipe, backend=backend,
        )  # fmt: skip
    query, key, value = autocast(query, key, value)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    factor = check_varlen_attention(query, key, value, lengths, is_causal, scale, enable_gqa)
    check_backend(backend)
    sharding.prepare(query)
    choices = max_seqlen_q, max_seqlen_k, is_causal, factor, resolve_recipe(recipe).key, backend
    out = torch.ops.qflash.varlen_attention(query, key, value, cu_seqlens_q, cu_seqlens_k, *choices)
    if query.is_cuda:  # elsewhere lengths are looked at in every call
        taken = varlen.given_tensors(query, key, value, cu_seqlens_q, cu_seqlens_k)
        plan_cache.remember(given, options, taken, out.shape, lambda: varlen.kept(taken, choices))
    return out


def quantize(
    x: torch.Tensor,
    granularity: str = "tensor",
    scale: float | torch.Tensor | None = None,
    *,
    center: bool = False,
    backend: str = "auto",
) -> QuantizedTensor:
    """Quantise a float tensor to int8 (Equations 1-2): ``round(x / scale)``, ties to even, saturating.

    Args:
        x: ``(..., tokens, channels)``, float16, bfloat16 or float32.
        granularity: what shares one scale: the whole ``"tensor"``, one ``"head"`` (the last two dimensions),
            one ``"token"`` (the last) or one ``"channel"`` (the last but one).
        scale: use these scales instead of ``max |x| / 127``: a number or a float32 tensor broadcastable to
            ``x``, positive and finite; ``granularity`` then plays no part.
        center: give every channel a zero point in the middle of its range over the tokens, rounded to whole steps; the
            result has an ``offset`` then. For a value (``Recipe.smooth_value``); not with a given scale, not per token.
        backend: see :func:`attention`.

    Returns:
        the int8 values (dynamic scales reach ±127, given ones may saturate at -128) and the float32 scale
        with reduced dimensions kept as 1; a tensor given as ``scale`` is the result's scale itself, not a copy.
        An all-zero tensor gets scale 1; a NaN or infinity makes its scale NaN, and so everything computed from it.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind; the message names it.
    """
    if has_torch_function((x, scale)):
        return handle_torch_function(quantize, (x, scale), x, granularity, scale, center=center, backend=backend)
    check_tensor("x", x, FLOAT_DTYPES, 1)
    check_no_derivative(x)
    check_backend(backend)
    check_flags(center=center)
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity must be one of {GRANULARITIES}, got {granularity!r}")
    if center and (scale is not None or granularity == "token" or x.dim() < 2):
        raise ValueError(
            "center=True finds a scale per tensor, head or channel of at least 2 dimensions, got "
            f"granularity={granularity!r}, scale={'None' if scale is None else 'one that is given'} and shape {tuple(x.shape)}"
        )
    sharded = sharding.prepare(x)
    if scale is None:
        if granularity != "tensor" and x.dim() < 2:
            raise ValueError(f"granularity={granularity!r} needs at least 2 dimensions, got shape {tuple(x.shape)}")
        if x.shape[-1] == 0:
            raise ValueError(f"x must have at least one channel, got shape {tuple(x.shape)}")
        if center:
            return QuantizedTensor.from_kernel(*torch.ops.qflash.quantize_centered(x, granularity, backend))
        if sharded and granularity == "tensor":
            return QuantizedTensor.from_kernel(*sharding.quantize_tensor(x, backend))
        return QuantizedTensor.from_kernel(*torch.ops.qflash.quantize(x, granularity, backend))
    scales = _scale_tensor(scale, "scale", x.device)
    try:
        fits = torch.broadcast_shapes(scales.shape, x.shape) == x.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"scale must broadcast to x of shape {tuple(x.shape)}, got {tuple(scales.shape)}")
    return QuantizedTensor(torch.ops.qflash.quantize_with_scale(x, scales, backend), scales)


def _scale_tensor(scale: float | torch.Tensor, name: str, device: torch.device) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        if scale.dtype != torch.float32:
            raise TypeError(f"{name} must be a float32 tensor or a number, got {scale.dtype}")
        if scale.device != device:
            raise ValueError(f"{name} is on {scale.device}, but belongs on {device}")
        check_scale_values(scale, name)
        return scale
    scale = unboxed(scale)
    if not is_number(scale):
        raise TypeError(f"{name} must be a number or a float32 tensor, got {type(scale).__name__}")
    if not 2.0**-126 <= scale < 2.0**127:
        raise ValueError(f"{name} must be positive and finite (a normal float32), got {scale}")
    if not isinstance(scale, (torch.SymFloat, torch.SymInt)):
        scale = float(scale)
    return torch.full((), scale, dtype=torch.float32, device=device)


def _check_quantized(query: QuantizedTensor, key: QuantizedTensor, value: QuantizedTensor, enable_gqa: bool) -> None:
    """Require int8 values whose shapes fit together, with scales of the granularities that operators take."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(f"{name}.values", x.values, (torch.int8,), 2)
    check_attention_shapes(query.values, key.values, value.values, enable_gqa)
    for name, x, dim, allowed in (
        ("query", query, -1, "tensor, head or token"),
        ("key", key, -1, "tensor, head or token"),
        ("value", value, -2, "tensor, head or channel"),
    ):
        if x.scale.dim() >= -dim and x.scale.shape[dim] != 1 and x.scale.numel() != 1:
            raise ValueError(f"{name} must have one scale per {allowed}, got scale of shape {tuple(x.scale.shape)}")
    if query.offset is not None:
        raise ValueError("query must have no offset: it would change the scores")


def _per_query_head(x: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Return scales or offsets of value's heads for the heads of a query of this shape; the same tensor where they agree."""
    if x is not None and x.dim() > 2 and x.shape[-3] not in (1, shape[-3]):
        return x.repeat_interleave(shape[-3] // x.shape[-3], dim=-3)
    return x


def _output_scale(output_scale: float | torch.Tensor | None, value: QuantizedTensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the scale of an int8 output of a shape: the given one, or the value's, repeated for query's heads."""
    if output_scale is None:
        given = _per_query_head(value.scale, shape)
        assert given is not None
        return given
    given = _scale_tensor(output_scale, "output_scale", value.device)
    if given.dim() > len(shape) or any(
        have not in (1, want) for have, want in zip(reversed(given.shape), reversed(shape), strict=False)
    ):
        raise ValueError(f"output_scale must broadcast to the output {shape}, got {tuple(given.shape)}")
    if given.dim() > 1 and given.shape[-2] != 1:
        raise ValueError(f"output_scale must be per tensor, head or channel, got shape {tuple(given.shape)}")
    return given


def _int8_tensors(
    query: QuantizedTensor,
    key: QuantizedTensor,
    value: QuantizedTensor,
    attn_mask: torch.Tensor | None,
    output_scale: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Return the tensors of a call of :func:`int8_attention`, in the order in which :mod:`.plan_cache` keeps it."""
    return (
        query.values, query.scale, key.values, key.scale, value.values, value.scale, attn_mask, output_scale, value.offset,
    )  # fmt: skip


@overload
def int8_attention(
    query: QuantizedTensor,
    key: QuantizedTensor,
    value: QuantizedTensor,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    output_scale: float | torch.Tensor | None = None,
    out_dtype: None = None,
    recipe: Recipe | str | None = None,
    backend: str = "auto",
) -> QuantizedTensor: ...
@overload
def int8_attention(
    query: QuantizedTensor,
    key: QuantizedTensor,
    value: QuantizedTensor,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    output_scale: None = None,
    out_dtype: torch.dtype,
    recipe: Recipe | str | None = None,
    backend: str = "auto",
) -> torch.Tensor: ...
@overload
def int8_attention(
    query: QuantizedTensor,
    key: QuantizedTensor,
    value: QuantizedTensor,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    output_scale: float | torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    recipe: Recipe | str | None = None,
    backend: str = "auto",
) -> QuantizedTensor | torch.Tensor: ...
def int8_attention(
    query: QuantizedTensor,
    key: QuantizedTensor,
    value: QuantizedTensor,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    output_scale: float | torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    recipe: Recipe | str | None = None,
    backend: str = "auto",
) -> QuantizedTensor | torch.Tensor:
    """The integer-only path: int8 query, key and value in, int8 out, no float instruction between.

    Args:
        query: values ``(..., heads, queries, head_dim)``; one scale per tensor, head or token.
        key: values ``(..., heads, keys, head_dim)``; one scale per tensor, head or token. An offset would shift all scores
            of a row by the same amount, which cancels in softmax, so it is ignored.
        value: values ``(..., heads, keys, value_dim)``; one scale per tensor, head or channel. Its offset, if it has one,
            is the output's: the weights of a row sum to 1.
        attn_mask: bool (True takes part), float (added to the scaled scores, in nats; converted first) or
            int32 (already in fixed point, :func:`qflash.quantize_bias`); broadcastable, never expanded; or a causal bias, as
            for :func:`attention`.
        is_causal, scale, enable_gqa, backend: see :func:`attention`.
        output_scale: scale of the int8 output, per tensor, head or channel; the value scale if None, as in
            the paper (s_O = s_V). A fitted one keeps several decibels when attention is diffuse.
        out_dtype: float16, bfloat16 or float32 for a float tensor with the accumulator's precision instead.
        recipe: its exponential, probabilities, normalisation and output; granularities come with the tensors.

    Returns:
        ``(..., heads, queries, value_dim)``, a ``QuantizedTensor`` or a tensor of ``out_dtype``; heads and queries lie in
        memory in query's order. The result's offset is ``value.offset``, repeated for query's heads. Its scale is the very
        tensor that ``output_scale`` is, or ``value.scale`` if that is None, so writing to it in place changes those; of a
        number a new tensor is made. A row without a key has the value zero, which stands for the offset where there is
        one. int8 has no NaN: where a scale is NaN, only a float output shows it.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind; the message names it.
    """
    scale_tensor = output_scale if isinstance(output_scale, torch.Tensor) else None
    if scale_tensor is None:
        output_scale = unboxed(output_scale)
    number = None if scale_tensor is not None else output_scale
    options = "int8", is_causal, scale, enable_gqa, number, out_dtype, recipe, backend
    if type(query) is type(key) is type(value) is QuantizedTensor:
        # before the checks, which take longer than the rest of a kept call
        tensors = _int8_tensors(query, key, value, attn_mask, scale_tensor)
        run = plan_cache.find(tensors, options)
        if run is not None:
            out = run(*tensors)
            if out_dtype is not None:
                return out
            offset = _per_query_head(value.offset, out.shape)
            return QuantizedTensor.from_kernel(out, value.scale if output_scale is None else output_scale, offset)
    attn_mask, is_causal = resolve_causal_bias(attn_mask, is_causal, query, key)
    given_tensors = query, key, value, attn_mask, output_scale
    if has_torch_function(given_tensors):
        return handle_torch_function(
            int8_attention, given_tensors, query, key, value, attn_mask, is_causal=is_causal, scale=scale,
            enable_gqa=enable_gqa, output_scale=output_scale, out_dtype=out_dtype, recipe=recipe, backend=backend,
        )  # fmt: skip
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, QuantizedTensor):
            raise TypeError(f"{name} must be a QuantizedTensor (qflash.quantize makes one), got {type(x).__name__}")
    tensors = _int8_tensors(query, key, value, attn_mask, scale_tensor)
    options = "int8", is_causal, scale, enable_gqa, number, out_dtype, recipe, backend
    check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    _check_quantized(query, key, value, enable_gqa)
    check_mask(attn_mask, query.values, key.values, value.values, is_causal, (torch.bool, torch.int32, *FLOAT_DTYPES))
    check_no_derivative(query.scale, key.scale, value.scale, value.offset, attn_mask)
    check_backend(backend)
    choices = resolve_recipe(recipe)
    if out_dtype is not None and out_dtype not in FLOAT_DTYPES:
        raise ValueError(f"out_dtype must be float16, bfloat16, float32 or None (int8), got {out_dtype}")
    if out_dtype is not None and output_scale is not None:
        raise ValueError("output_scale belongs to an int8 output and out_dtype asks for a float one; give one of them")
    query_values, key_values, value_values = broadcast_heads(query.values, key.values, value.values)
    shape = (*query_values.shape[:-1], value.shape[-1])
    value_scale = _four_scale(value.scale, value_values)
    given = None if out_dtype is not None else _output_scale(output_scale, value, shape)
    factor, mask = resolve_softmax_scale(scale, query.shape[-1]), as_four_mask(attn_mask, query_values)
    q, k, v = as_four(query_values), as_four(key_values), as_four(value_values)
    query_scale, key_scale = _four_scale(query.scale, query_values), _four_scale(key.scale, key_values)
    out_scale = None if given is None else _four_scale(given, query_values)
    offset = None if value.offset is None or out_dtype is None else _four_scale(value.offset, value_values)
    stored = torch.int8 if out_dtype is None else out_dtype
    sharding.prepare(q)
    out = torch.ops.qflash.int8_attention(
        q, query_scale, k, key_scale, v, value_scale, mask, is_causal, factor, out_scale, stored, choices.key, backend, offset
    )

    def prepare() -> Callable[..., torch.Tensor] | None:
        if output_scale is None and given is not None and given is not value.scale:
            # repeated for query's heads
            return None
        if scale_tensor is not None and not q.is_cuda:
            # whose values every call looks at
            return None
        found = q, query_scale, k, key_scale, v, value_scale, mask, out_scale, offset
        run = _shaped(execution.kept(execution.int8_attention, found, (is_causal, factor, stored, choices.key, backend)), shape)
        if run is None or given is None:
            return run
        # an int8 output carries the offset, and its computation has no part in it
        inner = run
        if scale_tensor is not None:
            return lambda *tensors: inner(*tensors[:8], None)
        if number is not None:
            return lambda *tensors: inner(*tensors[:7], given, None)
        return lambda *tensors: inner(*tensors[:7], tensors[5], None)

    views = (q, query_scale, k, key_scale, v, value_scale, mask, None if scale_tensor is None else out_scale, offset)
    plan_cache.remember(tensors, options, views, shape, prepare)
    out = out.view(shape)
    if given is None:
        return out
    out_offset = _per_query_head(value.offset, shape)
    if number is None or torch.compiler.is_compiling():
        return QuantizedTensor.from_kernel(out, given, out_offset)
    # the tensor made of it may be kept for the next call, so that the result gets another
    return QuantizedTensor.from_kernel(out, number, out_offset)


def quantize_bias(bias: torch.Tensor) -> torch.Tensor:
    """Turn an additive mask (nats) into the fixed point the integer-only path adds (design: log2 domain).

    Args:
        bias: float16, bfloat16 or float32, any shape.

    A softmax sees only differences within a row (the last dimension: keys). So if the largest number of a row is more than 1024
    nats from 0, it is subtracted from the row. If it is ``2**64`` or more from 0, as in a row of ``torch.finfo(dtype).min``, it
    outweighs every score: the keys that have it share the row evenly, as in ``scaled_dot_product_attention``.

    Returns:
        int32 of the same shape in 1/65536 octaves, ``round(bias * log2(e) * 2**16)``, clamped at 4096 octaves (2839 nats),
        where a weight is 0. Three larger numbers are marks: ``-2**30`` (from minus infinity) hides a key, ``2**30`` (from NaN
        and plus infinity) makes the row NaN, ``2**30 - 1`` is for the keys that share a row evenly. No other number beyond the
        clamp is valid; its result is undefined.

    Raises:
        TypeError: ``bias`` is not a float tensor.
        NotImplementedError: forward mode or ``torch.func`` takes a derivative.
    """
    if has_torch_function((bias,)):
        return handle_torch_function(quantize_bias, (bias,), bias)
    check_tensor("bias", bias, FLOAT_DTYPES, 0)
    check_no_derivative(bias)
    sharding.prepare(bias)
    return torch.ops.qflash.quantize_bias(bias)


def align_bias(bias: torch.Tensor) -> torch.Tensor:
    """Lay an additive mask out so that its rows begin at multiples of eight elements.

    Values, shape and results stay. Where rows have an odd length (Swin's 49 keys) a kernel then loads several elements at
    once; worth it for a bias that is used many times. ``scaled_dot_product_attention`` takes such a bias as well.

    Args:
        bias: float16, bfloat16, float32, or int32 as :func:`quantize_bias` returns it; (..., queries, keys).

    Returns:
        The same numbers; ``bias`` itself if its rows are aligned already. Expanded dimensions stay expanded.

    Raises:
        TypeError: ``bias`` is not a tensor of one of these types.
        ValueError: ``bias`` has fewer than two dimensions.
    """
    if has_torch_function((bias,)):
        return handle_torch_function(align_bias, (bias,), bias)
    check_tensor("bias", bias, (torch.int32, *FLOAT_DTYPES), 2)
    if has_aligned_rows(bias.stride(), 8):
        return bias
    once = bias[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in bias.stride()[:-1])]
    return empty_bias(bias, once.shape, bias.dtype).copy_(once).expand(bias.shape)
