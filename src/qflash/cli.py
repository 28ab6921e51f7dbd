"""The ``qflash`` command: what its users need. Measuring is ``qflash-lab``'s, a package of its own.

Nothing heavy is imported before a command runs, so that help and version answer at once.
"""

from __future__ import annotations

import contextlib
import enum
import json
import pathlib
from collections.abc import Iterator
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="qflash",
    help="QFlash: attention and vision transformers that run in integers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

MOVED = (
    "demo", "verify", "bench", "models", "energy", "profile", "evaluate", "accuracy", "real", "ablate", "report", "tune",
)  # fmt: skip
"""Commands that ``qflash-lab`` has now."""


class Format(str, enum.Enum):
    """How a command prints what it found.

    Members are called as their values: Typer before 0.16 refuses a default with another name where Click is 8.2 or newer.
    """

    table = "table"
    json = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="table for reading, json for programs.")]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"qflash {version('qflash')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", metavar="", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def info(output_format: FormatOption = Format.table) -> None:
    """Show versions, devices, what runs where and why something is not available."""
    from .info import collect_info, print_info

    if output_format is Format.json:
        typer.echo(json.dumps(collect_info(), indent=2))
    else:
        print_info()


@app.command()
def check_onnx(
    file: Annotated[pathlib.Path, typer.Argument(help="What qflash.export_onnx wrote.")],
    provider: Annotated[
        list[str] | None,
        typer.Option(help="Provider of onnxruntime, such as CPUExecutionProvider; repeatable. All if left out."),
    ] = None,
    runtime: Annotated[
        list[str] | None, typer.Option(help="onnxruntime, reference or openvino; repeatable. All installed if left out.")
    ] = None,
) -> None:
    """Run the self-test of an ONNX file in the runtimes that are installed, and compare every bit of its logits.

    Exit status: 0 all are equal; 1 some differ or cannot run it, or there is nothing to check.
    """
    try:
        from .network.onnx_check import check_onnx as check

        outcomes = check(file, runtime, provider)
    except (ImportError, ValueError, OSError) as error:
        typer.echo(f"qflash check-onnx: {error}", err=True)
        raise typer.Exit(1) from error
    for outcome in outcomes:
        typer.echo(f"{outcome.runtime}: {outcome.problem or 'equal'}")
    raise typer.Exit(int(any(outcome.problem for outcome in outcomes)))


class VectorFormat(str, enum.Enum):
    """What files of vectors hold."""

    hex = "hex"
    npy = "npy"
    c = "c"


@app.command()
def vectors(
    source: Annotated[pathlib.Path, typer.Argument(help="A network that network.save wrote, or a file of golden vectors.")],
    output: Annotated[pathlib.Path, typer.Option("--output", "-o", help="A new or empty folder.")],
    case: Annotated[
        list[str] | None, typer.Option(help="Pattern of names, such as 'gelu/*'; repeatable. All if left out.")
    ] = None,
    images: Annotated[
        pathlib.Path | None,
        typer.Option(help="Images for a network: .npy, uint8 (count, channels, height, width). A generated one if left out."),
    ] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Write every intermediate step that the documents name, too.")] = False,
    output_format: Annotated[
        list[VectorFormat] | None, typer.Option("--format", help="hex for $readmemh, npy, c; repeatable. hex if left out.")
    ] = None,
) -> None:
    """Write inputs, constants, outputs and steps as files for a testbench, in a folder for each golden case or node.

    Exit status: 0 written; 1 the source, a pattern, the images or the folder is refused.
    """
    try:
        from .network.vectors import write_vectors

        formats = [each.value for each in output_format or [VectorFormat.hex]]
        written = write_vectors(source, output, cases=case or (), images=images, trace=trace, formats=formats)
    except (ImportError, ValueError, OSError) as error:
        typer.echo(f"qflash vectors: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"{len(written)} cases in {output}")


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name of timm, hf-hub:OWNER/NAME of timm, OWNER/NAME of transformers, or a folder with config.json.",
    ),
]
ImagesArgument = Annotated[pathlib.Path, typer.Argument(metavar="IMAGES", help="A folder of images, or a .npy file of uint8.")]
FileArgument = Annotated[
    pathlib.Path, typer.Argument(metavar="FILE", dir_okay=False, help="What convert or network.save wrote.")
]
SizeOption = Annotated[str | None, typer.Option(help="Image size in pixels, such as 224 or 224x448 (height x width).")]
NetworkSizeOption = Annotated[
    str | None,
    typer.Option(
        help="One of the file's image sizes, such as 224 or 224x448. If left out, the one nearest in proportions, or the first."
    ),
]
OutputsOption = Annotated[
    str | None,
    typer.Option(
        help="What the network returns, names between commas: logits, features, tokens, a submodule such as blocks.3, or a "
        "field of the model's output."
    ),
]
RandomOption = Annotated[bool, typer.Option("--random-weights", help="Take random weights and download none.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda or cuda:1; auto takes a GPU if there is one.")]


@contextlib.contextmanager
def _errors(name: str) -> Iterator[None]:
    """Print an error that a user can mend as one line, and exit with 1."""
    try:
        yield
    except (ImportError, ValueError, TypeError, OSError) as error:
        typer.echo(f"qflash {name}: {error}", err=True)
        raise typer.Exit(1) from error


