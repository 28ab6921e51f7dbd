"""Write docs/performance/tables.md, the tables of docs/performance.md and docs/speed.svg from the committed results.

``python benchmarks/performance_tables.py``; the figure needs matplotlib.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "performance.md"
"""Has the tables of aims, between markers."""
TABLES = HERE.parent / "docs" / "performance" / "tables.md"
"""Is written whole."""
FIGURE = HERE.parent / "docs" / "speed.svg"
FP16 = ("sdpa flash", "sdpa cudnn")
"""What ratios are against: the faster of the two."""
FLOAT_SOFTMAX = ("int-flash-full kernel", "int-flash-half kernel", "qattn kernel")
"""This library's kernels of methods with int8 products and a float softmax."""
CARD = "h200"
"""Whose results are shown unless another card is named."""
OTHER_CARD = "h100"
CARDS = (CARD, OTHER_CARD)


def results(name: str) -> dict[str, Any]:
    """Return a result file, by its name in ``results`` without the suffix."""
    return json.loads((HERE / "results" / f"{name}.json").read_text())


def rows_of(name: str, card: str = CARD) -> list[dict[str, Any]]:
    """Return the rows of a run's result file for a card."""
    return results(f"{name}_{card}")["rows"]


def number(value: float | None, digits: int = 2) -> str:
    """Format a figure, ``-`` for one that is missing."""
    return "-" if value is None else f"{value:.{digits}f}" if value < 1000 else f"{value:.0f}"


