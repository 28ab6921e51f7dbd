"""``qflash report``: every table and figure of the paper beside what was measured, as one HTML page that loads nothing.

CPU parts (accuracy, ablation, Top-1 on digits) are run or read; GPU results are read from the files that ``qflash bench``,
``energy``, ``profile`` and ``ablate`` wrote. A file is known by what it says it holds, not by its name. What is not there is
named as not run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import html
import io
import json
import pathlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console

from ..bench import paper_results
from ..optional_packages import require_packages
from .html import document, heading, plot, table

CPU_PARTS = ("accuracy", "ablate", "evaluate")
_KINDS = {
    "latency of attention with its accuracy": "bench",
    "energy of one attention call": "energy",
    "tensor-core utilisation of one attention call": "profile",
    "ablation of the integer attention": "ablate",
    "SQNR and MSE of attention methods": "accuracy",
    "the paper authors' public kernel": "authors",
}
_EVALUATE_IMAGES = 64
_TOLERANCE_DB = 1.0

Record = dict[str, Any]
Found = dict[str, list[Record]]


# --- what there is ----------------------------------------------------------------------------------------------------


def kind_of(record: Any) -> str | None:
    """Return which command wrote a result, by its ``what`` (or its shape), or None."""
    if isinstance(record, list):
        return "verify" if record and isinstance(record[0], dict) and "float_instructions" in record[0] else None
    if not isinstance(record, dict):
        return None
    if "conditions" in record and "models" in record:
        return "evaluate"
    what = str(record.get("what", ""))
    return next((kind for beginning, kind in _KINDS.items() if what.startswith(beginning)), None)


def read_results(folders: Sequence[pathlib.Path]) -> Found:
    """Read every known result in ``folders``, newest first within a kind.

    Raises:
        ValueError: a folder is not there, or a file is not JSON.
    """
    found: Found = {}
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"results must be a folder, got {str(folder)!r}")
        for path in sorted(folder.glob("*.json")):
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path} is not JSON: {error}") from error
            kind = kind_of(record)
            if kind is not None:
                record = {"rows": record} if isinstance(record, list) else record
                found.setdefault(kind, []).append(record | {"file": path.name})
    for records in found.values():
        records.sort(key=_date, reverse=True)
    return found


def _date(record: Record) -> str:
    place = record.get("environment") or record.get("conditions") or record
    return str(place.get("date", "no date"))[:10]


def _device(record: Record) -> str:
    place = record.get("environment") or record.get("conditions") or record
    return str(place.get("device", "?"))


def _on_gpu(record: Record) -> bool:
    return record.get("environment", {}).get("device_type") == "cuda"


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


# --- rows by the paper's names -----------------------------------------------------------------------------------------


def _of_method(rows: Sequence[Record], method: str, **wanted: Any) -> Record | None:
    """Return the row of a method of the paper in which all ``wanted`` fields agree and that did not fail."""
    for name in paper_results.METHODS[method]:
        for row in rows:
            if row["method"] == name and not row.get("error") and all(row.get(key) == x for key, x in wanted.items()):
                return row
    return None


def _gpu_rows(found: Found, kind: str) -> tuple[list[Record], Record | None]:
    """Return the rows of a kind's newest GPU results (older files fill what newer ones lack), and the newest record."""
    records = [record for record in found.get(kind, []) if _on_gpu(record)]
    return [row for record in records for row in record["rows"]], records[0] if records else None


# --- claims -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Claim:
    """One statement of the paper beside what was measured.

    Attributes:
        text: the statement and where it stands.
        paper: its figure.
        ours: what was measured; None if nothing was.
        where: device and date.
        agrees: None where a comparison is not meaningful or was not made.
        why: the reason for a difference, or what is missing.
    """

    text: str
    paper: str
    ours: str | None
    where: str
    agrees: bool | None
    why: str

    @property
    def mark(self) -> str:
        """``agrees``, ``differs``, ``measured`` (no verdict) or ``not run``."""
        if self.ours is None:
            return "not run"
        return "measured" if self.agrees is None else "agrees" if self.agrees else "differs"


