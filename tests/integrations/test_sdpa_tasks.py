"""``qflash.sdpa`` where several things go on in one thread: tasks of asyncio, generators, modes of others."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qflash
from helpers import make_inputs, same_bits
from qflash.integrations import sdpa as module

SDPA, MULTI_HEAD = F.scaled_dot_product_attention, F.multi_head_attention_forward
X = make_inputs(1, 2, 5, 5, 16)[0]
TOKENS = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
RECIPES = {"paper": "paper", "accurate": "accurate", "default": None}
BITS = {name: qflash.attention(X, X, X, recipe=recipe) for name, recipe in RECIPES.items()}
BITS["float"] = SDPA(X, X, X)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        yield
    qflash.sdpa.disable()
    assert F.scaled_dot_product_attention is SDPA and F.multi_head_attention_forward is MULTI_HEAD
    assert torch.backends.mha.get_fastpath_enabled() is before
    assert torch.overrides._get_current_function_mode_stack() == []
    assert not module._thread.decided and module._deciding() is None


def attends() -> str:
    """Return which of the recipes attention has here, or float."""
    out = F.scaled_dot_product_attention(X, X, X)
    (found,) = [name for name, bits in BITS.items() if same_bits(out, bits)]
    return found


def multi_head() -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(32, 4, batch_first=True).eval()


def run(*tasks: Callable[[], Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run coroutine functions side by side in one thread."""

    async def together() -> list[Any]:
        return await asyncio.gather(*(task() for task in tasks))

    return asyncio.run(together())


def task(recipe: str, turns: int, seen: list[str], reports: list[Any] | None = None) -> Callable[[], Coroutine[Any, Any, None]]:
    """Return a task that attends in a context, and gives others their turn between."""

    async def attend() -> None:
        await asyncio.sleep(0)
        with qflash.sdpa(recipe, fallback="error") as report:
            for _ in range(turns):
                seen.append(attends())
                await asyncio.sleep(0)
        seen.append(attends())
        if reports is not None:
            reports.append(report.integer)

    return attend


def test_tasks_have_contexts_of_their_own() -> None:
    """The one that begins first ends first, in the middle and last."""
    for turns in ((2, 5, 3), (5, 2, 4), (3, 3, 3), (1, 6, 6)):
        paper, accurate, floating = [], [], []
        reports: list[int] = []

        async def without(count: int = turns[2], floating: list[str] = floating) -> None:
            for _ in range(count + 2):
                floating.append(attends())
                await asyncio.sleep(0)

        run(task("paper", turns[0], paper, reports), task("accurate", turns[1], accurate, reports), without)
        assert paper == ["paper"] * turns[0] + ["float"]
        assert accurate == ["accurate"] * turns[1] + ["float"]
        assert floating == ["float"] * (turns[2] + 2)
        assert sorted(reports) == sorted(turns[:2])


def test_one_context_for_several_tasks() -> None:
    report = qflash.sdpa("paper", fallback="error")

    async def attend(turns: int) -> list[str]:
        seen = []
        with report:
            for _ in range(turns):
                seen.append(attends())
                await asyncio.sleep(0)
        return [*seen, attends()]

    found = run(lambda: attend(1), lambda: attend(3), lambda: attend(2))
    assert found == [["paper"] * turns + ["float"] for turns in (1, 3, 2)]
    assert report.integer == 6


def test_multi_head_attention_of_several_tasks() -> None:
    model = multi_head()

    def call() -> torch.Tensor:
        return model(TOKENS, TOKENS, TOKENS, need_weights=False)[0]

    wanted = []
    for recipe in ("paper", "accurate"):
        with qflash.sdpa(recipe):
            wanted.append(call())
    floating = call()

    async def attend(recipe: str, want: torch.Tensor) -> tuple[int, list[bool]]:
        same = []
        with qflash.sdpa(recipe, fallback="quiet") as report:
            for _ in range(3):
                same.append(same_bits(call(), want))
                # weights are wanted
                model(TOKENS, TOKENS, TOKENS)
                await asyncio.sleep(0)
        assert dict(report.fallbacks) == {module.WEIGHTS_WANTED: 3}
        return report.integer, same

    async def without() -> list[bool]:
        same = []
        for _ in range(5):
            same.append(torch.allclose(call(), floating, atol=1e-6))
            await asyncio.sleep(0)
        return same

    found = run(lambda: attend("paper", wanted[0]), without, lambda: attend("accurate", wanted[1]))
    assert found == [(3, [True] * 3), [True] * 5, (3, [True] * 3)]