def by_shape(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, bool], dict[str, dict[str, Any]]]:
    """Group rows by shape (and bias), then by method."""
    found: dict[tuple[str, bool], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["mode"] == "eager":
            continue
        name = f"{row['workload']} b{row['batch']}" if row["batch"] else str(row["shape"])
        found.setdefault((name, bool(row["bias"])), {})[row["method"]] = row
    return found


def medians(methods: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the microseconds of every method of a shape."""
    return {method: row["median_us"] for method, row in methods.items()}


def fastest_fp16(time: dict[str, float]) -> float:
    """Return the time of the faster of FA2 and cuDNN."""
    return min(time[method] for method in FP16)


def unbiased(card: str, *names: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return every method's row, by shape, of runs without a bias, the last that has a shape."""
    return {name: methods for run in names for (name, bias), methods in by_shape(rows_of(run, card)).items() if not bias}


def our_cells(methods: dict[str, dict[str, Any]]) -> list[str]:
    """Our two kernels' times and accuracy on a shape, with the ratios that the run's methods allow."""
    time = medians(methods)
    fp16 = fastest_fp16(time)
    best = min(fp16, *(time[method] for method in FLOAT_SOFTMAX if method in time))
    ours, whole = methods["qflash int8"], methods["qflash"]
    cells = [number(ours["median_us"]), number(fp16 / ours["median_us"]), number(best / ours["median_us"])]
    cells += [number(ours["sqnr_db"], 1), number(whole["median_us"]), number(fp16 / whole["median_us"])]
    return [*cells, number(whole["sqnr_db"], 1)]


def latencies(card: str = CARD) -> dict[str, dict[str, dict[str, Any]]]:
    """Return every method's row, by shape: long rows have runs of their own, those of 1024 keys another."""
    return unbiased(card, "bench", "bench_1024", "bench_long")


def latency(card: str = CARD) -> list[str]:
    """Every shape: PyTorch's kernels, the baselines, ours, with ratios and accuracy."""
    lines = [
        "| shape | FA2 | cuDNN | efficient | INT-Flash-Full | INT-Flash-Half | QAttn | I-ViT "
        "| **int8** | ratio | best | SQNR dB | **fp16** | ratio | SQNR dB |",
        "|" + "---|" * 15,
    ]
    names = (*FP16, "sdpa efficient", *FLOAT_SOFTMAX)
    for name, methods in latencies(card).items():
        time = medians(methods)
        cells = [number(time.get(method)) for method in (*names, "i-vit kernel")]
        lines.append(f"| {name} | {' | '.join(cells + our_cells(methods))} |")
    return lines


OTHERS = {
    "CLIP L/14, 224 pixels": "16x257x64",
    "DINOv2-B, 224 pixels, with registers": "12x261x64",
    "ViT-B/16, 320 pixels": "12x401x64",
    "ViT-B/16, 384 pixels": "12x577x64",
    "CLIP L/14, 336 pixels": "16x577x64",
    "ViT-B/16, 448 pixels": "12x785x64",
    "ViT-B/16, 512 pixels": "12x1025x64",
    "DINOv2-B, 518 pixels": "12x1370x64",
    "SigLIP So400m, 224 pixels": "16x256x72",
    "SigLIP So400m, 384 pixels": "16x729x72",
    "ViT-H/14, 224 pixels": "16x257x80",
    "ViT-H/14, 336 pixels": "16x577x80",
}
"""Vision transformers whose attention is not among A1 to A7: heads, tokens, channels."""


def other_shapes(card: str = CARD) -> dict[str, dict[str, dict[str, Any]]]:
    """Return every method's row, by shape, of the run of other vision transformers."""
    return unbiased(card, "shapes")


def ratios(card: str = CARD) -> list[str]:
    """The faster of FA2 and cuDNN in fp16, divided by ours, by model."""
    found = other_shapes(card)
    lines = ["| | heads x tokens x channels | int8: batch 1 | 8 | 64 | fp16: batch 1 | 8 | 64 |", "|" + "---|" * 8]
    for name, shape in OTHERS.items():
        cells = []
        for method in ("qflash int8", "qflash"):
            for batch in (1, 8, 64):
                time = medians(found[f"{batch}x{shape}"])
                ratio = fastest_fp16(time) / time[method]
                cells.append(f"**{ratio:.2f}**" if ratio > 1 else number(ratio))
        lines.append(f"| {name} | {shape.replace('x', ' x ')} | {' | '.join(cells)} |")
    return lines


def shapes(card: str = CARD) -> list[str]:
    """Other shapes of vision transformers in microseconds, with ratios and accuracy."""
    lines = [
        "| shape | FA2 | cuDNN | best of INT-Flash, QAttn | **int8** | ratio | best | SQNR dB | **fp16** | ratio | SQNR dB |",
        "|" + "---|" * 11,
    ]
    for name, methods in sorted(other_shapes(card).items(), key=lambda found: [int(part) for part in found[0].split("x")]):
        time = medians(methods)
        others = min(time[method] for method in time if method in FLOAT_SOFTMAX)
        cells = [number(time["sdpa flash"]), number(time["sdpa cudnn"]), number(others)]
        lines.append(f"| {name} | {' | '.join(cells + our_cells(methods))} |")
    return lines


def biased(card: str = CARD) -> dict[str, dict[str, dict[str, Any]]]:
    """Return every method's row, by shape, of the run with a bias."""
    return {name: methods for (name, bias), methods in by_shape(rows_of("bench_bias", card)).items() if bias}


def bias(card: str = CARD) -> list[str]:
    """Swin with its bias and shift mask."""
    lines = [
        "| shape | cuDNN | efficient | int8 | cost of the bias | fp16 | cost of the bias | efficient ÷ fp16 |",
        "|" + "---|" * 8,
    ]
    for name, methods in biased(card).items():
        cells = [number(methods[method]["median_us"]) for method in ("sdpa cudnn", "sdpa efficient")]
        for row in (methods["qflash int8"], methods["qflash"]):
            cells += [number(row["median_us"]), number(row["bias_cost"])]
        time = medians(methods)
        cells.append(number(time["sdpa efficient"] / time["qflash"]))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def eager(card: str = CARD) -> list[str]:
    """Eager calls on A2, batch 8."""
    lines = ["| method | until the device is done, µs | issuing, µs |", "|---|---|---|"]
    for row in rows_of("bench_eager", card):
        if row["mode"] == "eager" and row["median_us"] is not None:
            lines.append(f"| {row['method']} | {number(row['median_us'], 1)} | {number(row['issue_us'], 1)} |")
    return lines


def energy(card: str = CARD) -> list[str]:
    """Microjoules a call."""
    rows = rows_of("energy", card)
    reference = next(row["uj"] for row in rows if row["method"] == "sdpa flash")
    lines = ["| method | µJ a call | ÷ FA2 | SQNR dB |", "|---|---|---|---|"]
    for row in rows:
        if row["uj"] is not None:
            cells = f"{row['uj']:.0f} | {row['uj'] / reference:.2f} | {number(row['sqnr_db'], 1)}"
            lines.append(f"| {row['method']} | {cells} |")
    return lines


def profile() -> list[str]:
    """What Nsight Compute says."""
    lines = [
        "| shape | method | launches | µs | IMMA % | HMMA % | tensor pipe % | issue slots % | occupancy % "
        "| registers | warp instructions |",
        "|" + "---|" * 11,
    ]
    percents = ("duration_us", "imma_percent", "hmma_percent", "tensor_percent", "issue_percent")
    for row in rows_of("profile"):
        cells = [number(row[field], 1) for field in percents]
        cells += [number(row["occupancy_percent"], 1), f"{row['registers']:.0f}", f"{row['instructions']:.0f}"]
        lines.append(f"| {row['workload']} b{row['batch']} | {row['method']} | {row['kernels']} | {' | '.join(cells)} |")
    return lines


def instructions() -> list[str]:
    """Instructions a score of every case that ``qflash verify`` compiles, with Triton 3.6."""
    lines = ["| case | sm_80 | sm_90 | registers (sm_90) | spills (sm_90) |", "|---|---|---|---|---|"]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for report in results("verify_triton36"):
        found.setdefault(report["case"], {})[report["target"]] = report
    for case, targets in found.items():
        cells = [number(targets.get(target, {}).get("per_score"), 1) for target in ("sm_80", "sm_90")]
        lines.append(f"| {case} | {' | '.join(cells)} | {targets['sm_90']['registers']} | {targets['sm_90']['spills']} |")
    return lines


def newer() -> list[str]:
    """Triton 3.9's machine code against Triton 3.6's."""
    columns = "int8", "fp16", "int8, form for 3.9", "fp16, form for 3.9"
    lines = [f"| shape | {' | '.join(columns)} |", "|" + "---|" * (1 + len(columns))]
    found: dict[str, dict[str, float]] = {}
    for row in rows_of("trials/triton39"):
        if used_by := row.get("used_by"):
            column = row["kind"] if used_by == "3.6" else f"{row['kind']}, form for 3.9"
            found.setdefault(row["shape"], {}).setdefault(column, row["triton39_us"] / row["triton36_us"])
    for shape, of in found.items():
        lines.append(f"| {shape} | {' | '.join(number(of.get(column)) for column in columns)} |")
    return lines


def models(card: str = CARD) -> list[str]:
    """Whole models: images a second, and the ratio to the fastest SDPA back end."""
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in rows_of("models", card):
        found.setdefault((row["model"], row["batch"]), {})[row["method"]] = row
    others = {"timm": "timm", "SDPA flash": "sdpa flash", "SDPA cuDNN": "sdpa cudnn", "SDPA efficient": "sdpa efficient"}
    kept = "qflash kept bias"
    has_kept = any(kept in methods for methods in found.values())
    columns = ["model", *others, "**qflash**", "ratio", "÷ timm", *(["**bias kept**", "ratio"] if has_kept else [])]
    columns.append("SQNR dB of logits")
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for (model, batch), methods in found.items():
        speed = {name: row["images_s"] for name, row in methods.items()}
        cells = [number(speed[name], 0) for name in (*others.values(), "qflash")]
        cells += [number(methods["qflash"]["ratio"], 3), number(speed["qflash"] / speed["timm"])]
        if has_kept:
            cells += [
                number(methods[kept][key], digits) if kept in methods else "" for key, digits in (("images_s", 0), ("ratio", 3))
            ]
        lines.append(f"| {model} b{batch} | {' | '.join(cells)} | {number(methods['qflash']['sqnr_db'], 1)} |")
    return lines


def aims(card: str = CARD) -> list[str]:
    """What this library set out to reach on this GPU, and what was measured."""
    found = {name: medians(methods) for name, methods in latencies(card).items()}
    vit = {name: time for name, time in found.items() if name.startswith("A")}
    energy_of = {row["method"]: row["uj"] for row in rows_of("energy", card)}
    issue_of = {row["method"]: row["issue_us"] for row in rows_of("bench_eager", card) if row["mode"] == "eager"}

    def long_rows(head_dim: int, least: int) -> list[dict[str, float]]:
        shapes = {name: [int(part) for part in name.split("x")] for name in found if name not in vit}
        return [found[name] for name, shape in shapes.items() if shape[3] == head_dim and shape[2] >= least]

    lines = ["| | aim | measured, least to most | reached |", "|---|---|---|---|"]

    def add(what: str, aim: float, values: Iterable[float], *, at_most: bool = False) -> None:
        values = sorted(values)
        # as far as the figures that are shown go
        reached = sum(round(value, 2) <= aim if at_most else round(value, 2) >= aim for value in values)
        spread = " to ".join(f"{value:.2f}" for value in dict.fromkeys((values[0], values[-1])))
        lines.append(f"| {what} | {'≤' if at_most else '≥'} {aim} | {spread} | {reached} of {len(values)} |")

    def ratio(times: Iterable[dict[str, float]], ours: str, *others: str) -> list[float]:
        return [min(time[other] for other in others) / time[ours] for time in times]

    # measured on this card alone: another one's times are no times to compare with
    record = results(f"authors_kernel_{CARD}")
    column = record["methods"].index("authors' QFlash")
    authors = {
        f"{workload} b{batch}": times[column]
        for workload, batches in record["latency_us"].items()
        for batch, times in batches.items()
    }
    for head, keep, aim in (("A1 to A3", "123", 3), ("A4 to A7", "4567", 2)):
        times = {name: time for name, time in vit.items() if name[1] in keep}
        add(f"{head}, fp16 in and out, against the faster of FA2 and cuDNN", 1.2, ratio(times.values(), "qflash", *FP16))
        best = ratio(times.values(), "qflash int8", *FP16, *FLOAT_SOFTMAX)
        add(f"{head}, int8, against the fastest of all methods here", 1.5, best)
        if card == CARD:
            quotients = [authors[name] / time["qflash int8"] for name, time in times.items()]
            add(f"{head}, int8, against the paper authors' kernel (a run of its own, {record['date']})", aim, quotients)
    for head_dim, aim, fa2 in ((64, 1.15, 1.7), (128, 1.4, 2.4)):
        rows = long_rows(head_dim, 1024)
        add(f"rows of 1024 keys and more, d = {head_dim}, int8, against cuDNN", aim, ratio(rows, "qflash int8", "sdpa cudnn"))
        add(f"the same against FA2, d = {head_dim}", fa2, ratio(rows, "qflash int8", "sdpa flash"))
    for head_dim, aim in ((64, 1.05), (128, 1.25)):
        rows = long_rows(head_dim, 4096)
        add(f"rows of 4096 keys and more, d = {head_dim}, fp16, against cuDNN", aim, ratio(rows, "qflash", "sdpa cudnn"))
    runs = biased(card).values()
    rows = [medians(methods) for methods in runs]
    for method, name in (("qflash int8", "int8"), ("qflash", "fp16")):
        costs = [methods[method]["bias_cost"] for methods in runs]
        add(f"A4 to A7, {name}: time with a bias ÷ without", 1.25, costs, at_most=True)
        add(f"the same against the fastest SDPA with the bias, {name}", 2, ratio(rows, method, "sdpa cudnn", "sdpa efficient"))
    add("energy, A2 batch 8, int8 ÷ FA2", 0.6, [energy_of["qflash int8"] / energy_of["sdpa flash"]], at_most=True)
    for method, name in (("qflash", "fp16"), ("qflash int8", "int8")):
        add(f"issuing an eager call, A2 batch 8, {name} ÷ FA2", 2, [issue_of[method] / issue_of["sdpa flash"]], at_most=True)
    return lines


def draw() -> None:
    """Draw how many times as fast as the faster of FA2 and cuDNN we are, shape by shape."""
    import matplotlib
    from matplotlib.figure import Figure

    found = {name: medians(methods) for name, methods in latencies().items()}
    shapes = sorted(found, key=lambda name: name[:2] if name.startswith("A") else "B")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "qflash", "font.size": 9}):
        figure = Figure(figsize=(9.5, 5.2), layout="constrained")
        for axes, (method, title) in zip(
            figure.subplots(2, 1, sharex=True),
            (("qflash", "fp16 in and out, quantisation included"), ("qflash int8", "int8 in and out")),
            strict=True,
        ):
            heights = [fastest_fp16(found[name]) / found[name][method] for name in shapes]
            colours = ["#2a6f97" if height >= 1 else "#c1666b" for height in heights]
            axes.bar(range(len(shapes)), heights, color=colours)
            axes.axhline(1, color="black", linewidth=0.8)
            for place, height in enumerate(heights):
                axes.annotate(f"{height:.2f}", (place, height), ha="center", va="bottom", fontsize=7)
            axes.set_ylabel("times as fast")
            axes.set_title(title, loc="left", fontsize=9)
            axes.set_ylim(0, 1.12 * max(heights))
            axes.spines[["top", "right"]].set_visible(False)
        axes.set_xticks(range(len(shapes)), shapes, rotation=60, ha="right", fontsize=8)
        figure.suptitle("Speed on one H200 against the faster of FlashAttention-2 and cuDNN in fp16", fontsize=10)
        figure.savefig(FIGURE, metadata={"Date": None})


