"""How tensors are viewed in four dimensions, and how outputs and biases lie in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def as_four(x: torch.Tensor) -> torch.Tensor:
    """View a tensor of any rank as (batch, heads, tokens, channels); copy where its leading dimensions do not collapse."""
    if x.dim() == 4:
        return x
    if x.dim() > 4:
        return x.flatten(0, -4)
    return x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))


def as_four_mask(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """Bring a mask to (period, heads | 1, queries | 1, keys | 1), expanding nothing that can repeat.

    Leading dimensions that are a run of ones followed by the query's own (Swin's windows inside a batch of
    images) become a period that repeats over the batch.
    """
    if mask is None or (mask.dim() == 4 and query.dim() == 4):
        return mask
    if mask.dim() < query.dim():
        mask = mask.reshape((1,) * (max(query.dim(), 4) - mask.dim()) + tuple(mask.shape))
    if mask.dim() <= 4:
        return as_four(mask)
    lead, have = query.shape[:-3], mask.shape[:-3]
    first = next((i for i, size in enumerate(have) if size != 1), len(have))
    if tuple(have[first:]) != tuple(lead[first:]):
        mask = mask.expand(*have[:first], *lead[first:], *mask.shape[-3:])
    return as_four(mask)


def is_expanded(x: torch.Tensor) -> bool:
    """Tell whether a (batch, heads, tokens, channels) holds the same batch element several times, in one place of memory."""
    return x.dim() == 4 and x.shape[0] > 1 and x.stride(0) == 0


def broadcast_shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the scores, (..., heads, queries, keys), of tensors whose batch and heads broadcast."""
    rank = max(x.dim() for x in (query, key, value))
    shape = list(query.shape[:-1])
    shape[:0] = [1] * (rank - query.dim())
    heads = rank - 3
    for x in (key, value):
        for place, size in enumerate(x.shape[:-2], rank - x.dim()):
            # of fewer heads of key each serves several of query's
            if shape[place] == 1 or (place < heads and size != 1):
                shape[place] = size
    return (*shape, key.shape[-2])


def broadcast_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Expand batch and heads to those of the scores, as views; key and value may keep fewer heads, the same number each.

    Args:
        query, key, value: (..., heads, tokens, channels), checked; leading dimensions may be missing.
    """
    if query.dim() == key.dim() == value.dim() == 2:
        return query, key, value
    lead = broadcast_shape(query, key, value)[:-2]
    heads = max(x.shape[-3] if x.dim() > 2 else 1 for x in (key, value))
    if 0 in (*key.shape[:-2], *value.shape[:-2]):
        heads = lead[-1]

    def expanded(x: torch.Tensor, heads: int) -> torch.Tensor:
        shape = *lead[:-1], heads, *x.shape[-2:]
        return x if x.shape == shape else x.expand(shape)

    return expanded(query, lead[-1]), expanded(key, heads), expanded(value, heads)


def empty_output(like: torch.Tensor, channels: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an empty (batch, heads, tokens, ``channels``) whose heads and tokens lie in memory in the order of ``like``'s.

    A query that is a view of a projection, (batch, tokens, heads, channels) transposed, gets an output that the next
    projection reads without a copy.

    Args:
        like: (batch, heads, tokens, any number of channels), of any strides.
        channels: of the output, which are neighbours.
        dtype: of the output.
    """
    batch, heads, tokens, _ = like.shape
    if heads > 1 and tokens > 1 and like.stride(1) < like.stride(2):
        return like.new_empty((batch, tokens, heads, channels), dtype=dtype).transpose(1, 2)
    return like.new_empty((batch, heads, tokens, channels), dtype=dtype)


def has_aligned_rows(strides: Sequence[int], elements: int) -> bool:
    """Tell whether every row begins a multiple of so many elements behind the first, its elements beside one another."""
    *rows, step = strides
    return step == 1 and all(stride % elements == 0 for stride in rows)


def padded_row(elements: int) -> int:
    """Return from where to where rows of a bias of so many elements are that begin at multiples of eight."""
    return -(-elements // 8) * 8


def empty_bias(like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an empty bias whose rows begin at multiples of eight elements, whatever their length.

    A kernel then loads four neighbours at once, and every other use sees a view as usual.

    Args:
        like: a tensor on the device.
        shape: of the bias, of one dimension or more.
        dtype: of the bias.
    """
    return like.new_empty((*shape[:-1], padded_row(shape[-1])), dtype=dtype)[..., : shape[-1]]
