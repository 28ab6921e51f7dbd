"""One place that refuses bad arguments, in sentences that name the argument, what it was and what is allowed."""

from __future__ import annotations

import math
import numbers
import operator
import sys
from collections.abc import Sequence

import torch
from torch.autograd import forward_ad

from . import torch_internals
from .scalars import whole_number
from .specification.fixed_point import MAX_HEAD_DIM, MAX_KEYS
from .specification.memory_format import broadcast_shape
from .specification.quantization import QuantizedTensor

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")
BACKENDS = ("auto", "reference", "cpu", "triton")


def _size(size: int) -> int:
    """Return a size for a message; Dynamo forms no text of one that it keeps open, so that it settles this one."""
    return operator.index(size) if torch.compiler.is_dynamo_compiling() else size


def _shape(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple([_size(size) for size in shape])


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def is_number(x: object) -> bool:
    """Tell whether something is a real number: of Python, NumPy, or one that a compiler keeps open; True and False are not."""
    if isinstance(x, (int, float, torch.SymFloat, torch.SymInt)):
        return not isinstance(x, bool)
    return isinstance(x, numbers.Real)


def check_tensor(name: str, x: object, dtypes: tuple[torch.dtype, ...], least_rank: int) -> None:
    """Require a strided tensor of one of ``dtypes`` with at least ``least_rank`` dimensions.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: too few dimensions, a sparse layout or a nested tensor.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name} must be {_names(dtypes)}, got {str(x.dtype).removeprefix('torch.')}")
    if x.layout != torch.strided:
        raise ValueError(f"{name} must be a dense (strided) tensor, got layout {x.layout}")
    if x.is_nested:
        raise ValueError(f"{name} must be a dense (strided) tensor, got a nested tensor of strided layout")
    if x.dim() < least_rank:
        raise ValueError(f"{name} must have at least {least_rank} dimensions, got shape {_shape(x.shape)}")


def check_no_derivative(*tensors: torch.Tensor | None) -> None:
    """Refuse derivatives that PyTorch would not ask our operators for: forward mode, and those of torch.func.

    Of the first it would make zeros, of the others an error of its own. ``backward()`` says what there is to say by itself.

    Raises:
        NotImplementedError: a tensor has a tangent, or torch.func takes a gradient of it.
    """
    if torch.compiler.is_compiling():
        return
    transformed, tangents = torch_internals.in_transform(), torch_internals.in_forward_mode()
    if not transformed and not tangents:
        return
    for x in tensors:
        if x is None:
            continue
        wanted = transformed and torch_internals.has_transform_gradient(x)
        if wanted or (tangents and forward_ad.unpack_dual(x).tangent is not None):
            raise NotImplementedError(
                "QFlash is for inference: integer attention has no gradient, as torch.func.grad, jvp and the like want one"
            )


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return float tensors in the dtype that autocast computes attention in where it is on, and as they are where it is not."""
    device = tensors[0].device.type if isinstance(tensors[0], torch.Tensor) else None
    if device not in _AUTOCAST_DEVICES or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in FLOAT_DTYPES else x for x in tensors)