def processor(name: str) -> list[str]:
    """One CPU's run: SDPA in float32, the CPU back end and the reference, lowest of the rounds."""
    lines = [
        "| shape | SDPA ms | int8 ms | ratio | SQNR dB | float32 ms | ratio | SQNR dB | reference ms |",
        "|" + "---|" * 9,
    ]

    def time(milliseconds: float) -> str:
        return f"{milliseconds:.3g}" if milliseconds < 1000 else f"{milliseconds:.0f}"

    for shape, row in results(name)["results"].items():
        sdpa, int8, floats, slow = (
            row[method]["lowest_ms"] for method in ("sdpa float32", "cpu int8", "cpu float32", "reference float32")
        )
        cells = [time(sdpa), time(int8), number(sdpa / int8), number(row["sqnr_db"]["cpu int8"])]
        cells += [time(floats), number(sdpa / floats), number(row["sqnr_db"]["cpu float32"]), time(slow)]
        lines.append(f"| {shape} | {' | '.join(cells)} |")
    return lines


def when(name: str) -> str:
    """Return the day of a run."""
    record = results(name)
    about = record.get("environment") or record.get("conditions") or record
    return about["date"][:10]


class Section(NamedTuple):
    """A heading of the page of tables, what is said about its tables, and the tables: of each card, or of a card alone.

    Attributes:
        files: result files; ``{card}`` stands for each of ``cards``.
    """

    title: str
    about: str
    table: Callable[..., list[str]]
    files: tuple[str, ...]
    cards: tuple[str, ...] = CARDS


