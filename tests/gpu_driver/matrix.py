"""Small calls that reach every GPU kernel: attention of all families, quantisation, packed sequences and layers of networks.

A call draws its inputs from its number and gives the same numbers on every back end and device. Lengths lie around the blocks
of the kernels, and a few streaming multiprocessors stand for many where the rules divide the work of large calls otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

import network_cases
import qflash
from helpers import GPU, draw_case, draw_fused_case, lay_out, make_inputs
from qflash import execution, plan_cache, varlen
from qflash.execution import attend, quantize_bias
from qflash.integrations.swin_bias import window_bias
from qflash.kernels import device as device_facts
from qflash.kernels.dispatch import launch_attention
from qflash.kernels.launch_recorder import LaunchRecorder
from qflash.kernels.triton.swin_bias import launch_window_bias
from qflash.network import execution as layers
from qflash.network.operators import gated, narrow, norms, rotary
from qflash.specification import reference
from qflash.specification.attention_call import float_call, int8_call
from qflash.specification.layers import ACTIVATIONS

CPU = torch.device("cpu")
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
WITH_ACTIVATION = tuple(f"int8_linear_{name}" for name in ACTIVATIONS)
LAYER_OPERATORS = ("int8_linear", *WITH_ACTIVATION, "integer_layer_norm", "integer_mean", "patch_embedding")
"""Of :mod:`qflash.network.execution`."""
OWN_OPERATORS = {"integer_norm": norms, "integer_narrow": narrow}
RECIPES = ("default", "accurate", "paper")
DRAWN = dataclasses.replace(
    GPU, batches=(1, 1, 2, 3), key_heads=(1, 2), groups=(1, 1, 2), tokens=(1, 17, 49, 64, 127, 128, 197, 257, 300), work=150
)
"""As the GPU's tests draw them, but with few enough blocks for a sanitizer, which makes kernels 10 to 100 times slower."""
Compute = Callable[[str, torch.device], tuple[torch.Tensor, ...]]


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the library.

    Attributes:
        kind: of what family, for counting.
        name: says what is called, and is no other call's.
        compute: takes a back end and a device, and returns the results there.
        processors: how many streaming multiprocessors the rules are to see; None for the device's own.
        repeat: whether a second call, which repeats the launches that the first one left, is made and returned.
    """

    kind: str
    name: str
    compute: Compute
    processors: int | None = None
    repeat: bool = False

    def results(self, backend: str, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Make the call as if there had been none before."""
        plan_cache._plans.clear()
        plan_cache._unrepeatable.clear()
        with few_processors(self.processors):
            found = self.compute(backend, device)
            return self.compute(backend, device) if self.repeat else found


@contextlib.contextmanager
def few_processors(count: int | None) -> Iterator[None]:
    """Let the rules see so many streaming multiprocessors, on a GPU and on what stands for one."""
    if count is None:
        yield
        return
    with (
        mock.patch.object(device_facts, "_processors", return_value=count),
        mock.patch.object(device_facts, "STAND_IN_PROCESSORS", count),
    ):
        yield


