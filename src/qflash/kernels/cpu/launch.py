"""The CPU back end's C code, compiled on first use and called through ctypes, and the launches of ``attention.c``.

The same bits as the reference. Layers of integer networks are launched by :mod:`.network`.

The machine's own C compiler makes it for the machine's own CPU, which takes a few seconds once; the library is
kept in the user's cache folder, under a name that says what it was compiled from and what its bytes are. Without a
compiler the back end is unavailable and says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import importlib.resources
import math
import os
import pathlib
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar

import torch

from ...paths import check_private, make_cache_folder
from ...specification import fixed_point as fp
from ...specification.attention_call import AttentionCall, Scales, VarlenCall
from ...specification.memory_format import empty_output
from ...specification.quantization import GRANULARITIES, scale_shape
from ...specification.recipe import Recipe

_SOURCES = ("attention.c", "network.c", "threads.c")
"""What is compiled, to one library."""
_HEADERS = ("products.h", "threads.h")
_FUNCTIONS = {
    "attention": 1, "attention_at": 11, "quantize": 1, "bias": 3, "seen": 3, "float_attention": 7, "varlen_attention": 4,
    "linear": 1, "layer_norm": 1, "pack": 1, "packed_bytes": 1, "mean": 1, "patches": 1, "move_rows": 1, "gated": 1,
    "rotary": 1, "narrow": 1, "run": 2, "linear_scratch": 1, "attention_scratch": 1,
}  # fmt: skip
"""Functions of the library, and how many addresses each takes."""
# no contraction: a product that is rounded in the reference is rounded
_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
# Best first. -fopenmp shares PyTorch's own threads (one libgomp in the process); Apple's clang has none.
_TRIES = (
    ("-march=native", "-mprefer-vector-width=512", "-fopenmp"),
    ("-march=native", "-fopenmp"),
    ("-mcpu=native", "-fopenmp"),
    ("-march=native",),
    (),
)
_COMPILER_SECONDS = 900
"""After which a compiler is taken to hang; it needs seconds, and minutes on a machine that is very busy."""
_LIBRARY_BYTES = 1 << 20
"""More than the library has."""
_SERIAL_WORK = 1 << 19
"""Multiply-adds below which waking other threads costs more than they bring."""


class BuildError(RuntimeError):
    """The kernel could not be compiled or loaded; the message says why."""


def _compiler() -> list[str]:
    """Return the words of a command that begins with an existing program: ``$CC``'s, else the first usual compiler."""
    named = os.environ.get("CC", "")
    try:
        words = shlex.split(named)
    except ValueError as error:
        raise BuildError(f"the environment variable CC is no command, it is {named!r}: {error}") from error
    missing = ""
    for command in ([words] if words else []) + [["cc"], ["gcc"], ["clang"]]:
        if found := shutil.which(command[0]):
            if missing:
                warnings.warn(f"{missing}: {found} is used instead", RuntimeWarning, stacklevel=3)
            return [found, *command[1:]]
        if command is words:
            missing = f"the environment variable CC is {named!r}, and {words[0]!r} was not found"
    raise BuildError(f"{missing or 'CC is not set'}, and no C compiler was found (cc, gcc, clang)")


