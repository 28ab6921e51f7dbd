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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from qflash.network import execution  # noqa: F401 - registers the operators
from qflash_lab.bench import errors, records, timers

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


def methods_for(device: torch.device) -> dict[str, Callable[[Layer, torch.device], timers.TimedCall]]:
    """Return what is timed on a device, by name."""
    if device.type == "cpu":
        return {"qflash": ours, "float32": functools.partial(_product, dtype=torch.float32)}
    half = functools.partial(_product, dtype=torch.float16)
    return {"qflash": ours, "cuBLAS float16": half, "cuBLAS float8": _float8, "cuBLAS int8 to int32": _int8}


def measure(layer: Layer, device: torch.device, rounds: int) -> dict[str, Any]:
    """Return a layer's row: microseconds of every method, in turns, and the shares of the card's peaks that ours has."""
    row: dict[str, Any] = dataclasses.asdict(layer) | {"us": {}, "errors": {}}
    running: dict[str, timers.Timer] = {}
    for name, prepare in methods_for(device).items():
        try:
            with errors.explained():
                running[name] = timers.make_timer(prepare(layer, device), "kernel", device)
        except Exception as error:
            row["errors"][name] = errors.describe(error)
    row["us"] = {name: found["median_us"] for name, found in timers.sample_by_turns(running, rounds).items()}
    card = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else ""
    peaks = next((peak for name, peak in PEAK.items() if name in card), None)
    if peaks is not None and "qflash" in row["us"]:
        seconds = row["us"]["qflash"] * 1e-6
        row |= {"of_int8_peak": layer.operations / seconds / peaks[0], "of_bandwidth": layer.bytes / seconds / peaks[1]}
    del running
    timers.tidy(device)
    return row


def render(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the rows as a table."""
    names = list(dict.fromkeys(name for row in rows for name in row["us"]))
    table = Table(title="linear layers, µs", title_justify="left")
    for heading in ("layer", "rows x inputs x outputs", "epilogue", *names, "of int8 peak", "of bandwidth"):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("layer", "epilogue") else "right")
    for row in rows:
        times = [f"{row['us'][name]:.2f}" if name in row["us"] else "failed" for name in names]
        shares = [f"{row[name]:.0%}" if name in row else "" for name in ("of_int8_peak", "of_bandwidth")]
        table.add_row(row["name"], f"{row['rows']} x {row['inputs']} x {row['outputs']}", row["epilogue"], *times, *shares)
    return table


@torch.inference_mode()
def run(folder: Path, layers: Sequence[Layer], device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Measure, print the table, and write ``linear_layers.json`` after every layer."""
    folder.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "what": "linear layers of integer networks beside cuBLAS",
        "environment": records.environment(device),
        "timing": f"{'CUDA-graph replay' if device.type == 'cuda' else 'calls on the CPU'}, warm, methods in turns, median of "
        f"{rounds} samples; ours with its epilogue, the others without",
        "rows": [],
    }  # fmt: skip
    rows: list[dict[str, Any]] = record["rows"]
    for layer in track(layers, "Layers", console=Console(stderr=True)):
        rows.append(measure(layer, device, rounds))
        records.write_json(folder / "linear_layers.json", record)
    Console(width=160).print(render(rows))
    return rows


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