def check_attention_shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> None:
    """Require shapes and devices that scaled_dot_product_attention would take, within QFlash's limits.

    Raises:
        ValueError: devices, batch dimensions, heads, tokens or channels do not fit together or exceed a limit.
    """
    for name, x in (("key", key), ("value", value)):
        if x.device != query.device:
            raise ValueError(f"{name} is on {x.device}, query is on {query.device}; they must agree")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key must have query's head dimension {_size(query.shape[-1])}, got {_size(key.shape[-1])}")
    if not 1 <= query.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"query's head dimension must be 1 to {MAX_HEAD_DIM}, got {_size(query.shape[-1])}")
    if value.shape[-1] > MAX_HEAD_DIM:
        raise ValueError(f"value's head dimension must be at most {MAX_HEAD_DIM}, got {_size(value.shape[-1])}")
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value must have as many tokens as key ({_size(key.shape[-2])}), got {_size(value.shape[-2])}")
    if key.shape[-2] > MAX_KEYS:
        raise ValueError(
            f"key must have at most {MAX_KEYS} tokens (more could overflow sums of int32), got {_size(key.shape[-2])}"
        )
    if enable_gqa and min(query.dim(), key.dim(), value.dim()) < 3:
        raise ValueError(f"enable_gqa needs a head dimension in each tensor, got query of shape {_shape(query.shape)}")
    heads, key_heads, value_heads = (x.shape[-3] if x.dim() > 2 else 1 for x in (query, key, value))
    if key_heads != value_heads and key_heads != 1 and value_heads != 1:
        raise ValueError(f"key and value must have the same number of heads, got {_size(key_heads)} and {_size(value_heads)}")
    shared = key_heads if value_heads == 1 else value_heads
    if shared not in (1, heads) and heads != 1:
        if not enable_gqa:
            raise ValueError(
                f"key must have query's {_size(heads)} heads or 1, got {_size(shared)}; "
                "for grouped-query attention pass enable_gqa=True"
            )
        if shared == 0 or heads % shared:
            counts = _shape((heads, shared))
            raise ValueError(f"with enable_gqa, query's heads must be a multiple of key's, got {counts[0]} and {counts[1]}")
    for name, x in (("key", key), ("value", value)):
        for have, want in zip(reversed(x.shape[:-3]), reversed(query.shape[:-3]), strict=False):
            if have != want and 1 not in (have, want):
                raise ValueError(
                    f"{name}'s batch shape {_shape(x.shape[:-3])} and query's {_shape(query.shape[:-3])} do not broadcast"
                )
    for have, want in zip(reversed(value.shape[:-3]), reversed(key.shape[:-3]), strict=False):
        if have != want and 1 not in (have, want):
            raise ValueError(
                f"value's batch shape {_shape(value.shape[:-3])} and key's {_shape(key.shape[:-3])} do not broadcast"
            )


def resolve_causal_bias(
    attn_mask: torch.Tensor | None, is_causal: bool, query: torch.Tensor | QuantizedTensor, key: torch.Tensor | QuantizedTensor
) -> tuple[torch.Tensor | None, bool]:
    """Return the mask and ``is_causal`` that a bias of ``torch.nn.attention.bias`` stands for; any other mask as it is.

    Raises:
        ValueError: the bias is for other numbers of queries and keys, or ``is_causal`` is set as well.
    """
    if attn_mask is None or type(attn_mask) is torch.Tensor:
        return attn_mask, is_causal
    # torch.nn.attention.bias takes seconds to import, and whoever has such a bias has imported it
    bias = sys.modules.get("torch.nn.attention.bias")
    if bias is None or not isinstance(attn_mask, bias.CausalBias):
        return attn_mask, is_causal
    if is_causal:
        raise ValueError("attn_mask and is_causal=True exclude each other; a causal bias is one already")
    queries, keys = query.shape[-2], key.shape[-2]
    if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (queries, keys):
        raise ValueError(
            f"attn_mask must be a causal bias of {_size(queries)} queries and {_size(keys)} keys, "
            f"got {attn_mask.seq_len_q} and {attn_mask.seq_len_kv}"
        )
    if queries == keys or attn_mask.variant == bias.CausalVariant.UPPER_LEFT:
        return None, True
    return torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries), False


