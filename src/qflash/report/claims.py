"""The paper's claims beside what was measured."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any

from ..bench import paper_results
from .results import Found, Record, gpu_rows, row_of_method, where_of

_TOLERANCE_DB = 1.0


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


def _speed_claims(found: Found) -> Iterator[Claim]:
    rows, record = gpu_rows(found, "bench")
    for (family, batch), paper in paper_results.SPEEDUP_OVER_I_VIT.items():
        ratios = {}
        for workload in paper_results.FAMILIES[family]:
            options: dict[str, Any] = {"workload": workload, "batch": batch, "bias": False, "causal": False}
            ours = row_of_method([row for row in rows if row["mode"] != "eager"], "QFlash", **options)
            theirs = row_of_method([row for row in rows if row["mode"] != "eager"], "I-ViT", **options)
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
        yield Claim(text, f"{paper} times", ours_text, where_of(record), ratios[best] >= 0.9 * paper, why)


def _fp16_claim(found: Found) -> Claim:
    text = "Generally faster than or comparable to FP16 and mixed-precision kernels (section 5.1)"
    rows, record = gpu_rows(found, "bench")
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
            f"The authors' own kernel, {where_of(authors[0])}: slower than the faster FP16 kernel in {slower} of 14 cases "
            f"(A2, batch 8: {latency['A2']['8'][2]} µs against {min(latency['A2']['8'][:2])} µs)."
        )
    if not ratios:
        return Claim(text, "Figure 3", None, "", None, ("Needs a GPU run of qflash bench. " + why).strip())
    ours = f"fastest FP16 kernel's time ÷ ours: {min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}"
    return Claim(text, "Figure 3", ours, where_of(record), min(ratios) >= 0.95, why)


def _utilisation_claim(found: Found) -> Claim:
    text = "QFlash uses less of the int8 tensor peak than FlashAttention-2 of the fp16 peak on A2 (Table 2)"
    paper = "IMMA 8.00 % against HMMA 13.08 %"
    rows, record = gpu_rows(found, "profile")
    ours = row_of_method(rows, "QFlash", workload="A2", batch=8)
    flash = row_of_method(rows, "Flash-2", workload="A2", batch=8)
    if not ours or not flash or ours["imma_percent"] is None or flash["hmma_percent"] is None:
        return Claim(text, paper, None, "", None, "Needs a GPU run of qflash profile (Nsight Compute).")
    got = f"IMMA {ours['imma_percent']:.2f} % against HMMA {flash['hmma_percent']:.2f} %"
    why = f"Percent of another GPU's peak than the paper's ({paper_results.DEVICE}); only the order is comparable."
    return Claim(text, paper, got, where_of(record), ours["imma_percent"] < flash["hmma_percent"], why)


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
            where_of(authors[0]), theirs < flash, "On this larger chip it takes longer than FP16.",
        )  # fmt: skip
    rows, record = gpu_rows(found, "energy")
    ours = row_of_method(rows, "QFlash", workload="A2", batch=8, bias=False)
    reference = row_of_method(rows, "Flash-2", workload="A2", batch=8, bias=False)
    if not ours or not reference:
        yield Claim(text + ": this library's", f"{paper:+.1f} %", None, "", None, "Needs a GPU run of qflash energy.")
        return
    change = 100 * (ours["uj"] / reference["uj"] - 1)
    got = f"{change:+.1f} % ({ours['uj']:.0f} against {reference['uj']:.0f} µJ)"
    why = (
        f"Another GPU than the paper's ({paper_results.DEVICE}), another kernel; energy by NVML's counter, idle power included."
    )
    yield Claim(text + ": this library's", f"{paper:+.1f} %", got, where_of(record), ours["uj"] < reference["uj"], why)


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
        yield Claim(
            text, f"{paper:.2f} dB", f"{got:.2f} dB, batch {mine[0]['batch']}", where_of(mine[0]["record"]), agrees, why
        )
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
            text, "6.7 dB", got, where_of(records[0]), agrees, "" if agrees else "Our PAPER and I-ViT, both from their papers."
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
            f"Instead: Top-1 of {name} on {result['images']} held-out digits", "-", ours, where_of(record),
            top1["qflash-default"] >= top1["fp32"] - 0.3, "Small models on an easy task: no statement about ImageNet.",
        )  # fmt: skip


def _ablation_claims(found: Found) -> Iterator[Claim]:
    rows, record = gpu_rows(found, "ablate")
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
        yield Claim(text, f"{percent} %", got, where_of(record), speed[name] > 1, why)
    scales_from = _with_part(found, "scales")
    text = "Scale accumulation collapses with the number of tiles, scale release does not (appendix B.1)"
    if scales_from:
        by = {(r["group"], r["tiles"]): float(r["sqnr_db"]["mean"]) for r in scales_from["rows"] if r["part"] == "scales"}
        wide, release = by["scale accumulation, 64 bits", 8], by["scale release (paper)", 8]
        got = f"8 tiles: {wide:.1f} dB (64-bit sums) against {release:.1f} dB"
        why = f"In 32-bit sums {by['scale accumulation, 32 bits', 2]:.1f} dB at 2 tiles."
        yield Claim(text, "plotted only", got, where_of(scales_from), release - wide > 10, why)
    else:
        yield Claim(text, "plotted only", None, "", None, "No ablation result.")
    throughput = [row for row in rows if row["part"] == "throughput"]
    text = "Integer division has far lower throughput than multiply and shift on a GPU (appendix B.2)"
    gops = {row["label"]: row["gops"] for row in throughput}
    if gops:
        ratio = gops["multiply and shift"] / gops["divide"]
        yield Claim(text, "plotted only", f"{ratio:.1f} times lower", where_of(record), ratio > 2, "")
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
        yield Claim(text, "“limited in practice”", got, where_of(grid_from), fine <= coarse, why)
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
