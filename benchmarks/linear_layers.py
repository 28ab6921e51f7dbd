"""Time linear layers of integer networks, with everything fused behind them, beside products by cuBLAS.

    python benchmarks/linear_layers.py FOLDER

Layers are those of DeiT-S, DeiT-B and Swin-T at several batches. Beside ours, whose epilogue is in the clock: cuBLAS in float16
with a bias, in float8 (e4m3, float16 out, one scale a tensor) and in int8 with int32 out, all three without GELU, residual and
quantisation. Ours is compared with the reference's bits before it is timed. Where there is no GPU, ours and float32 are timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from qflash.network import execution  # noqa: F401 - registers the operators
from qflash_lab.bench import report, runner, tables, timers
from qflash_lab.bench import schema as col

PEAK = {"h100": (1979e12, 3.35e12), "h200": (1979e12, 4.8e12)}
"""Dense int8 operations and bytes a second by a card's name, from the vendor's data sheets (SXM)."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """A linear layer; ``epilogue`` is ``"int8"``, ``"residual"`` (int16) or ``"gelu"`` (int8)."""

    name: str
    rows: int
    inputs: int
    outputs: int
    epilogue: str

    @property
    def operations(self) -> int:
        """Multiplications and additions of the product."""
        return 2 * self.rows * self.inputs * self.outputs

    @property
    def bytes(self) -> int:
        """What has to be read and written at least."""
        out = self.rows * self.outputs
        return self.rows * self.inputs + self.inputs * self.outputs + out * (4 if self.epilogue == "residual" else 1)


def block_layers(model: str, tokens: int, channels: int) -> list[Layer]:
    """Return the four layers of a transformer block on so many tokens."""
    return [
        Layer(f"{model} qkv", tokens, channels, 3 * channels, "int8"),
        Layer(f"{model} proj", tokens, channels, channels, "residual"),
        Layer(f"{model} fc1", tokens, channels, 4 * channels, "gelu"),
        Layer(f"{model} fc2", tokens, 4 * channels, channels, "residual"),
    ]


def all_layers(batches: Sequence[int]) -> list[Layer]:
    """Return the layers of DeiT-S and -B and of Swin-T's first and third stage."""
    found = []
    for batch in batches:
        for model, tokens, channels in (
            ("DeiT-S", 197, 384),
            ("DeiT-B", 197, 768),
            ("Swin-T 1", 3136, 96),
            ("Swin-T 3", 196, 384),
        ):
            found += block_layers(f"{model} b{batch}", batch * tokens, channels)
    return found


def ours(layer: Layer, device: torch.device) -> timers.TimedCall:
    """Return a call of our layer on random numbers, after a look at its bits."""
    generator = torch.Generator().manual_seed(0)

    def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device="cpu").to(dtype).to(device)

    x = integers(-128, 128, layer.rows, layer.inputs, dtype=torch.int8)
    weight = integers(-128, 128, layer.outputs, layer.inputs, dtype=torch.int8)
    # sums are below 2**14 * inputs; random ones have a few thousandths of that, which should come to int8, or to GELU's range
    left = 30 - (1 << 14).bit_length() - layer.inputs.bit_length()
    bias = integers(-1000, 1000, layer.outputs) << left
    wanted = {"int8": 5, "residual": 11, "gelu": 12}[layer.epilogue]
    typical = 12 + layer.inputs.bit_length() // 2 + left
    multiplier = integers(1 << 30, (1 << 31) - 1, layer.outputs) >> max(0, typical - wanted - 1)
    constants = weight, bias, multiplier, left
    if layer.epilogue == "gelu":
        call = functools.partial(
            torch.ops.qflash.int8_linear_gelu, x, *constants, integers(500, 8000, layer.outputs),
            integers(-9000, 9000, layer.outputs), 14,
        )  # fmt: skip
    else:
        residual = (
            integers(-20000, 20000, layer.rows, layer.outputs, dtype=torch.int16) if layer.epilogue == "residual" else None
        )
        dtype = torch.int8 if residual is None else torch.int16
        call = functools.partial(torch.ops.qflash.int8_linear, x, *constants, residual, None, dtype)
    if not torch.equal(call("auto"), call("reference")):
        raise AssertionError(f"{layer.name}: not the reference's bits")
    return functools.partial(call, "auto")


def _product(layer: Layer, device: torch.device, dtype: torch.dtype) -> timers.TimedCall:
    x, weight = (torch.randn(n, layer.inputs, device=device).to(dtype) for n in (layer.rows, layer.outputs))
    return functools.partial(torch.nn.functional.linear, x, weight, torch.randn(layer.outputs, device=device).to(dtype))