def _where(record: Record | None) -> str:
    return "" if record is None else f"{_device(record)}, {_date(record)}"


def _speed_claims(found: Found) -> Iterator[Claim]:
    rows, record = _gpu_rows(found, "bench")
    for (family, batch), paper in paper_results.SPEEDUP_OVER_I_VIT.items():
        ratios = {}
        for workload in paper_results.FAMILIES[family]:
            options: dict[str, Any] = {"workload": workload, "batch": batch, "bias": False, "causal": False}
            ours = _of_method([row for row in rows if row["mode"] != "eager"], "QFlash", **options)
            theirs = _of_method([row for row in rows if row["mode"] != "eager"], "I-ViT", **options)
            if ours and theirs:
                ratios[workload] = theirs["median_us"] / ours["median_us"]
        text = f"Up to {paper} times as fast as I-ViT on {family} at batch {batch} (abstract, Figure 3)"
        if not ratios:
            why = "Needs a GPU run of qflash bench with I-ViT's kernels."
            yield Claim(text, f"{paper} times", None, "", None, why)
            continue
        best = max(ratios, key=lambda name: ratios[name])
        why = (
            f"Other GPU than the paper's ({paper_results.DEVICE}); our kernel, DEFAULT's arithmetic; I-ViT in Triton, not TVM."
        )
        ours_text = f"{ratios[best]:.2f} times ({best}; range {min(ratios.values()):.2f} to {max(ratios.values()):.2f})"
        yield Claim(text, f"{paper} times", ours_text, _where(record), ratios[best] >= 0.9 * paper, why)


def _fp16_claim(found: Found) -> Claim:
    text = "Generally faster than or comparable to FP16 and mixed-precision kernels (section 5.1)"
    rows, record = _gpu_rows(found, "bench")
    ratios = [
        row["ratio"]
        for row in rows
        if row["method"] == "qflash int8" and row["mode"] == "kernel" and row["batch"] in (1, 8) and row["ratio"]
        and row["workload"][:1] == "A" and not row["bias"] and not row["causal"]
    ]  # fmt: skip
    authors = found.get("authors", [])
    why = ""
    if authors:
        latency = authors[0]["latency_us"]
        slower = sum(us[2] > min(us[:2]) for workload in latency.values() for batch in ("1", "8") for us in (workload[batch],))
        why = (
            f"The authors' own kernel, {_where(authors[0])}: slower than the faster FP16 kernel in {slower} of 14 cases "
            f"(A2, batch 8: {latency['A2']['8'][2]} µs against {min(latency['A2']['8'][:2])} µs)."
        )
    if not ratios:
        return Claim(text, "Figure 3", None, "", None, ("Needs a GPU run of qflash bench. " + why).strip())
    ours = f"fastest FP16 kernel's time ÷ ours: {min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}"
    return Claim(text, "Figure 3", ours, _where(record), min(ratios) >= 0.95, why)


def _utilisation_claim(found: Found) -> Claim:
    text = "QFlash uses less of the int8 tensor peak than FlashAttention-2 of the fp16 peak on A2 (Table 2)"
    paper = "IMMA 8.00 % against HMMA 13.08 %"
    rows, record = _gpu_rows(found, "profile")
    ours = _of_method(rows, "QFlash", workload="A2", batch=8)
    flash = _of_method(rows, "Flash-2", workload="A2", batch=8)
    if not ours or not flash or ours["imma_percent"] is None or flash["hmma_percent"] is None:
        return Claim(text, paper, None, "", None, "Needs a GPU run of qflash profile (Nsight Compute).")
    got = f"IMMA {ours['imma_percent']:.2f} % against HMMA {flash['hmma_percent']:.2f} %"
    why = f"Percent of another GPU's peak than the paper's ({paper_results.DEVICE}); only the order is comparable."
    return Claim(text, paper, got, _where(record), ours["imma_percent"] < flash["hmma_percent"], why)


