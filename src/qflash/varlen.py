"""Attention of sequences of several lengths that lie one behind the other in packed tensors: what the operator does.

The specification is a call of attention for each sequence. The other back ends take all sequences at once:
the C kernels quantise and attend; on a GPU one or two launches quantise, or for recipes that those do not know PyTorch
(:mod:`.segments`), and one attends. None looks at lengths on the host, so that a GPU is not waited for.
"""

from __future__ import annotations

from typing import Any

import torch

from . import plan_cache
from .backends import find_backend
from .specification.attention_call import Lengths, VarlenCall
from .specification.recipe import Recipe


def _check_on_the_host(name: str, cumulative: torch.Tensor, tokens: int, most: int, most_name: str) -> None:
    """Require cumulative lengths that cut ``tokens`` tokens into sequences of at most ``most``; for a CPU's tensors."""
    if cumulative[0] != 0:
        raise ValueError(f"{name} must begin with 0, got {int(cumulative[0])}")
    if cumulative[-1] != tokens:
        raise ValueError(f"{name} must end with the number of tokens, {tokens}, got {int(cumulative[-1])}")
    lengths = cumulative.diff()
    if len(lengths) and lengths.min() < 0:
        raise ValueError(f"{name} must not fall, got {cumulative.tolist() if len(lengths) < 20 else 'one that does'}")
    if len(lengths) and lengths.max() > most:
        raise ValueError(f"{most_name} must be at least the longest of {name}, {int(lengths.max())}, got {most}")


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    scale: float,
    recipe: str,
    backend: str,
) -> torch.Tensor:
    """Quantise by the recipe and attend, sequence by sequence; see :func:`qflash.varlen_attention`."""
    if query.device.type == "cpu":
        _check_on_the_host("cu_seqlens_q", cu_seqlens_q, query.shape[0], max_seqlen_q, "max_seqlen_q")
        _check_on_the_host("cu_seqlens_k", cu_seqlens_k, key.shape[0], max_seqlen_k, "max_seqlen_k")
    tensors = given_tensors(query, key, value, cu_seqlens_q, cu_seqlens_k)
    choices = max_seqlen_q, max_seqlen_k, is_causal, scale, recipe, backend
    run = kept(tensors, choices)
    if run is not None:
        return run(*tensors)

    found = find_backend(backend, query.device)
    if 0 in (*query.shape[:2], value.shape[2], cu_seqlens_q.shape[0] - 1, max_seqlen_q):
        return query.new_zeros((*query.shape[:2], value.shape[2]))

    def go(*tensors: torch.Tensor | None) -> torch.Tensor:
        return found.attend_varlen(call_of(tensors, choices))

    if not query.is_cuda or plan_cache.place_of(tensors) is None:
        return go(*tensors)
    if plan_cache.is_unrepeatable(tensors, (varlen_attention, *choices)):
        return go(*tensors)
    from .kernels.launch_recorder import record

    out, prepare = record(go, tensors)
    plan_cache.remember(tensors, (varlen_attention, *choices), tensors, out.shape, prepare)
    return out


def given_tensors(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Return the tensors of a call as :mod:`.plan_cache` keeps it: lengths that serve both are there once."""
    return query, key, value, cu_seqlens_q, None if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k


def call_of(tensors: plan_cache.Tensors, choices: tuple[Any, ...]) -> VarlenCall:
    """Return the call of :func:`given_tensors` and the other arguments of :func:`varlen_attention`."""
    query, key, value, queries, keys = tensors
    most_queries, most_keys, is_causal, scale, recipe, _ = choices
    assert query is not None and key is not None and value is not None and queries is not None
    queries = queries.contiguous()
    lengths = Lengths(queries, queries if keys is None else keys.contiguous(), most_queries, most_keys)
    return VarlenCall(query, key, value, None, None, lengths, is_causal, scale, query.dtype, Recipe.from_key(recipe))


def kept(tensors: plan_cache.Tensors, choices: tuple[Any, ...]) -> plan_cache.Run | None:
    """Return what an earlier :func:`varlen_attention` left for such tensors (:func:`given_tensors`), which it takes."""
    return plan_cache.find(tensors, (varlen_attention, *choices))
