"""What ``qflash.sdpa`` changes for a while is put back: after errors, nested, in threads, and where Dynamo traces."""

from __future__ import annotations

import sys
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qflash
from helpers import make_inputs, same_bits
from qflash.integrations.sdpa import attend_or_fall_back

SDPA, MULTI_HEAD = F.scaled_dot_product_attention, F.multi_head_attention_forward
PYTORCHS = [SDPA, MULTI_HEAD]
"""In a list, where nothing replaces them: the names of this module are replaced as those of any other."""
X = make_inputs(1, 2, 5, 5, 16, dtype=torch.float32)[0]


def integer() -> torch.Tensor:
    return qflash.attention(X, X, X)


def refused() -> torch.Tensor:
    """Make a call that stays in floating point, and fails there."""
    return F.scaled_dot_product_attention(X, X[..., :3], X)


@pytest.fixture(autouse=True, params=[True, False], ids=["fast path", "no fast path"])
def _fast_path(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever the user chose is there again, and the functions and modes of PyTorch are."""
    usual = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(request.param)
    try:
        with torch.no_grad():
            yield
        qflash.sdpa.disable()
        assert torch.backends.mha.get_fastpath_enabled() is request.param
    finally:
        qflash.sdpa.disable()
        torch.backends.mha.set_fastpath_enabled(usual)
    assert F.scaled_dot_product_attention is SDPA and F.multi_head_attention_forward is MULTI_HEAD
    assert torch.overrides._get_current_function_mode_stack() == []
    assert not same_bits(SDPA(X, X, X), integer())


def is_off() -> bool:
    return not torch.backends.mha.get_fastpath_enabled()


def test_the_fast_path_is_off_until_the_last_context_ends() -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    with qflash.sdpa() as context:
        with context, qflash.sdpa():
            assert is_off()
        assert is_off()
        qflash.sdpa.enable()
        qflash.sdpa.enable("paper")
        assert is_off()
    assert is_off()
    with qflash.sdpa():
        qflash.sdpa.disable()
        assert is_off()
    assert torch.backends.mha.get_fastpath_enabled() is before
    qflash.sdpa.disable()
    assert torch.backends.mha.get_fastpath_enabled() is before


def test_the_fast_path_is_off_until_the_last_thread_ends() -> None:
    before, inside, leave = torch.backends.mha.get_fastpath_enabled(), threading.Event(), threading.Event()
    seen: list[Any] = []

    def other() -> None:
        with qflash.sdpa():
            inside.set()
            leave.wait(60)
            seen.append(is_off())

    thread = threading.Thread(target=other)
    with qflash.sdpa():
        thread.start()
        inside.wait(60)
    assert is_off()
    leave.set()
    thread.join()
    assert seen == [True]
    assert torch.backends.mha.get_fastpath_enabled() is before


@pytest.mark.parametrize("process", [False, True])
def test_a_call_that_fails_in_floating_point_leaves_the_next_one_in_integers(process: bool) -> None:
    context = qflash.sdpa(fallback="quiet")
    if process:
        report = qflash.sdpa.enable(fallback="quiet")
    else:
        report = context.__enter__()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="size"):
            refused()
        assert same_bits(F.scaled_dot_product_attention(X, X, X), integer())
    assert (report.integer, sum(report.fallbacks.values())) == (2, 2)
    if not process:
        context.__exit__(None, None, None)


def test_a_function_to_fall_back_to_stays_alone_to_its_end() -> None:
    """Also behind another one that was fallen back to within it, and behind one that failed."""
    options: dict[str, Any] = {"scale": -1.0, "fallback": "quiet"}
    seen = []

    def inner(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(SDPA(X, X, X))
        return X

    def failing(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise ZeroDivisionError

    def outer(*args: Any, **kwargs: Any) -> torch.Tensor:
        attend_or_fall_back(X, X, X, fall_back=inner, **options)
        seen.append(F.scaled_dot_product_attention(X, X, X))
        with pytest.raises(ZeroDivisionError):
            attend_or_fall_back(X, X, X, fall_back=failing, **options)
        seen.append(F.scaled_dot_product_attention(X, X, X))
        return X

    floating = SDPA(X, X, X)
    with qflash.sdpa() as report:
        attend_or_fall_back(X, X, X, fall_back=outer, **options)
        assert same_bits(SDPA(X, X, X), integer())
    qflash.sdpa.enable()
    attend_or_fall_back(X, X, X, fall_back=outer, **options)
    assert same_bits(F.scaled_dot_product_attention(X, X, X), integer())
    assert len(seen) == 6 and all(same_bits(each, floating) for each in seen)
    assert report.integer == 1


def test_attention_of_many_heads_that_fails_leaves_the_context_as_it_was() -> None:
    model = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    tokens, wrong = torch.randn(2, 5, 32), torch.zeros(1, 5, dtype=torch.bool)
    with qflash.sdpa("accurate", fallback="error") as outer, qflash.sdpa("paper", fallback="error") as report:
        for _ in range(2):
            with pytest.raises(AssertionError, match="key_padding_mask"):
                model(tokens, tokens, tokens, key_padding_mask=wrong, need_weights=False)
            assert same_bits(SDPA(X, X, X), qflash.attention(X, X, X, recipe="paper"))
    assert (outer.integer, report.integer) == (0, 2)


def compiled(function: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="eager", fullgraph=True)


def test_a_traced_context_ends_where_it_ends() -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with qflash.sdpa("paper"):
            with qflash.sdpa("accurate"):
                first = F.scaled_dot_product_attention(x, x, x)
            second = F.scaled_dot_product_attention(x, x, x)
        return first, second, F.scaled_dot_product_attention(x, x, x)

    first, second, third = compiled(run)(X)
    assert same_bits(first, qflash.attention(X, X, X, recipe="accurate"))
    assert same_bits(second, qflash.attention(X, X, X, recipe="paper"))
    assert same_bits(third, SDPA(X, X, X))


def test_a_traced_context_puts_the_fast_path_back_for_what_comes_behind() -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    states: list[bool] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        with qflash.sdpa():
            with qflash.sdpa():
                x = F.scaled_dot_product_attention(x, x, x)
            off = torch.backends.mha.get_fastpath_enabled()
        return x + 2 * off + torch.backends.mha.get_fastpath_enabled()

    got = compiled(run)(X) - integer()
    states = [bool(round(float(got.mean())) & 2), bool(round(float(got.mean())) & 1)]
    assert states == [False, before]


def test_traced_calls_count_where_they_are_traced() -> None:
    """In the context that is on outside; behind an inner one that has ended, in the outer one again."""
    with qflash.sdpa() as outer:
        with qflash.sdpa() as inner:
            compiled(lambda x: F.scaled_dot_product_attention(x, x, x))(X)
        assert (outer.integer, inner.integer) == (0, 1)
        compiled(lambda x: F.scaled_dot_product_attention(x, x, x))(X)
        assert (outer.integer, inner.integer) == (1, 1)
        with pytest.raises(ZeroDivisionError), qflash.sdpa() as failed:
            raise ZeroDivisionError
        compiled(lambda x: F.scaled_dot_product_attention(x, x, x))(X)
        assert (outer.integer, failed.integer) == (2, 0)
    report = qflash.sdpa.enable()
    compiled(lambda x: F.scaled_dot_product_attention(x, x, x))(X)
    assert (outer.integer, report.integer) == (2, 1)


def test_disabling_gives_every_module_pytorchs_functions_again() -> None:
    other = types.ModuleType("a_module_that_holds_both_by_name")
    other.attend, other.multi_head = SDPA, MULTI_HEAD  # type: ignore[attr-defined]
    sys.modules[other.__name__] = other
    try:
        for _ in range(2):
            qflash.sdpa.enable(fallback="quiet")
            kept = F.scaled_dot_product_attention, F.multi_head_attention_forward
            assert kept == (other.attend, other.multi_head) and PYTORCHS[0] is not kept[0] and PYTORCHS[1] is not kept[1]
            # of PyTorch's own modules only this one
            assert torch.nn.functional.scaled_dot_product_attention is kept[0]
            assert torch._C._nn.scaled_dot_product_attention is PYTORCHS[0]
            # what a module loaded meanwhile holds, and nobody finds
            late = types.ModuleType("a_module_that_nobody_finds")
            late.attend = kept[0]  # type: ignore[attr-defined]
            assert same_bits(late.attend(X, X, X), integer())
            qflash.sdpa.disable()
            assert (other.attend, other.multi_head) == (SDPA, MULTI_HEAD)
            assert same_bits(late.attend(X, X, X), SDPA(X, X, X))
            with qflash.sdpa():
                assert same_bits(late.attend(X, X, X), integer())
    finally:
        del sys.modules[other.__name__]


def test_the_first_warning_of_a_reason_is_one_for_each_report() -> None:
    context = qflash.sdpa()
    with pytest.warns(UserWarning, match="scale must be positive"), context:
        SDPA(X, X, X, scale=-1.0)
    with warnings.catch_warnings(record=True) as caught, context:
        warnings.simplefilter("always")
        SDPA(X, X, X, scale=-1.0)
        SDPA(X, X, X, dropout_p=0.5)
    assert [str(each.message).split(": ")[1].split(" ")[0] for each in caught] == ["dropout_p"]
    assert sorted(context.fallbacks.values()) == [1, 2]
    # without a report every call is the first
    for _ in range(2):
        with pytest.warns(UserWarning, match="scale must be positive"):
            attend_or_fall_back(X, X, X, scale=-1.0)


def warned(function: Any) -> list[str]:
    """Return the warnings of attention that a compiled function makes while it is traced."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(function)(X)
    return [str(each.message) for each in caught if "floating point" in str(each.message)]


def test_traced_calls_warn_as_others_do() -> None:
    def unfit(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, scale=-1.0)

    def with_its_own_context(x: torch.Tensor) -> torch.Tensor:
        with qflash.sdpa():
            return unfit(x)

    # outside of the traced code, once a reason and report
    with qflash.sdpa() as report:
        assert len(warned(unfit)) == 1
        assert warned(unfit) == []
        assert warned(lambda x: F.scaled_dot_product_attention(x, x, x)) == []
    assert report.integer == 1 and len(report.fallbacks) == 1
    with qflash.sdpa(fallback="quiet") as report:
        assert warned(unfit) == []
    assert len(report.fallbacks) == 1
    # where no report counts, every time
    assert len(warned(with_its_own_context)) == len(warned(with_its_own_context)) == 1