def _energy_claims(found: Found) -> Iterator[Claim]:
    paper = 100 * (paper_results.ENERGY_UJ["QFlash"] / paper_results.ENERGY_UJ["Flash-2"] - 1)
    text = "Less energy than FP16 FlashAttention-2, A2, batch 8 (abstract, Table 3)"
    authors = found.get("authors", [])
    if authors:
        uj = authors[0]["energy_uj"]
        theirs, flash = uj["authors' QFlash"], uj["sdpa flash"]
        yield Claim(
            text + ": the authors' own kernel", f"{paper:+.1f} %",
            f"{100 * (theirs / flash - 1):+.1f} % ({theirs} against {flash} µJ, idle power included)",
            _where(authors[0]), theirs < flash, "On this larger chip it takes longer than FP16.",
        )  # fmt: skip
    rows, record = _gpu_rows(found, "energy")
    ours = _of_method(rows, "QFlash", workload="A2", batch=8, bias=False)
    reference = _of_method(rows, "Flash-2", workload="A2", batch=8, bias=False)
    if not ours or not reference:
        yield Claim(text + ": this library's", f"{paper:+.1f} %", None, "", None, "Needs a GPU run of qflash energy.")
        return
    change = 100 * (ours["uj"] / reference["uj"] - 1)
    got = f"{change:+.1f} % ({ours['uj']:.0f} against {reference['uj']:.0f} µJ)"
    why = (
        f"Another GPU than the paper's ({paper_results.DEVICE}), another kernel; energy by NVML's counter, idle power included."
    )
    yield Claim(text + ": this library's", f"{paper:+.1f} %", got, _where(record), ours["uj"] < reference["uj"], why)


_ACCURACY_REASONS = {
    "qflash-paper": "Algorithm 1 in exact fixed point as printed; an independent emulation gives the same within 0.02 dB. "
    "The paper's figure comes from its own kernel.",
    "i-vit": "I-ViT knows of the scores' scale only round(1 / S), which moves the figure by several dB from draw to draw; the "
    "paper gives one figure and no seed (docs/baselines.md).",
    "qattn": "The formula alone. With bfloat16 inputs and an int8 output around it the paper's figure comes out within 0.3 dB; "
    "which steps the paper's run took is not printed (qflash.baselines.qattn).",
}


def _accuracy_claims(found: Found) -> Iterator[Claim]:
    from ..bench.paper_results import TABLE4

    records = found.get("accuracy", [])
    rows = [row | {"record": record} for record in records for row in record["rows"] if row["input"] == "paper"]
    for (workload, method), (paper, _) in TABLE4.items():
        mine = [row for row in rows if (row["workload"], row["method"]) == (workload, method) and row["sqnr_db"] is not None]
        mine.sort(key=lambda row: row["batch"] != 8)
        text = f"SQNR of {method} on {workload}, batch 8 (table of SQNR and MSE)"
        if not mine:
            yield Claim(text, f"{paper:.2f} dB", None, "", None, "No result for this method.")
            continue
        got = mine[0]["sqnr_db"]
        agrees = abs(got - paper) <= _TOLERANCE_DB
        why = f"Judged by {_TOLERANCE_DB:g} dB." if agrees else _ACCURACY_REASONS.get(method, "")
        yield Claim(text, f"{paper:.2f} dB", f"{got:.2f} dB, batch {mine[0]['batch']}", _where(mine[0]["record"]), agrees, why)
    gains = []
    for workload in ("A2", "A7"):
        # the newest record is first
        by = {row["method"]: row["sqnr_db"] for row in reversed(rows) if row["workload"] == workload and row["batch"] == 8}
        if by.get("qflash-paper") is not None and by.get("i-vit") is not None:
            gains.append((by["qflash-paper"] - by["i-vit"], by["qflash-default"] - by["i-vit"]))
    text = "SQNR better than I-ViT's by up to 6.7 dB (section 1)"
    if gains:
        got = f"PAPER {max(x for x, _ in gains):.1f} dB, DEFAULT {max(x for _, x in gains):.1f} dB"
        agrees = max(x for x, _ in gains) >= 6.7 - _TOLERANCE_DB
        yield Claim(
            text, "6.7 dB", got, _where(records[0]), agrees, "" if agrees else "Our PAPER and I-ViT, both from their papers."
        )
    else:
        yield Claim(text, "6.7 dB", None, "", None, "No accuracy result.")


