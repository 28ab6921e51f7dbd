"""What the tests share: inputs, an exact softmax to compare with, and a seeded generator of attention cases.

Every random choice comes from a generator seeded by the case's number, so a failure is repeated by its id, and
the interpreter and the GPU draw from the same distribution of cases.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gzip
import importlib.util
import math
import os
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import qflash
from qflash.kernels.launch_recorder import KernelLaunch
from qflash.kernels.tiles import most_queries
from qflash.specification.attention_call import AttentionCall
from qflash.specification.recipe import PRESETS, Recipe

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where Triton kernels run: the GPU, or the CPU in the interpreter (see conftest.py)."""


def slow(*values: Any) -> Any:
    """Return a case for parametrize that is slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def few(cases: Iterable[Any], count: int = 3) -> list[Any]:
    """Return cases for parametrize that take one path: all are slow but ``count`` at equal distances, ends included."""
    each = list(cases)
    kept = {round(index * (len(each) - 1) / max(count - 1, 1)) for index in range(count)}
    return [case if index in kept else slow(case) for index, case in enumerate(each)]


def eviction_policy(case: int) -> str:
    """What the rules say of tensors that the L2 does not hold, for every other pair of cases, whose tensors it does."""
    return "evict_first" if case % 4 > 1 else ""


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Have tensors made without a dtype be of this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


HELP_OF_ALL = """
import contextlib
def run(*arguments):
    with contextlib.suppress(SystemExit):
        app(arguments)
names = [command.callback.__name__.replace("_", "-") for command in app.registered_commands if not command.hidden]
for name in names:
    run(name, "--help")