def _cpu_identity() -> str:
    """Return what tells apart CPUs whose machine code differs, for home folders that several machines share."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = platform.processor()
    lines = {line for line in text.splitlines() if line.startswith(("flags", "Features", "model name", "CPU part"))}
    return platform.machine() + "".join(sorted(lines) or text[:1000])


def _digest(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _run(command: list[str]) -> tuple[int, str]:
    """Run a compiler; return its exit status and what it said.

    Raises:
        BuildError: it does not run, or it does not end.
    """
    try:
        # a session of its own: what it starts is ended with it, and would keep the pipe open otherwise
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    with process:
        try:
            _, said = process.communicate(timeout=_COMPILER_SECONDS)
        except BaseException as error:
            if hasattr(os, "killpg"):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                raise BuildError(f"{command[0]} did not end within {_COMPILER_SECONDS} seconds") from error
            raise
    return process.returncode, said


def _build(folder: pathlib.Path, stem: str, texts: dict[str, str], compiler: list[str]) -> pathlib.Path:
    """Compile into ``folder``; return the library, whose name ends with its digest.

    ``texts`` are the sources and headers by their names. The library is moved there when it is whole, so that processes that
    start together never see half a file.

    Raises:
        BuildError: the compiler does not run, hangs, or refuses it.
        OSError: the folder cannot be written to, or has no room.
    """
    said = ""
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as temporary:
        made = pathlib.Path(temporary, "cpu.so")
        for name, text in texts.items():
            pathlib.Path(temporary, name).write_text(text, encoding="utf-8")
        sources = [str(pathlib.Path(temporary, name)) for name in _SOURCES]
        for extra in _TRIES:
            command = [*compiler, *_FLAGS, *extra, *sources, "-o", str(made), "-lm"]
            status, words = _run(command)
            if status == 0 and made.is_file():
                made.chmod(0o700)
                return made.replace(folder / f"{stem}-{_digest(made)}.so")
            said = next((line for line in words.splitlines() if "error" in line), words[-200:]).strip()
        # a disk without room is the folder's fault, not the compiler's
        pathlib.Path(temporary, "room").write_bytes(bytes(_LIBRARY_BYTES))
    raise BuildError(f"{shlex.join(compiler)} refused it: {said or f'exit status {status}, no library'}")


def _open(path: pathlib.Path) -> ctypes.CDLL:
    """Load a library of :func:`_build`. Half a file would end the process (SIGBUS), so its digest is looked at first.

    Raises:
        OSError: others can have written it, it is not what was compiled, or it cannot be loaded.
    """
    check_private(path)
    if path.stem.rpartition("-")[2] != _digest(path):
        raise OSError(f"{path} is not what was compiled")
    library = ctypes.CDLL(str(path))
    for function, arguments in _FUNCTIONS.items():
        getattr(library, f"qflash_{function}").argtypes = [ctypes.c_void_p] * arguments
    for name in ("packed_bytes", "linear_scratch", "attention_scratch"):
        getattr(library, f"qflash_{name}").restype = ctypes.c_int64
    return library


def _open_or_build(folder: pathlib.Path, stem: str, texts: dict[str, str], compiler: list[str]) -> ctypes.CDLL:
    for path in folder.glob(f"{stem}-*.so"):
        with contextlib.suppress(OSError):
            return _open(path)
    return _open(_build(folder, stem, texts, compiler))


@functools.cache
def load() -> ctypes.CDLL:
    """Return the compiled kernels, compiling them if this machine has not done so yet.

    Where the user's cache folder cannot be used they are compiled for this process alone, with a warning.

    Raises:
        BuildError: no compiler, it failed, or what it made cannot be loaded.
    """
    here = importlib.resources.files(__package__)
    texts = {name: here.joinpath(name).read_text(encoding="utf-8") for name in (*_SOURCES, *_HEADERS)}
    compiler = _compiler()
    identity = "\0".join((*texts.values(), *compiler, repr(_FLAGS), repr(_TRIES), _cpu_identity()))
    stem = f"cpu-{hashlib.sha256(identity.encode()).hexdigest()[:24]}"
    try:
        return _open_or_build(make_cache_folder(), stem, texts, compiler)
    except OSError as error:
        reason = str(error)
    try:
        with tempfile.TemporaryDirectory(prefix="qflash-", ignore_cleanup_errors=True) as folder:
            library = _open_or_build(pathlib.Path(folder), stem, texts, compiler)
    except OSError as error:
        raise BuildError(f"it cannot be kept or loaded: {reason}; nor from a temporary folder: {error}") from error
    warnings.warn(
        f"the CPU kernels were compiled for this process alone, which takes seconds in every process: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )
    return library


def arguments_type(pointers: tuple[str, ...], integers: int) -> type[ctypes.Structure]:
    """Return the type of a C function's arguments: pointers by their names, then integers."""
    fields = [*((name, ctypes.c_void_p) for name in pointers), ("integers", ctypes.c_int64 * integers)]
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a function of C.

    Attributes:
        function: its name, without ``qflash_``.
        arguments: of :func:`arguments_type`.
        tensors: whose addresses the pointers are, in their order; None for NULL.
    """

    function: str
    arguments: ctypes.Structure
    tensors: tuple[torch.Tensor | None, ...]

    @property
    def pointers(self) -> list[str]:
        """Names of the pointers, in their order; the integers are behind them."""
        return [name for name, _ in type(self.arguments)._fields_[:-1]]  # type: ignore[misc]


_calls: ContextVar[list[Call] | None] = ContextVar("_calls", default=None)


@contextlib.contextmanager
def noted_calls() -> Iterator[list[Call]]:
    """Note the calls that a block makes by :func:`run_call`; yields the list of them."""
    calls: list[Call] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


def run_call(
    function: str, arguments: Callable[..., ctypes.Structure], tensors: Sequence[torch.Tensor | None], integers: Sequence[int],
    purpose: str = "",
) -> None:  # fmt: skip
    """Call a function of C that returns whether memory ran out.

    Args:
        function: its name, without ``qflash_``.
        arguments: the type of its arguments.
        tensors: whose addresses the pointers are, in their order; None for NULL.
        integers: behind them.
        purpose: of the memory, for the message.

    Raises:
        MemoryError: it ran out.
    """
    given = arguments(*(0 if x is None else x.data_ptr() for x in tensors), tuple(integers))
    if (calls := _calls.get()) is not None:
        calls.append(Call(function, given, tuple(tensors)))
    check_memory(getattr(load(), f"qflash_{function}")(ctypes.byref(given)), purpose)


_POINTERS = ("q", "k", "v", "qs", "ks", "vs", "os", "offset", "mask", "out")
_Attention = arguments_type((*_POINTERS, "scratch"), 61)
_Quantize = arguments_type(("x", "values", "scale", "offset"), 11)
_AS_IS, _MIDRANGE, _ZERO_POINT, _GIVEN = range(4)
"""What a channel is quantised less: nothing, its midrange, a zero point, which comes out as an offset, or a given number, whose
step is given as well."""
_Packing = arguments_type(("cu_q", "cu_k"), 2)
_PACKED = "for the packed keys and values of a head"


def _strides(x: torch.Tensor, dims: tuple[int, ...]) -> list[int]:
    shape, stride = x.shape, x.stride()
    return [0 if shape[dim] == 1 else stride[dim] for dim in dims]


def threads_for(work: int) -> int:
    """Return how many threads a number of multiply-adds is worth."""
    return 1 if work < _SERIAL_WORK else torch.get_num_threads()


def _quantization(
    x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None, granularity: str, center: int
) -> ctypes.Structure:
    return _Quantize(
        x.data_ptr(), values.data_ptr(), scale.data_ptr(), 0 if offset is None else offset.data_ptr(),
        (*x.shape, *x.stride(), GRANULARITIES.index(granularity), center, threads_for(8 * x.numel())),
    )  # fmt: skip


def check_memory(failed: int, purpose: str) -> None:
    """Raise MemoryError if a C function says that it ran out of memory."""
    if failed:
        raise MemoryError(f"not enough memory {purpose}")


def launch_quantize(x: torch.Tensor, granularity: str, center: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x`` (batch, heads, tokens, channels), finding its scales: ``(values, scale)``.

    Args:
        x: float16, bfloat16 or float32, on the CPU.
        granularity: see :func:`qflash.quantize`.
        center: subtract every channel's midrange first (:func:`qflash.specification.quantization.center_channels`).
    """
    shape = scale_shape(x.shape, granularity)
    values = torch.empty(x.shape, dtype=torch.int8, device="cpu")
    if x.numel() == 0:
        return values, torch.ones(shape, dtype=torch.float32, device="cpu")
    x = x.to(torch.float32)
    scale = torch.empty(shape, dtype=torch.float32, device="cpu")
    arguments = _quantization(x, values, scale, None, granularity, _MIDRANGE if center else _AS_IS)
    check_memory(load().qflash_quantize(ctypes.byref(arguments)), "to quantise")
    return values, scale


