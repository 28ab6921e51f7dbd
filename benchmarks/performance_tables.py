"""Write the tables of docs/performance.md and docs/speed.svg from the committed results of the H200 and the H100.

``python benchmarks/performance_tables.py``; the figure needs matplotlib.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "performance.md"
FIGURE = HERE.parent / "docs" / "speed.svg"
FP16 = ("sdpa flash", "sdpa cudnn")
"""What ratios are against: the faster of the two."""
FLOAT_SOFTMAX = ("int-flash-full kernel", "int-flash-half kernel", "qattn kernel")
"""This library's kernels of methods with int8 products and a float softmax."""
CARD = "h200"
"""Whose results are shown unless another card is named."""
OTHER_CARD = "h100"
"""Whose results are shown, too, more briefly."""


def rows_of(name: str, card: str = CARD) -> list[dict[str, Any]]:
    """Return the rows of a run's result file for a card."""
    return json.loads((HERE / "results" / f"{name}_{card}.json").read_text())["rows"]


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


def shapes() -> list[str]:
    """Other shapes of vision transformers in microseconds, with ratios and accuracy."""
    lines = [
        "| shape | FA2 | cuDNN | best of INT-Flash, QAttn | **int8** | ratio | best | SQNR dB | **fp16** | ratio | SQNR dB |",
        "|" + "---|" * 11,
    ]
    for name, methods in sorted(other_shapes().items(), key=lambda found: [int(part) for part in found[0].split("x")]):
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


def eager() -> list[str]:
    """Eager calls on A2, batch 8."""
    lines = ["| method | until the device is done, µs | issuing, µs |", "|---|---|---|"]
    for row in rows_of("bench_eager"):
        if row["mode"] == "eager" and row["median_us"] is not None:
            lines.append(f"| {row['method']} | {number(row['median_us'], 1)} | {number(row['issue_us'], 1)} |")
    return lines


def energy() -> list[str]:
    """Microjoules a call."""
    rows = rows_of("energy")
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
        "| shape | method | launches | µs | IMMA % | tensor pipe % | issue slots % | occupancy % "
        "| registers | warp instructions |",
        "|" + "---|" * 10,
    ]
    for row in rows_of("profile"):
        cells = [number(row[field], 1) for field in ("duration_us", "imma_percent", "tensor_percent", "issue_percent")]
        cells += [number(row["occupancy_percent"], 1), f"{row['registers']:.0f}", f"{row['instructions']:.0f}"]
        lines.append(f"| {row['workload']} b{row['batch']} | {row['method']} | {row['kernels']} | {' | '.join(cells)} |")
    return lines


def instructions() -> list[str]:
    """Instructions a score of every case that ``qflash verify`` compiles, with Triton 3.6."""
    lines = ["| case | sm_80 | sm_90 | registers (sm_90) | spills (sm_90) |", "|---|---|---|---|---|"]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for report in json.loads((HERE / "results" / "verify_triton36.json").read_text()):
        found.setdefault(report["case"], {})[report["target"]] = report
    for case, targets in found.items():
        cells = [number(targets.get(target, {}).get("per_score"), 1) for target in ("sm_80", "sm_90")]
        lines.append(f"| {case} | {' | '.join(cells)} | {targets['sm_90']['registers']} | {targets['sm_90']['spills']} |")
    return lines


def newer() -> list[str]:
    """Triton 3.9's machine code beside Triton 3.6's."""
    columns = "int8", "fp16", "int8 since", "fp16 since"
    lines = [f"| shape | {' | '.join(columns)} |", "|" + "---|" * (1 + len(columns))]
    found: dict[str, dict[str, float]] = {}
    for row in rows_of("triton39"):
        if used_by := row.get("used_by"):
            column = row["kind"] if used_by == "3.6" else f"{row['kind']} since"
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
    record = json.loads((HERE / "results" / f"authors_kernel_{CARD}.json").read_text())
    column = record["methods"].index("authors' QFlash")
    authors = {
        f"{workload} b{batch}": times[column]
        for workload, batches in record["latency_us"].items()
        for batch, times in batches.items()
    }
    for head, keep, aim in (("A1 to A3", "123", 3), ("A4 to A7", "4567", 2)):
        times = {name: time for name, time in vit.items() if name[1] in keep}
        add(f"{head}, fp16 in and out, beside the faster of FA2 and cuDNN", 1.2, ratio(times.values(), "qflash", *FP16))
        best = ratio(times.values(), "qflash int8", *FP16, *FLOAT_SOFTMAX)
        add(f"{head}, int8, beside the fastest of all methods here", 1.5, best)
        if card == CARD:
            quotients = [authors[name] / time["qflash int8"] for name, time in times.items()]
            add(f"{head}, int8, beside the paper authors' kernel (a run of its own, {record['date']})", aim, quotients)
    for head_dim, aim, fa2 in ((64, 1.15, 1.7), (128, 1.4, 2.4)):
        rows = long_rows(head_dim, 1024)
        add(f"rows of 1024 keys and more, d = {head_dim}, int8, beside cuDNN", aim, ratio(rows, "qflash int8", "sdpa cudnn"))
        add(f"the same beside FA2, d = {head_dim}", fa2, ratio(rows, "qflash int8", "sdpa flash"))
    for head_dim, aim in ((64, 1.05), (128, 1.25)):
        rows = long_rows(head_dim, 4096)
        add(f"rows of 4096 keys and more, d = {head_dim}, fp16, beside cuDNN", aim, ratio(rows, "qflash", "sdpa cudnn"))
    runs = biased(card).values()
    rows = [medians(methods) for methods in runs]
    for method, name in (("qflash int8", "int8"), ("qflash", "fp16")):
        costs = [methods[method]["bias_cost"] for methods in runs]
        add(f"A4 to A7, {name}: time with a bias ÷ without", 1.25, costs, at_most=True)
        add(f"the same beside the fastest SDPA with the bias, {name}", 2, ratio(rows, method, "sdpa cudnn", "sdpa efficient"))
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
        figure.suptitle("Speed on one H200, beside the faster of FlashAttention-2 and cuDNN in fp16", fontsize=10)
        figure.savefig(FIGURE, metadata={"Date": None})


def laid_out(text: str) -> str:
    """Return the page with every table between its markers as the results have it."""
    every = (aims, latency, ratios, shapes, models, bias, eager, energy, profile, instructions, newer)
    made = {make.__name__: make() for make in every}
    made |= {f"{make.__name__} {OTHER_CARD}": make(OTHER_CARD) for make in (aims, latency, ratios, models, bias)}
    for name, lines in made.items():
        start, end = f"<!-- table:{name} -->\n", "<!-- end -->"
        before, found, rest = text.partition(start)
        if not found:
            raise ValueError(f"the page has no place for the table {name!r}")
        text = before + start + "\n".join(lines) + "\n" + end + rest.partition(end)[2]
    return text


def main() -> None:
    """Write the page's tables and the figure."""
    PAGE.write_text(laid_out(PAGE.read_text()))
    draw()


if __name__ == "__main__":
    main()
