"""``qflash-lab report``: every table and figure of the paper beside what was measured, as one HTML page that loads nothing.

CPU parts (accuracy, ablation, Top-1 on digits) are run or read; GPU results are read from the files that ``qflash-lab bench``,
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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console

from qflash.optional_packages import require_packages

from ..baselines import METHODS
from ..baselines.method import FLOAT
from ..bench import schema as col
from ..bench.html import anchor, contents, document, folded, heading, plot, table
from . import paper_results
from .claims import RULES, SECTIONS, Claim, claims, counts
from .plots import ratio_dots, sqnr_dots
from .results import Found, accuracy_record, gpu_rows, on_gpu, read_results, row_of_method, where_of

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


_STYLES = {"agrees": ("agrees", "✓ agrees"), "differs": ("differs", "≠ differs"), "not run": ("open", "not run")}


def _summary(items: Sequence[Claim]) -> Iterator[str]:
    """Yield what agrees, what does not and why, in a line a section."""
    count = counts(items)
    yield heading("Summary")
    yield (
        f"<p>Of {len(items)} claims {count['agrees']} agree with what was measured here, {count['differs']} differ and "
        f"{count['not run']} could not be run.</p>"
    )
    lines = []
    for section in SECTIONS:
        mine = [item for item in items if item.section == section]
        agree = sum(item.mark == "agrees" for item in mine)
        reasons = list(dict.fromkeys(item.why for item in mine if item.mark != "agrees" and item.why))
        said = "not run." if all(item.mark == "not run" for item in mine) else f"{agree} of {len(mine)} agree."
        differ = [f"{item.paper} → {item.brief}" for item in mine if item.mark == "differs" and item.brief]
        if differ:
            said += f" Paper → here: {'; '.join(differ)}."
        link = f'<a href="#{anchor(section)}">{html.escape(section)}</a>'
        lines.append(f"<li><strong>{link}</strong>: {html.escape(' '.join((said, *reasons)))}</li>")
    yield f'<ul class="summary">{"".join(lines)}</ul>'


def _claims_section(items: Sequence[Claim]) -> Iterator[str]:
    """Yield the claims by section, with buttons that show some of them."""
    count = counts(items)
    yield heading("Claims")
    yield '<ul class="summary">' + "".join(f"<li>{html.escape(rule)}</li>" for rule in RULES.values()) + "</ul>"
    yield (
        '<p class="note">Where there is a result of the authors\' code it decides, and this library is beside it; where there '
        "is none, this library decides. A mark says how two figures compare, not who is right: devices, kernels and draws "
        "differ.</p>"
    )
    buttons = [("all", f"all {len(items)}"), ("agrees", f"agree ({count['agrees']})")]
    buttons += [("differs", f"differ ({count['differs']})"), ("open", f"not run ({count['not run']})")]
    parts = []
    for name, label in buttons:
        checked = " checked" if name == "all" else ""
        parts.append(f'<input type="radio" name="show" id="show-{name}"{checked}><label for="show-{name}">{label}</label>')
    for section in SECTIONS:
        lines = []
        for claim in (item for item in items if item.section == section):
            style, mark = _STYLES[claim.mark]
            got = f"{claim.ours}; {claim.of}, {claim.where}" if claim.ours else "not run"
            cells = [("paper", claim.paper), ("here", got), ("beside", claim.also), ("note", claim.why)]
            body = "".join(f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in cells if text)
            lines.append(f'<li class="{style}"><b>{mark}</b> {html.escape(claim.text)}<dl>{body}</dl></li>')
        parts.append(f"<section>{heading(section, level=3)}<ul>{''.join(lines)}</ul></section>")
    yield f'<div class="claims">{"".join(parts)}</div>'


def _missing(command: str, where: str = "") -> str:
    """Return what to run: results in a folder, which the report is then given."""
    given = f"{command}{where}, then qflash-lab report --gpu-results DIR." if where else command
    return f'<p class="open">Not run. {html.escape(given)}</p>'


def _number(x: Any, digits: int = 2) -> str:
    return "-" if x is None else f"{x:.{digits}f}" if isinstance(x, float | int) else str(x)


def _figure(draw: Callable[[], Any]) -> Iterator[str]:
    """Yield a plot, or nothing where there is nothing to draw."""
    if draw() is not None:
        yield plot(draw)


def _paper_first(row: dict[str, Any]) -> tuple[bool, str]:
    return not row["workload"].startswith("A"), row["workload"] if row["workload"].startswith("A") else ""


_TAKEN = {
    "end-to-end": ("from fp16", "Float in, float out; quantisation is inside the clock."),
    "kernel": ("from int8 tensors", "Quantised before the clock starts; the line at 1 is PyTorch's fastest kernel from fp16."),
}


def _latency_section(found: Found) -> Iterator[str]:

    records = [record for record in found.get("bench", []) if any(row[col.MEDIAN_US] for row in record["rows"])]
    yield heading(
        "Figure 3: latency",
        "Dots right of 1 are faster than the fastest of PyTorch's 16-bit kernels that a run has. What takes floats and what "
        "takes int8 tensors is never in one plot. Tables: microseconds a call, median, CUDA-graph replay.",
    )
    if not records:
        yield _missing("qflash-lab bench --output DIR", " on a GPU")
        return

    label = col.full_label
    # the paper's workloads come before other shapes
    records.sort(key=lambda record: (not any(row["workload"] == "A1" for row in record["rows"]), record["file"]))
    for record in records:
        rows = [row for row in record["rows"] if row[col.MEDIAN_US] is not None and row["mode"] != "eager"]
        rows = sorted((row for row in rows if row["method"] not in ("sdpa math", "sdpa math fp32")), key=_paper_first)
        if not rows:
            continue
        first = rows[0]["workload"].startswith("A")
        names = list(dict.fromkeys(row["workload"] for row in rows))
        what = f"{names[0]} to {names[-1]}" if first and len(names) > 1 else names[0] if first else "Other shapes"
        what += ", with and without bias and mask" * any(row["bias"] for row in rows)
        parts = []
        for mode, (title, note) in _TAKEN.items():
            mine = [row for row in rows if row["mode"] == mode]
            if not mine:
                continue
            parts += [f"<p><strong>{what}, {title}.</strong> {note}</p>"]
            parts += list(_figure(functools.partial(ratio_dots, rows, mode, label)))
            labels = list(dict.fromkeys(map(label, mine)))
            by = {(row["method"], label(row)): row[col.MEDIAN_US] for row in mine}
            methods = list(dict.fromkeys(row["method"] for row in mine))
            body = [[name, *(_number(by.get((m, name)), 1) for m in methods)] for name in labels]
            parts.append(folded(f"{what}, {title}: microseconds", [table(["", *methods], body, 1)]))
        title = f"{where_of(record)}, {record['file']}"
        parts += _eager_table(record)
        if record is records[0]:
            yield f"<p>{html.escape(title)}.</p>"
            yield folded("How it was timed", [f"<p>{html.escape(record['timing'])}.</p>"])
            yield from parts
        else:
            if record["timing"] != records[0]["timing"]:
                parts.append(folded("How it was timed", [f"<p>{html.escape(record['timing'])}.</p>"]))
            yield folded(f"{what}: {title}", parts)
    for record in found.get("authors", [])[:1]:
        batches = ("1", "8", "64")
        body = []
        for name, times in record["latency_us"].items():
            for batch in batches:
                body.append([f"{name} b{batch}", *(f"{us:g}" for us in times[batch])])
        note = f"<p>{html.escape(where_of(record))}. {html.escape(record['timing'])}.</p>"
        yield folded("The authors' public kernel: microseconds", [note, table(["", *record["methods"]], body, 1)])


def _eager_table(record: dict[str, Any]) -> list[str]:
    """Return calls without a graph as a table, or nothing where a result has none."""
    rows = [row for row in record["rows"] if row["mode"] == "eager" and row[col.MEDIAN_US] is not None]
    if not rows:
        return []
    body = [[row["method"], _number(row[col.MEDIAN_US], 1), _number(row[col.ISSUE_US], 1)] for row in rows]
    what = ", ".join(dict.fromkeys(f"{row['workload']} b{row['batch']}" for row in rows))
    return [f"<p><strong>{html.escape(what)}, eager calls</strong></p>", table(["", "until done, µs", "issuing, µs"], body, 1)]


def _utilisation_section(found: Found) -> Iterator[str]:
    yield heading(
        "Table 2: tensor-core utilisation",
        "Cycles in which the tensor pipe worked on int8 (IMMA) and 16-bit (HMMA) products, percent, batch 8; in brackets the "
        "paper's.",
    )
    rows, record = gpu_rows(found, "profile")
    if record is None:
        yield _missing("qflash-lab profile --output DIR", " on a GPU with Nsight Compute")
    else:
        yield f"<p>{html.escape(where_of(record))}. {html.escape(record['timing'])}.</p>"
    body = []
    for method, figures in paper_results.UTILISATION.items():
        cells = [method]
        for workload, pair in figures.items():
            row = row_of_method(rows, method, workload=workload, batch=8)
            for field, paper in zip((col.IMMA_PERCENT, col.HMMA_PERCENT), pair, strict=True):
                ours = _number(row[field]) if row else "not run"
                cells.append(f"{ours} ({_number(paper)})")
        body.append(cells)
    yield table(["method", "A2 IMMA", "A2 HMMA", "A7 IMMA", "A7 HMMA"], body, 1)


def _energy_section(found: Found) -> Iterator[str]:
    yield heading(
        "Table 3: energy",
        "Microjoules a call on A2, batch 8; idle power counts. All but PyTorch's and the last start from int8 tensors.",
    )
    rows, record = gpu_rows(found, "energy")
    if record is None:
        yield _missing("qflash-lab energy --output DIR", " on a GPU")
    else:
        idle = f", idle {record['idle_watts']} W" if "idle_watts" in record else ""
        yield f"<p>{html.escape(where_of(record))}{idle}. {html.escape(record['timing'])}.</p>"
    rows = [row for row in rows if (row["workload"], row["batch"], row["bias"]) == ("A2", 8, False) and row[col.UJ] is not None]
    uj = {row["method"]: row[col.UJ] for row in rows}
    flash, least = uj.get(col.SDPA_FLASH), min((uj[name] for name in col.FP16 if name in uj), default=None)
    body = []

    def line(label: str, paper: float | None, here: float | None) -> None:
        theirs = ["", ""] if paper is None else [f"{paper:.1f}", f"{paper / paper_results.ENERGY_UJ['Flash-2']:.2f}"]
        ratios = [_number(here / other) if here and other else "-" for other in (flash, least)]
        body.append([label, *theirs, "not run" if here is None else f"{here:.0f}", *ratios])

    for method, paper in paper_results.ENERGY_UJ.items():
        row = row_of_method(rows, method)
        line("QFlash (this library)" if method == "QFlash" else method, paper, row[col.UJ] if row else None)
    for name, label in ((col.SDPA_CUDNN, "cuDNN"), (col.SDPA_EFFICIENT, "memory-efficient"), ("qflash", "QFlash from fp16")):
        if name in uj:
            line(label, None, uj[name])
    yield table(["method", "paper µJ", "÷ FA2", "here µJ", "÷ FA2", "÷ least of 16 bits"], body, 1)
    for other in found.get("authors", [])[:1]:
        theirs, reference = other["energy_uj"]["authors' QFlash"], other["energy_uj"][col.SDPA_FLASH]
        yield (
            f"<p>The authors' kernel, {html.escape(where_of(other))}: {theirs} µJ, {theirs / reference:.2f} of "
            f"FlashAttention-2's {reference} in that run.</p>"
        )


def _accuracy_section(found: Found) -> Iterator[str]:
    yield heading(
        "Table 4: SQNR and MSE",
        "Against float64 attention, mean over seeds; in brackets and as crosses the paper's figure (batch 8). Bars are the "
        "range over the seeds; round: integer-only softmax.",
    )
    record = accuracy_record(found)
    if record is None:
        yield _missing("qflash-lab accuracy --output FOLDER.")
        return
    yield f"<p>{html.escape(where_of(record))}.</p>"
    quantised = [row for row in record["rows"] if METHODS[row["method"]].query_granularity != FLOAT]
    drawn = [row for row in quantised if row["input"] == "paper" and row["batch"] == 8]
    yield from _figure(functools.partial(sqnr_dots, drawn, ("A2", "A7")))
    for kind in dict.fromkeys(row["input"] for row in record["rows"]):
        here = [row for row in record["rows"] if row["input"] == kind]
        parts = [part for field in (col.SQNR_DB, "mse") for part in _accuracy_table(here, field)]
        if kind == "paper":
            yield from parts
        else:
            yield folded(f"{kind} inputs", parts)


def _accuracy_table(rows: Sequence[dict[str, Any]], field: str) -> Iterator[str]:
    labels = list(dict.fromkeys((row["workload"], row["batch"]) for row in rows))
    form = ".2f" if field == col.SQNR_DB else ".1e"
    body = []
    for title in dict.fromkeys(row["title"] for row in rows):
        by = {(row["workload"], row["batch"]): row for row in rows if row["title"] == title}
        cells = []
        for label in labels:
            row = by.get(label)
            value = row and row[field]
            text = format(value, form) if isinstance(value, float) else str(value or "-")
            paper = row[f"paper_{field}"] if row and row["batch"] == 8 else None
            cells.append(f"{text} ({format(paper, form)})" if paper else text)
        body.append([title, *cells])
    yield f"<p><strong>{'SQNR, dB' if field == col.SQNR_DB else 'MSE'}; {rows[0]['input']} inputs</strong></p>"
    yield table(["method", *(label if batch is None else f"{label} b{batch}" for label, batch in labels)], body, 1)


def _top1_section(found: Found) -> Iterator[str]:
    yield heading(
        "Table 5: Top-1", "Percent, ImageNet. The paper's figures; where there is a run, ours with the paper's in brackets."
    )
    records = found.get("evaluate", [])
    ours: dict[tuple[str, str], float] = {}
    for record in reversed(records):
        for result in record["models"]:
            ours |= {(result["model"], summary["method"]): summary["top1_percent"] for summary in result["methods"]}

    some = any(model in paper_results.MODELS for model, _ in ours)

    def cell(model: str, names: Sequence[str], paper: float) -> str:
        value = next((ours[model, name] for name in names if (model, name) in ours), None)
        if not some:
            return f"{paper:.2f}"
        return f"{'not run' if value is None else f'{value:.2f}'} ({paper:.2f})"

    body = [["FP32", *(cell(model, ("fp32",), paper) for model, paper in paper_results.MODELS.items())]]
    for method, figures in paper_results.TOP1.items():
        cells = zip(paper_results.MODELS, figures, strict=True)
        body.append([method, *(cell(model, paper_results.METHODS[method], paper) for model, paper in cells)])
    yield table(["method", *paper_results.MODELS], body, 1)
    if not some:
        yield _missing("qflash-lab evaluate --model all --data FOLDER --pretrained (needs ImageNet).")
    seen: set[str] = set()
    for record in records:
        for result in record["models"]:
            if result["model"] in paper_results.MODELS or result["model"] in seen:
                continue
            seen.add(result["model"])
            data = result["run"]["data"]["name"]
            yield heading(
                f"Instead: Top-1 of {result['model']}",
                f"{result['images']} images of {data}: no statement about ImageNet. {where_of(record)}.",
                3,
            )
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
    from ..bench import ablation_tables, tables

    yield heading("Appendix: step by step, scales, division, granularity")
    records = found.get("ablate", [])
    if not records:
        yield _missing("qflash-lab ablate --output FOLDER.")
        return
    for part in ablation_tables.PARTS:
        # times are a GPU's where there is one; accuracy is the newest result's
        mine = [record for record in records if any(row["part"] == part for row in record["rows"])]
        if part in ("kernel", "throughput"):
            mine.sort(key=lambda record: not on_gpu(record))
        if not mine:
            yield heading(ablation_tables.TITLES[part], level=3)
            yield _missing(f"qflash-lab ablate --part {part} --output FOLDER.")
            continue
        record = mine[0]
        title, frame = next((title, frame) for name, title, frame in ablation_tables.sections(record) if name == part)
        taken = f". {record['timing'].partition(';')[0]}."
        yield heading(title, where_of(record) + taken * (on_gpu(record) and part in ("kernel", "throughput")), 3)
        if part == "kernel":
            paper = ", ".join(f"{step} {percent} %" for step, percent in paper_results.STEP_SPEEDUP_PERCENT.items())
            yield f"<p>The paper's speedups over V0 ({html.escape(paper_results.DEVICE)}): {paper}.</p>"
            if not on_gpu(record):
                yield _missing("qflash-lab ablate --part kernel --output DIR", " on a GPU for latencies")
        figure = ablation_tables.draw(record, part)
        if figure is not None:
            yield plot(functools.partial(ablation_tables.draw, record, part))
        laid = tables.page(frame, 1 if part == "scales" else 2)
        yield laid if len(frame) <= 12 else folded(f"{title}: table", [laid])


def render(found: Found, notes: Sequence[str] = ()) -> str:
    """Return the page for what was found."""
    items = claims(found)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    intro = [
        "<p>Every table and figure of <em>QFlash: Bridging Quantization and Memory Efficiency in Vision Transformer "
        f"Attention</em> (IJCAI 2026) beside what was measured with this library. The paper measured on one "
        f"{html.escape(paper_results.DEVICE)}. Made {today}.</p>",
        *(f'<p class="open">{html.escape(note)}</p>' for note in notes),
        *_summary(items),
    ]
    rest = [
        *_claims_section(items),
        *_latency_section(found),
        *_utilisation_section(found),
        *_energy_section(found),
        *_accuracy_section(found),
        *_top1_section(found),
        *_ablation_sections(found),
    ]
    return document("QFlash: the paper and what was measured", [*intro, contents(rest), *rest])


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
