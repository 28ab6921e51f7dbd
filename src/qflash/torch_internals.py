"""Names of PyTorch that are not public. Where a release has one no longer, no result changes.

Most tell whether anything but a kernel is on a call's way: a mode, a transform, a tangent, a lazily negated view. Without
them no call counts as ordinary, so that each goes through PyTorch's dispatcher and all checks, which is slower. Without those
of DTensor it does not take the operators, and without those of scaled_dot_product_attention outputs keep the memory layout of
:func:`qflash.attention`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode


def _find(path: str) -> Any:
    """Return what ``torch.<path>`` is, or None."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


_function_modes = _find("_C._len_torch_function_stack")
_keys_of = _find("_C._dispatch_keys")
_keys_of_thread = _find("_C._dispatch_tls_local_include_set")
_any_autocast = _find("_C._is_any_autocast_enabled")
_transform_level = _find("_C._functorch.maybe_current_level")
_has_transform_gradient = _find("_C._functorch.is_gradtrackingtensor")
_sdpa_kernel = _find("_fused_sdp_choice")
without_function_modes: Callable[[], contextlib.AbstractContextManager[Any]] = (
    _find("_C.DisableTorchFunction") or contextlib.nullcontext
)
"""Makes a context in which no function mode and no ``__torch_function__`` is asked."""


_any_global_hook = _find("nn.modules.module._has_any_global_hook")


def has_global_hooks() -> bool:
    """Tell whether PyTorch calls something at every module, or cannot be asked."""
    return _any_global_hook is None or bool(_any_global_hook())


def _plain_keys() -> int | None:
    """Return the dispatch keys of an ordinary tensor of a CPU or GPU, and of a thread without modes and transforms.

    Any other stands for something that PyTorch does on the way to a kernel: it resolves a negative or zero tensor, calls a
    dispatch mode, notes a call for a trace, looks into a functorch wrapper, refuses a layout.
    """
    names = "CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA", "ADInplaceOrView", "BackendSelect"
    plain = 0
    try:
        for name in names:
            plain |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
        # what is asked in every call has to answer, too
        _keys_of(torch.empty(0, dtype=torch.float32, device="cpu")).raw_repr(), _keys_of_thread().raw_repr(), _function_modes()
    except (AttributeError, TypeError):
        return None
    return plain


_plain = _plain_keys()
KNOWS_STATE = _plain is not None and hasattr(forward_ad, "_current_level")
"""Whether this release of PyTorch tells what :func:`thread_state` and :func:`has_plain_keys` ask."""
_STRANGE = ~(_plain or 0)


class LightDispatchMode(TorchDispatchMode):
    """A dispatch mode whose first call does not import Dynamo, which takes up to five seconds.

    PyTorch wraps ``__torch_dispatch__`` so that Dynamo leaves it alone, and the wrapper imports Dynamo. Here
    :meth:`dispatch` is wrapped once there is a Dynamo that could look.
    """

    def __init__(self) -> None:
        super().__init__()
        self._wrapped: Callable[..., Any] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "torch._dynamo" not in sys.modules:
            return self.dispatch(function, args, kwargs or {})
        if self._wrapped is None:
            self._wrapped = torch.compiler.disable(self.dispatch)
        return self._wrapped(function, args, kwargs or {})

    def dispatch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of an operator."""
        raise NotImplementedError


_tracer = _find("fx.experimental.proxy_tensor._ModuleStackTracer")
_tracing = threading.Lock()


@contextlib.contextmanager
def tracing_alone() -> Iterator[None]:
    """Let this thread alone trace modules, and other threads call theirs meanwhile.

    ``torch.export`` puts itself in place of every module's call and attributes, and turns oneDNN off, which rounds otherwise:
    in all threads. Where a release has these parts no longer, only one thread traces at a time.
    """
    import torch.export._trace as export

    with _tracing, contextlib.ExitStack() as stack:
        owner = threading.get_ident()

        def put(place: Any, name: str, make: Callable[[Any], Any]) -> None:
            if (old := getattr(place, name, None)) is not None:
                setattr(place, name, make(old))
                stack.callback(setattr, place, name, old)

        def call_of(old: Any) -> Any:
            def call_module(tracer: Any, module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
                mine = threading.get_ident() == owner
                return old(tracer, module, forward, args, kwargs) if mine else forward(*args, **kwargs)

            return call_module

        def attribute_of(old: Any) -> Any:
            def get_attribute(tracer: Any, name: str, value: Any, *rest: Any) -> Any:
                return old(tracer, name, value, *rest) if threading.get_ident() == owner else value

            return get_attribute

        put(_tracer, "call_module", call_of)
        put(_tracer, "getattr", attribute_of)
        put(export, "_ignore_backend_decomps", lambda old: contextlib.nullcontext)
        yield


def leave_function_mode(mode: TorchFunctionMode) -> None:
    """Take a mode off the thread's stack, from below others if these were entered later; without effect if it is not there."""
    if not any(each is mode for each in _get_current_function_mode_stack()):
        return
    later = []
    while (last := _pop_mode()) is not mode:
        later.append(last)
    for each in reversed(later):
        _push_mode(each)