def _top1_claims(found: Found) -> Iterator[Claim]:
    records = found.get("evaluate", [])
    named = [result for record in records for result in record["models"] if result["model"] in paper_results.MODELS]
    text = "Top-1 on ImageNet close to FP32 on ViT and DeiT, lower on Swin (Table 5)"
    if not named:
        why = "Neither ImageNet nor pretrained weights could be had: qflash evaluate --model all --data FOLDER --pretrained."
        yield Claim(text, "QFlash -2.0 to +1.7 points", None, "", None, why)
    digits = [(record, result) for record in records for result in record["models"] if result["model"].startswith("digits")]
    for name in dict.fromkeys(result["model"] for _, result in digits):
        record, result = max(((a, b) for a, b in digits if b["model"] == name), key=lambda pair: pair[1]["images"])
        top1 = {summary["method"]: summary["top1_percent"] for summary in result["methods"]}
        if "qflash-default" not in top1 or "fp32" not in top1:
            continue
        ours = ", ".join(
            f"{method} {top1[method]:.2f} %" for method in ("fp32", "qflash-default", "qflash-paper") if method in top1
        )
        yield Claim(
            f"Instead: Top-1 of {name} on {result['images']} held-out digits", "-", ours, _where(record),
            top1["qflash-default"] >= top1["fp32"] - 0.3, "Small models on an easy task: no statement about ImageNet.",
        )  # fmt: skip


def _ablation_claims(found: Found) -> Iterator[Claim]:
    rows, record = _gpu_rows(found, "ablate")
    speed = {row["label"]: row["speedup"] for row in rows if row["part"] == "kernel" and row.get("speedup")}
    for step, percent in paper_results.STEP_SPEEDUP_PERCENT.items():
        name = "V4 paper" if step == "V4" else step
        text = f"{step} faster than V0, A2, batch 1024 (appendix A, Figure 4)"
        if name not in speed:
            yield Claim(text, f"{percent} %", None, "", None, "Needs a GPU run of qflash ablate.")
            continue
        got = f"{100 * (speed[name] - 1):+.1f} % (V0's time ÷ {step}'s: {speed[name]:.2f})"
        why = "V0 to V3: one plain Triton kernel; V4: this library's kernel with the paper's recipe. The paper does not say "
        why += "whether a speedup of 41 % is a ratio of 1.41 or 41 % less time; read as the former."
        yield Claim(text, f"{percent} %", got, _where(record), speed[name] > 1, why)
    scales_from = _with_part(found, "scales")
    text = "Scale accumulation collapses with the number of tiles, scale release does not (appendix B.1)"
    if scales_from:
        by = {(r["group"], r["tiles"]): float(r["sqnr_db"]["mean"]) for r in scales_from["rows"] if r["part"] == "scales"}
        wide, release = by["scale accumulation, 64 bits", 8], by["scale release (paper)", 8]
        got = f"8 tiles: {wide:.1f} dB (64-bit sums) against {release:.1f} dB"
        why = f"In 32-bit sums {by['scale accumulation, 32 bits', 2]:.1f} dB at 2 tiles."
        yield Claim(text, "plotted only", got, _where(scales_from), release - wide > 10, why)
    else:
        yield Claim(text, "plotted only", None, "", None, "No ablation result.")
    throughput = [row for row in rows if row["part"] == "throughput"]
    text = "Integer division has far lower throughput than multiply and shift on a GPU (appendix B.2)"
    gops = {row["label"]: row["gops"] for row in throughput}
    if gops:
        ratio = gops["multiply and shift"] / gops["divide"]
        yield Claim(text, "plotted only", f"{ratio:.1f} times lower", _where(record), ratio > 2, "")
    else:
        yield Claim(text, "plotted only", None, "", None, "Needs a GPU run of qflash ablate.")
    grid_from = _with_part(found, "granularity")
    text = "Per-token scales do not fit integer-only fused attention (C3, appendix B.3)"
    if grid_from:
        grid = {
            row["label"]: float(row["sqnr_db"]["mean"])
            for row in grid_from["rows"]
            if (row["part"], row["group"], row["input"]) == ("granularity", "default", "outliers")
        }
        coarse, fine = grid["Q tensor, K tensor, V tensor"], grid["Q token, K token, V channel"]
        got = f"they run in integers here; outlier inputs, DEFAULT: {coarse:.1f} dB per tensor, {fine:.1f} dB per token"
        why = "Scores are brought to one fixed-point unit per row before the maximum is taken (docs/algorithm.md, step 2)."
        yield Claim(text, "“limited in practice”", got, _where(grid_from), fine <= coarse, why)
    else:
        yield Claim(text, "“limited in practice”", None, "", None, "No ablation result.")


