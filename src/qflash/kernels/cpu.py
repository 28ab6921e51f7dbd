"""The CPU back end: ``cpu.c``, compiled on first use and called through ctypes. The same bits as the reference.

The machine's own C compiler makes it for the machine's own CPU, which takes a few seconds once; the library is
kept in the user's cache folder. Without a compiler the back end is unavailable and says so.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.resources
import math
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable

import torch

from .. import fixed_point as fp
from ..folders import cache_folder
from ..quantization import GRANULARITIES, scale_shape
from ..recipe import Recipe

_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
# Best first. -fopenmp shares PyTorch's own threads (one libgomp in the process); Apple's clang has none.
_TRIES = (
    ("-march=native", "-mprefer-vector-width=512", "-fopenmp"),
    ("-march=native", "-fopenmp"),
    ("-mcpu=native", "-fopenmp"),
    ("-march=native",),
    (),
)
_SERIAL_WORK = 1 << 19
"""Multiply-adds below which waking other threads costs more than they bring."""


class BuildError(RuntimeError):
    """The kernel could not be compiled or loaded; the message says why."""


def _compiler() -> str:
    named = os.environ.get("CC", "").split()
    for name in (*named[:1], "cc", "gcc", "clang"):
        if found := shutil.which(name):
            return found
    raise BuildError("no C compiler (cc, gcc, clang or $CC) was found to compile it with")


def _cpu_identity() -> str:
    """Return what tells apart CPUs whose machine code differs, for home folders that several machines share."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = platform.processor()
    lines = {line for line in text.splitlines() if line.startswith(("flags", "Features", "model name", "CPU part"))}
    return platform.machine() + "".join(sorted(lines) or text[:1000])


def _build(target: pathlib.Path, source: str, compiler: str) -> None:
    """Compile to a neighbouring name first: processes that start together must not load half a file."""
    said = ""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        code, made = pathlib.Path(folder, "cpu.c"), pathlib.Path(folder, target.name)
        code.write_text(source, encoding="utf-8")
        for extra in _TRIES:
            command = [compiler, *_FLAGS, *extra, str(code), "-o", str(made), "-lm"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise BuildError(f"{compiler} did not run: {error}") from error
            if done.returncode == 0:
                os.replace(made, target)
                return
            said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-200:]).strip()
    raise BuildError(f"{compiler} refused it: {said}")


@functools.cache
def load() -> ctypes.CDLL:
    """Return the compiled kernels, compiling them if this machine has not done so yet.

    Raises:
        BuildError: no compiler, or it failed.
    """
    source = importlib.resources.files(__package__).joinpath("cpu.c").read_text(encoding="utf-8")
    compiler = _compiler()
    identity = "\0".join((source, compiler, repr(_FLAGS), repr(_TRIES), _cpu_identity()))
    name = f"cpu-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.so"
    try:
        cache = cache_folder()
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        usable = os.access(cache, os.W_OK) and getattr(os, "getuid", lambda: 0)() == cache.stat().st_uid
    except (OSError, RuntimeError):
        usable = False
    if not usable:
        # no home, or another user's: compile for this process alone
        cache = pathlib.Path(tempfile.mkdtemp(prefix="qflash-"))
    path = cache / name
    try:
        if not path.is_file():
            _build(path, source, compiler)
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"it was compiled but cannot be loaded: {error}") from error
    finally:
        if not usable:
            shutil.rmtree(cache, ignore_errors=True)
    for function in (library.qflash_attention, library.qflash_quantize):
        function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int
    return library


def _fields(pointers: int, integers: int) -> type[ctypes.Structure]:
    fields = [("pointers", ctypes.c_void_p * pointers), ("integers", ctypes.c_int64 * integers)]
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})


_Attention = _fields(9, 53)
_Quantize = _fields(3, 11)


def _strides(x: torch.Tensor, dims: tuple[int, ...]) -> list[int]:
    shape, stride = x.shape, x.stride()
    return [0 if shape[dim] == 1 else stride[dim] for dim in dims]


def _threads(work: int) -> int:
    return 1 if work < _SERIAL_WORK else torch.get_num_threads()


def _quantization(
    x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, granularity: str, center: bool
) -> ctypes.Structure:
    return _Quantize(
        (x.data_ptr(), values.data_ptr(), scale.data_ptr()),
        (*x.shape, *x.stride(), GRANULARITIES.index(granularity), center, _threads(8 * x.numel())),
    )


