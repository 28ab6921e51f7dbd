"""``qflash report``: every table and figure of the paper beside what was measured, as one HTML page that loads nothing.

CPU parts (accuracy, ablation, Top-1 on digits) are run or read; GPU results are read from the files that ``qflash bench``,
``energy``, ``profile`` and ``ablate`` wrote. A file is known by what it says it holds, not by its name. What is not there is
named as not run.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import html
import io
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console

from ..bench import paper_results
from ..optional_packages import require_packages
from .claims import Claim, claims
from .html import document, heading, plot, table
from .results import Found, device_of, gpu_rows, on_gpu, read_results, row_of_method, where_of

_EVALUATE_IMAGES = 64


def run_cpu_parts(output: pathlib.Path, console: Console) -> list[str]:
    """Run the CPU parts into ``output``; their own tables are not printed.

    Returns:
        the parts that could not run, with the reason.
    """
    import torch

    from ..bench import ablation, accuracy
    from ..evaluation.top1 import run_evaluate

    cpu = torch.device("cpu")

    def run_accuracy() -> None:
        cases = accuracy.make_cases(("paper",), ("A2", "A7"), batch=8)
        cases += accuracy.make_cases(("paper",), batch=1)
        cases += accuracy.make_cases(("normal", "outlier"), ("A2", "A7"), batch=1)
        accuracy.run_accuracy(cases, device=cpu, output=output)

    def run_digits() -> None:
        models = ["digits-vit", "digits-swin"]
        folder = output / "evaluate"
        run_evaluate(models, ["all"], output=folder, subset=_EVALUATE_IMAGES, device="cpu", overwrite=True)
        (output / "evaluate.json").write_text((folder / "evaluate.json").read_text(encoding="utf-8"), encoding="utf-8")

    failed = []
    for name, run in (
        ("accuracy", run_accuracy),
        ("ablate", lambda: ablation.run_ablate(device=cpu, output=output)),
        ("evaluate", run_digits),
    ):
        begin = time.monotonic()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                run()
            console.print(f"{name}: {time.monotonic() - begin:.0f} s", highlight=False)
        except ImportError as error:  # an extra is not installed
            failed.append(f"{name}: {error}")
            console.print(f"{name} not run: {error}", highlight=False)
    return failed


# --- the page ---------------------------------------------------------------------------------------------------------


def _claim_list(items: Sequence[Claim]) -> str:
    marks = {"agrees": ("agrees", "✓ agrees"), "differs": ("differs", "≠ differs")}
    marks |= {"measured": ("open", "measured"), "not run": ("open", "- not run")}
    lines = []
    for claim in items:
        style, mark = marks[claim.mark]
        cells = [("paper", claim.paper), ("here", claim.ours or "not run"), ("where", claim.where), ("note", claim.why)]
        body = "".join(f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in cells if text)
        lines.append(f'<li><span class="{style}">{mark}</span> {html.escape(claim.text)}<dl>{body}</dl></li>')
    return f'<ul class="claims">{"".join(lines)}</ul>'


def _missing(command: str) -> str:
    return f'<p class="open">Not run. {html.escape(command)}</p>'


def _number(x: Any, digits: int = 2) -> str:
    return "-" if x is None else f"{x:.{digits}f}" if isinstance(x, float | int) else str(x)


def _wide(svg: str) -> str:
    return f'<div class="wide">{svg}</div>'


def _latency_section(found: Found) -> Iterator[str]:
    from ..bench import latency as bench_latency

    yield heading("Figure 3: latency", "Microseconds a call, median; SQNR in the JSON beside it. Empty: not run or failed.")
    records = found.get("bench", [])
    if not records:
        yield _missing("qflash bench --output benchmarks/results (on a GPU).")
    for record in records:
        rows = [row for row in record["rows"] if row["median_us"] is not None and row["mode"] != "eager"]
        if not rows:
            continue
        labels = list(dict.fromkeys((bench_latency._label(row), row["batch"]) for row in rows))
        by = {(row["method"], bench_latency._label(row), row["batch"]): row["median_us"] for row in rows}
        header = ["method", *(f"{label} b{batch}" if batch else label for label, batch in labels)]
        methods = dict.fromkeys(row["method"] for row in rows)
        body = [[m, *(_number(by.get((m, *label)), 1) if (m, *label) in by else "" for label in labels)] for m in methods]
        yield f"<p>{html.escape(where_of(record))}, {html.escape(record['file'])}. {html.escape(record['timing'])}.</p>"
        title = f"{device_of(record)}, {rows[0]['input']} inputs"
        yield _wide(plot(functools.partial(bench_latency.draw, rows, title)))
        yield table(header, body, 1)
    for record in found.get("authors", [])[:1]:
        yield f"<p>{html.escape(where_of(record))}: the authors' public kernel. {html.escape(record['timing'])}.</p>"
        batches = ("1", "8", "64")
        body = []
        for index, method in enumerate(record["methods"]):
            cells = [f"{record['latency_us'][name][b][index]:g}" for b in batches for name in record["latency_us"]]
            body.append([method, *cells])
        yield table(["method", *(f"{name} b{b}" for b in batches for name in record["latency_us"])], body, 1)


def _utilisation_section(found: Found) -> Iterator[str]:
    yield heading("Table 2: tensor-core utilisation", "Percent of peak, batch 8; in brackets the paper's.")
    rows, record = gpu_rows(found, "profile")
    if record is None:
        yield _missing("qflash profile --output benchmarks/results (on a GPU with Nsight Compute).")
    else:
        yield f"<p>{html.escape(where_of(record))}. {html.escape(record['timing'])}.</p>"
    body = []
    for method, figures in paper_results.UTILISATION.items():
        cells = [method]
        for workload, pair in figures.items():
            row = row_of_method(rows, method, workload=workload, batch=8)
            for field, paper in zip(("imma_percent", "hmma_percent"), pair, strict=True):
                ours = _number(row[field]) if row else "not run"
                cells.append(f"{ours} ({_number(paper)})")
        body.append(cells)
    yield table(["method", "A2 IMMA", "A2 HMMA", "A7 IMMA", "A7 HMMA"], body, 1)


def _energy_section(found: Found) -> Iterator[str]:
    yield heading("Table 3: energy", "Microjoules a call on A2, batch 8; idle power counts.")
    rows, record = gpu_rows(found, "energy")
    if record is None:
        yield _missing("qflash energy --output benchmarks/results (on a GPU).")
    else:
        idle = f"idle {record['idle_watts']} W" if "idle_watts" in record else ""
        yield f"<p>{html.escape(where_of(record))}, {idle}. {html.escape(record['timing'])}.</p>"
    body = []
    reference = row_of_method(rows, "Flash-2", workload="A2", batch=8, bias=False)
    for method, paper in paper_results.ENERGY_UJ.items():
        row = row_of_method(rows, method, workload="A2", batch=8, bias=False)
        ratio = f"{row['uj'] / reference['uj']:.2f}" if row and reference else "-"
        cells = [f"{paper:.1f}", f"{paper / paper_results.ENERGY_UJ['Flash-2']:.2f}"]
        body.append([method, *cells, _number(row["uj"], 0) if row else "not run", ratio])
    for other in found.get("authors", [])[:1]:
        uj = other["energy_uj"]
        flash = uj["sdpa flash"]
        for name in ("sdpa flash", "authors' QFlash"):
            body.append([f"{name} ({where_of(other)})", "", "", f"{uj[name]}", f"{uj[name] / flash:.2f}"])
    yield table(["method", "paper µJ", "÷ FA2", "here µJ", "÷ FA2"], body, 1)


def _accuracy_section(found: Found) -> Iterator[str]:
    from ..bench import accuracy

    yield heading("SQNR and MSE", "Mean over seeds, against float64 attention; in brackets the paper's figure (batch 8).")
    records = found.get("accuracy", [])
    if not records:
        yield _missing("qflash accuracy --output FOLDER.")
        return
    record = records[0]
    yield f"<p>{html.escape(where_of(record))}.</p>"
    drawn = [row for row in record["rows"] if row["input"] == "paper" and row["batch"] == 1] or record["rows"]
    with contextlib.suppress(ValueError):  # nothing finite to draw
        yield _wide(plot(lambda: accuracy.draw_figure(drawn)))
    for kind in dict.fromkeys(row["input"] for row in record["rows"]):
        here = [row for row in record["rows"] if row["input"] == kind]
        labels = list(dict.fromkeys((row["workload"], row["batch"]) for row in here))
        for field, digits in (("sqnr_db", "SQNR, dB"), ("mse", "MSE")):
            body = []
            for title in dict.fromkeys(row["title"] for row in here):
                by = {(row["workload"], row["batch"]): row for row in here if row["title"] == title}
                cells = []
                for label in labels:
                    row = by.get(label)
                    value = row and row[field]
                    form = ".2f" if field == "sqnr_db" else ".1e"
                    text = format(value, form) if isinstance(value, float) else str(value or "-")
                    paper = row[f"paper_{field}"] if row and row["batch"] == 8 else None
                    cells.append(f"{text} ({format(paper, form)})" if paper else text)
                body.append([title, *cells])
            yield heading(f"{digits}, {kind} inputs")
            yield table(["method", *(label if batch is None else f"{label} b{batch}" for label, batch in labels)], body, 1)


def _top1_section(found: Found) -> Iterator[str]:
    yield heading("Table 5: Top-1", "Percent. ImageNet: the paper's figures, and ours where a run is there.")
    records = found.get("evaluate", [])
    ours: dict[tuple[str, str], float] = {}
    for record in reversed(records):
        for result in record["models"]:
            ours |= {(result["model"], summary["method"]): summary["top1_percent"] for summary in result["methods"]}

    def cell(model: str, names: Sequence[str], paper: float) -> str:
        value = next((ours[model, name] for name in names if (model, name) in ours), None)
        return f"{'not run' if value is None else f'{value:.2f}'} ({paper:.2f})"

    body = [["FP32", *(cell(model, ("fp32",), paper) for model, paper in paper_results.MODELS.items())]]
    for method, figures in paper_results.TOP1.items():
        cells = zip(paper_results.MODELS, figures, strict=True)
        body.append([method, *(cell(model, paper_results.METHODS[method], paper) for model, paper in cells)])
    yield table(["method", *paper_results.MODELS], body, 1)
    if not any(model in paper_results.MODELS for model, _ in ours):
        yield _missing("qflash evaluate --model all --data FOLDER --pretrained (needs ImageNet).")
    for record in records:
        for result in record["models"]:
            if result["model"] in paper_results.MODELS:
                continue
            yield heading(f"Top-1 of {result['model']}", f"{result['images']} images, {where_of(record)}, {record['file']}.")
            body = []
            for summary in result["methods"]:
                low, high = summary["top1_interval_percent"]
                against = summary.get("against_fp32", {})
                lost = f"-{against['lost']} +{against['gained']}" if against else ""
                line = [summary["title"], f"{summary['top1_percent']:.2f} [{low:.2f}, {high:.2f}]", lost]
                change = against.get("loss_change")
                body.append(
                    [*line, f"{against['mcnemar_p']:.2g}" if against else "", "" if change is None else f"{change:.1e}"]
                )
            header = ["method", "Top-1 % [95 %]", "lost, gained against FP32", "p (McNemar)", "change of the loss, nats"]
            yield table(header, body, 1)


def _ablation_sections(found: Found) -> Iterator[str]:
    from ..bench import ablation_tables

    records = found.get("ablate", [])
    if not records:
        yield heading("Appendix: ablation")
        yield _missing("qflash ablate --output FOLDER.")
        return
    for part in ablation_tables.PARTS:
        # times are a GPU's where there is one; accuracy is the newest result's
        mine = [record for record in records if any(row["part"] == part for row in record["rows"])]
        if part in ("kernel", "throughput"):
            mine.sort(key=lambda record: not on_gpu(record))
        if not mine:
            yield heading(ablation_tables.TITLES[part])
            yield _missing(f"qflash ablate --part {part} --output FOLDER.")
            continue
        record = mine[0]
        title, header, body = next((t, h, b) for name, t, h, b in ablation_tables.sections(record) if name == part)
        note = where_of(record) + (f". {record['timing']}." if part in ("kernel", "throughput") else "")
        yield heading(title, note)
        if part == "kernel":
            paper = ", ".join(f"{step} {percent} %" for step, percent in paper_results.STEP_SPEEDUP_PERCENT.items())
            yield f"<p>The paper's speedups over V0 ({html.escape(paper_results.DEVICE)}): {paper}.</p>"
            if not on_gpu(record):
                yield _missing("qflash ablate --output benchmarks/results (on a GPU) for latencies.")
        figure = ablation_tables.draw(record, part)
        if figure is not None:
            yield plot(functools.partial(ablation_tables.draw, record, part))
        yield table(header, body, 1 if part == "scales" else 2)


def render(found: Found, notes: Sequence[str] = ()) -> str:
    """Return the page for what was found."""
    items = claims(found)
    count = {mark: sum(claim.mark == mark for claim in items) for mark in ("agrees", "differs", "not run")}
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    parts = [
        "<p>Every table and figure of <em>QFlash: Bridging Quantization and Memory Efficiency in Vision Transformer "
        f"Attention</em> (IJCAI 2026) beside what was measured with this library. Made {today}.</p>",
        f'<p class="note">{count["agrees"]} claims agree, {count["differs"]} differ, {count["not run"]} were not run. '
        f"The paper measured on one {html.escape(paper_results.DEVICE)}.</p>",
        *(f'<p class="open">{html.escape(note)}</p>' for note in notes),
        heading("Claims"),
        _claim_list(items),
        *_latency_section(found),
        *_utilisation_section(found),
        *_energy_section(found),
        *_accuracy_section(found),
        *_top1_section(found),
        *_ablation_sections(found),
    ]
    return document("QFlash: the paper and what was measured", parts)


def run_report(
    output: pathlib.Path,
    *,
    results: pathlib.Path | None = None,
    gpu_results: pathlib.Path | None = None,
    console: Console | None = None,
) -> pathlib.Path:
    """Write ``report.html``; run the CPU parts first unless ``results`` holds them.

    Args:
        output: folder of the page, and of the CPU parts' own files.
        results: read accuracy, ablation and evaluation from here instead of running them.
        gpu_results: folder of GPU results; ``benchmarks/results`` if None and it is there.
        console: where to print; standard output if None.

    Returns:
        the page's path.

    Raises:
        ValueError: a folder is not there, or holds a file that is not JSON.
        ImportError: matplotlib is not installed.
    """
    require_packages("the report", "matplotlib")
    console = console or Console()
    default = pathlib.Path("benchmarks/results")
    gpu = gpu_results if gpu_results is not None else default if default.is_dir() else None
    for folder in (results, gpu):
        if folder is not None and not folder.is_dir():
            raise ValueError(f"results must be a folder, got {str(folder)!r}")
    notes: list[str] = []
    output.mkdir(parents=True, exist_ok=True)
    if results is None:
        notes = [f"Not run: {reason}" for reason in run_cpu_parts(output, console)]
    folders = [folder for folder in (results or output, gpu) if folder is not None]
    found = read_results([folder for index, folder in enumerate(folders) if folder not in folders[:index]])
    path = output / "report.html"
    path.write_text(render(found, notes), encoding="utf-8")
    items = claims(found)
    for claim in items:
        console.print(f"{claim.mark:9} {claim.text}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"Report: {path}", highlight=False, soft_wrap=True)
    return path