def in_forward_mode() -> bool:
    """Tell whether a level of forward-mode derivatives is open; True where that cannot be told."""
    level: int = getattr(forward_ad, "_current_level", 0)
    return level >= 0


def may_autocast() -> bool:
    """Tell whether autocast is on for any kind of device; True where that cannot be told."""
    return _any_autocast is None or bool(_any_autocast())


def thread_state() -> int | None:
    """Return the thread's dispatch keys; None where a function mode or forward mode is on, or nothing can be told."""
    if not KNOWS_STATE or _function_modes() or in_forward_mode():
        return None
    keys: int = _keys_of_thread().raw_repr()
    return keys


def is_plain_state(state: int | None) -> bool:
    """Tell whether a thread in this :func:`thread_state` takes operators straight to kernels."""
    return state is not None and not state & _STRANGE


def has_plain_keys(x: torch.Tensor) -> bool:
    """Tell whether a tensor's operators go straight to kernels, as far as the tensor itself is concerned."""
    return not _keys_of(x).raw_repr() & _STRANGE


def ragged_dim(x: torch.Tensor) -> int:
    """Return which dimension of a nested tensor of jagged layout is jagged."""
    return int(x._ragged_idx)  # type: ignore[attr-defined]


def longest_jagged(x: torch.Tensor) -> int:
    """Return the length of the longest sequence of a nested tensor, which keeps it; the first look waits for a GPU."""
    if hasattr(x, "_get_max_seqlen"):
        return int(x._get_max_seqlen())
    offsets: torch.Tensor = x.offsets()  # type: ignore[attr-defined]
    return int(offsets.diff().amax()) if x.shape[0] else 0


def in_transform() -> bool:
    """Tell whether a transform of ``torch.func`` is on; False where that cannot be told."""
    return _transform_level is not None and _transform_level() is not None


def has_transform_gradient(x: torch.Tensor) -> bool:
    """Tell whether a transform of ``torch.func`` takes the derivative by a tensor; False where that cannot be told.

    An operator's own derivative then says that there is none.
    """
    return _has_transform_gradient is not None and bool(_has_transform_gradient(x)) and x.requires_grad


def sdpa_kernel(*args: Any, **kwargs: Any) -> str | None:
    """Return by which kind of kernel PyTorch would run a call of scaled_dot_product_attention; None where nothing tells.

    Args:
        args, kwargs: those of scaled_dot_product_attention.

    Returns:
        ``"plain"``, ``"flash"``, ``"efficient"``, ``"cudnn"`` or ``"other"``.
    """
    if _sdpa_kernel is None or torch.compiler.is_compiling() or torch.jit.is_tracing() or in_transform():
        return None
    kinds = {0: "plain", 1: "flash", 2: "efficient", 3: "cudnn"}
    return kinds.get(_sdpa_kernel(*args, **kwargs), "other")


def register_sharding(operator: torch._ops.OpOverload, rule: Callable[..., Any]) -> None:
    """Register a rule for DTensor as ``torch.distributed.tensor.experimental.register_sharding`` does.

    That function has DTensor keep what a rule answers for tensors and integers, and give the same answer for other strings
    and flags. Where it cannot be told to look at all arguments no rule is registered: DTensor then refuses the operator.
    """
    try:
        from torch.distributed.tensor import DTensor, experimental
        from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

        looked_at = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
        everything = RuntimeSchemaInfo(static_argnum=0, needs_pytree=True)
    except (ImportError, AttributeError, TypeError):
        return
    experimental.register_sharding(operator)(rule)
    looked_at[operator] = everything


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def constant_in_traces(function: FunctionT) -> FunctionT:
    """Do what ``torch.compiler.assume_constant_result`` does, which imports the compiler: Dynamo calls the function."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_traces
def traces_context_variables() -> bool:
    """Tell, in traced code, whether Dynamo takes a context variable's value, and compiles again where that is another one."""
    return hasattr(sys.modules.get("torch._dynamo.variables.misc"), "ContextVarVariable")