def _float8(layer: Layer, device: torch.device) -> timers.TimedCall:
    x, weight = (torch.randn(n, layer.inputs, device=device).to(torch.float8_e4m3fn) for n in (layer.rows, layer.outputs))
    one = torch.ones((), dtype=torch.float32, device=device)
    return functools.partial(torch._scaled_mm, x, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float16)


def _int8(layer: Layer, device: torch.device) -> timers.TimedCall:
    x, weight = (torch.randint(-128, 128, (n, layer.inputs), device=device).to(torch.int8) for n in (layer.rows, layer.outputs))
    return functools.partial(torch._int_mm, x, weight.t())


_GPU, _CPU = ("cuda",), ("cpu",)
METHODS: tuple[runner.TimedMethod[tuple[Layer, torch.device]], ...] = (
    runner.TimedMethod(col.QFLASH, "kernel", lambda of: ours(*of), is_ours=True),
    runner.TimedMethod("float32", "kernel", lambda of: _product(*of, dtype=torch.float32), devices=_CPU),
    runner.TimedMethod(col.CUBLAS_FLOAT16, "kernel", lambda of: _product(*of, dtype=torch.float16), devices=_GPU),
    runner.TimedMethod(col.CUBLAS_FLOAT8, "kernel", lambda of: _float8(*of), devices=_GPU),
    runner.TimedMethod(col.CUBLAS_INT8, "kernel", lambda of: _int8(*of), devices=_GPU),
)
FIELDS = col.pick(
    col.LAYER, col.ROWS, col.INPUTS, col.OUTPUTS, col.EPILOGUE, col.METHOD, *col.TIMES, col.OF_INT8_PEAK, col.OF_BANDWIDTH,
    col.ERROR,
)  # fmt: skip


def measure(layer: Layer, device: torch.device, rounds: int) -> list[col.Row]:
    """Return a layer's rows: every method, in alternation, and the shares of the card's peaks that ours has."""
    known = {
        col.LAYER: layer.name, col.ROWS: layer.rows, col.INPUTS: layer.inputs, col.OUTPUTS: layer.outputs,
        col.EPILOGUE: layer.epilogue,
    }  # fmt: skip
    runs = []
    for method in runner.choose(METHODS, device):
        row = col.empty(FIELDS) | known | {col.METHOD: method.name}
        runs.append(runner.Run(row, functools.partial(runner.unjudged, method, (layer, device)), method.mode))
    rows = runner.measure(runs, device, rounds)
    card = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else ""
    peaks = next((peak for name, peak in PEAK.items() if name in card), None)
    for row in rows:
        if peaks is not None and row[col.METHOD] == col.QFLASH and row[col.MEDIAN_US] is not None:
            seconds = row[col.MEDIAN_US] * 1e-6
            row[col.OF_INT8_PEAK] = layer.operations / seconds / peaks[0]
            row[col.OF_BANDWIDTH] = layer.bytes / seconds / peaks[1]
    return rows


TABLE = (
    tables.names("layer", col.LAYER),
    tables.names("rows x inputs x outputs", lambda row: f"{row[col.ROWS]} x {row[col.INPUTS]} x {row[col.OUTPUTS]}"),
    tables.names("epilogue", col.EPILOGUE), tables.names("method", col.METHOD), tables.Column("µs", col.MEDIAN_US),
    tables.Column("of int8 peak", col.OF_INT8_PEAK, ".0%"), tables.Column("of bandwidth", col.OF_BANDWIDTH, ".0%"),
)  # fmt: skip


@torch.inference_mode()
def run(folder: Path, layers: Sequence[Layer], device: torch.device, rounds: int) -> list[col.Row]:
    """Measure, print the table, and write ``linear_layers.json`` and ``.csv`` after every layer."""
    done = report.Report(
        "linear_layers", "linear layers of integer networks beside cuBLAS", device, FIELDS, folder,
        timing=f"{'CUDA-graph replay' if device.type == 'cuda' else 'calls on the CPU'}, warm, methods alternating, median of "
        f"{rounds} samples; ours with its epilogue, the others without",
    )  # fmt: skip
    for layer in track(layers, "Layers", console=Console(stderr=True)):
        done.add(measure(layer, device, rounds))
    done.finish(tables.render(done.rows, TABLE, "linear layers", groups=3))
    return done.rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, metavar="FOLDER", help="where linear_layers.json goes")
    parser.add_argument("--batch", type=int, action="append", help="images; repeatable; 1, 8, 64 if left out")
    parser.add_argument("--rounds", type=int, default=9, help="samples a method")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or min(arguments.batch or [1]) < 1:
        parser.error("--batch and --rounds must be at least 1")
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run(arguments.output, all_layers(arguments.batch or (1, 8, 64)), where, arguments.rounds)
