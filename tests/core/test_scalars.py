"""Arguments that are numbers take scalars of NumPy and tensors of one element, and mean the same by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import qflash
from helpers import make_inputs, same_bits
from qflash.network.calibration import check_method
from qflash.scalars import unboxed, whole_number

INTEGERS: dict[str, Callable[[int], Any]] = {
    "int64": numpy.int64,
    "uint8": numpy.uint8,
    "array": numpy.array,
    "tensor": torch.tensor,
    "int32 tensor": lambda x: torch.tensor(x, dtype=torch.int32),
    "tensor of one element": lambda x: torch.tensor([x]),
}
FLOATS: dict[str, Callable[[float], Any]] = {
    "float16": numpy.float16,
    "float64": numpy.float64,
    "array": numpy.array,
    "tensor": torch.tensor,
    "float64 tensor": lambda x: torch.tensor(x, dtype=torch.float64),
    "parameter": lambda x: torch.nn.Parameter(torch.tensor([x]), requires_grad=False),
}
NO_INTEGERS = [
    True, numpy.bool_(True), torch.tensor(True), 5.0, numpy.float32(5), torch.tensor(5.0), torch.tensor([5, 5]),
    numpy.array([5, 5]), torch.empty(1, dtype=torch.int64, device="meta"), "5", None,
]  # fmt: skip
NO_NUMBERS = [
    True, numpy.bool_(True), torch.tensor(True), torch.tensor([0.5, 0.5]), torch.tensor(0.5, requires_grad=True),
    torch.tensor(0.5j), "0.5",
]  # fmt: skip

QUERY, KEY, VALUE = make_inputs(1, 2, 5, 7, 16)
PACKED, LENGTHS = torch.randn(9, 2, 16), torch.tensor([0, 4, 9], dtype=torch.int32)


def attend_int8(**options: Any) -> torch.Tensor:
    out = qflash.int8_attention(*(qflash.quantize(x, "head") for x in (QUERY, KEY, VALUE)), **options)
    return out.dequantize() if isinstance(out, qflash.QuantizedTensor) else out


def attend_packed(**options: Any) -> torch.Tensor:
    given = {"max_seqlen_q": 5, "max_seqlen_k": 5} | options
    return qflash.varlen_attention(PACKED, PACKED, PACKED, LENGTHS, LENGTHS, **given)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("box", INTEGERS)
@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_longest_sequences(name: str, box: str) -> None:
    want = attend_packed()
    for _ in range(2):
        assert same_bits(attend_packed(**{name: INTEGERS[box](5)}), want)
    with pytest.raises(ValueError, match=f"{name} must be at least the longest of .*, 5, got 4"):
        attend_packed(**{name: INTEGERS[box](4)})


@pytest.mark.parametrize("wrong", NO_INTEGERS, ids=repr)
@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_what_is_no_integer_is_refused(name: str, wrong: Any) -> None:
    attend_packed()
    with pytest.raises(TypeError, match=f"{name} must be an integer, got "):
        attend_packed(**{name: wrong})


@pytest.mark.parametrize("number", [numpy.float16(0.25), numpy.float32(0.25), numpy.array(0.25), numpy.int64(1)], ids=repr)
def test_scales_that_are_numbers(number: Any) -> None:
    want = qflash.quantize(QUERY, scale=float(number)), attend_int8(output_scale=float(number))
    for _ in range(2):
        got = qflash.quantize(QUERY, scale=number)
        assert same_bits(got.values, want[0].values) and same_bits(got.scale, want[0].scale)
        assert same_bits(attend_int8(output_scale=number), want[1])


@pytest.mark.parametrize("wrong", NO_NUMBERS, ids=repr)
def test_what_is_no_number_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="percentile must be a number"):
        check_method("percentile", wrong)
    if not isinstance(wrong, torch.Tensor):
        for call, name in ((attend_int8, "output_scale"), (lambda scale: qflash.quantize(QUERY, scale=scale), "scale")):
            with pytest.raises(TypeError, match=f"{name} must be a number or a float32 tensor"):
                call(**{name: wrong})


def test_a_tensor_is_looked_at_in_every_call(plans: dict[object, object]) -> None:
    """A call is repeated by what it was given, and what a tensor holds may have changed."""
    longest = torch.tensor(5)
    for _ in range(2):
        attend_packed(max_seqlen_q=longest, max_seqlen_k=longest)
    longest.fill_(3)
    with pytest.raises(ValueError, match="max_seqlen_q must be at least"):
        attend_packed(max_seqlen_q=longest)


@pytest.mark.parametrize("number", [torch.tensor(0.25), torch.tensor([0.25])], ids=repr)
def test_factors_in_tensors_are_refused(number: torch.Tensor) -> None:
    """On a GPU a look would wait in every call, where PyTorch's function of this signature does not."""
    attends = lambda **options: qflash.attention(QUERY, KEY, VALUE, **options)  # noqa: E731
    for call, name in ((attends, "scale"), (attends, "dropout_p"), (attend_int8, "scale"), (attend_packed, "scale")):
        with pytest.raises(TypeError, match=f"{name} must be a number"):
            call(**{name: number})  # type: ignore[operator]


def test_a_compiler_looks_into_no_tensor() -> None:
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(x: torch.Tensor, longest: Any) -> torch.Tensor:
        return qflash.varlen_attention(x, x, x, LENGTHS, LENGTHS, longest, longest)

    assert same_bits(compiled(PACKED, 5), attend_packed())
    with pytest.raises(Exception, match="max_seqlen_q must be an integer, got"):
        compiled(PACKED, torch.tensor(5))


@pytest.mark.parametrize("box", INTEGERS)
def test_other_integers(box: str) -> None:
    assert qflash.warmup(lambda x: x, torch.ones(1), processes=INTEGERS[box](2), progress=False) == 0
    with pytest.raises(ValueError, match="processes must be an integer of at least 1 or None, got 0"):
        qflash.warmup(lambda x: x, torch.ones(1), processes=INTEGERS[box](0))


@pytest.mark.parametrize("box", FLOATS)
def test_percentiles(box: str) -> None:
    percentile = check_method("percentile", FLOATS[box](99.5))
    assert type(percentile) is float and percentile == 99.5
    with pytest.raises(ValueError, match=r"percentile must be above 50 and at most 100, got 12\.5"):
        check_method("percentile", FLOATS[box](12.5))


def test_what_stays_as_it_is() -> None:
    with torch.no_grad():
        sparse = torch.ones(1).to_sparse()
        for x in (None, True, 3, 0.5, "3", torch.ones(2), torch.ones(0), sparse, numpy.ones(2), numpy.float64):
            assert unboxed(x) is x
    assert whole_number("count", 3) == 3
    needed = torch.ones(1, requires_grad=True)
    assert unboxed(needed) is needed
    seen = []
    torch.func.vmap(lambda x: (seen.append(unboxed(x) is x), x)[1])(torch.ones(3))
    assert seen == [True]