SECTIONS = (
    Section(
        "Latency",
        """Microseconds, all methods in alternation in one run, median of 15 rounds. `int8` is `qflash.int8_attention`, int8 in
and out, one scale per tensor, fitted output scale; the tensors are quantised before the clock starts. `fp16` is
`qflash.attention` with the default recipe, quantisation included. FA2, cuDNN and efficient are PyTorch's
`scaled_dot_product_attention` in fp16. INT-Flash, QAttn and I-ViT are this library's kernels of those methods on
tensors quantised beforehand ([baselines](../baselines.md)). A **ratio** is the faster of FA2 and cuDNN divided by
ours: above 1 we are faster. **best** divides the fastest of FA2, cuDNN, INT-Flash and QAttn by ours. Shapes are
batch x heads x tokens x channels; A1 to A7 are the paper's workloads ([what they are](../performance.md#workloads)).
The rows of 16384 keys reach the power limit: their quartiles lie several per cent apart.""",
        latency,
        ("bench_{card}", "bench_1024_{card}", "bench_long_{card}"),
    ),
    Section(
        "Swin with its bias and shift mask",
        """Microseconds. An additive bias (windows, heads, N, N) in fp16 that repeats over the images, its rows aligned
(`qflash.align_bias`) for every method. FA2 takes no bias. The cost of the bias is the time with it divided by the
time without it.""",
        bias,
        ("bench_bias_{card}",),
    ),
    Section(
        "Other vision transformers, ratios",
        "The faster of FA2 and cuDNN in fp16, divided by ours; medians of nine rounds.",
        ratios,
        ("shapes_{card}",),
    ),
    Section(
        "Other vision transformers, microseconds",
        "The runs of the table above. **best** divides the fastest of FA2, cuDNN, INT-Flash and QAttn by ours.",
        shapes,
        ("shapes_{card}",),
    ),
    Section(
        "Whole models",
        """Images per second of timm's models in fp16, one forward pass in a CUDA graph (`qflash models`). **ratio** is against
the fastest SDPA back end with every attention module made to call SDPA, which timm does not do in Swin (`÷ timm`).
**bias kept** is `qflash.patch(model, keep_bias=True)`, which differs only where a model has a bias. Weights are
random: they change no kernel's speed. The SQNR is of these logits against float32. The other methods of this library
quantise in launches of their own and were not in these runs. The H200 run is older than the single launch for Swin's
bias, which the H100 run has.""",
        models,
        ("models_{card}",),
    ),
    Section(
        "Eager calls",
        """A2, batch 8, no CUDA graph. Issuing is the time until the last call has returned, divided by the number of calls.""",
        eager,
        ("bench_eager_{card}",),
    ),
    Section(
        "Energy",
        """A2, batch 8: NVML's energy counter over two seconds of graph replay, two rounds, idle power (about 120 W on the H200)
included.""",
        energy,
        ("energy_{card}",),
    ),
    Section(
        "Utilisation",
        """Nsight Compute, one launch each at its own clocks; durations are longer than under replay.""",
        profile,
        ("profile_{card}",),
        (CARD,),
    ),
    Section(
        "Instructions per score",
        """From the machine code of Triton 3.6 (`qflash verify`): warp instructions of a whole kernel where a program computes
all scores of its queries at once, else of one iteration of its loops over the keys, divided by its scores.

* `vit-257`, `vit-257-80`, `vit-577`, `vit-1370` and `vit-729-72` take the sm_90 resident kernel on Hopper. Elsewhere
  such rows take the streaming kernel, of which the usual loops are counted. `vit-577` is 0.7 in the first pass and
  8.2 in the second, which includes a maximum that seldom runs. `vit-1370` and `vit-729-72` are persistent programs.
* `vit-80` has few heads: two warps share each row, so its code is half of each warp's work and an exchange between
  them.
* `vit-hundreds` and `vit-257-80` contain code for tail queries as well as for a block, and per-channel scales.
* `swin`, `swin-windows` and `swin-thousands` are the windows kernel: one tile of 16 queries per warp and all that
  precedes it, so few scores share the cost of keys and values; with thousands of windows half a tile more. With a
  bias the code is there twice, for tiles with and without marks.
* Of the streaming kernel, the loops that usually run are counted: 1.0 in the first pass and 7.8 in the second at d =
  64. At d = 128 the maxima that clamp scores are included, one per score, which seldom run. Of the 15 spills at d =
  64, caused by per-channel scales, two are in an iteration of the second pass (two tiles).""",
        instructions,
        ("verify_triton36",),
        ("",),
    ),
    Section(
        "Machine code of Triton 3.9",
        """What Triton 3.9 (ptxas 13.4) makes of the same kernels was put in place of 3.6's machine code in the launcher's cache
and timed in the same session. All launches returned the reference's bits (from 456 to 512 keys they were compared
with the output of Triton 3.6's code, which tests compare with the reference). Time divided by the time with Triton
3.6's code; `form for 3.9` is the form that is used with Triton 3.9, where it is another one
([why](limits.md#register-pressure-and-ptxas)).""",
        newer,
        ("trials/triton39_{card}",),
        (CARD,),
    ),
    Section(
        "CPUs",
        """Two threads, eager calls, inputs uniform in [-4, 4) float32, all methods in alternation in every round, **lowest** of
nine rounds (three for the reference); the files have medians, too. `python benchmarks/cpu.py OUT.json` measures
again. `int8` is int8 in and out on tensors quantised before; `float32` is `qflash.attention`, default recipe,
quantisation included. A ratio is SDPA's time in float32 divided by ours. The first CPU is a Zen 5 EPYC with VNNI,
the second a Zen 4 EPYC with VNNI, the third an EPYC with AVX2 only, whose two cores were shared with other work:
there ratios of a few per cent mean nothing.""",
        processor,
        ("{card}",),
        ("cpu_vnni", "cpu_zen4", "cpu"),
    ),
)

