"""Every numerical choice of the integer attention, in one frozen value.

A :class:`Recipe` names mathematics, never an implementation: two back ends given the same recipe and
the same tensors return the same integers.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

from .fixed_point import MOST_ROUNDED_KEYS

_CHOICES: dict[str, tuple[Any, ...]] = {
    "query_granularity": ("tensor", "head", "token"),
    "key_granularity": ("tensor", "head", "token"),
    "value_granularity": ("tensor", "head", "channel"),
    "exponential": ("linear", "quadratic"),
    "probability_bits": (7, 8, 15),
    "probability_rounding": ("nearest", "floor"),
    "row_sum": ("exact", "rounded"),
    "smooth_key": (False, True),
    "smooth_value": (False, True),
    "balance": (False, True),
    "rotate": (False, True),
    "normalization": ("two_pass", "online"),
    "key_block": (32, 64, 128, 256),
    "output": ("accumulator", "value_scale"),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The numerical choices of one integer attention.

    Attributes:
        query_granularity: one scale per ``"tensor"``, per ``"head"`` (batch and head) or per ``"token"``,
            used when :func:`qflash.attention` quantises the query. :func:`qflash.int8_attention` takes
            whatever granularity its tensors carry.
        key_granularity: the same for the key.
        value_granularity: ``"tensor"``, ``"head"`` or ``"channel"`` (one scale per batch, head and channel).
        exponential: ``"linear"`` is the paper's ShiftExp2 (Algorithm 2), a chord of ``2**x`` between two
            integers, up to 6.1 % above it; ``"quadratic"`` adds one square and stays within 0.35 %.
        probability_bits: width of the unnormalised probabilities P: 7 (the paper's int8), 8 (stored as
            ``127 - P``) or 15 (two int8 products).
        probability_rounding: ``"nearest"`` or the paper's ``"floor"`` (the right shift of Equation 10).
        row_sum: what an output is divided by. ``"exact"`` is the sum of the probabilities before they are rounded. What
            rounding took from them, the missing mass, goes to the mean of the value. ``"rounded"`` is the sum of the
            rounded ones, as in the paper, and drops it. ``"exact"`` is for 8 bits, rounded to nearest, with two passes and the
            accumulator's precision (15 bits are as fine by themselves), and for rows of more than 64 keys (fewer lose
            little). With other choices it means ``"rounded"``.
        smooth_key: subtract each channel's midrange over the tokens from the key before quantising it.
            Softmax does not see it, the int8 range does.
        smooth_value: subtract each channel's midrange over the tokens, rounded to whole quantisation steps, from the value
            before quantising it, and add it to the output. The weights of a row sum to 1, so it comes out unchanged.
        balance: scale each channel of the query down and of the key up by one power of two that evens out
            their amplitudes. Exact in floating point, and no score changes.
        rotate: multiply query and key by the same Hadamard matrix before quantising. The scores do not
            change, outlier channels spread. The head dimension is padded to a power of two.
        normalization: ``"two_pass"`` takes the true row maximum first, so no result ever depends on a
            tile size; ``"online"`` is Algorithm 1: a running maximum and ScaleRelease after every
            ``key_block`` keys, whose rounding makes ``key_block`` part of the mathematics.
        key_block: keys per step (the paper's B_c) when ``normalization="online"``; unused otherwise.
        output: ``"accumulator"`` keeps the accumulator's precision up to the requested output type;
            ``"value_scale"`` floors the output to int8 at the value scale first, as Algorithm 1 does.

    Raises:
        ValueError: a field has a value that is not one of its choices, or two fields contradict.
    """

    query_granularity: str = "token"
    key_granularity: str = "head"
    value_granularity: str = "channel"
    exponential: str = "quadratic"
    probability_bits: int = 8
    probability_rounding: str = "nearest"
    row_sum: str = "exact"
    smooth_key: bool = True
    smooth_value: bool = False
    balance: bool = False
    rotate: bool = False
    normalization: str = "two_pass"
    key_block: int = 64
    output: str = "accumulator"
    key: str = dataclasses.field(init=False, repr=False, compare=False)
    """A canonical string that :meth:`from_key` turns back into this recipe (operators take strings)."""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            got = getattr(self, name)
            # the type as well: 8.0 and True are equal to numbers that are allowed, and shift nothing
            if type(got) is not type(allowed[0]) or got not in allowed:
                raise ValueError(f"Recipe.{name} must be one of {allowed}, got {got!r}")
        if self.normalization == "online" and (self.exponential != "linear" or self.probability_bits != 7):
            raise ValueError(
                "Recipe.normalization='online' is Algorithm 1's and needs exponential='linear' and "
                f"probability_bits=7, got exponential={self.exponential!r} and "
                f"probability_bits={self.probability_bits!r}"
            )
        if self.output == "value_scale" and self.probability_bits == 15:
            raise ValueError("Recipe.output='value_scale' needs probability_bits 7 or 8, got 15")

        object.__setattr__(self, "key", json.dumps(self._arguments(), sort_keys=True))

    def _arguments(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}

    def __fx_create_arg__(self, tracer: Any) -> Any:
        # by itself torch.fx would make the recipe again from all fields, also from those that are no arguments
        preset = next((name for name, recipe in PRESETS.items() if recipe == self), None)
        return preset or tracer.create_node("call_function", Recipe, (), self._arguments())

    def takes_exact_sum(self, keys: int) -> bool:
        """Tell whether rows of ``keys`` keys are divided by the sum of their probabilities before rounding (``row_sum``)."""
        return (
            self.row_sum == "exact"
            and self.probability_bits == 8
            and self.probability_rounding == "nearest"
            and self.normalization == "two_pass"
            and self.output == "accumulator"
            and keys > MOST_ROUNDED_KEYS
        )

    def replace(self, **changes: Any) -> Recipe:
        """Return a copy with the named fields changed, validated again."""
        return dataclasses.replace(self, **changes)

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def from_key(key: str) -> Recipe:
        """Return the recipe whose :attr:`key` this is; what an older key does not name is as it was before it had a name."""
        return Recipe(**({"row_sum": "rounded", "smooth_value": False} | json.loads(key)))