def check_mask(
    mask: object,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Require an attention mask that broadcasts to (..., queries, keys), on query's device.

    Raises:
        TypeError: not a tensor, or a dtype that is neither bool nor a supported bias.
        ValueError: the shape does not broadcast, the device differs, or ``is_causal`` is set as well.
    """
    if mask is None:
        return
    if is_causal:
        raise ValueError("attn_mask and is_causal=True exclude each other; put the causal part into attn_mask")
    check_tensor("attn_mask", mask, dtypes, 0)
    assert isinstance(mask, torch.Tensor)
    if mask.device != query.device:
        raise ValueError(f"attn_mask is on {mask.device}, query is on {query.device}; they must agree")
    target = broadcast_shape(query, key, value)
    fits = mask.dim() <= len(target) and all(
        have in (1, want) for have, want in zip(reversed(mask.shape), reversed(target), strict=False)
    )
    if not fits:
        raise ValueError(f"attn_mask must broadcast to {_shape(target)}, got shape {_shape(mask.shape)}")


def resolve_softmax_scale(scale: float | None, head_dim: int) -> float:
    """Return the softmax scale: the given one, or ``head_dim ** -0.5``.

    Raises:
        TypeError: not a number.
        ValueError: not positive and finite.
    """
    if scale is None:
        return head_dim**-0.5
    if not is_number(scale):
        raise TypeError(f"scale must be a number or None, got {type(scale).__name__}")
    # NumPy's float16 does not hold the limits below
    if not isinstance(scale, (int, float, torch.SymFloat)) and not isinstance(scale, numbers.Rational):
        scale = float(scale)
    # comparisons only, which a number that torch.compile keeps open has as well
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")
    if not 2.0**-60 <= scale <= 2.0**60:
        raise ValueError(f"scale must lie between 2**-60 and 2**60, got {scale}")
    return scale if isinstance(scale, torch.SymFloat) else float(scale)


def check_dropout(dropout_p: object) -> None:
    """Require a dropout probability of 0: dropout is for training.

    Raises:
        TypeError: not a number.
        ValueError: another number.
    """
    if not is_number(dropout_p):
        raise TypeError(f"dropout_p must be a number, got {type(dropout_p).__name__}")
    if dropout_p != 0:
        raise ValueError(f"dropout_p must be 0, because QFlash is for inference and drops nothing; got {dropout_p}")


def check_flags(**flags: object) -> None:
    """Require True or False.

    Raises:
        TypeError: something else.
    """
    for name, flag in flags.items():
        if not isinstance(flag, (bool, torch.SymBool)):
            raise TypeError(f"{name} must be True or False, got {flag!r}")


def check_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> float:
    """Require what :func:`qflash.attention` takes; return the softmax scale.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind; the message names it.
        NotImplementedError: forward mode or ``torch.func`` takes a derivative.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x, FLOAT_DTYPES, 2)
        if x.dtype != query.dtype:
            raise TypeError(f"{name} must have query's dtype {query.dtype}, got {x.dtype}")
    check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    check_dropout(dropout_p)
    check_attention_shapes(query, key, value, enable_gqa)
    check_mask(attn_mask, query, key, value, is_causal, (torch.bool, *FLOAT_DTYPES))
    check_no_derivative(query, key, value, attn_mask)
    return resolve_softmax_scale(scale, query.shape[-1])


def _check_lengths(name: str, cumulative: object, query: torch.Tensor) -> None:
    """Require cumulative lengths, as far as that can be told without looking at them."""
    check_tensor(name, cumulative, (torch.int32, torch.int64), 1)
    assert isinstance(cumulative, torch.Tensor)
    if cumulative.dim() != 1 or cumulative.shape[0] == 0:
        raise ValueError(f"{name} must have the shape (sequences + 1,), got {_shape(cumulative.shape)}")
    if cumulative.device != query.device:
        raise ValueError(f"{name} is on {cumulative.device}, query is on {query.device}; they must agree")


def _check_longest(name: str, most: object) -> None:
    """Require a length."""
    if whole_number(name, most) < 0:
        raise ValueError(f"{name} must not be negative, got {most}")


def check_varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: tuple[torch.Tensor, torch.Tensor, int, int],
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> float:
    """Require what :func:`qflash.varlen_attention` takes; return the softmax scale. Nothing waits for a GPU.

    Args:
        query, key, value, is_causal, scale, enable_gqa: its arguments.
        lengths: its other four.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind; the message names it.
        NotImplementedError: forward mode or ``torch.func`` takes a derivative.
    """
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = lengths
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x, FLOAT_DTYPES, 3)
        if x.dim() != 3:
            raise ValueError(f"{name} must have the shape (tokens, heads, channels), got {_shape(x.shape)}")
        if x.dtype != query.dtype:
            raise TypeError(f"{name} must have query's dtype {query.dtype}, got {x.dtype}")
    check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    if value.shape[:2] != key.shape[:2]:
        raise ValueError(f"value must have key's tokens and heads {_shape(key.shape[:2])}, got {_shape(value.shape[:2])}")
    heads, key_heads = query.shape[1], key.shape[1]
    if heads != key_heads and (key_heads == 0 or heads % key_heads):
        raise ValueError(f"query's heads must be a multiple of key's, got {_size(heads)} and {_size(key_heads)}")
    if heads != key_heads and not enable_gqa:
        raise ValueError(
            f"key must have query's {_size(heads)} heads, got {_size(key_heads)}; "
            "for grouped-query attention pass enable_gqa=True"
        )
    # the number of tokens is not that of a row
    none = query[:0].transpose(0, 1), key[:0].transpose(0, 1), value[:0].transpose(0, 1)
    check_attention_shapes(none[0], none[1], none[2], enable_gqa)
    _check_lengths("cu_seqlens_q", cu_seqlens_q, query)
    _check_lengths("cu_seqlens_k", cu_seqlens_k, query)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k must be of as many sequences as cu_seqlens_q, got shapes {_shape(cu_seqlens_k.shape)} and "
            f"{_shape(cu_seqlens_q.shape)}"
        )
    _check_longest("max_seqlen_q", max_seqlen_q)
    _check_longest("max_seqlen_k", max_seqlen_k)
    if max_seqlen_k > MAX_KEYS:
        raise ValueError(f"max_seqlen_k must be at most {MAX_KEYS} (more could overflow sums of int32), got {max_seqlen_k}")
    check_no_derivative(query, key, value)
    return resolve_softmax_scale(scale, query.shape[-1])