def launch_quantize_centered(x: torch.Tensor, granularity: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run :func:`qflash.specification.quantization.quantize_centered` on ``x`` (batch, heads, tokens, channels): same bits."""
    values = torch.empty(x.shape, dtype=torch.int8, device="cpu")
    scale = torch.ones(scale_shape(x.shape, granularity), dtype=torch.float32, device="cpu")
    offset = torch.zeros(scale_shape(x.shape, "channel"), dtype=torch.float32, device="cpu")
    if x.numel():
        x = x.to(torch.float32)
        arguments = _quantization(x, values, scale, offset, granularity, _ZERO_POINT)
        check_memory(load().qflash_quantize(ctypes.byref(arguments)), "to quantise")
    return values, scale, offset


def launch_quantize_values(x: torch.Tensor, scale: torch.Tensor, center: torch.Tensor | None) -> torch.Tensor:
    """Quantise ``x`` (batch, heads, tokens, channels) with given scales: :func:`.specification.quantization.quantize_values`.

    Args:
        x: float16, bfloat16 or float32, on the CPU.
        scale: float32 (1, heads or 1, 1, channels or 1).
        center: float32, of such a shape, subtracted first; None for nothing.
    """
    values = torch.empty(x.shape, dtype=torch.int8, device="cpu")
    if x.numel():
        x = x.to(torch.float32)
        each = 1, x.shape[1], 1, x.shape[3]
        steps, middles = (None if given is None else given.expand(each).contiguous() for given in (scale, center))
        assert steps is not None
        arguments = _quantization(x, values, steps, middles, "head", _GIVEN)
        check_memory(load().qflash_quantize(ctypes.byref(arguments)), "to quantise")
    return values


def launch_quantize_bias(bias: torch.Tensor) -> torch.Tensor:
    """Turn an additive float mask of any rank into fixed point, contiguous; see :func:`qflash.quantize_bias`."""
    wide = bias.to(torch.float32).contiguous()
    fixed = torch.empty(bias.shape, dtype=torch.int32, device="cpu")
    if wide.numel():
        keys = bias.shape[-1] if bias.dim() else 1
        sizes = (ctypes.c_int64 * 3)(wide.numel() // keys, keys, threads_for(8 * wide.numel()))
        load().qflash_bias(wide.data_ptr(), fixed.data_ptr(), ctypes.byref(sizes))
    return fixed


def launch_seen(mask: torch.Tensor, key_heads: int) -> torch.Tensor:
    """Run :func:`qflash.unseen_tokens.shown_tokens`: same arguments, same result."""
    period, heads, rows, keys = mask.shape
    shared = 1 if heads == 1 else key_heads
    seen = torch.empty((period, shared, keys), dtype=torch.bool, device="cpu")
    sizes = (ctypes.c_int64 * 11)(
        period, shared, heads // shared, rows, keys, *_strides(mask, (0, 1, 2, 3)), mask.dtype == torch.int32,
        threads_for(mask.numel()),
    )  # fmt: skip
    load().qflash_seen(mask.data_ptr(), seen.data_ptr(), ctypes.byref(sizes))
    return seen


def _attention_arguments(call: AttentionCall, out: torch.Tensor) -> tuple[tuple[torch.Tensor | None, ...], tuple[int, ...]]:
    """Spell out a call of C: tensors and integers. ``out`` is int8 or float32, its channels neighbours."""
    query, key, value, mask, recipe, scales = call.query, call.key, call.value, call.mask, call.recipe, call.scales
    assert scales is not None and scales.query is not None
    given = scales.value if scales.output is None else scales.output
    offset = scales.offset
    tensors = query, key, value, scales.query, scales.key, scales.value, given, offset, mask, out, None
    start, up, down = fp.probability_constants(recipe.exponential, recipe.probability_bits)
    integers = (
        call.batch, call.heads, key.shape[1], call.queries, call.keys, call.head_dim, call.value_dim,
        *query.stride(), *key.stride(), *value.stride(),
        *_strides(scales.query, (0, 1, 2)), *_strides(scales.key, (0, 1, 2)),
        *_strides(scales.value, (0, 1, 3)), *_strides(given, (0, 1, 3)),
        *((0, 0, 0) if offset is None else _strides(offset, (0, 1, 3))), *out.stride()[:3],
        *((0, 0, 0, 0) if mask is None else _strides(mask, (0, 1, 2, 3))), 1 if mask is None else mask.shape[0],
        ("none", "bool", "bias").index(call.mask_kind), call.is_causal, call.has_token_keys,
        1 if given.shape[1] == call.heads else call.heads // key.shape[1], out.dtype == torch.int8,
        *fp.split_float(call.softmax_scale * math.log2(math.e)),
        recipe.exponential == "quadratic", recipe.probability_bits, recipe.probability_rounding == "nearest",
        start, up, down, recipe.key_block, recipe.normalization == "online", recipe.output == "value_scale",
        call.exact_sum, fp.inverse_count(max(1, call.keys)),
        threads_for(call.batch * call.heads * call.queries * call.keys * (call.head_dim + call.value_dim)),
    )  # fmt: skip
    return tensors, integers


def _attention(call: AttentionCall, out: torch.Tensor) -> ctypes.Structure:
    """Spell out a call of C as its arguments."""
    tensors, integers = _attention_arguments(call, out)
    return _Attention(*(0 if x is None else x.data_ptr() for x in tensors), integers)


def launch_attention(call: AttentionCall) -> torch.Tensor:
    """Run :func:`qflash.specification.reference.int8_attention` as one function of C: same arguments, same bits."""
    stored = torch.int8 if call.out_dtype == torch.int8 else torch.float32
    out = empty_output(call.order, call.value_dim, stored)
    if out.numel() == 0 or call.keys == 0:
        return out.zero_().to(call.out_dtype)
    run_call("attention", _Attention, *_attention_arguments(call, out), _PACKED)
    return out.to(call.out_dtype)


def launch_varlen(call: VarlenCall) -> torch.Tensor:
    """Run :func:`qflash.varlen.varlen_attention` as one function of C: float tensors, balanced and rotated already."""
    recipe, lengths = call.recipe, call.lengths
    queries, keys = max(1, lengths.most_queries), max(1, lengths.most_keys)
    heads, value_dim = call.query.shape[1], call.value.shape[2]
    steps, sizes, granularities = (_Quantize * 3)(), (queries, keys, keys), _kinds(recipe)
    floats = [x.to(torch.float32) for x in (call.query, call.key, call.value)]
    values, scales = [], []
    for index, (x, most, (granularity, center)) in enumerate(zip(floats, sizes, granularities, strict=True)):
        steps[index] = _Quantize(
            x.data_ptr(), 0, 0, 0,
            (1, x.shape[1], x.shape[0], x.shape[2], 0, x.stride(1), x.stride(0), x.stride(2), GRANULARITIES.index(granularity),
             center, 1),
        )  # fmt: skip
        values.append(torch.empty((1, x.shape[1], most, x.shape[2]), dtype=torch.int8, device="meta"))
        scales.append(torch.empty(scale_shape(values[-1].shape, granularity), dtype=torch.float32, device="meta"))
    out = torch.empty((call.query.shape[0], heads, value_dim), dtype=torch.float32, device="cpu")
    offset = None
    if recipe.smooth_value:
        offset = torch.empty(scale_shape(values[2].shape, "channel"), dtype=torch.float32, device="meta")
    longest = AttentionCall(
        values[0], values[1], values[2], Scales(scales[0], scales[1], scales[2], None, offset), None, call.is_causal,
        call.softmax_scale, torch.float32, recipe,
    )  # fmt: skip
    like = _attention(longest, out[None].transpose(1, 2))
    begins = [x.to(torch.int64) for x in (lengths.queries, lengths.keys)]
    packing = _Packing(*(x.data_ptr() for x in begins), (lengths.sequences, fp.MOST_ROUNDED_KEYS))
    addresses = ctypes.byref(steps), ctypes.byref(like), ctypes.byref(packing)
    check_memory(load().qflash_varlen_attention(*addresses, out.data_ptr()), f"to quantise or {_PACKED}")
    return out.to(call.out_dtype)


def prepare_attention(call: AttentionCall, out: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    """Return what repeats :func:`qflash.execution.attend` on other tensors of the same shapes and strides.

    That takes the operator's tensors in their order, of any rank. None where a step of its own precedes: a float mask that
    is turned into fixed point, balancing, rotation. ``out`` is an output of that call; new ones are like it.
    """
    if call.keys == 0 or (call.mask is not None and call.mask.dtype.is_floating_point):
        return None
    return _prepare_floats(call, out) if call.scales is None else _prepare_int8(call, out)


_INT8_TENSORS = ("q", "qs", "k", "ks", "v", "vs", "mask", "os", "offset")
"""Tensors of the operator on int8, in its order, by the names of pointers."""


def _prepare_int8(call: AttentionCall, out: torch.Tensor) -> Callable[..., torch.Tensor]:
    assert call.scales is not None
    stored = torch.empty_like(out, dtype=torch.int8 if out.dtype == torch.int8 else torch.float32, device="meta")
    template = _attention(call, stored)
    like, attend = ctypes.byref(template), load().qflash_attention_at
    shape, strides, stored_dtype, dtype = stored.shape, stored.stride(), stored.dtype, out.dtype
    # which of the tensors each of the pointers is; without an output scale any will do
    places = {name: index for index, name in enumerate(_INT8_TENSORS)}
    if call.scales.output is None:
        places["os"] = places["vs"]
    order = [places[name] for name in _POINTERS[:-1]]

    def repeat(*tensors: torch.Tensor | None) -> torch.Tensor:
        out = torch.empty_strided(shape, strides, dtype=stored_dtype, device="cpu")
        given = [tensors[index] for index in order]
        if _calls.get() is not None:
            run_call("attention", _Attention, (*given, out, None), template.integers, _PACKED)
            return out.to(dtype)
        addresses = [0 if x is None else x.data_ptr() for x in given]
        check_memory(attend(like, *addresses, out.data_ptr()), _PACKED)
        return out.to(dtype)

    return repeat


def _kinds(recipe: Recipe) -> tuple[tuple[str, int], ...]:
    """Return of query, key and value what shares a scale, and what a channel is quantised less."""
    return (
        (recipe.query_granularity, _AS_IS),
        (recipe.key_granularity, _MIDRANGE if recipe.smooth_key else _AS_IS),
        (recipe.value_granularity, _ZERO_POINT if recipe.smooth_value else _AS_IS),
    )


def _prepare_floats(call: AttentionCall, out: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    recipe, dtype = call.recipe, call.query.dtype
    if recipe.balance or recipe.rotate or call.mask_kind == "bias":
        return None
    floats = call.query, call.key, call.value
    kinds = _kinds(recipe)
    values, scales, steps = [], [], (_Quantize * 3)()
    for index, (x, (granularity, center)) in enumerate(zip(floats, kinds, strict=True)):
        # only the strides that a conversion gives are of interest, not its numbers
        wide = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="meta").to(torch.float32)
        values.append(torch.empty(x.shape, dtype=torch.int8, device="meta"))
        scales.append(torch.empty(scale_shape(x.shape, granularity), dtype=torch.float32, device="meta"))
        steps[index] = _quantization(wide, values[index], scales[index], None, granularity, center)
    offset = torch.empty(scale_shape(call.value.shape, "channel"), dtype=torch.float32, device="meta")
    stored = torch.empty_like(out, dtype=torch.float32, device="meta")
    quantised = dataclasses.replace(
        call,
        query=values[0],
        key=values[1],
        value=values[2],
        scales=Scales(scales[0], scales[1], scales[2], None, offset if recipe.smooth_value else None),
        out_dtype=torch.float32,
    )
    template = _attention(quantised, stored)
    conversions, like, attend = ctypes.byref(steps), ctypes.byref(template), load().qflash_float_attention
    shape, strides, views = stored.shape, stored.stride(), [x.shape for x in floats]

    def repeat(*tensors: torch.Tensor | None) -> torch.Tensor:
        out = torch.empty_strided(shape, strides, dtype=torch.float32, device="cpu")
        floats: Iterable[torch.Tensor] = tensors[:3]  # type: ignore[assignment]
        if dtype != torch.float32:
            floats = [x.reshape(view).to(torch.float32) for x, view in zip(floats, views, strict=True)]
        at = [x.data_ptr() for x in floats]
        masked = 0 if tensors[3] is None else tensors[3].data_ptr()
        check_memory(attend(conversions, like, *at, masked, out.data_ptr()), f"to quantise or {_PACKED}")
        return out.to(dtype)

    return repeat