PAPER = Recipe(
    query_granularity="tensor",
    key_granularity="tensor",
    value_granularity="tensor",
    exponential="linear",
    probability_bits=7,
    probability_rounding="floor",
    row_sum="rounded",
    smooth_key=False,
    normalization="online",
    output="value_scale",
)
"""The paper's choices (per-tensor scales, linear ShiftExp2, int8 P, floors, ScaleRelease, output at s_V) in this library's
fixed point, which serves any scale. :data:`qflash_lab.baselines.PRINTED` is the paper to the letter, and
:data:`qflash_lab.baselines.AUTHORS` what its authors' code computes."""

DEFAULT = Recipe()
"""What real networks need at little cost in time; benchmarks/archive/experiments.md has both sides of each choice."""

ACCURATE = Recipe(key_granularity="token", probability_bits=15, smooth_value=True, balance=True)
"""The best accuracy the integer path has: two int8 products for P·V and the finest scales."""

PRESETS = {"paper": PAPER, "default": DEFAULT, "accurate": ACCURATE}


def resolve_recipe(recipe: Recipe | str | None) -> Recipe:
    """Turn the ``recipe`` argument of a public function into a :class:`Recipe`.

    Args:
        recipe: a recipe, the name of a preset (``"paper"``, ``"default"``, ``"accurate"``) or ``None``
            for :data:`DEFAULT`.

    Raises:
        TypeError: ``recipe`` is of another type.
        ValueError: no preset has that name.
    """
    if recipe is None:
        return DEFAULT
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str):
        if recipe not in PRESETS:
            raise ValueError(f"recipe must be a Recipe or one of {sorted(PRESETS)}, got {recipe!r}")
        return PRESETS[recipe]
    raise TypeError(f"recipe must be a Recipe, a preset's name or None, got {type(recipe).__name__}")