def check_jagged(query: object, key: object, value: object, attn_mask: object, dropout_p: float) -> None:
    """Require nested tensors of jagged layout that :func:`qflash.attention` takes.

    Raises:
        TypeError: one of the three is no tensor, or not jagged.
        ValueError: another shape than (batch, heads, jagged tokens, channels), tokens left out, or a mask.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor) or x.layout != torch.jagged:
            raise TypeError(f"{name} must be a nested tensor of jagged layout like the others, got {_kind(x)}")
        ragged = torch_internals.ragged_dim(x)
        if x.dim() != 4 or ragged != 2:
            raise ValueError(
                f"{name} must have the shape (batch, heads, jagged tokens, channels), got {x.dim()} dimensions of which "
                f"number {ragged} is jagged"
            )
        if x.lengths() is not None:  # type: ignore[attr-defined]
            raise ValueError(
                f"{name} must have no holes between its sequences; transpose(1, 2).contiguous().transpose(1, 2) closes them"
            )
    if attn_mask is not None:
        raise ValueError("attn_mask must be None beside jagged tensors, which have no common shape; is_causal=True is taken")
    check_dropout(dropout_p)


def unpack_jagged(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the tokens of a checked nested tensor, (tokens, heads, channels), their cumulative lengths, and the longest."""
    packed = x.transpose(1, 2)
    return packed.values(), packed.offsets(), torch_internals.longest_jagged(x)  # type: ignore[attr-defined]


def _kind(x: object) -> str:
    return f"a tensor of layout {x.layout}" if isinstance(x, torch.Tensor) else type(x).__name__


def is_jagged(*tensors: object) -> bool:
    """Tell whether one of them is a nested tensor of jagged layout."""
    return any(isinstance(x, torch.Tensor) and x.layout == torch.jagged for x in tensors)


def reason_for_float(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str | None:
    """Return why a call of scaled_dot_product_attention cannot run in integers, or None where it can.

    It cannot where :func:`qflash.attention` would raise, and where somebody may want a gradient.
    """
    try:
        attn_mask, is_causal = resolve_causal_bias(attn_mask, is_causal, query, key)
        if is_jagged(query, key, value):
            check_jagged(query, key, value, attn_mask, dropout_p)
            packed = unpack_jagged(query), unpack_jagged(key), unpack_jagged(value)
            (query, begins, longest), (key, key_begins, longest_key), (value, _, _) = packed
            query, key, value = autocast(query, key, value)
            lengths = begins, key_begins, longest, longest_key
            check_varlen_attention(query, key, value, lengths, is_causal, scale, enable_gqa)
        else:
            query, key, value = autocast(query, key, value)
            check_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    except (TypeError, ValueError, NotImplementedError) as error:
        return str(error)
    if torch.is_grad_enabled():
        for x in (query, key, value, attn_mask):
            if x is not None and x.requires_grad:
                return (
                    "it needs a gradient, which integer attention has not (torch.inference_mode() and no_grad() ask for none)"
                )
    return None


def resolve_device(name: str | None, index: int | None = None) -> torch.device:
    """Return the device called ``name``; None is a GPU if there is one, else the CPU.

    Args:
        index: of the GPU where the name has none; PyTorch's current one if None.

    Raises:
        ValueError: no name of a device, or a GPU that is not there.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"device must be one that PyTorch knows, for instance cpu, cuda or cuda:1, got {name!r}") from error
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ValueError(f"device={name!r} was asked for, and PyTorch finds no NVIDIA GPU with a working driver")
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    if device.index >= torch.cuda.device_count():
        raise ValueError(f"device {device} is not there: PyTorch finds {torch.cuda.device_count()} NVIDIA GPUs")
    return device


def check_backend(backend: object) -> None:
    """Require one of the back ends' names.

    Raises:
        ValueError: another value.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