def test_a_task_started_inside_is_inside_while_the_context_is_on() -> None:
    async def child(left: asyncio.Event) -> list[str]:
        seen = [attends()]
        await left.wait()
        # the task that entered has left, and another one has entered
        return [*seen, attends()]

    async def parent() -> list[str]:
        left = asyncio.Event()
        with qflash.sdpa("paper"):
            started = asyncio.create_task(child(left))
            await asyncio.sleep(0)

        async def other() -> None:
            with qflash.sdpa("accurate"):
                left.set()
                await asyncio.sleep(0)
                assert attends() == "accurate"

        await other()
        return await started

    assert run(parent) == [["paper", "float"]]


def test_the_process_choice_beside_contexts_of_tasks() -> None:
    model = multi_head()
    report = qflash.sdpa.enable("accurate", fallback="quiet")

    async def without() -> list[str]:
        seen = []
        for _ in range(4):
            seen.append(attends())
            model(TOKENS, TOKENS, TOKENS)
            await asyncio.sleep(0)
        return seen

    paper: list[str] = []
    found = run(task("paper", 2, paper), without)
    assert paper == ["paper", "paper", "accurate"] and found[1] == ["accurate"] * 4
    assert report.integer == 5 and dict(report.fallbacks) == {module.WEIGHTS_WANTED: 4}
    with torch.device("cpu"):  # a mode of somebody else's
        model(TOKENS, TOKENS, TOKENS)
    assert dict(report.fallbacks) == {module.WEIGHTS_WANTED: 5}


def test_a_thread_that_a_task_asks_has_no_context() -> None:
    async def attend() -> list[str]:
        with qflash.sdpa("paper"), torch.no_grad():
            return [await asyncio.to_thread(attends), attends()]

    assert run(attend) == [["float", "paper"]]


def test_an_error_in_one_task_leaves_the_others() -> None:
    async def fails() -> None:
        with qflash.sdpa("accurate"):
            await asyncio.sleep(0)
            raise ZeroDivisionError

    async def caught() -> str:
        with pytest.raises(ZeroDivisionError):
            await fails()
        return attends()

    async def cancelled() -> None:
        with qflash.sdpa("accurate"):
            await asyncio.sleep(3600)

    async def cancels() -> None:
        started = asyncio.create_task(cancelled())
        await asyncio.sleep(0)
        started.cancel()
        with pytest.raises(asyncio.CancelledError):
            await started

    seen: list[str] = []
    found = run(task("paper", 4, seen), caught, cancels)
    assert seen == ["paper"] * 4 + ["float"] and found[1] == "float"


@pytest.mark.parametrize("what", ["function", "coroutine"])
def test_a_decorated_function_runs_inside(what: str) -> None:
    context = qflash.sdpa("paper")

    @context
    async def coroutine(fail: bool = False) -> list[str]:
        """Attend twice."""
        seen = [attends()]
        await asyncio.sleep(0)
        if fail:
            raise ZeroDivisionError
        return [*seen, attends()]

    @context
    def function(fail: bool = False) -> list[str]:
        """Attend twice."""
        if fail:
            raise ZeroDivisionError
        return [attends(), attends()]

    async def call(fail: bool) -> Any:
        return await coroutine(fail) if what == "coroutine" else function(fail)

    seen: list[str] = []
    assert run(lambda: call(False), task("accurate", 3, seen))[0] == ["paper", "paper"]
    assert seen == ["accurate"] * 3 + ["float"]
    with pytest.raises(ZeroDivisionError):
        run(lambda: call(True))
    assert coroutine.__doc__ == function.__doc__ == "Attend twice." and coroutine.__name__ == "coroutine"
    assert attends() == "float"


def test_a_generator_function_is_not_decorated() -> None:
    def generator() -> Iterator[str]:
        yield attends()

    async def later() -> AsyncIterator[str]:
        yield attends()

    for wrong in (generator, later):
        with pytest.raises(TypeError, match=f"func must be no generator function, got .*{wrong.__name__}: enter the context"):
            qflash.sdpa()(wrong)


def attending(recipe: str, turns: int) -> Iterator[str]:
    with qflash.sdpa(recipe):
        for _ in range(turns):
            yield attends()


