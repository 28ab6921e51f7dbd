"""A repeated call does what a first call does, whatever the tensors and the thread are up to; results belong to the caller."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import qflash
from helpers import DEVICE, make_inputs, same_bits
from qflash_lab.bench.metrics import sqnr

Tensors = tuple[torch.Tensor, ...]


def inputs(seed: int = 0) -> Tensors:
    return tuple(x.to(DEVICE) for x in make_inputs(1, 2, 12, head_dim=16, seed=seed))


def outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    """Return what a call returns or raises."""
    try:
        return "returned", call()
    except Exception as error:
        return "raised", (type(error), str(error))


def same_outcome(a: tuple[str, Any], b: tuple[str, Any]) -> bool:
    return a[0] == b[0] and (same_bits(a[1], b[1]) if a[0] == "returned" else a[1] == b[1])


# --- tensors that PyTorch resolves on the way to a kernel -----------------------------------------------------


def negative(x: torch.Tensor) -> torch.Tensor:
    """Return a view whose memory holds ``-x``."""
    view = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert view.is_neg() and torch.equal(view, x)
    return view


def plain_twin(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same numbers and strides as :func:`negative` has, without its bit."""
    return torch.complex(torch.zeros_like(x), x).imag


@pytest.mark.parametrize("where", range(4), ids=["query", "key", "value", "mask"])
def test_negative_views(where: int, plans: dict[object, object]) -> None:
    tensors = [*inputs(), *((torch.randn(12, 12).to(DEVICE),) if where == 3 else ())]
    plain, view = list(tensors), list(tensors)
    plain[where], view[where] = plain_twin(tensors[where]), negative(tensors[where])
    expected = qflash.attention(*tensors, backend="reference")
    for _ in range(2):
        assert same_bits(qflash.attention(*plain), expected)
    for _ in range(2):
        assert same_bits(qflash.attention(*view), expected)
    assert plans or where == 3  # calls with a float mask are repeated on a GPU only


@pytest.mark.parametrize("where", range(3))
def test_negative_scales(where: int, plans: dict[object, object]) -> None:
    tensors = [qflash.quantize(x, "head") for x in inputs()]
    expected = qflash.int8_attention(*tensors, out_dtype=torch.float32, backend="reference")
    for make in (plain_twin, negative):
        given = list(tensors)
        given[where] = qflash.QuantizedTensor(tensors[where].values, make(tensors[where].scale))
        for _ in range(2):
            assert same_bits(qflash.int8_attention(*given, out_dtype=torch.float32), expected)
    assert plans


@pytest.mark.parametrize("where", range(3))
def test_zero_tensors(where: int, plans: dict[object, object]) -> None:
    tensors = list(inputs())
    tensors[where] = torch.zeros_like(tensors[where])
    expected = qflash.attention(*tensors, backend="reference")
    for _ in range(2):
        assert same_bits(qflash.attention(*tensors), expected)
    tensors[where] = torch._efficientzerotensor(tuple(tensors[where].shape), device=DEVICE)
    for _ in range(2):
        assert same_bits(qflash.attention(*tensors), expected)


def test_complex_tensors_are_refused(plans: dict[object, object]) -> None:
    query, key, value = inputs()
    qflash.attention(query, key, value)
    for x in (torch.complex(value, value), torch.complex(value, value).conj()):
        with pytest.raises(TypeError, match="value must be"):
            qflash.attention(query, key, x)


# --- what goes on in the thread -------------------------------------------------------------------------------


class Counting(TorchDispatchMode):
    """Counts operators of this package and doubles what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function.namespace != "qflash":
            return out
        self.seen += 1
        return out * 2


class Doubling(TorchFunctionMode):
    """Doubles what operators of this package return."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        return out * 2 if "qflash" in str(function) else out


