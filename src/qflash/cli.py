"""The ``qflash`` command: what its users need. Measuring is ``qflash-lab``'s, a package of its own.

Nothing heavy is imported before a command runs, so that help and version answer at once.
"""

from __future__ import annotations

import enum
import json
import pathlib
from typing import Annotated

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
    """How a command prints what it found."""

    TABLE = "table"
    JSON = "json"


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
def info(output_format: FormatOption = Format.TABLE) -> None:
    """Show versions, devices, what runs where and why something is not available."""
    from .info import collect_info, print_info

    if output_format is Format.JSON:
        typer.echo(json.dumps(collect_info(), indent=2))
    else:
        print_info()


@app.command()
def check_onnx(
    file: Annotated[pathlib.Path, typer.Argument(help="What qflash.export_onnx wrote.")],
    provider: Annotated[
        list[str] | None, typer.Option(help="Of onnxruntime, as CPUExecutionProvider; repeatable. All if left out.")
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

    HEX = "hex"
    NPY = "npy"
    C = "c"


@app.command()
def vectors(
    source: Annotated[pathlib.Path, typer.Argument(help="A network that network.save wrote, or a file of golden vectors.")],
    output: Annotated[pathlib.Path, typer.Option("--output", "-o", help="A new or empty folder.")],
    case: Annotated[list[str] | None, typer.Option(help="Pattern of names, as 'gelu/*'; repeatable. All if left out.")] = None,
    images: Annotated[
        pathlib.Path | None,
        typer.Option(help="Of a network: .npy, uint8 (count, channels, height, width). A made one if left out."),
    ] = None,
    trace: Annotated[bool, typer.Option("--trace", help="With every step that the documents name.")] = False,
    output_format: Annotated[
        list[VectorFormat] | None, typer.Option("--format", help="hex for $readmemh, npy, c; repeatable. hex if left out.")
    ] = None,
) -> None:
    """Write inputs, constants, outputs and steps as files for a testbench: a folder a golden case, or a node of a network.

    Exit status: 0 written; 1 the source, a pattern, the images or the folder is refused.
    """
    try:
        from .network.vectors import write_vectors

        formats = [each.value for each in output_format or [VectorFormat.HEX]]
        written = write_vectors(source, output, cases=case or (), images=images, trace=trace, formats=formats)
    except (ImportError, ValueError, OSError) as error:
        typer.echo(f"qflash vectors: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"{len(written)} cases in {output}")


def _moved(context: typer.Context) -> None:
    name = context.info_name
    typer.echo(f"`qflash {name}` is `qflash-lab {name}` now, in the package qflash-lab: pip install qflash-lab", err=True)
    raise typer.Exit(2)


for _name in MOVED:
    app.command(
        _name, hidden=True, add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
    )(_moved)