def _console(output_format: Format) -> Any:
    """Return where tables go: nowhere if JSON is wanted."""
    from rich.console import Console

    return Console(quiet=output_format is Format.json)


def _print_json(output_format: Format, report: Any) -> None:
    if output_format is Format.json:
        typer.echo(json.dumps(report, indent=2))


@app.command()
def convert(
    model: ModelArgument,
    images: ImagesArgument,
    output: Annotated[pathlib.Path, typer.Option("-o", "--output", dir_okay=False, help="File for the integer network.")],
    onnx: Annotated[pathlib.Path | None, typer.Option(dir_okay=False, help="Also write ONNX, of the first size.")] = None,
    tosa: Annotated[pathlib.Path | None, typer.Option(dir_okay=False, help="Also write TOSA, of the first size.")] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(
            help="Image size in pixels, such as 224 or 224x448 (height x width); repeatable: one file for all of them."
        ),
    ] = None,
    outputs: OutputsOption = None,
    calibrate: Annotated[int, typer.Option(min=1, help="How many images to calibrate on.")] = 64,
    compare: Annotated[int, typer.Option(min=1, help="How many further images to compare with the float model on.")] = 64,
    recipe: Annotated[str | None, typer.Option(help="Recipe of attention: default or accurate.")] = None,
    keep_float: Annotated[list[str] | None, typer.Option(help="A submodule that stays in floating point; repeatable.")] = None,
    random_weights: RandomOption = False,
    device: DeviceOption = "auto",
    output_format: FormatOption = Format.table,
) -> None:
    """Quantise a float model on images, write it to a file, and compare both."""
    with _errors("convert"):
        from .commands import check_files, load_float, parse_size
        from .commands import convert as run

        exports = {kind: path for kind, path in (("onnx", onnx), ("tosa", tosa)) if path is not None}
        check_files(output, exports)
        sizes = size or []
        # further sizes are resampled from the model's own
        found = load_float(model, sizes[0] if len(sizes) == 1 else None, random_weights, device)
        options: dict[str, Any] = {"recipe": recipe, "keep_float": keep_float or [], "progress": output_format is Format.table}
        if len(sizes) > 1:
            options["sizes"] = [parse_size(each) for each in sizes]
        counts = calibrate, compare
        report = run(
            found, images, output, exports, outputs=outputs, counts=counts, options=options, console=_console(output_format)
        )
        _print_json(output_format, {**report, "random_weights": random_weights})
        if random_weights and output_format is Format.table:
            typer.echo("random weights: this shows that conversion works, not how close a trained model is")


@app.command()
def coverage(
    model: ModelArgument,
    size: SizeOption = None,
    outputs: OutputsOption = None,
    random_weights: RandomOption = False,
    compute: Annotated[
        bool,
        typer.Option(
            "--compute/--no-compute",
            help="Whether to run the integer network on drawn images and compare it with the model: seconds to minutes.",
        ),
    ] = True,
    output_format: FormatOption = Format.table,
) -> None:
    """Say which parts of a model become integers, why the others do not, and that the integers compute the model.

    It needs no images: some are drawn. Exit status: 0 the whole model becomes integers, and they have at least 10 dB; 1 a part
    does not, or what was captured of the model computes something else, or the integers have less.
    """
    with _errors("coverage"):
        from .commands import coverage as run
        from .commands import load_float

        found = load_float(model, size, random_weights, "cpu")
        report = run(found, outputs, _console(output_format), compute=compute)
        _print_json(output_format, {**report, "random_weights": random_weights})
    raise typer.Exit(int(not report["integers"]))


@app.command()
def predict(
    file: FileArgument,
    images: ImagesArgument,
    labels: Annotated[
        pathlib.Path | None,
        typer.Option(
            dir_okay=False, help="File with the names of classes, one a line or JSON; those in the network's file if left out."
        ),
    ] = None,
    output: Annotated[
        pathlib.Path | None, typer.Option(dir_okay=False, help="Write all outputs, float32: .npy, .npz if there are several.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many classes to print for each image.")] = 5,
    size: NetworkSizeOption = None,
    device: DeviceOption = "auto",
    output_format: FormatOption = Format.table,
) -> None:
    """Print the most likely classes of images by an integer network, or write its outputs."""
    with _errors("predict"):
        from .commands import predict as run

        rows = run(
            file, images, labels=labels, output=output, top=top, device=device, console=_console(output_format), size=size
        )
        _print_json(output_format, rows)


@app.command()
def time(
    file: FileArgument,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Images a call; repeatable. 1, 8 and 64 if left out.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads on a CPU; PyTorch's choice if left out.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How many calls to time.")] = 20,
    size: NetworkSizeOption = None,
    device: DeviceOption = "auto",
    output_format: FormatOption = Format.table,
) -> None:
    """Time an integer network: median and range of calls, images a second; CUDA graphs on a GPU."""
    with _errors("time"):
        from .commands import measure as run

        report = run(
            file, batches=batch or [1, 8, 64], device=device, threads=threads, rounds=rounds, console=_console(output_format),
            size=size,
        )  # fmt: skip
        _print_json(output_format, report)


def _moved(context: typer.Context) -> None:
    name = context.info_name
    typer.echo(f"`qflash {name}` is `qflash-lab {name}` now, in the package qflash-lab: pip install qflash-lab", err=True)
    raise typer.Exit(2)


for _name in MOVED:
    app.command(
        _name, hidden=True, add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
    )(_moved)