class Subclass(torch.Tensor):
    """Doubles what operators of this package return."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(function, types, args, kwargs or {})
        return out * 2 if "qflash" in str(function) else out


def with_mode(mode: Any) -> Callable[[Tensors], Any]:
    def call(tensors: Tensors) -> Any:
        with mode():
            return qflash.attention(*tensors)

    return call


def traced(tensors: Tensors) -> Any:
    """Return what the trace of a call returns for other tensors."""
    function = torch.jit.trace(lambda *x: qflash.attention(*x), tensors, check_trace=False)
    return function(*inputs(1))


def fx_traced(tensors: Tensors) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda *x: qflash.attention(*x))(*tensors)(*inputs(1))


def with_tangents(tensors: Tensors) -> Any:
    with forward_ad.dual_level():
        return qflash.attention(*(forward_ad.make_dual(x, torch.ones_like(x)) for x in tensors))


def with_gradients(tensors: Tensors) -> Any:
    out = qflash.attention(*(x.clone().requires_grad_() for x in tensors))
    out.sum().backward()


def compiled(tensors: Tensors) -> Any:
    return torch.compile(lambda *x: qflash.attention(*x), backend="eager")(*tensors)


STATES: dict[str, Callable[[Tensors], Any]] = {
    "dispatch mode": with_mode(Counting),
    "function mode": with_mode(Doubling),
    "subclass": lambda tensors: qflash.attention(*(x.as_subclass(Subclass) for x in tensors)).as_subclass(torch.Tensor),
    "vmap": lambda tensors: torch.func.vmap(lambda *x: qflash.attention(*x))(*tensors),
    "functionalize": lambda tensors: torch.func.functionalize(lambda *x: qflash.attention(*x))(*tensors),
    "jvp": lambda tensors: torch.func.jvp(lambda *x: qflash.attention(*x), tensors, tensors)[0],
    "grad": lambda tensors: torch.func.grad(lambda *x: qflash.attention(*x).sum())(*tensors),
    "tangents": with_tangents,
    "gradients": with_gradients,
    "jit.trace": traced,
    "make_fx": fx_traced,
    "compile": compiled,
    "inference mode": with_mode(torch.inference_mode),
    "no grad": with_mode(torch.no_grad),
    "autocast": with_mode(lambda: torch.autocast(DEVICE.type)),
    "device context": with_mode(lambda: torch.device("meta")),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.filterwarnings("ignore")
def test_states_of_the_thread(state: str, plans: dict[object, object]) -> None:
    tensors = inputs()
    call = STATES[state]
    first = outcome(lambda: call(tensors))
    # two in and out of vmap: its calls are of three dimensions
    for given in (tensors, tuple(x[0] for x in tensors)):
        for _ in range(2):
            qflash.attention(*given)
    assert plans
    for _ in range(2):
        assert same_outcome(outcome(lambda: call(tensors)), first), state


def test_a_dispatch_mode_sees_repeated_calls(plans: dict[object, object]) -> None:
    tensors = inputs()
    for _ in range(2):
        qflash.attention(*tensors)
    with Counting() as mode:
        qflash.attention(*tensors)
    assert mode.seen == 1


# --- options that are equal and not the same ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"is_causal": True}, {"is_causal": 1}),
        ({"is_causal": True}, {"is_causal": 1.0}),
        ({"is_causal": False}, {"is_causal": 0}),
        ({"enable_gqa": False}, {"enable_gqa": 0}),
        ({"enable_gqa": True}, {"enable_gqa": 1.0}),
        ({"scale": 1.0}, {"scale": True}),
        ({"scale": 1}, {"scale": True}),
        ({"dropout_p": 0.0}, {"dropout_p": False}),
    ],
    ids=str,
)
def test_equal_options_of_another_type_are_refused(good: dict, bad: dict, plans: dict[object, object]) -> None:
    tensors, int8 = inputs(), [qflash.quantize(x) for x in inputs()]
    for _ in range(2):
        qflash.attention(*tensors, **good)
        if "dropout_p" not in good:
            qflash.int8_attention(*int8, **good)
    for _ in range(2):
        with pytest.raises(TypeError, match=next(iter(bad))):
            qflash.attention(*tensors, **bad)
        if "dropout_p" not in good:
            with pytest.raises(TypeError, match=next(iter(bad))):
                qflash.int8_attention(*int8, **bad)


def test_an_output_scale_of_true_is_refused(plans: dict[object, object]) -> None:
    int8 = [qflash.quantize(x) for x in inputs()]
    for scale in (1.0, 1):
        for _ in range(2):
            qflash.int8_attention(*int8, output_scale=scale)
    with pytest.raises(TypeError, match="output_scale"):
        qflash.int8_attention(*int8, output_scale=True)


# --- whose memory a result is ---------------------------------------------------------------------------------


def storages(*tensors: torch.Tensor) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tensors}


def test_a_result_can_be_written_to(plans: dict[object, object]) -> None:
    tensors = [qflash.quantize(x, "head") for x in inputs()]
    expected = qflash.int8_attention(*tensors, output_scale=0.01, backend="reference")
    seen: set[int] = set()
    alive = []
    for _ in range(4):
        out = qflash.int8_attention(*tensors, output_scale=0.01)
        assert same_bits(out.values, expected.values) and out.scale.item() == torch.tensor(0.01).item()
        assert not seen & storages(out.scale, out.values)
        out.scale.mul_(4)
        out.values.zero_()
        seen |= storages(out.scale, out.values)
        alive.append(out)  # or the next one gets its memory
    assert plans


def test_scales_are_shared_as_documented(plans: dict[object, object]) -> None:
    query, key, value = (qflash.quantize(x, "head") for x in inputs())
    given = torch.full((1,), 0.01, device=DEVICE)
    for _ in range(3):
        assert qflash.int8_attention(query, key, value).scale is value.scale
        assert qflash.int8_attention(query, key, value, output_scale=given).scale is given
    assert qflash.quantize(inputs()[0], scale=given).scale is given
    for function in (qflash.attention, qflash.int8_attention, qflash.quantize):
        text = " ".join((function.__doc__ or "").split())
        assert "itself" in text or "the very tensor" in text or function is qflash.attention


@pytest.mark.parametrize("recipe", ["default", "accurate", "paper"])
@pytest.mark.parametrize("tokens", [0, 1, 12])
def test_outputs_share_nothing_with_inputs(tokens: int, recipe: str, plans: dict[object, object]) -> None:
    tensors = tuple(x.to(DEVICE) for x in make_inputs(1, 2, tokens, head_dim=16))
    for _ in range(3):
        out = qflash.attention(*tensors, recipe=recipe)
        if out.numel():
            assert not storages(out) & storages(*tensors)
        one = qflash.quantize(tensors[0])
        if one.values.numel():
            assert not storages(one.values, one.scale, one.dequantize()) & storages(*tensors)


def test_a_number_becomes_a_scale_when_asked_for() -> None:
    tensors = [qflash.quantize(x, "head") for x in inputs()]
    out = [qflash.int8_attention(*tensors, output_scale=0.01) for _ in range(2)][1]
    for twin in (copy.copy(out), copy.deepcopy(out), pickle.loads(pickle.dumps(out))):
        assert twin.scale.dtype == torch.float32 and twin.scale.device == out.values.device and twin.scale.dim() == 0
        assert same_bits(twin.dequantize(), out.dequantize())
    assert out.scale is out.scale and out.granularity == "tensor"
    with pytest.raises(AttributeError, match="no attribute 'scales'"):
        out.scales  # noqa: B018


# --- SDPA's signature -----------------------------------------------------------------------------------------


def test_arguments_by_position_are_sdpas() -> None:
    tensors, mask = inputs(), torch.randn(12, 12).to(DEVICE)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for given in ((None, 0.0, True), (mask, 0.0, False), (mask, 0, False), (mask, 0.0), ()):
        for _ in range(2):
            assert sqnr(sdpa(*tensors, *given), qflash.attention(*tensors, *given)) > 30
    assert same_bits(
        qflash.attention(*tensors, None, 0.0, True, 0.3, True),
        qflash.attention(*tensors, is_causal=True, scale=0.3, enable_gqa=True),
    )


def test_multihead_attention_with_the_function_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.nn.MultiheadAttention(32, 2, batch_first=True).to(DEVICE).eval()
    x = torch.randn(2, 12, 32).to(DEVICE).requires_grad_()  # which keeps it from a fused layer of its own
    with torch.no_grad():
        expected = module(x, x, x, need_weights=False)[0]
    calls = []

    def replaced(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(args)
        return qflash.attention(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", replaced)
    module.train()  # the fused layer is for evaluation; there is no dropout
    with torch.no_grad():
        out = module(x, x, x, need_weights=False)[0]
    assert calls and sqnr(expected, out) > 25