def move(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor in the same memory format elsewhere.

    All of the memory that it is a view of goes with it, so that nothing between its elements is uninitialised there.
    """
    if device.type == "cpu":
        return x
    size = x.untyped_storage().nbytes() // x.element_size()
    whole = x.new_empty(0).set_(x.untyped_storage(), 0, (size,), (1,))
    return whole.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def move_all(values: Any, device: torch.device) -> list[Any]:
    """:func:`move` the tensors among some values."""
    return [move(x, device) if isinstance(x, torch.Tensor) else x for x in values]


@dataclasses.dataclass(frozen=True)
class Attention:
    """Shapes and options of a call of :func:`qflash.attention` or :func:`qflash.int8_attention`.

    Attributes:
        mask: ``"none"``, ``"causal"``, ``"bool"`` (batch, 1, queries, keys), ``"padding"`` (batch, 1, 1, keys), ``"bias"``
            (1, heads, queries, keys) with keys that take no part, or ``"windows"``: (windows, heads, queries, keys) with
            aligned rows, of which there are half as many as batch elements.
        output: of int8 tensors: ``"int8"`` or the name of a float type. None for a call on floats.
        grains: of int8 tensors, whether there is one scale a tensor ("tensor") or several ("fine").
    """

    queries: int
    keys: int
    head_dim: int
    value_dim: int | None = None
    batch: int = 1
    heads: int = 2
    key_heads: int | None = None
    dtype: torch.dtype = torch.float16
    recipe: str = "default"
    mask: str = "none"
    layout: str = "contiguous"
    output: str | None = None
    grains: str = "tensor"
    centered: bool = False
    smooth_value: bool = False

    def inputs(self, seed: int) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Draw query, key, value and a mask or none."""
        inputs = make_inputs(
            self.batch, self.heads, self.queries, self.keys, self.head_dim, self.value_dim, key_heads=self.key_heads,
            seed=seed, dtype=self.dtype,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        shapes = {
            "bool": (self.batch, 1, self.queries, self.keys),
            "bias": (1, self.heads, self.queries, self.keys),
            "windows": (max(1, self.batch // 2), self.heads, self.queries, self.keys),
        }
        mask = None
        if self.mask == "bool":
            mask = torch.rand(shapes["bool"], generator=generator) < 0.7
        elif self.mask == "padding":
            lengths = torch.randint(1, self.keys + 1, (self.batch, 1, 1, 1), generator=generator)
            mask = torch.arange(self.keys) < lengths
        elif self.mask in shapes:
            mask = torch.randn(shapes[self.mask], generator=generator).to(self.dtype)
            mask = mask.masked_fill(torch.rand(mask.shape, generator=generator) < 0.1, -torch.inf)
            if self.mask == "windows":
                mask = qflash.align_bias(mask)
        return [self.with_windows(lay_out(x, self.layout)) for x in inputs], mask

    def with_windows(self, x: torch.Tensor) -> torch.Tensor:
        """Return (images, windows, heads, tokens, channels) where there is a bias for every window."""
        return x.unflatten(0, (-1, max(1, self.batch // 2))) if self.mask == "windows" else x

    def compute(self, seed: int) -> Compute:
        """Return the call on inputs of a number."""
        options: dict[str, Any] = {"is_causal": self.mask == "causal", "enable_gqa": True}
        recipe = qflash.recipe.PRESETS[self.recipe]

        def on_floats(backend: str, device: torch.device) -> tuple[torch.Tensor, ...]:
            inputs, mask = self.inputs(seed)
            moved, given = move_all(inputs, device), None if mask is None else move(mask, device)
            chosen = recipe.replace(smooth_value=True) if self.smooth_value else recipe
            return (qflash.attention(*moved, given, **options, recipe=chosen, backend=backend),)

        def on_int8(backend: str, device: torch.device) -> tuple[torch.Tensor, ...]:
            inputs, mask = self.inputs(seed)
            kinds = ("tensor",) * 3 if self.grains == "tensor" else ("token", "head", "channel")
            int8 = [
                qflash.quantize(x, kind, center=self.centered and index == 2, backend="reference")
                for index, (x, kind) in enumerate(zip(inputs, kinds, strict=True))
            ]
            moved = [
                qflash.QuantizedTensor(
                    move(x.values, device),
                    move(x.scale, device),
                    None if x.offset is None else move(x.offset, device),
                )
                for x in int8
            ]
            dtype = None if self.output == "int8" else getattr(torch, str(self.output))
            given = None if mask is None else move(mask, device)
            out = qflash.int8_attention(*moved, given, **options, out_dtype=dtype, recipe=recipe, backend=backend)
            return (out,) if isinstance(out, torch.Tensor) else (out.values,)

        return on_floats if self.output is None else on_int8

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.key_heads is None else f"{self.heads}/{self.key_heads}"
        channels = f"{self.head_dim}" if self.value_dim is None else f"{self.head_dim}/{self.value_dim}"
        of = str(self.dtype).removeprefix("torch.") if self.output is None else f"int8 to {self.output}"
        extra = {"recipe": ("default",), "mask": ("none",), "layout": ("contiguous",), "grains": ("tensor",)}
        more = [getattr(self, field) for field, usual in extra.items() if getattr(self, field) not in usual]
        more += [field for field in ("centered", "smooth_value") if getattr(self, field)]
        return " ".join((f"{self.batch}x{heads}x{self.queries}x{self.keys}x{channels}", of, *more))


# queries, keys, head_dim, heads, processors: one block and several, with a few queries past them, rows that registers hold and
# rows that are read twice, channels in one part and in two, programs of a head and such that go from head to head
_RESIDENT = (
    (65, 65, 64, 2, None), (197, 197, 64, 3, 2), (137, 100, 64, 4, 2), (72, 128, 80, 4, 2), (64, 225, 128, 2, None),
    (197, 256, 64, 1, None), (300, 257, 64, 3, 2), (197, 288, 40, 2, None), (208, 321, 64, 4, 1), (137, 401, 64, 4, 2),
    (65, 577, 64, 6, 2), (197, 577, 72, 2, None), (300, 401, 16, 2, 1), (33, 96, 96, 2, None),
)  # fmt: skip
_STREAMING = ((65, 900, 128), (40, 1000, 96), (130, 1800, 64), (33, 2100, 40))
_SHORT = (
    (1, 1, 16), (17, 17, 20), (49, 49, 31), (1, 197, 33), (17, 49, 64), (49, 64, 65), (197, 197, 1), (64, 17, 100),
    (20, 128, 128),
)  # fmt: skip
_LONG = ((17, 300, 20), (49, 513, 33), (1, 300, 64), (65, 300, 160), (20, 129, 256), (197, 300, 255))


def _attentions() -> Iterator[tuple[str, Attention, int | None, bool]]:
    """Give kinds, calls, processors, and whether they are repeated."""
    masks = ("none", "causal", "bool", "padding", "bias")
    for index, (queries, keys, channels) in enumerate((*_SHORT, *_LONG)):
        kind = "short rows" if index < len(_SHORT) else "long rows"
        call = Attention(queries, keys, channels, batch=1 + index % 3, dtype=FLOATS[index % 3], mask=masks[index % 5])
        yield kind, call, None, index % 4 == 0
        call = dataclasses.replace(call, dtype=FLOATS[(index + 1) % 3], mask=masks[(index + 2) % 5])
        yield kind, dataclasses.replace(call, recipe=RECIPES[index % 3], key_heads=1), None, False
        yield kind, dataclasses.replace(call, output=("int8", "float32", "bfloat16")[index % 3], grains="fine"), None, False
    for recipe in RECIPES:
        for number, dtype in enumerate(FLOATS):
            call = Attention(70, (49, 197, 300)[number], 64, dtype=dtype, recipe=recipe, layout="packed")
            yield "recipes", call, None, False
            output, mask = ("int8", "float16", "int8")[number], masks[number]
            yield "recipes", dataclasses.replace(call, output=output, mask=mask), None, False
    for index, (queries, keys, channels, heads, processors) in enumerate(_RESIDENT):
        layout = ("contiguous", "tokens_first")[index % 2]
        call = Attention(queries, keys, channels, heads=heads, dtype=FLOATS[index % 2], layout=layout)
        yield "rows in shared memory", call, processors, index % 5 == 0
        grains = ("tensor", "fine")[index % 2]
        call = dataclasses.replace(call, output=("int8", "int8", "float16", "float32")[index % 4], grains=grains)
        yield "rows in shared memory", call, processors, index % 5 == 1
    for index, (queries, keys, channels) in enumerate(_STREAMING):
        call = Attention(queries, keys, channels, dtype=FLOATS[index % 3], smooth_value=index % 2 == 1)
        yield "streamed rows", call, None, index == 0
        grains = ("tensor", "fine")[index % 2]
        call = dataclasses.replace(call, smooth_value=False, output=("int8", "float32")[index // 2], grains=grains)
        yield "streamed rows", call, None, index == 1
    yield "streamed rows", Attention(197, 300, 64, dtype=torch.float32), None, False
    for keys, channels, mask in ((520, 64, "bias"), (301, 128, "bias"), (512, 64, "bool"), (301, 64, "padding")):
        yield "streamed rows", Attention(140, keys, channels, mask=mask), None, False
    for keys, channels, mask in ((196, 64, "bias"), (197, 80, "bias"), (196, 64, "bool"), (197, 64, "padding")):
        yield "rows in shared memory", Attention(140, keys, channels, mask=mask), None, False
    # queries that lie in shared memory, and two spans of channels
    for channels in (72, 80, 96):
        yield "streamed rows", Attention(140, 1800, channels), None, False
    for index, queries in enumerate((9, 16, 24, 33, 49, 49, 49, 64)):
        keys, batch = (49, 33, 49, 56, 49, 49, 49, 64)[index], (1, 2, 4, 8)[index % 4]
        mask = ("windows", "none", "windows", "bias")[index % 4]
        call = Attention(queries, keys, 32, batch=batch, heads=3, dtype=FLOATS[index % 3], mask=mask)
        processors = (None, 1, 2, 3)[index // 2]
        yield "windows", call, processors, index in (0, 2)
        grains = ("tensor", "fine")[index % 2]
        yield "windows", dataclasses.replace(call, output=("int8", "float16")[index // 4], grains=grains), processors, False
    for smooth, keys in ((True, 49), (True, 300)):
        call = Attention(40, keys, 48, smooth_value=smooth, layout="every_second")
        yield "offsets of V", call, None, False
        call = dataclasses.replace(call, smooth_value=False, output="float16", grains="fine", centered=True)
        yield "offsets of V", call, None, False


def _drawn_int8(number: int) -> Compute:
    """Return attention on int8 tensors with any strides, scales, masks and tiles."""
    case = draw_case(number, DRAWN)

    def compute(backend: str, device: torch.device) -> tuple[torch.Tensor, ...]:
        call = int8_call(*move_all(case.arguments(CPU), device))
        if backend == "reference":
            return (reference.int8_attention(call),)
        return (launch_attention(call, tiles=case.tiles) if backend == "triton" else attend(call, backend),)

    return compute


def _drawn_floats(number: int) -> Compute:
    case = draw_fused_case(number, small=False)

    def compute(backend: str, device: torch.device) -> tuple[torch.Tensor, ...]:
        return (attend(float_call(*move_all(case.arguments(CPU), device)), backend),)

    return compute


def _varlen(number: int) -> tuple[str, Compute]:
    """Return attention of packed sequences, some of them empty."""
    chance = random.Random(number)
    sequences, heads, channels = chance.randint(1, 4), chance.choice((1, 2)), (64, 20, 80, 32, 16, 128)[number % 6]
    queries, keys = ([chance.choice((0, 1, 17, 49, 130)) for _ in range(sequences)] for _ in range(2))
    queries[0], keys[0] = 1 + chance.randint(0, 60), 1 + chance.randint(0, 260)
    dtype, causal, recipe = FLOATS[number % 3], number % 2 == 1, RECIPES[number % 2]

    def compute(backend: str, device: torch.device) -> tuple[torch.Tensor, ...]:
        drawn = make_inputs(1, 2 * heads, sum(queries), sum(keys), channels, key_heads=heads, seed=number, dtype=dtype)
        packed = [x[0].transpose(0, 1).contiguous() for x in drawn]
        lengths = [torch.tensor([0, *each], dtype=torch.int32).cumsum(0, dtype=torch.int32) for each in (queries, keys)]
        return (
            qflash.varlen_attention(
                *move_all((*packed, *lengths), device), max(queries), max(keys), is_causal=causal, enable_gqa=True,
                recipe=recipe, backend=backend,
            ),
        )  # fmt: skip

    return f"{queries} on {keys}, {channels} channels, {recipe}{', causal' if causal else ''}", compute


def _quantise(number: int, shape: tuple[int, ...], granularity: str, center: bool, layout: str) -> Compute:
    def compute(backend: str, device: torch.device) -> tuple[torch.Tensor, ...]:
        x = lay_out(torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(FLOATS[number % 3]), layout)
        found = qflash.quantize(move(x, device), granularity, center=center, backend=backend)
        return (found.values, found.scale) if found.offset is None else (found.values, found.scale, found.offset)

    return compute


def _quantise_given(number: int, shape: tuple[int, ...]) -> Compute:
    def compute(backend: str, device: torch.device) -> tuple[torch.Tensor, ...]:
        x, scale = (torch.randn(size, generator=torch.Generator().manual_seed(number)) for size in (shape, shape[-1:]))
        return (qflash.quantize(move(x, device), scale=move(scale.abs() / 50 + 0.001, device), backend=backend).values,)

    return compute


def _bias(number: int, shape: tuple[int, ...]) -> Compute:
    def compute(backend: str, device: torch.device) -> tuple[torch.Tensor, ...]:
        bias = torch.randn(shape, generator=torch.Generator().manual_seed(number)) * 10.0 ** (number % 4)
        bias[..., 0] = -torch.inf
        return (quantize_bias(move(bias.to(FLOATS[number % 3]), device), backend),)

    return compute


def _window_bias(number: int, side: int, heads: int, windows: int) -> Compute:
    def compute(backend: str, device: torch.device) -> tuple[torch.Tensor, ...]:
        generator, tokens = torch.Generator().manual_seed(number), side * side
        table = torch.randn(((2 * side - 1) ** 2, heads), generator=generator)
        index = torch.randint(len(table), (tokens, tokens), generator=generator)
        mask = torch.randn(windows, tokens, tokens, generator=generator) if windows else None
        # without memory nothing tells that the tensors stand for a GPU's
        run = launch_window_bias if device.type == "meta" else window_bias
        return (run(move(table, device), move(index, device), None if mask is None else move(mask, device)),)

    return compute


def _layer(layer: network_cases.Layer) -> Compute:
    def compute(backend: str, device: torch.device) -> tuple[torch.Tensor, ...]:
        return (getattr(torch.ops.qflash, layer.name)(*move_all(layer.arguments, device), backend),)

    return compute


def _linear_layers() -> Iterator[tuple[network_cases.Layer, int | None]]:
    """Give linear layers for the copy engine and such that are no multiple of anything, in tiles of all sizes."""
    sizes = (
        (1, 64, 32),
        (17, 48, 96),
        (197, 192, 192),
        (300, 128, 384),
        (130, 384, 64),
        (300, 384, 384),
        (49, 27, 9),
        (64, 60, 33),
    )
    for number, (rows, inputs, outputs) in enumerate(sizes):
        for offset in range(len(network_cases.KINDS) if number in (2, 6) else 3):
            kind = network_cases.KINDS[(number + offset) % len(network_cases.KINDS)]
            chance = random.Random(10 * number + offset)
            x, weight = (
                network_cases.integers(-128, 128, size, torch.int8, chance) for size in ((rows, inputs), (outputs, inputs))
            )
            # one processor has programs that go from tile to tile, and large tiles
            yield network_cases.linear(x, weight, kind, chance), (None, 1, 2)[offset % 3]


def _layers() -> Iterator[tuple[str, network_cases.Layer, int | None]]:
    for layer, processors in _linear_layers():
        yield "linear layers", layer, processors
    for number in range(6):
        yield "linear layers", network_cases.draw_linear(number), None
    for number, channels in enumerate((1, 33, 96, 192, 384, 1000)):
        yield "layer normalisation", network_cases.draw_layer_norm(number, channels), None
    # numbers that 8 divides have no images now and then
    for number in (1, 2, 3, 4, 5):
        for draw in network_cases.MOVING:
            yield "tokens of other places", draw(number), None
    chance = random.Random(7)
    for tokens, width, outputs in ((49, 96, 96), (197, 64, 192)):
        x, weight = (
            network_cases.integers(-128, 128, size, torch.int8, chance) for size in ((2, tokens, width), (outputs, width))
        )
        arguments = network_cases.linear(x, weight, "residual", chance).arguments
        scattered = (*arguments[:6], network_cases.shuffled(tokens, chance), arguments[7])
        yield "tokens of other places", network_cases.Layer("int8_linear", scattered), 1


def calls() -> list[Call]:
    """Return all calls, in the same order every time."""
    found = []
    for seed, (kind, attention, processors, repeat) in enumerate(_attentions()):
        found.append(Call(kind, str(attention), attention.compute(seed), processors, repeat))
    found += [Call("drawn int8", f"draw_case({number})", _drawn_int8(number)) for number in range(20)]
    found += [Call("drawn floats", f"draw_fused_case({number})", _drawn_floats(number)) for number in range(30_000, 30_012)]
    for number in range(8):
        about, compute = _varlen(number)
        found.append(Call("packed sequences", about, compute))
    shapes = ((2, 2, 1, 16), (1, 3, 17, 33), (2, 1, 300, 64))
    for number, shape in enumerate(shapes):
        for granularity in ("tensor", "head", "token", "channel"):
            layout = ("contiguous", "channels_first", "every_second")[number]
            compute = _quantise(number, shape, granularity, False, layout)
            found.append(Call("quantisation", f"{shape} {granularity} {layout}", compute))
            if granularity != "token":
                compute = _quantise(number + 1, shape, granularity, True, layout)
                found.append(Call("quantisation", f"{shape} {granularity} {layout}, centred", compute))
        found.append(Call("quantisation", f"{shape} given scales", _quantise_given(number, shape)))
    for number, bias_shape in enumerate(((3, 49, 49), (1, 17, 300), (2, 2, 1, 197), (1,))):
        found.append(Call("bias", f"{bias_shape}", _bias(number, bias_shape)))
    for number, (side, heads, windows) in enumerate(((7, 3, 0), (7, 2, 4), (4, 1, 1))):
        found.append(Call("bias", f"of windows {side} {heads} {windows}", _window_bias(number, side, heads, windows)))
    for kind, layer, processors in _layers():
        found.append(Call(kind, f"{layer}", _layer(layer), processors))
    # what differs in the numbers alone has its place in its name
    return [dataclasses.replace(call, name=f"{number} {call.kind}: {call.name}") for number, call in enumerate(found)]


def kernels_on_hopper(call: Call) -> list[str]:
    """Return the names of the kernels that a call launches on an H100, found out without one."""
    token = device_facts.STAND_IN.set((9, 0))
    # PyTorch's dispatcher would make no call on tensors without memory
    operators = {name: getattr(execution, name) for name in ("attention", "int8_attention", "quantize", "quantize_centered")}
    operators |= {name: getattr(layers, name) for name in LAYER_OPERATORS}
    operators |= {name: getattr(module, name) for name, module in OWN_OPERATORS.items()}
    operators |= {
        "gated": gated.gated,
        "int8_linear_gated": gated.int8_linear_gated,
        "rotary": rotary.rotary,
        "quantize_with_scale": execution.quantize_with_scale,
        "quantize_bias": execution.quantize_bias,
        "varlen_attention": varlen.varlen_attention,
    }
    try:
        with (
            mock.patch.object(torch.ops, "qflash", SimpleNamespace(**operators)),
            LaunchRecorder(launching=False) as recording,
        ):
            call.results("triton", torch.device("meta"))
    finally:
        device_facts.STAND_IN.reset(token)
    return [launch.kernel.__name__ for launch in recording.launches]