def _with_part(found: Found, part: str) -> Record | None:
    """Return the newest ablation that holds a part."""
    records = found.get("ablate", [])
    return next((record for record in records if any(row["part"] == part for row in record["rows"])), None)


def _integer_claim(found: Found) -> Claim:
    text = "The whole kernel runs in the integer domain (abstract, section 3): this library's, int8 in and out"
    reports = found.get("verify", [])
    if not reports:
        return Claim(text, "integer-only", None, "", None, "qflash verify --format json > FILE in the results folder.")
    rows = [row for row in reports[0]["rows"] if row.get("integer", True)]
    clean = sum(not row["float_instructions"] and not row.get("error") for row in rows)
    got = f"{clean} of {len(rows)} compiled kernels hold no float instruction (qflash verify, {reports[0]['file']})"
    why = "The authors' public kernel holds some: integer division lowers to I2F and MUFU.RCP (docs/reproduction.md)."
    return Claim(text, "integer-only", got, "compiled for six NVIDIA targets", clean == len(rows), why)


def claims(found: Found) -> list[Claim]:
    """Return every claim of the paper that results can speak to, in the paper's order."""
    return [
        _integer_claim(found),
        *_speed_claims(found),
        _fp16_claim(found),
        _utilisation_claim(found),
        *_energy_claims(found),
        *_accuracy_claims(found),
        *_top1_claims(found),
        *_ablation_claims(found),
    ]


# --- the page -----------------------------------------------------------------------------------------------------------


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
        yield f"<p>{html.escape(_where(record))}, {html.escape(record['file'])}. {html.escape(record['timing'])}.</p>"
        title = f"{_device(record)}, {rows[0]['input']} inputs"
        yield _wide(plot(functools.partial(bench_latency.draw, rows, title)))
        yield table(header, body, 1)
    for record in found.get("authors", [])[:1]:
        yield f"<p>{html.escape(_where(record))}: the authors' public kernel. {html.escape(record['timing'])}.</p>"
        batches = ("1", "8", "64")
        body = []
        for index, method in enumerate(record["methods"]):
            cells = [f"{record['latency_us'][name][b][index]:g}" for b in batches for name in record["latency_us"]]
            body.append([method, *cells])
        yield table(["method", *(f"{name} b{b}" for b in batches for name in record["latency_us"])], body, 1)