def test_generators_that_take_turns() -> None:
    """Whatever ends first, what is left belongs to the other one."""
    for first, second in ((1, 3), (3, 1), (2, 2)):
        paper, accurate = attending("paper", first), attending("accurate", second)
        assert next(paper) == "paper" and next(accurate) == "accurate"
        (paper if first <= second else accurate).close()  # type: ignore[attr-defined]
        assert attends() == ("accurate" if first <= second else "paper")
        (accurate if first <= second else paper).close()  # type: ignore[attr-defined]
        assert attends() == "float"


def test_a_generator_leaves_modes_of_others() -> None:
    paper = attending("paper", 1)
    next(paper)
    with torch.device("meta"):
        paper.close()  # type: ignore[attr-defined]
        assert torch.empty(1).device.type == "meta"
        assert len(torch.overrides._get_current_function_mode_stack()) == 1
    assert torch.empty(1).device.type == "cpu" and attends() == "float"


def test_a_generator_that_fails_leaves_the_other() -> None:
    def failing() -> Iterator[str]:
        with qflash.sdpa("paper"):
            yield attends()
            raise ZeroDivisionError

    paper, accurate = failing(), attending("accurate", 3)
    assert [next(paper), next(accurate)] == ["paper", "accurate"]
    with pytest.raises(ZeroDivisionError):
        next(paper)
    assert attends() == next(accurate) == "accurate"
    accurate.close()  # type: ignore[attr-defined]
    assert attends() == "float"


def test_a_generator_that_another_task_closes() -> None:
    async def later() -> AsyncIterator[str]:
        with qflash.sdpa("paper"):
            yield attends()
            yield attends()

    async def begin(generator: Any) -> str:
        return await anext(generator)

    async def end(generator: Any) -> str:
        await generator.aclose()
        return attends()

    async def both() -> list[str]:
        generator = later()
        return [await asyncio.create_task(begin(generator)), attends(), await asyncio.create_task(end(generator)), attends()]

    assert run(both) == [["paper", "float", "float", "float"]]


def test_the_inner_context_alone_counts_weights_that_are_wanted() -> None:
    with qflash.sdpa(fallback="error") as outer, qflash.sdpa(fallback="quiet") as inner:
        multi_head()(TOKENS, TOKENS, TOKENS)
    assert not outer.fallbacks and dict(inner.fallbacks) == {module.WEIGHTS_WANTED: 1}


def test_one_context_inside_itself() -> None:
    context = qflash.sdpa("paper")
    with context:
        with context, qflash.sdpa("accurate"), context:
            assert attends() == "paper"
        assert attends() == "paper"
    assert attends() == "float" and context.integer == 2 and context._entries == []


@pytest.mark.parametrize("where", [module._FLOAT, module._MULTI_HEAD])
def test_enabling_that_fails_is_undone(where: Any) -> None:
    class Stubborn(types.ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            raise ZeroDivisionError

    stubborn = Stubborn("a_module_that_nobody_may_change")
    stubborn.__dict__["held"] = where
    sys.modules[stubborn.__name__] = stubborn
    try:
        with pytest.raises(ZeroDivisionError):
            qflash.sdpa.enable()
    finally:
        del sys.modules[stubborn.__name__]
    assert F.scaled_dot_product_attention is SDPA and F.multi_head_attention_forward is MULTI_HEAD
    assert module._fast_path.users == 0 and attends() == "float"
    qflash.sdpa.enable()
    assert attends() == "default"


def test_compiled_code_of_several_tasks() -> None:
    if not hasattr(__import__("torch._dynamo.variables.misc", fromlist=["_"]), "ContextVarVariable"):
        pytest.skip("this PyTorch traces no context variables")
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: SDPA(x, x, x), fullgraph=True, backend="eager")

    def kind() -> str:
        out = compiled(X)
        return next(name for name, bits in BITS.items() if torch.allclose(out, bits, atol=1e-6))

    async def attend(recipe: str) -> list[str]:
        seen = []
        with qflash.sdpa(recipe):
            for _ in range(3):
                seen.append(kind())
                await asyncio.sleep(0)
        return seen

    async def without() -> list[str]:
        seen = []
        for _ in range(5):
            seen.append(kind())
            await asyncio.sleep(0)
        return seen

    found = run(lambda: attend("paper"), without, lambda: attend("accurate"))
    assert found == [["paper"] * 3, ["float"] * 5, ["accurate"] * 3]
