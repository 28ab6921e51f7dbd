"""The ``qflash`` command: demo, verify, info.

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
    help="QFlash: fused attention whose matrix products and softmax run in integers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


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
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


@app.command()
def demo(
    output: Annotated[pathlib.Path, typer.Option(help="Folder for the results.")] = pathlib.Path("qflash-report"),
    limit: Annotated[int | None, typer.Option(min=1, help="Use at most this many images.")] = None,
) -> None:
    """Run a small vision transformer with integer attention and compare it with float attention."""
    try:
        from .demo import run_demo

        run_demo(output, limit)
    except ImportError as error:
        typer.echo(f"qflash demo: {error}", err=True)
        raise typer.Exit(1) from error


@app.command()
def verify(
    target: Annotated[list[str] | None, typer.Option(help="Architecture, for instance sm_90; repeatable.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Attention problem, for instance vit; repeatable.")] = None,
    dump: Annotated[pathlib.Path | None, typer.Option(help="Folder for the PTX and SASS of every kernel.")] = None,
    output_format: FormatOption = Format.TABLE,
) -> None:
    """Prove that the int8-to-int8 attention kernels hold no float instruction. Needs no GPU.

    Compiles the kernels as the launcher would for sm_80, 86, 89, 90, 100 and 120, disassembles them and counts
    float instructions: arithmetic, comparison, selection, conversion, MUFU, float matrix products. An HFMA2
    whose operands are all zero registers or numbers is how ptxas loads a constant; these are counted apart.

    The kernels that quantise float tensors, and attention with a float output, are float by nature and are
    not verified.

    Exit status: 0 no float instruction; 1 some, or a kernel does not compile; 2 it cannot be verified here.
    """
    from .verify import VerificationError, render
    from .verify import verify as run_verify

    try:
        reports = run_verify(case or (), target or (), dump=dump, progress=True)
    except VerificationError as error:
        typer.echo(f"qflash verify: {error}", err=True)
        raise typer.Exit(2) from error
    failed = [report for report in reports if not report.passed]
    if output_format is Format.JSON:
        typer.echo(json.dumps([report.to_dict() for report in reports], indent=2))
    else:
        from rich.console import Console

        console = Console()
        # a pipe has no width, and rich would fold the table into 80 columns
        console.print(render(reports), width=None if console.is_terminal else 120)
        for report in failed:
            if report.error:
                typer.echo(f"{report.case} {report.target}: {report.error}")
            for instruction, count in report.float_instructions.items():
                typer.echo(f"{report.case} {report.target}: {count} x {instruction}")
        verdict = f"{len(reports) - len(failed)} of {len(reports)} kernels hold no float instruction"
        typer.echo(verdict if not failed else f"{verdict}; {len(failed)} FAILED")
    if failed:
        raise typer.Exit(1)


@app.command()
def info(output_format: FormatOption = Format.TABLE) -> None:
    """Show versions, devices, what runs where and why something is not available."""
    from .info import collect_info, print_info

    if output_format is Format.JSON:
        typer.echo(json.dumps(collect_info(), indent=2))
    else:
        print_info()


class Precision(str, enum.Enum):
    """The floating-point type of everything outside the attention method."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


@app.command()
def evaluate(
    model: Annotated[
        list[str],
        typer.Option(
            help="ViT-S, ViT-B, DeiT-T, DeiT-S, DeiT-B, Swin-T, Swin-S (all: these seven), any timm name, "
            "digits-vit or digits-swin; repeatable."
        ),
    ],
    method: Annotated[list[str] | None, typer.Option(help="Attention method; repeatable. All of them if left out.")] = None,
    data: Annotated[str, typer.Option(help="Folder with one folder of images per class, or digits.")] = "digits",
    pretrained: Annotated[bool, typer.Option("--pretrained", help="Download timm's weights.")] = False,
    weights: Annotated[pathlib.Path | None, typer.Option(help="safetensors file or torch checkpoint.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images per step; part of what is measured.")] = 64,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read images.")] = 4,
    subset: Annotated[int | None, typer.Option(min=1, help="Only this many images, even over the classes.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the subset and of the bootstrap.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; a GPU if there is one.")] = None,
    dtype: Annotated[Precision, typer.Option(help="Type of everything outside the attention.")] = Precision.FLOAT32,
    output: Annotated[pathlib.Path, typer.Option(help="Folder for the results.")] = pathlib.Path("qflash-evaluate"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start anew where other results lie.")] = False,
) -> None:
    """Measure Top-1 and Top-5 of image classifiers with any method in their attention (the paper's Table 5).

    An interrupted run continues when the same command is given again. Several GPUs or processes:
    torchrun --nproc-per-node N -m qflash evaluate ... gives the same figures as one.

    Exit status: 0 done; 1 something is missing or an argument is not allowed.
    """
    try:
        from .evaluate import run_evaluate

        run_evaluate(
            model,
            method or ["all"],
            data=data,
            output=output,
            pretrained=pretrained,
            weights=weights,
            batch=batch,
            workers=workers,
            subset=subset,
            seed=seed,
            device=device,
            dtype=dtype.value,
            overwrite=overwrite,
        )
    except (ImportError, ValueError, OSError) as error:
        typer.echo(f"qflash evaluate: {error}", err=True)
        raise typer.Exit(1) from error