def _utilisation_section(found: Found) -> Iterator[str]:
    yield heading("Table 2: tensor-core utilisation", "Percent of peak, batch 8; in brackets the paper's.")
    rows, record = _gpu_rows(found, "profile")
    if record is None:
        yield _missing("qflash profile --output benchmarks/results (on a GPU with Nsight Compute).")
    else:
        yield f"<p>{html.escape(_where(record))}. {html.escape(record['timing'])}.</p>"
    body = []
    for method, figures in paper_results.UTILISATION.items():
        cells = [method]
        for workload, pair in figures.items():
            row = _of_method(rows, method, workload=workload, batch=8)
            for field, paper in zip(("imma_percent", "hmma_percent"), pair, strict=True):
                ours = _number(row[field]) if row else "not run"
                cells.append(f"{ours} ({_number(paper)})")
        body.append(cells)
    yield table(["method", "A2 IMMA", "A2 HMMA", "A7 IMMA", "A7 HMMA"], body, 1)


def _energy_section(found: Found) -> Iterator[str]:
    yield heading("Table 3: energy", "Microjoules a call on A2, batch 8; idle power counts.")
    rows, record = _gpu_rows(found, "energy")
    if record is None:
        yield _missing("qflash energy --output benchmarks/results (on a GPU).")
    else:
        idle = f"idle {record['idle_watts']} W" if "idle_watts" in record else ""
        yield f"<p>{html.escape(_where(record))}, {idle}. {html.escape(record['timing'])}.</p>"
    body = []
    reference = _of_method(rows, "Flash-2", workload="A2", batch=8, bias=False)
    for method, paper in paper_results.ENERGY_UJ.items():
        row = _of_method(rows, method, workload="A2", batch=8, bias=False)
        ratio = f"{row['uj'] / reference['uj']:.2f}" if row and reference else "-"
        cells = [f"{paper:.1f}", f"{paper / paper_results.ENERGY_UJ['Flash-2']:.2f}"]
        body.append([method, *cells, _number(row["uj"], 0) if row else "not run", ratio])
    for other in found.get("authors", [])[:1]:
        uj = other["energy_uj"]
        flash = uj["sdpa flash"]
        for name in ("sdpa flash", "authors' QFlash"):
            body.append([f"{name} ({_where(other)})", "", "", f"{uj[name]}", f"{uj[name] / flash:.2f}"])
    yield table(["method", "paper µJ", "÷ FA2", "here µJ", "÷ FA2"], body, 1)


def _accuracy_section(found: Found) -> Iterator[str]:
    from ..bench import accuracy

    yield heading("SQNR and MSE", "Mean over seeds, against float64 attention; in brackets the paper's figure (batch 8).")
    records = found.get("accuracy", [])
    if not records:
        yield _missing("qflash accuracy --output FOLDER.")
        return
    record = records[0]
    yield f"<p>{html.escape(_where(record))}.</p>"
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
            yield heading(f"Top-1 of {result['model']}", f"{result['images']} images, {_where(record)}, {record['file']}.")
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
            mine.sort(key=lambda record: not _on_gpu(record))
        if not mine:
            yield heading(ablation_tables.TITLES[part])
            yield _missing(f"qflash ablate --part {part} --output FOLDER.")
            continue
        record = mine[0]
        title, header, body = next((t, h, b) for name, t, h, b in ablation_tables.sections(record) if name == part)
        note = _where(record) + (f". {record['timing']}." if part in ("kernel", "throughput") else "")
        yield heading(title, note)
        if part == "kernel":
            paper = ", ".join(f"{step} {percent} %" for step, percent in paper_results.STEP_SPEEDUP_PERCENT.items())
            yield f"<p>The paper's speedups over V0 ({html.escape(paper_results.DEVICE)}): {paper}.</p>"
            if not _on_gpu(record):
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