HEADER = """# Measured tables

Written by `python benchmarks/performance_tables.py` from the result files named under each heading, which also have
quartiles and the environment; do not edit. Aims and a summary: [performance](../performance.md). Why the numbers are
what they are: [limits](limits.md). What was tried: [experiments](experiments.md).

Unless a section says otherwise: one NVIDIA H200 or one H100 (80 GB, HBM3), torch 2.11.0+cu130, Triton 3.6.0, driver
580.159; CUDA-graph replay of about a millisecond of calls behind an untimed replay; inputs uniform in [-4, 4) fp16.
"""


def tables_page() -> str:
    """Return docs/performance/tables.md."""
    parts = [HEADER]
    for section in SECTIONS:
        parts.append(f"\n## {section.title}\n\n{section.about}\n")
        for card in section.cards:
            names = [file.format(card=card) for file in section.files]
            links = ", ".join(
                f"[{name}](../../benchmarks/results/{name}.json)" + (f" ({when(name)})" if card else "") for name in names
            )
            title = f"{card.upper()}: " if card in CARDS and len(section.cards) > 1 else ""
            table = section.table(card) if len(section.cards) > 1 else section.table()
            parts.append(f"\n{title}{links}\n\n" + "\n".join(table) + "\n")
    return "".join(parts)


def laid_out(text: str) -> str:
    """Return a page with the tables of aims between its markers as the results have them."""
    for name, lines in ((f"aims {card}", aims(card)) for card in CARDS):
        start, end = f"<!-- table:{name} -->\n", "<!-- end -->"
        before, found, rest = text.partition(start)
        if not found:
            raise ValueError(f"the page has no place for the table {name!r}")
        text = before + start + "\n".join(lines) + "\n" + end + rest.partition(end)[2]
    return text


def main() -> None:
    """Write the pages' tables and the figure."""
    PAGE.write_text(laid_out(PAGE.read_text()))
    TABLES.write_text(tables_page())
    draw()


if __name__ == "__main__":
    main()
