"""Which back end and which family of kernels take a call, and why the others do not: :func:`explain`."""

from __future__ import annotations

import dataclasses
import re

import torch

from . import backends
from .specification.attention_call import float_call
from .specification.memory_format import as_four, as_four_mask, broadcast_heads
from .specification.recipe import Recipe, resolve_recipe
from .validation import autocast, check_attention, check_backend, resolve_causal_bias

_TAKERS = {"reference": "PyTorch, by the specification", "cpu": "the C kernels"}
_NOTHING = "nothing: there is no output, or no key"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What :func:`explain` returns; ``str()`` of it is for people.

    Attributes:
        backend: that takes the call.
        backends: why the others do not, by name.
        family: the kernels that attend, for instance ``"sm90.resident"``.
        families: why the families that were asked before do not, by name.
        fused: whether one launch quantises and attends.
        apart: why no family does that, by name; empty where one does, or none was asked: a rule has long rows of few heads
            quantised by launches of their own.
    """

    backend: str
    backends: dict[str, str]
    family: str
    families: dict[str, str] = dataclasses.field(default_factory=dict)
    fused: bool = False
    apart: dict[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        def listed(reasons: dict[str, str]) -> list[str]:
            return [f"  not {name}: {reason}" for name, reason in reasons.items()]

        lines = [f"back end: {self.backend}", *listed(self.backends), f"attends: {self.family}", *listed(self.families)]
        if self.fused:
            lines.append("quantises: the same launch")
        elif self.family not in (*_TAKERS.values(), _NOTHING):
            why = "no family does it while attending" if self.apart else "as for few heads of long rows, and for masks"
            lines += [f"quantises: launches before it, {why}", *listed(self.apart)]
        return "\n".join(lines)


def explain(
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
    architecture: str | None = None,
) -> Explanation:
    """Say which back end and which kernels :func:`attention` uses for a call, and why no others. Nothing is computed.

    Args:
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, recipe, backend: see :func:`attention`; no nested
            tensors.
        architecture: of a GPU that need not be present, for instance ``"sm_90"``: say what such a GPU would do with tensors
            of these shapes and strides, at aligned addresses. None: say what happens where the tensors are.

    Returns:
        an ``Explanation``, to be printed.

    Raises:
        TypeError, ValueError: as :func:`attention`, or ``architecture`` is not the name of one.
    """
    attn_mask, is_causal = resolve_causal_bias(attn_mask, is_causal, query, key)
    query, key, value = autocast(query, key, value)
    factor = check_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    check_backend(backend)
    if architecture is not None and not re.fullmatch(r"sm_\d{2,3}", str(architecture)):
        raise ValueError(f"architecture must be a name like 'sm_90' or None, got {architecture!r}")
    choices = resolve_recipe(recipe)
    query, key, value = broadcast_heads(query, key, value)
    q, k, v, mask = as_four(query), as_four(key), as_four(value), as_four_mask(attn_mask, query)
    where, capability, missing = query.device, None, None
    if architecture is not None:
        where, capability = torch.device("cuda"), (int(architecture[3:-1]), int(architecture[-1]))
        missing = backends.architecture_unsupported(capability) or backends.triton_missing()
        if backend == "cpu" or (missing and backend == "triton"):
            raise ValueError(f"backend={backend!r} cannot run on {architecture}: {missing or backends.cpu_unavailable(where)}")
        resolved = "reference" if missing or backend == "reference" else "triton"
    else:
        resolved = backends.resolve_backend(backend, where)
    others = {name: _why_not(name, where, backend, missing) for name in ("triton", "cpu", "reference") if name != resolved}
    if resolved != "triton":
        return Explanation(resolved, others, _TAKERS[resolved])
    from .kernels.families import listen

    if capability is not None:
        q, k, v = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in (q, k, v))
        mask = None if mask is None else torch.empty_strided(mask.shape, mask.stride(), dtype=mask.dtype, device="meta")
    with torch.no_grad(), listen(capability) as heard:
        backends.named_backend(resolved).attend(float_call(q, k, v, mask, is_causal, factor, choices))
    last = heard[-1] if heard else None
    if last is None or last.family is None:
        return Explanation(resolved, others, _NOTHING)
    return Explanation(
        resolved, others, last.family.name, last.refusals, last.fused, heard[0].refusals if len(heard) > 1 else {}
    )


def _why_not(name: str, device: torch.device, backend: str, missing: str | None) -> str:
    """Return why a back end does not take a call that another one takes; ``missing`` is what Triton lacks, if known."""
    reasons = {"cpu": backends.cpu_unavailable, "triton": lambda device: missing or backends.triton_unavailable(device)}
    if reason := reasons.get(name, lambda _: None)(device):
        return reason
    if backend != "auto":
        return f"backend={backend!r} was asked for"
    return "it is slower" if name == "reference" else "on a CPU it is Triton's interpreter, which is slow"