def _quantize(arguments: ctypes.Structure) -> None:
    if load().qflash_quantize(ctypes.byref(arguments)):
        raise MemoryError("not enough memory to quantise")


def _attend(arguments: ctypes.Structure) -> None:
    if load().qflash_attention(ctypes.byref(arguments)):
        raise MemoryError("not enough memory for the packed keys and values of a head")


def launch_quantize(x: torch.Tensor, granularity: str, center: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x`` (batch, heads, tokens, channels), finding its scales: ``(values, scale)``.

    Args:
        x: float16, bfloat16 or float32, on the CPU.
        granularity: see :func:`qflash.quantize`.
        center: subtract every channel's midrange first (:func:`qflash.quantization.center_channels`).
    """
    shape = scale_shape(x.shape, granularity)
    values = torch.empty(x.shape, dtype=torch.int8)
    if x.numel() == 0:
        return values, torch.ones(shape)
    x = x.to(torch.float32)
    scale = torch.empty(shape)
    _quantize(_quantization(x, values, scale, granularity, center))
    return values, scale


_POINTERS = ("q", "k", "v", "qs", "ks", "vs", "os", "mask", "out")
"""What the addresses of an ``_Attention`` belong to."""


def _attention(
    query: torch.Tensor,
    query_scale: torch.Tensor,
    key: torch.Tensor,
    key_scale: torch.Tensor,
    value: torch.Tensor,
    value_scale: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    softmax_scale: float,
    output_scale: torch.Tensor | None,
    out: torch.Tensor,
    recipe: Recipe,
) -> ctypes.Structure:
    """Spell out a call of C; ``out`` is contiguous, int8 or float32."""
    batch, heads, queries, head_dim = query.shape
    key_heads, keys, value_dim = key.shape[1], key.shape[2], value.shape[3]
    given = value_scale if output_scale is None else output_scale
    pointers = (
        query.data_ptr(), key.data_ptr(), value.data_ptr(), query_scale.data_ptr(), key_scale.data_ptr(),
        value_scale.data_ptr(), given.data_ptr(), 0 if mask is None else mask.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    offset, up, down = fp.probability_constants(recipe.exponential, recipe.probability_bits)
    integers = (
        batch, heads, key_heads, queries, keys, head_dim, value_dim,
        *query.stride(), *key.stride(), *value.stride(),
        *_strides(query_scale, (0, 1, 2)), *_strides(key_scale, (0, 1, 2)),
        *_strides(value_scale, (0, 1, 3)), *_strides(given, (0, 1, 3)),
        *((0, 0, 0, 0) if mask is None else _strides(mask, (0, 1, 2, 3))), 1 if mask is None else mask.shape[0],
        0 if mask is None else 1 if mask.dtype == torch.bool else 2,
        is_causal, key_scale.shape[2] > 1, 1 if given.shape[1] == heads else heads // key_heads, out.dtype == torch.int8,
        *fp.split_float(softmax_scale * math.log2(math.e)),
        recipe.exponential == "quadratic", recipe.probability_bits, recipe.probability_rounding == "nearest",
        offset, up, down, recipe.key_block, recipe.normalization == "online", recipe.output == "value_scale",
        _threads(batch * heads * queries * keys * (head_dim + value_dim)),
    )  # fmt: skip
    return _Attention(pointers, integers)


def launch_attention(
    query: torch.Tensor,
    query_scale: torch.Tensor,
    key: torch.Tensor,
    key_scale: torch.Tensor,
    value: torch.Tensor,
    value_scale: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    softmax_scale: float,
    output_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
    recipe: Recipe,
) -> torch.Tensor:
    """Run :func:`qflash.reference.int8_attention` as one function of C: same arguments, same bits."""
    stored = torch.int8 if out_dtype == torch.int8 else torch.float32
    out = torch.empty((*query.shape[:3], value.shape[3]), dtype=stored)
    if out.numel() == 0 or key.shape[2] == 0:
        return out.zero_().to(out_dtype)
    _attend(
        _attention(
            query, query_scale, key, key_scale, value, value_scale, mask, is_causal, softmax_scale, output_scale, out, recipe
        )
    )
    return out.to(out_dtype)


def prepare_int8_attention(
    query: torch.Tensor,
    query_scale: torch.Tensor,
    key: torch.Tensor,
    key_scale: torch.Tensor,
    value: torch.Tensor,
    value_scale: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    softmax_scale: float,
    output_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
    recipe: Recipe,
    shape: tuple[int, ...],
    places: dict[str, int],
) -> Callable[..., torch.Tensor] | None:
    """Return what repeats :func:`launch_attention` on other tensors of the same shapes and strides, or None.

    Args:
        shape: of the output, as the caller wants it.
        places: names of :data:`_POINTERS`, and which of the caller's tensors each is. Other addresses stay.
    """
    if key.shape[2] == 0:
        return None
    stored = torch.int8 if out_dtype == torch.int8 else torch.float32
    template = _attention(
        query, query_scale, key, key_scale, value, value_scale, mask, is_causal, softmax_scale, output_scale,
        torch.empty(shape, dtype=stored), recipe,
    )  # fmt: skip
    targets = [(_POINTERS.index(name), index) for name, index in places.items()]
    out_at = _POINTERS.index("out")

    def repeat(*tensors: torch.Tensor | None) -> torch.Tensor:
        out = torch.empty(shape, dtype=stored)
        arguments = _Attention.from_buffer_copy(template)
        for position, index in targets:
            arguments.pointers[position] = tensors[index].data_ptr()  # type: ignore[union-attr]
        arguments.pointers[out_at] = out.data_ptr()
        _attend(arguments)
        return out.to(out_dtype)

    return repeat


def prepare_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    softmax_scale: float,
    recipe: Recipe,
    shape: tuple[int, ...],
) -> Callable[..., torch.Tensor] | None:
    """Return what repeats :func:`qflash.ops.attention` on other tensors of the same shapes and strides.

    None where steps in PyTorch precede: a float mask, balancing, rotation.
    """
    if recipe.balance or recipe.rotate or (mask is not None and mask.dtype != torch.bool) or key.shape[2] == 0:
        return None
    dtype = query.dtype
    kinds = (recipe.query_granularity, False), (recipe.key_granularity, recipe.smooth_key), (recipe.value_granularity, False)
    shapes = [x.shape for x in (query, key, value)]
    floats = [x.to(torch.float32) for x in (query, key, value)]
    # one piece of memory for all values, and one for all scales
    values_sizes = [x.numel() for x in floats]
    scale_shapes = [scale_shape(x.shape, granularity) for x, (granularity, _) in zip(floats, kinds, strict=True)]
    scale_sizes = [math.prod(size) for size in scale_shapes]
    value_starts = [sum(values_sizes[:i]) for i in range(3)]
    scale_starts = [4 * sum(scale_sizes[:i]) for i in range(3)]
    values = [torch.empty(x.shape, dtype=torch.int8) for x in floats]
    scales = [torch.empty(size) for size in scale_shapes]
    quantizations = [
        _quantization(x, value, scale, *kind) for x, value, scale, kind in zip(floats, values, scales, kinds, strict=True)
    ]
    template = _attention(
        values[0], scales[0], values[1], scales[1], values[2], scales[2], mask, is_causal, softmax_scale, None,
        torch.empty(shape), recipe,
    )  # fmt: skip

    def repeat(*tensors: torch.Tensor | None) -> torch.Tensor:
        out = torch.empty(shape)
        held, factors = torch.empty(sum(values_sizes), dtype=torch.int8), torch.empty(sum(scale_sizes))
        arguments = _Attention.from_buffer_copy(template)
        for index in range(3):
            x: torch.Tensor = tensors[index]  # type: ignore[assignment]
            if dtype != torch.float32:
                x = x.reshape(shapes[index]).to(torch.float32)
            one = _Quantize.from_buffer_copy(quantizations[index])
            value_at, scale_at = held.data_ptr() + value_starts[index], factors.data_ptr() + scale_starts[index]
            one.pointers[:] = (x.data_ptr(), value_at, scale_at)
            _quantize(one)
            arguments.pointers[index], arguments.pointers[3 + index] = value_at, scale_at
        arguments.pointers[6] = arguments.pointers[5]
        if mask is not None:
            arguments.pointers[7] = tensors[3].data_ptr()  # type: ignore[union-attr]
        arguments.pointers[8] = out.data_ptr()
        _attend(arguments)
        return out.to(dtype)

    return repeat