run("--version")
run("nonsense")
print(*names, {"torch", "numpy", "triton"} & sys.modules.keys())
"""
"""For :func:`run_command`: ask every command for its help, print their names and which heavy packages were imported."""


def run_command(folder: Path, name: str, module: str, program: str) -> str:
    """Run what an installed command runs, but for its last line; return what it prints.

    Args:
        folder: for the command's file.
        name: of the command.
        module: has ``app``.
        program: follows the import.
    """
    script = folder / name
    script.write_text(f"import sys\nfrom {module} import app\n{program}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported_by(*arguments: str) -> tuple[str, set[str]]:
    """Return what ``python -m ARGUMENTS`` prints, and the modules that it imports."""
    command = [sys.executable, "-X", "importtime", "-m", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return done.stdout, {line.rpartition("|")[2].strip() for line in lines}


BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def count_calls(plans: Iterable[Any]) -> int:
    """Return how many of the calls kept in ``launch._plans`` did not begin at an operator."""
    return sum(not callable(key[1]) for key in plans)


def run_by_address(launched: list[str]) -> Callable[[KernelLaunch], Callable[..., None]]:
    """Return what stands in for ``KernelLaunch.launcher`` on a CPU: what it returns runs the call, and notes the kernel's name.

    Arguments that are addresses become tensors that lie there, like those of the call it was made of.
    """

    def there(address: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        last = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        memory = (ctypes.c_char * (last * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)

    def launcher(call: KernelLaunch) -> Callable[..., None]:
        def launch(*values: Any) -> None:
            arguments = dict(call.arguments)
            for name, x in zip(call.kernel.arg_names, values, strict=True):
                like = arguments[name]
                if isinstance(like, torch.Tensor):
                    arguments[name] = there(x, like.shape, like.stride(), like.dtype)
                elif isinstance(like, tuple) and isinstance(like[0], torch.Tensor):
                    given = [there(at, y.shape, y.stride(), y.dtype) for y, at in zip(like, x, strict=True)]
                    arguments[name] = type(like)(*given)
                elif hasattr(like, "base"):
                    base = there(x.base.data_ptr(), x.shape, x.strides, like.base.dtype)
                    arguments[name] = dataclasses.replace(x, base=base)
                else:
                    arguments[name] = x
            launched.append(call.kernel.__name__)
            call._replace(arguments=arguments).run()

        return launch

    return launcher


def load_script(path: Path) -> ModuleType:
    """Import a script that lies in no package."""
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module  # where dataclasses look for their annotations
    specification.loader.exec_module(module)
    return module


def load_benchmark(name: str) -> ModuleType:
    """Import a script of benchmarks/."""
    return load_script(BENCHMARKS / f"{name}.py")


def run_compiling(*command: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, in which Triton compiles kernels instead of interpreting them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)


def run_two_processes(*command: str) -> list[str]:
    """Run Python in two processes that know of each other, as torchrun would start them; return what each printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = []
    for rank in ("0", "1"):
        own = {**environment, "RANK": rank, "LOCAL_RANK": rank}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen([sys.executable, *command], **pipes, text=True, env=own))
    try:
        # one waits for the other, which may have failed: an hour is a limit for that, not for a busy machine
        outputs = [process.communicate(timeout=3600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "".join(errors for _, errors in outputs)
    return [printed for printed, _ in outputs]


def print_products(call: Any) -> None:
    """Compile a launch for compute capability 9.0; print how many tensor-core instructions it has and waits for them."""
    from qflash_lab.verify import compile, sass

    text, _ = sass.disassemble(compile.compile_call(call, "sm_90").asm["cubin"])
    instructions = sass.parse_sass(text)
    print(sum(map(sass.is_tensor_core, instructions)), sum(i.opcode.startswith("WARPGROUP.DEPBAR") for i in instructions))


def products_printed_by(file: str) -> list[int]:
    """Return the products of launches that a run of ``file`` compiles by :func:`print_products`, in a process of its own.

    It has to succeed, and the assembler may not have serialised any, which it does where registers are short.
    """
    done = run_compiling(file)
    assert done.returncode == 0, done.stderr
    counts = [[int(count) for count in line.split()] for line in done.stdout.splitlines()]
    assert all(2 * waits <= products for products, waits in counts), counts
    return [products for products, _ in counts]


LAYOUTS = ("contiguous", "tokens_first", "packed", "channels_first", "every_second", "expanded")


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return ``x`` (batch, heads, tokens, channels) in other strides.

    The values are the same, except that ``"expanded"`` repeats the first batch element with stride 0.
    """
    if layout == "contiguous":
        return x.contiguous()
    if layout == "tokens_first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "packed":
        rows = x.transpose(1, 2)
        return torch.stack((torch.ones_like(rows), rows, torch.ones_like(rows)), dim=2)[:, :, 1].transpose(1, 2)
    if layout == "channels_first":
        return x.mT.contiguous().mT
    if layout == "every_second":
        wide = x.new_ones((*x.shape[:2], 2 * x.shape[2] + 1, 2 * x.shape[3] + 1))
        wide[:, :, 1::2, 1::2] = x
        return wide[:, :, 1::2, 1::2]
    assert layout == "expanded", layout
    return x[:1].expand(x.shape)


def draw_scale(size: tuple[int, int, int, int], granularity: str, generator: torch.Generator) -> torch.Tensor:
    """Draw scales between 0.5 and 1.5 for a tensor of ``size``, on the generator's device."""
    batch, heads, tokens, channels = size
    shape = {
        "tensor": (1, 1, 1, 1),
        "head": (batch, heads, 1, 1),
        "token": (batch, heads, tokens, 1),
        "channel": (batch, heads, 1, channels),
    }[granularity]
    return torch.rand(shape, generator=generator, device=generator.device) + 0.5


def make_inputs(
    batch: int = 1,
    heads: int = 2,
    queries: int = 40,
    keys: int | None = None,
    head_dim: int = 32,
    value_dim: int | None = None,
    *,
    key_heads: int | None = None,
    seed: int = 0,
    amplitude: float = 1.0,
    dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw query, key and value from N(0, 1), query and key times ``amplitude``, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys
    key_heads = heads if key_heads is None else key_heads
    shapes = (
        (batch, heads, queries, head_dim),
        (batch, key_heads, keys, head_dim),
        (batch, key_heads, keys, head_dim if value_dim is None else value_dim),
    )
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    inputs = (query * amplitude, key * amplitude, value)
    return tuple(lay_out(x.to(dtype), layout) for x in inputs)  # type: ignore[return-value]


def outlier_inputs(seed: int = 0, heads: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw the outlier set of the design: a few channels of query, key and value far from the others."""
    query, key, value = make_inputs(1, heads, 197, head_dim=64, seed=seed)
    query[..., 3] *= 8
    key[..., 3] += 12
    key[..., 7] -= 9
    value[..., 5] += 4
    return query, key, value


def quantize_all(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], recipe: Recipe | None = None
) -> tuple[qflash.QuantizedTensor, qflash.QuantizedTensor, qflash.QuantizedTensor]:
    """Quantise query, key and value, per tensor or at the recipe's granularities."""
    grains = (
        ("tensor", "tensor", "tensor")
        if recipe is None
        else (recipe.query_granularity, recipe.key_granularity, recipe.value_granularity)
    )
    return tuple(qflash.quantize(x, grain) for x, grain in zip(inputs, grains, strict=True))  # type: ignore[return-value]


def dequantize_all(tensors: tuple[qflash.QuantizedTensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return what the int8 tensors stand for, in float64."""
    return tuple(x.values.double() * x.scale.double() for x in tensors)


def exact_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Softmax attention in float64; key and value may have fewer heads; a row with no key is zero."""
    query, key, value = query.double(), key.double(), value.double()
    if key.dim() > 2 and key.shape[-3] != query.shape[-3]:
        group = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(group, dim=-3), value.repeat_interleave(group, dim=-3)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    if is_causal:
        lower = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~lower, -math.inf)
    weights = torch.softmax(scores, dim=-1)
    return torch.where((scores == -math.inf).all(dim=-1, keepdim=True), 0.0, weights) @ value


FAR = (0.0, 900.0, 1024.0, 1025.0, -1025.0, 3000.0, -65504.0, 1e9, -1e9, -1e18, 1e20, torch.finfo(torch.float32).min)
"""Where a row's largest bias may lie: on either side of every limit in :func:`qflash.quantize_bias`."""


def move_far(bias: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Move every row of a float32 bias to one of :data:`FAR`; keys of which there are two may then be alike."""
    chosen = torch.randint(len(FAR), (*bias.shape[:-1], 1), generator=generator, device=bias.device)
    return bias + torch.tensor(FAR, dtype=torch.float32, device=bias.device)[chosen]


@dataclasses.dataclass(frozen=True)
class Limits:
    """How large :func:`draw_case` may make a case."""

    batches: tuple[int, ...]
    key_heads: tuple[int, ...]
    groups: tuple[int, ...]
    tokens: tuple[int, ...]
    head_dims: tuple[int, ...]
    tiles_m: tuple[int, ...]
    tiles_n: tuple[int, ...]
    work: int
    """Most kernel tile steps (batch x heads x query blocks x key blocks) of one case."""


_HEAD_DIMS = (1, 3, 8, 16, 20, 31, 32, 32, 33, 48, 64, 64, 65, 72, 80, 96, 100, 128, 160, 255, 256)
INTERPRETER = Limits(
    batches=(1, 1, 2),
    key_heads=(1, 1, 2),
    groups=(1, 1, 2, 3),
    tokens=(1, 2, 5, 16, 17, 31, 32, 33, 40, 49, 63, 64, 65, 80, 97, 128, 130),
    head_dims=_HEAD_DIMS,
    tiles_m=(16, 32, 64),
    tiles_n=(32, 64, 128),
    work=4,
)
GPU = Limits(
    batches=(2, 3, 4, 8),
    key_heads=(1, 2, 3, 6),
    groups=(1, 1, 1, 2, 4),
    tokens=(1, 17, 49, 64, 127, 128, 197, 256, 257, 300, 512, 577, 1000, 1024, 2049),
    head_dims=_HEAD_DIMS,
    tiles_m=(16, 32, 64, 64, 128),
    tiles_n=(32, 64, 128, 256),
    work=20_000,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention call on int8 tensors. Everything but ``data`` and ``amplitude`` shapes the compiled kernel."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    layouts: tuple[str, str, str]
    scale_dims: tuple[tuple[bool, ...], ...]
    """For query, key, value and output: which of the four dimensions of the scale are not 1."""
    mask: str
    mask_dims: tuple[int, bool, bool, bool]
    """The mask's period over the batch, and which of its other dimensions are not 1."""
    mask_layout: str
    recipe: Recipe
    tiles: tuple[int, int, int, int] | None
    out_dtype: torch.dtype
    softmax_scale: float
    amplitude: float
    extreme: bool
    """Values over all of int8 and unrelated scales, instead of quantised normal numbers."""
    data: int

    def arguments(self, device: torch.device) -> tuple:
        """Return the positional arguments of ``reference.int8_attention`` and ``launch_attention``."""
        generator = torch.Generator().manual_seed(self.data)
        shapes = (
            (self.batch, self.heads, self.queries, self.head_dim),
            (self.batch, self.key_heads, self.keys, self.head_dim),
            (self.batch, self.key_heads, self.keys, self.value_dim),
        )
        floats = make_inputs(
            self.batch, self.heads, self.queries, self.keys, self.head_dim, self.value_dim,
            key_heads=self.key_heads, seed=self.data, amplitude=self.amplitude,
        )  # fmt: skip
        arguments: list = []
        for index, (shape, x) in enumerate(zip(shapes, floats, strict=True)):
            reduced = tuple(dim for dim, full in enumerate(self.scale_dims[index]) if not full)
            if self.extreme:
                values = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
                spread = [size if full else 1 for size, full in zip(shape, self.scale_dims[index], strict=True)]
                scale = torch.exp2(torch.randn(spread, generator=generator) * 3 - 6) * self.amplitude
            else:
                amax = x.abs().amax(dim=reduced, keepdim=True) if reduced else x.abs()
                scale = (amax / 127).clamp(min=1e-30)
                values = (x / scale).round().clamp(-128, 127).to(torch.int8)
            arguments += [lay_out(values, self.layouts[index]).to(device), scale.to(device)]
        output_scale = None
        if self.out_dtype == torch.int8:
            shape = (self.batch, self.heads, 1, self.value_dim)
            spread = [size if full else 1 for size, full in zip(shape, self.scale_dims[3], strict=True)]
            ratio = torch.exp2(torch.randn(spread, generator=generator) * 2 - 1)
            output_scale = arguments[5].amax() * ratio.to(device)
        mask = self._mask(generator)
        return (
            *arguments,
            None if mask is None else mask.to(device),
            self.mask == "causal",
            self.softmax_scale,
            output_scale,
            self.out_dtype,
            self.recipe,
        )

    def _mask(self, generator: torch.Generator) -> torch.Tensor | None:
        if self.mask in ("none", "causal"):
            return None
        period, heads, queries, keys = self.mask_dims
        shape = (
            period, self.heads if heads else 1, self.queries if queries else 1, self.keys if keys else 1,
        )  # fmt: skip
        density = (0.0, 0.05, 0.5, 0.5, 0.95, 1.0)[int(torch.randint(6, (), generator=generator))]
        keep = torch.rand(shape, generator=generator) < density
        if self.mask == "bool":
            return lay_out(keep, self.mask_layout)
        bias = torch.randn(shape, generator=generator) * self.amplitude * 4
        bias = torch.where(keep | (torch.rand(shape, generator=generator) < 0.3), bias, -math.inf)
        if self.mask == "poison":
            bias = torch.where(torch.rand(shape, generator=generator) < 0.02, math.nan, bias)
        if self.mask == "far":
            bias = move_far(bias, generator)
        return lay_out(qflash.quantize_bias(bias), self.mask_layout)


def draw_recipe(rng: random.Random) -> Recipe:
    """Draw the fields of a recipe that concern int8 tensors; the granularities come with the tensors."""
    if rng.random() < 0.25:
        return Recipe(
            exponential="linear",
            probability_bits=7,
            probability_rounding=rng.choice(("nearest", "floor")),
            normalization="online",
            key_block=rng.choice((32, 64, 128)),
            output=rng.choice(("accumulator", "value_scale")),
        )
    bits = rng.choice((7, 8, 8, 15))
    return Recipe(
        exponential=rng.choice(("linear", "quadratic", "quadratic")),
        probability_bits=bits,
        probability_rounding=rng.choice(("nearest", "nearest", "floor")),
        output="accumulator" if bits == 15 else rng.choice(("accumulator", "accumulator", "value_scale")),
    )


def draw_case(seed: int, limits: Limits) -> Case:
    """Draw case number ``seed``."""
    rng = random.Random(seed)
    recipe = draw_recipe(rng)
    head_dim = rng.choice(limits.head_dims)
    value_dim = head_dim if rng.random() < 0.7 else rng.choice(limits.head_dims)
    tiles = None
    while True:
        batch, key_heads, group = rng.choice(limits.batches), rng.choice(limits.key_heads), rng.choice(limits.groups)
        keys = rng.choice(limits.tokens)
        queries = keys if rng.random() < 0.6 else rng.choice(limits.tokens)
        block_m, block_n = 64, 128
        if rng.random() < 0.7:
            block_m, block_n = rng.choice(limits.tiles_m), rng.choice(limits.tiles_n)
            if recipe.normalization == "online":
                block_n = recipe.key_block
            stages = rng.choice((1, 2, 3))
            width = max(32, 1 << (head_dim - 1).bit_length()) + max(32, 1 << (value_dim - 1).bit_length())
            if block_n * width * stages > 1 << 16 or block_m * block_n > 1 << 14:
                continue
            if block_m > most_queries(value_dim):  # the launcher refuses them
                continue
            tiles = (block_m, block_n, 8 if block_m == 128 else 4, stages)
        if batch * key_heads * group * math.ceil(queries / block_m) * math.ceil(keys / block_n) <= limits.work:
            break
        tiles = None
    heads = key_heads * group
    mask = rng.choice(("none", "none", "causal", "bool", "bias", "far", "poison"))
    periods = [period for period in range(1, batch + 1) if batch % period == 0]
    grain = {
        "tensor": (False, False, False, False),
        "heads": (False, True, False, False),
        "head": (True, True, False, False),
        "token": (True, True, True, False),
        "tokens": (False, False, True, False),
        "channel": (True, True, False, True),
        "channels": (False, False, False, True),
    }
    rows, columns = ("tensor", "heads", "head", "token", "token", "tokens"), ("tensor", "head", "channel", "channels")
    return Case(
        batch=batch,
        heads=heads,
        key_heads=key_heads,
        queries=queries,
        keys=keys,
        head_dim=head_dim,
        value_dim=value_dim,
        layouts=(rng.choice(LAYOUTS), rng.choice(LAYOUTS), rng.choice(LAYOUTS)),
        scale_dims=(grain[rng.choice(rows)], grain[rng.choice(rows)], grain[rng.choice(columns)], grain[rng.choice(columns)]),
        mask=mask,
        mask_dims=(rng.choice(periods), rng.random() < 0.5, rng.random() < 0.7, rng.random() < 0.9),
        mask_layout=rng.choice(LAYOUTS),
        recipe=recipe,
        tiles=tiles,
        out_dtype=rng.choice((torch.int8, torch.float16, torch.bfloat16, torch.float32)),
        softmax_scale=head_dim**-0.5 if rng.random() < 0.7 else 2.0 ** rng.uniform(-12, 3),
        amplitude=10.0 ** rng.choice((-4, -2, -1, 0, 0, 0, 1, 3)),
        extreme=rng.random() < 0.3,
        data=seed,
    )


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors agree in dtype, shape and every bit, zeros in their sign, too; any NaN equals any NaN."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    if not got.dtype.is_floating_point:
        return torch.equal(got, expected)
    nan = torch.isnan(expected)
    if not torch.equal(torch.isnan(got), nan):
        return False
    got, expected = got[~nan], expected[~nan]
    return torch.equal(got, expected) and torch.equal(torch.signbit(got), torch.signbit(expected))


def random_scales(count: int, seed: int, low: int = -60, high: int = 40) -> torch.Tensor:
    """Draw ``count`` float32 scales over octaves ``low`` to ``high``: log-uniform, and powers of two and their neighbours."""
    generator = torch.Generator().manual_seed(seed)
    exact = torch.exp2(torch.randint(low, high + 1, (count,), generator=generator).float())
    spread = torch.exp2(torch.rand(count, generator=generator, dtype=torch.float64) * (high - low) + low).float()
    kind = torch.randint(8, (count,), generator=generator)
    near = torch.where(kind == 1, torch.nextafter(exact, exact * 2), torch.nextafter(exact, exact / 2))
    return torch.where(kind > 2, spread, torch.where(kind == 0, exact, near))


def operator_samples(device: torch.device, backend: str) -> dict[str, tuple]:
    """Return arguments of every operator in torch.ops.qflash."""
    query, key, value = (x.to(device) for x in make_inputs(2, 2, 9, 12, 16))
    q, k, v = quantize_all((query, key, value), qflash.DEFAULT)
    mask = (torch.rand(2, 1, 9, 12, generator=torch.Generator().manual_seed(0)) < 0.7).to(device)
    bias = mask.float()
    tensors = (q.values, q.scale, k.values, k.scale, v.values, v.scale)
    samples = {
        "quantize_bias": (bias,),
        "quantize_with_scale": (query, torch.full((), 0.02, device=device), backend),
        "int8_attention": (*tensors, None, True, 0.25, v.scale, torch.int8, qflash.DEFAULT.key, backend),
        "int8_attention to float": (*tensors, bias, False, 0.25, None, torch.float16, qflash.PAPER.key, backend),
        "int8_attention with an offset": (
            *tensors, None, False, 0.25, None, torch.float32, qflash.DEFAULT.key, backend, torch.rand_like(v.scale),
        ),
        "quantize_centered": (value, "channel", backend),
    }  # fmt: skip
    for granularity in ("tensor", "head", "token", "channel"):
        samples[f"quantize {granularity}"] = (query.mT, granularity, backend)
    for name, recipe in PRESETS.items():
        samples[f"attention {name}"] = (query, key, value, mask, False, 0.25, recipe.key, backend)
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    lengths = [torch.tensor(each, dtype=torch.int32, device=device) for each in ([0, 9, 18], [0, 12, 24])]
    samples["varlen_attention"] = (*packed, *lengths, 9, 12, False, 0.25, qflash.DEFAULT.key, backend)
    x, weight = q.values[0, 0], k.values[0, 0]
    bias, ratio = (torch.full((12,), number, dtype=torch.int32, device=device) for number in (77, 1 << 29))
    stream = torch.full((9, 12), -300, dtype=torch.int16, device=device)
    samples["int8_linear"] = (x, weight, bias, ratio, 1, stream, None, torch.int16, backend)
    samples["int8_linear_gelu"] = (x, weight, bias, ratio, 1, bias, bias, 8, backend)
    samples["int8_linear_silu"] = samples["int8_linear_relu"] = samples["int8_linear_gelu"]
    samples["gated"] = (stream, 1 << 28, ratio[:6], bias[:6], "silu", torch.int8, backend)
    samples["int8_linear_gated"] = (x, weight, bias, ratio, 1, 1 << 28, ratio[:6], bias[:6], "silu", torch.int8, backend)
    turns = torch.full((1, 9, 3), 1 << 14, dtype=torch.int32, device=device)
    samples["rotary"] = (stream[None], turns, bias, ratio, torch.int8, backend)
    samples["integer_layer_norm"] = (stream, 5, ratio, bias, 17, None, torch.int8, backend)
    order = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    tokens = x.view(3, 3, 16), weight, bias, ratio, 1, stream.view(3, 3, 12), order
    samples["int8_linear to other places"] = (*tokens, torch.int16, backend)
    joined = (stream[:, :6].reshape(3, 3, 6), 5, ratio, bias, 17, order.view(3, 1).expand(3, 2), torch.int8, backend)
    samples["integer_layer_norm of joined tokens"] = joined
    images = torch.arange(2 * 16, dtype=torch.uint8, device=device).view(2, 1, 4, 4)
    places = images, (4, 4), weight, bias, ratio, 1, stream[None, :1], stream[None, :2], backend
    samples["patch_embedding"] = places
    constants = ratio, bias, 17, None
    samples["integer_norm"] = (stream, 5, *constants, stream, False, torch.int16, backend)
    samples["integer_narrow"] = (stream, ratio, 1, bias, None, torch.int8, backend)
    ids = torch.tensor([[0, 8, 3], [1, 1, 2]], device=device)
    samples["token_embedding"] = (ids, stream, stream[:3], backend)
    samples["integer_mean"] = (stream.view(3, 3, 12), ratio, 2, bias, torch.int8, backend)
    return samples


@dataclasses.dataclass(frozen=True)
class FusedCase:
    """One attention call on float tensors that one launch can do. Everything but ``data`` shapes the compiled kernel."""

    shape: tuple[int, int, int, int, int, int, int]
    """batch, heads, key heads, queries, keys, head_dim, value_dim."""
    layouts: tuple[str, str, str]
    dtype: torch.dtype
    mask: str
    mask_dims: tuple[bool, bool, bool, bool]
    recipe: Recipe
    tiles: tuple[int, ...] | None
    amplitude: float
    special: str
    data: int

    def arguments(self, device: torch.device) -> tuple:
        """Return the positional arguments of ``launch_fused``."""
        batch, heads, key_heads, queries, keys, head_dim, value_dim = self.shape
        generator = torch.Generator().manual_seed(self.data)
        inputs = [
            lay_out((x * self.amplitude).to(self.dtype), layout)
            for x, layout in zip(
                make_inputs(batch, heads, queries, keys, head_dim, value_dim, key_heads=key_heads, seed=self.data),
                self.layouts,
                strict=True,
            )
        ]
        if self.special != "none":
            chosen = inputs[int(torch.randint(3, (), generator=generator))]
            spot = tuple(int(torch.randint(size, (), generator=generator)) for size in chosen.shape)
            chosen[spot] = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.get(self.special, 0.0)
            if self.special == "zero head":
                chosen[spot[:2]] = 0
        mask = None
        if self.mask in ("bool", "float", "far", "poison"):
            spread = [size if full else 1 for size, full in zip((batch, heads, queries, keys), self.mask_dims, strict=True)]
            keep = torch.rand(spread, generator=generator) < 0.6
            mask = keep
            if self.mask != "bool":
                bias = torch.randn(spread, generator=generator) * 3
                mask = torch.where(keep, bias, -math.inf)
                if self.mask == "poison":
                    mask = torch.where(torch.rand(spread, generator=generator) < 0.02, math.nan, mask)
                if self.mask == "far":
                    mask = move_far(mask, generator)
                mask = mask.clamp(-math.inf, torch.finfo(self.dtype).max).to(self.dtype)
        moved = [x.to(device) for x in inputs]
        return (*moved, None if mask is None else mask.to(device), self.mask == "causal", head_dim**-0.5, self.recipe)


def draw_fused_case(seed: int, small: bool) -> FusedCase:
    """Draw a case for the kernel that quantises and attends; ``small`` keeps it fit for the interpreter."""
    rng = random.Random(seed)
    key_heads = rng.choice((1, 1, 2) if small else (1, 3, 6))
    head_dim = rng.choice((8, 20, 32, 64) if small else (16, 32, 40, 64, 64, 80, 128))
    tokens = (1, 5, 33, 49, 64, 65) if small else (1, 17, 49, 64, 65, 128)
    if not small and head_dim <= 64:
        tokens += (129, 197, 255, 256)
    queries = rng.choice(tokens)
    keys = queries if rng.random() < 0.6 else rng.choice(tokens)
    bits = rng.choice((7, 8, 8, 8, 15))
    recipe = Recipe(
        query_granularity=rng.choice(("token", "token", "head")),
        value_granularity=rng.choice(("channel", "channel", "head")),
        exponential=rng.choice(("quadratic", "quadratic", "linear")),
        probability_bits=bits,
        probability_rounding=rng.choice(("nearest", "nearest", "floor")),
        smooth_key=rng.random() < 0.7,
        output="value_scale" if bits != 15 and rng.random() < 0.15 else "accumulator",
    )
    whole = max(32, 1 << (keys - 1).bit_length())
    tiles = None
    if rng.random() < 0.5:
        tiles = (rng.choice((16, 32, 64)), min(256, whole) if rng.random() < 0.3 else max(32, whole // 2), 4, 1)
    return FusedCase(
        shape=(
            rng.choice((1, 1, 2) if small else (1, 3)), key_heads * rng.choice((1, 1, 2)), key_heads, queries, keys, head_dim,
            head_dim if rng.random() < 0.7 else rng.choice((16, 24, 64)),
        ),
        layouts=tuple(rng.choice(LAYOUTS) for _ in range(3)),
        dtype=rng.choice((torch.float16, torch.float16, torch.bfloat16, torch.float32)),
        mask=rng.choice(("none", "none", "none", "causal", "bool", "float", "far", "poison")),
        mask_dims=tuple(rng.random() < 0.6 for _ in range(4)),
        recipe=recipe,
        tiles=tiles,
        amplitude=rng.choice((1.0, 1.0, 4.0, 0.01, 1e-4)),
        special=rng.choice(("none",) * 6 + ("nan", "inf", "-inf", "zero", "zero head")),
        data=seed,
    )  # fmt: skip


def idx(x: torch.Tensor) -> bytes:
    """Return a uint8 tensor as an idx file."""
    return bytes((0, 0, 8, x.dim())) + struct.pack(f">{x.dim()}I", *x.shape) + x.contiguous().numpy().tobytes()


def write_fashion(folder: Path, train: int = 20, test: int = 10) -> Path:
    """Write made-up images as Fashion-MNIST's four files, and return the folder."""
    generator = torch.Generator().manual_seed(0)
    folder.mkdir(exist_ok=True)
    for part, count, suffix in (("train", train, ".gz"), ("t10k", test, "")):
        labels = torch.arange(count, dtype=torch.uint8) % 10
        images = torch.randint(0, 256, (count, 28, 28), generator=generator, dtype=torch.uint8)
        for kind, x in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
            content = idx(x)
            (folder / f"{part}-{kind}{suffix}").write_bytes(gzip.compress(content) if suffix else content)
    return folder


def attention_launches(
    call: AttentionCall, out: torch.Tensor, *, tiles: tuple[Any, ...] | None = None, **options: Any
) -> list[KernelLaunch]:
    """Return the launches that fill ``out``, in order; float tensors are quantised in the same one.

    Args:
        tiles: ``Tiles`` or its first fields; chosen by shape if None.
        options: of a ``KernelRequest``.

    Raises:
        ValueError: ``tiles`` does not fit the shapes, or one launch cannot quantise and attend.
    """
    from qflash.kernels.dispatch import tiles_of
    from qflash.kernels.families import choose_family
    from qflash.kernels.launch_arguments import KernelRequest
    from qflash.kernels.tiles import Tiles

    request = KernelRequest(call, out, **options)
    return choose_family(request, Tiles(*tiles) if tiles else tiles_of(call, request.fused)).launches(request)
