"""The paper's claims beside what was measured, and the rules by which the two are compared."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from ..bench import schema as col
from . import paper_results
from .results import Found, Record, gpu_rows, on_gpu, row_of_method, where_of

TOLERANCE = 0.1
"""By how much a ratio may differ from the paper's, either way, as a part of the larger of the two."""

TOLERANCE_DB = 1.0
COLLAPSE_DB = 10.0
"""By how much less SQNR counts as a collapse."""
FAR = 2.0
"""From this ratio on a throughput is far lower."""
CLOSE_POINTS = 2.0
"""By how many points of Top-1 a model may differ from FP32 and be close to it."""

RULES = {
    "ratio": f"A speed-up or saving agrees if it is within {TOLERANCE:.0%} of the paper's, whether larger or smaller.",
    "decibels": f"SQNR agrees if the paper's figure lies among the seeds, or within {TOLERANCE_DB:g} dB of their mean.",
    "order": f"A comparison without a figure agrees if it holds. “Comparable” is at most {TOLERANCE:.0%} slower, “collapses” "
    f"{COLLAPSE_DB:g} dB less, “far lower” less than 1/{FAR:g}, “close to FP32” within {CLOSE_POINTS:g} points, and “around "
    "10⁻³” what has 10⁻³ as its nearest power of ten.",
    "points": "Top-1 agrees if the paper's figure lies in the 95 % interval of ours.",
}
"""How a verdict is found, by the kind of a claim."""

LATENCY = "Latency (section 5.1, Figure 3)"
SECTIONS = (
    "Integer-only", LATENCY, "Tensor cores (Table 2)", "Energy (Table 3)", "SQNR (Table 4)",
    "Top-1 (Table 5)", "Appendix A (Figure 4)", "Appendix B",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Claim:
    """One statement of the paper beside what was measured.

    Attributes:
        section: one of :data:`SECTIONS`.
        text: the statement.
        paper: its figure.
        rule: of :data:`RULES`.
        ours: what was measured; None if nothing was.
        of: what that was measured on: the authors' code where there is a result of it, else this library.
        where: device and date.
        agrees: what the rule says; None where nothing was measured.
        also: what else bears on it and decides nothing, for instance this library beside the authors' code.
        why: the reason for a difference, or what is missing.
        brief: ``ours`` in a few words, for a summary.
    """

    section: str
    text: str
    paper: str
    rule: str
    ours: str | None = None
    of: str = "this library"
    where: str = ""
    agrees: bool | None = None
    also: str = ""
    why: str = ""
    brief: str = ""

    @property
    def mark(self) -> str:
        """``agrees``, ``differs`` or ``not run``."""
        return "not run" if self.agrees is None else "agrees" if self.agrees else "differs"


def ratio_agrees(ours: float, paper: float) -> bool:
    """Tell whether two ratios are the same by the rule ``ratio``."""
    return min(ours, paper) / max(ours, paper) >= 1 - TOLERANCE


def decibels_agree(each: Sequence[float], paper: float) -> bool:
    """Tell whether a figure of the paper is among those of the seeds by the rule ``decibels``."""
    return min(each) <= paper <= max(each) or abs(statistics.fmean(each) - paper) <= TOLERANCE_DB


def _integer_claim(found: Found) -> Claim:
    claim = Claim("Integer-only", "The whole kernel runs in the integer domain (abstract, section 3)", "integer-only", "order")
    also = ""
    if reports := found.get("verify", []):
        rows = [row for row in reports[0]["rows"] if row.get("integer", True)]
        clean = sum(not row["float_instructions"] and not row.get("error") for row in rows)
        also = f"This library, int8 in and out: {clean} of {len(rows)} compiled launches hold no float instruction"
        also += f" (qflash-lab verify, {reports[0]['file']})."
        claim = dataclasses.replace(claim, ours=also, where="machine code, six NVIDIA targets", agrees=clean == len(rows))
    if authors := found.get("authors code", []):
        record = authors[0]
        counts = [sum(of.values()) for of in record["float_instructions"].values()]
        claim = dataclasses.replace(
            claim, of="the authors' code", also=also,
            ours="one division for each output element in floating point" if max(counts) else "no float instruction",
            agrees=max(counts) == 0, brief="a float division for each output element in the authors' kernel",
            where=f"machine code of six targets, Triton {record['triton']}, {record['date']}",
            why="The authors' kernel divides the sums by / between integers, which Triton computes in float32.",
        )  # fmt: skip
    return (
        claim if claim.ours else dataclasses.replace(claim, why="qflash-lab verify --format json > FILE in the results folder.")
    )


def _authors_us(found: Found, method: str = "authors' QFlash") -> dict[tuple[str, int], float]:
    """Return what a method of the run of the authors' kernel took, by workload and batch (1 and 8); nothing without a run."""
    for record in found.get("authors", []):
        if method in record["methods"]:
            place = record["methods"].index(method)
            return {(name, batch): by[str(batch)][place] for name, by in record["latency_us"].items() for batch in (1, 8)}
    return {}


def _speed_claims(found: Found) -> Iterator[Claim]:
    rows, record = gpu_rows(found, "bench")
    rows = [row for row in rows if row["mode"] != "eager"]
    authors = _authors_us(found)
    for (family, batch), paper in paper_results.SPEEDUP_OVER_I_VIT.items():
        ratios, of_authors = {}, {}
        for workload in paper_results.FAMILIES[family]:
            options: dict[str, Any] = {"workload": workload, "batch": batch, "bias": False, "causal": False}
            ours = row_of_method(rows, "QFlash", **options)
            theirs = row_of_method(rows, "I-ViT", **options)
            if ours and theirs:
                ratios[workload] = theirs[col.MEDIAN_US] / ours[col.MEDIAN_US]
            if theirs and (workload, batch) in authors:
                of_authors[workload] = theirs[col.MEDIAN_US] / authors[workload, batch]
        claim = Claim(
            LATENCY, f"Up to {paper} times as fast as I-ViT on {family} at batch {batch}",
            f"{paper} times", "ratio", why="Needs a GPU run of qflash-lab bench with I-ViT's kernels.",
        )  # fmt: skip
        if ratios:
            best = max(ratios, key=lambda name: ratios[name])
            claim = dataclasses.replace(
                claim, ours=f"up to {ratios[best]:.2f} times ({best}; from {min(ratios.values()):.2f})", where=where_of(record),
                agrees=ratio_agrees(ratios[best], paper),
                brief=f"{ratios[best]:.2f} times", why="Both from int8 tensors; I-ViT in Triton here, in TVM there.",
            )  # fmt: skip
        if of_authors:
            best = max(of_authors, key=lambda name: of_authors[name])
            claim = dataclasses.replace(
                claim, of="the authors' code", agrees=ratio_agrees(of_authors[best], paper),
                ours=f"up to {of_authors[best]:.2f} times ({best}; from {min(of_authors.values()):.2f})",
                brief=f"{of_authors[best]:.2f} times", also=f"This library: {claim.ours}, in I-ViT's run.",
                where=f"{where_of(found['authors'][0])}; I-ViT {where_of(record)}",
            )  # fmt: skip
        yield claim


def fp16_ratios(
    rows: Sequence[Record],
    method: str = col.QFLASH_INT8,
    batches: Sequence[int] = (1, 8),
    compared: Sequence[str] = tuple(col.FP16),
) -> dict[str, float]:
    """Return the time of the fastest of some kernels, by default of 16 bits, divided by a method's.

    By workload and batch (A1 to A7, without a bias).
    """
    time: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        if row["mode"] == "eager" or row["bias"] or row["causal"] or row[col.MEDIAN_US] is None:
            continue
        if row["workload"][:1] == "A" and row["batch"] in batches:
            time.setdefault((row["workload"], row["batch"]), {}).setdefault(row["method"], row[col.MEDIAN_US])
    found = {}
    for (workload, batch), of in time.items():
        others = [of[name] for name in compared if name in of]
        if others and method in of:
            found[f"{workload} b{batch}"] = min(others) / of[method]
    return found


def _fp16_claim(found: Found) -> Claim:
    claim = Claim(
        LATENCY, "Generally faster than or comparable to FP16 kernels, batch 1 and 8", "Figure 3", "order",
        why="Needs a GPU run of qflash-lab bench.",
    )  # fmt: skip
    rows, record = gpu_rows(found, "bench")
    ratios = list(fp16_ratios(rows).values())
    also = ""
    if ratios:
        also = f"This library from int8 tensors: fastest 16-bit kernel's time ÷ ours {min(ratios):.2f} to {max(ratios):.2f}"
        also += f" ({where_of(record)})."
        claim = dataclasses.replace(claim, ours=also, where=where_of(record), agrees=min(ratios) >= 1 - TOLERANCE, why="")
    if authors := found.get("authors", []):
        record = authors[0]
        latency, methods = record["latency_us"], record["methods"]
        column = methods.index("authors' QFlash")
        peers = [methods.index(name) for name in col.FP16 if name in methods]
        quotients = {
            name: [min(by[batch][peer] for peer in peers) / by[batch][column] for batch in ("1", "8")]
            for name, by in latency.items()
        }
        spans = []
        for family, names in paper_results.FAMILIES.items():
            values = [x for name in names for x in quotients[name]]
            spans.append(f"{family} {min(values):.2f} to {max(values):.2f}")
        claim = dataclasses.replace(
            claim, of="the authors' code", also=also, where=where_of(record),
            ours="fastest of FlashAttention-2 and cuDNN ÷ theirs: " + ", ".join(spans),
            agrees=all(x >= 1 - TOLERANCE for values in quotients.values() for x in values), brief=f"{', '.join(spans)} times",
            why="The authors' kernel: on Swin, not on ViT and DeiT; their run has no memory-efficient kernel.",
        )  # fmt: skip
    return claim


def _mixed_claim(found: Found) -> Claim:
    claim = Claim(
        LATENCY, "Generally faster than or comparable to mixed-precision kernels, batch 1 and 8", "Figure 3", "order",
        why="Needs a GPU run of qflash-lab bench.",
    )  # fmt: skip
    mixed = tuple(name for title in paper_results.MIXED for name in paper_results.METHODS[title])
    rows, record = gpu_rows(found, "bench")
    ratios = fp16_ratios(rows, compared=mixed).values()
    also = ""
    if ratios:
        also = (
            f"This library: fastest of INT-Flash-Half, INT-Flash-Full and QAttn ÷ ours {min(ratios):.2f} to {max(ratios):.2f}"
        )
        also += f" ({where_of(record)})."
        claim = dataclasses.replace(claim, ours=also, where=where_of(record), agrees=min(ratios) >= 1 - TOLERANCE, why="")
    authors, qattn = _authors_us(found), _authors_us(found, "QAttn")
    if authors and qattn:
        quotients = [qattn[key] / authors[key] for key in authors]
        claim = dataclasses.replace(
            claim, of="the authors' code", also=also, where=where_of(found["authors"][0]),
            ours=f"QAttn ÷ theirs {min(quotients):.2f} to {max(quotients):.2f}",
            agrees=min(quotients) >= 1 - TOLERANCE, brief=f"{min(quotients):.2f} to {max(quotients):.2f} times",
            why="QAttn's kernel ran beside the authors', INT-Flash's did not.",
        )  # fmt: skip
    return claim


def _utilisation_claim(found: Found, workload: str) -> Claim:
    imma, hmma = (paper_results.UTILISATION[name][workload][place] for name, place in (("QFlash", 0), ("Flash-2", 1)))
    claim = Claim(
        "Tensor cores (Table 2)", f"QFlash keeps the tensor cores less busy than FlashAttention-2 on {workload}, batch 8",
        f"IMMA {imma:.2f} % against HMMA {hmma:.2f} %", "order", why="Needs a GPU run of qflash-lab profile (Nsight Compute).",
    )  # fmt: skip
    rows, record = gpu_rows(found, "profile")
    ours = row_of_method(rows, "QFlash", workload=workload, batch=8)
    flash = row_of_method(rows, "Flash-2", workload=workload, batch=8)
    if not ours or not flash or ours[col.IMMA_PERCENT] is None or flash[col.HMMA_PERCENT] is None:
        return claim
    return dataclasses.replace(
        claim, ours=f"IMMA {ours[col.IMMA_PERCENT]:.2f} % against HMMA {flash[col.HMMA_PERCENT]:.2f} %", where=where_of(record),
        agrees=ours[col.IMMA_PERCENT] < flash[col.HMMA_PERCENT],
        why=f"Percent of another GPU's peak than the paper's ({paper_results.DEVICE}); only the order is comparable.",
    )  # fmt: skip


def _energy_claim(found: Found) -> Claim:
    paper = paper_results.ENERGY_UJ["QFlash"] / paper_results.ENERGY_UJ["Flash-2"]
    claim = Claim(
        "Energy (Table 3)", "18.8 % less energy than FP16 FlashAttention-2 on A2, batch 8", f"{paper:.2f} of its energy",
        "ratio", why="Needs a GPU run of qflash-lab energy.",
    )  # fmt: skip
    rows, record = gpu_rows(found, "energy")
    ours = row_of_method(rows, "QFlash", workload="A2", batch=8, bias=False)
    flash = row_of_method(rows, "Flash-2", workload="A2", batch=8, bias=False)
    also = ""
    if ours and flash:
        change = ours[col.UJ] / flash[col.UJ]
        joules = f"{ours[col.UJ]:.0f} against {flash[col.UJ]:.0f} µJ; {where_of(record)}"
        also = f"This library from int8 tensors: {change:.2f} ({joules})"
        others = [
            row for row in rows if row["method"] in col.FP16 and row["workload"] == "A2" and row["batch"] == 8 and row[col.UJ]
        ]
        best = min(others, key=lambda row: row[col.UJ])
        if best is not flash:
            also += f", {ours[col.UJ] / best[col.UJ]:.2f} of the least of all 16-bit kernels ({best['method']})"
        also += "."
        claim = dataclasses.replace(claim, ours=also, where=where_of(record), agrees=ratio_agrees(change, paper), why="")
    if authors := found.get("authors", []):
        uj = authors[0]["energy_uj"]
        theirs, fa2 = uj["authors' QFlash"], uj[col.SDPA_FLASH]
        claim = dataclasses.replace(
            claim, of="the authors' code", also=also, where=where_of(authors[0]),
            ours=f"{theirs / fa2:.2f} of its energy ({theirs} against {fa2} µJ, idle power included)",
            agrees=ratio_agrees(theirs / fa2, paper),
            brief=f"{theirs / fa2:.2f}", why="On A2 the authors' kernel takes longer than FP16 on an H200.",
        )  # fmt: skip
    return claim


def _lowest_energy_claim(found: Found) -> Claim:
    claim = Claim(
        "Energy (Table 3)", "The lowest energy of the five kernels on A2, batch 8", "754.6 µJ, the others from 795.2", "order",
        why="Needs a GPU run of qflash-lab energy.",
    )  # fmt: skip
    rows, record = gpu_rows(found, "energy")
    of = {name: row_of_method(rows, name, workload="A2", batch=8, bias=False) for name in paper_results.ENERGY_UJ}
    joules = {name: row[col.UJ] for name, row in of.items() if row}
    also = ""
    if len(joules) == len(paper_results.ENERGY_UJ):
        second = min((name for name in joules if name != "QFlash"), key=lambda name: joules[name])
        also = f"This library: {joules['QFlash']:.0f} µJ, the next {second} with {joules[second]:.0f}."
        claim = dataclasses.replace(
            claim, ours=also, where=where_of(record), agrees=joules["QFlash"] < joules[second], why=""
        )  # fmt: skip
    if authors := found.get("authors", []):
        uj = authors[0]["energy_uj"]
        theirs, fa2 = uj["authors' QFlash"], uj[col.SDPA_FLASH]
        claim = dataclasses.replace(
            claim, of="the authors' code", also=also, where=where_of(authors[0]), agrees=None if theirs < fa2 else False,
            ours=f"{theirs} µJ against FlashAttention-2's {fa2}", brief=f"{theirs} against {fa2} µJ",
            why="Only FlashAttention-2 was measured beside the authors' kernel.",
        )  # fmt: skip
    return claim


_ACCURACY_REASONS = {
    "qattn": "QAttn's formula alone is more accurate; with bfloat16 inputs and an int8 output around it the paper's figure "
    "comes out within 0.3 dB (qflash_lab.baselines.qattn).",
    "i-vit": "I-ViT knows of the scores' scale only round(1 / S), which moves the figure by several dB from draw to draw.",
}
_READINGS = {"qflash-printed": "as printed", "qflash-authors": "the authors' code", "qflash-paper": "recipe PAPER"}


def _accuracy_claims(found: Found) -> Iterator[Claim]:
    section = "SQNR (Table 4)"
    records = found.get("accuracy", [])
    # the newest record is first
    by: dict[tuple[str, str], Record] = {}
    for record in reversed(records):
        for row in record["rows"]:
            if row["input"] == "paper" and row["batch"] == 8 and row[col.SQNR_DB] is not None:
                by[row["workload"], row["method"]] = row | {"where": where_of(record)}
    for (workload, method), (paper, _) in paper_results.TABLE4.items():
        if method in paper_results.QFLASH_READINGS:
            continue
        row = by.get((workload, method))
        claim = Claim(
            section, f"SQNR of {method} on {workload}, batch 8", f"{paper:.2f} dB", "decibels", why="No result of it."
        )
        if row:
            claim = dataclasses.replace(
                claim, ours=f"{row[col.SQNR_DB]:.2f} dB ({row[col.SQNR_MIN_DB]:.1f} to {row[col.SQNR_MAX_DB]:.1f})",
                where=row["where"], agrees=decibels_agree(row["sqnr_each_db"], paper), why=_ACCURACY_REASONS.get(method, ""),
                brief=f"{row[col.SQNR_DB]:.2f} dB ({method})",
            )  # fmt: skip
        yield claim
    a2, a7 = (paper_results.TABLE4[workload, "qflash-paper"][0] for workload in ("A2", "A7"))
    claim = Claim(
        section, "SQNR of QFlash on A2 and on A7, batch 8", f"{a2:.2f} dB and {a7:.2f} dB", "decibels", why="No result of it."
    )
    pairs = {name: (by.get(("A2", name)), by.get(("A7", name))) for name in paper_results.QFLASH_READINGS}
    readings, verdicts = [], []
    for name, (first, second) in pairs.items():
        if first and second:
            readings.append(f"{_READINGS[name]} {first[col.SQNR_DB]:.2f} and {second[col.SQNR_DB]:.2f}")
            verdicts.append(decibels_agree(first["sqnr_each_db"], a2) and decibels_agree(second["sqnr_each_db"], a7))
            claim = dataclasses.replace(claim, where=first["where"])
    if readings:
        claim = dataclasses.replace(
            claim, ours="; ".join(readings), brief="; ".join(readings), agrees=any(verdicts), of="three readings of it",
            why="" if any(verdicts) else "Flooring P, as printed, gives A7's figure and rounding it, as the code does, A2's; "
            "no reading gives both.",
        )  # fmt: skip
    yield claim
    yield from _quality_claims(by)
    yield _gain_claim(by)


def _quality_claims(by: dict[tuple[str, str], Record]) -> Iterator[Claim]:
    """Yield what section 5.2 says of Table 4 in words; the first reading decides whose figures are there."""
    section = "SQNR (Table 4)"
    decisive = next(
        (name for name in ("qflash-authors", "qflash-printed", "qflash-paper") if ("A2", name) in by and ("A7", name) in by),
        None,
    )
    both = Claim(section, "QFlash has SQNR above 30 dB and MSE around 10⁻³ on A2 and A7", "32.50 and 31.02 dB", "order")
    between = Claim(
        section, "QFlash's SQNR is above I-ViT's and below INT-Flash-Half's and INT-Flash-Full's", "A2 and A7", "order"
    )
    if decisive is None:
        yield dataclasses.replace(both, why="No result of it.")
        yield dataclasses.replace(between, why="No result of it.")
        return
    of = "the authors' code" if decisive == "qflash-authors" else "this library"
    rows = [by[name, decisive] for name in ("A2", "A7")]
    figures = " and ".join(f"{row[col.SQNR_DB]:.2f} dB, {row[col.MSE]:.2e}" for row in rows)
    fine = all(row[col.SQNR_DB] > 30 and round(math.log10(row[col.MSE])) == -3 for row in rows)
    yield dataclasses.replace(both, ours=figures, of=of, where=rows[0]["where"], agrees=fine, brief=figures)
    lower, upper = ("i-vit",), ("int-flash-half", "int-flash-full")
    if all((name, other) in by for name in ("A2", "A7") for other in (*lower, *upper)):
        parts, holds = [], True
        for name in ("A2", "A7"):
            least, most = by[name, "i-vit"][col.SQNR_DB], min(by[name, other][col.SQNR_DB] for other in upper)
            mine = by[name, decisive][col.SQNR_DB]
            parts.append(f"{name} {least:.2f}, {mine:.2f}, {most:.2f} dB")
            holds = holds and least < mine < most
        between = dataclasses.replace(between, ours="; ".join(parts), of=of, where=rows[0]["where"], agrees=holds)
    yield between


def _gain_claim(by: dict[tuple[str, str], Record]) -> Claim:
    claim = Claim(
        "SQNR (Table 4)", "SQNR up to 6.7 dB better than I-ViT's (section 1)", "6.7 dB", "decibels", why="No result of it."
    )
    gains: dict[str, list[float]] = {}
    for method in (*paper_results.QFLASH_READINGS, "qflash-default"):
        ours, theirs = by.get(("A2", method)), by.get(("A2", "i-vit"))
        if ours and theirs:
            pairs = zip(ours["sqnr_each_db"], theirs["sqnr_each_db"], strict=True)
            gains[method] = [first - second for first, second in pairs]
            claim = dataclasses.replace(claim, where=ours["where"])
    decisive = next((name for name in ("qflash-authors", "qflash-printed", "qflash-paper") if name in gains), None)
    if decisive is None:
        return claim
    each = gains[decisive]
    others = [f"{name} {statistics.fmean(values):.1f} dB" for name, values in gains.items() if name != decisive]
    return dataclasses.replace(
        claim, ours=f"{statistics.fmean(each):.1f} dB on A2 ({min(each):.1f} to {max(each):.1f})",
        agrees=decibels_agree(each, 6.7),
        of="the authors' code" if decisive == "qflash-authors" else "this library",
        also="The same for " + ", ".join(others) + "." if others else "", why=_ACCURACY_REASONS["i-vit"],
    )  # fmt: skip


_TOP1_MISSING = (
    "Neither ImageNet nor the models' weights could be had: qflash-lab evaluate --model all --data FOLDER --pretrained."
)


def _of_pretrained(found: Found) -> list[Any]:
    """Return the evaluations of the weights that the paper's table is of."""
    return [record for record in found.get("evaluate", []) if record.get("conditions", {}).get("weights") == "pretrained"]


def _top1_claims(found: Found) -> Iterator[Claim]:
    """Yield what the text says of Table 5, and then its rows, a claim a method and model."""
    yield _top1_claim(found)
    measured = {
        (result["model"], summary["method"]): summary | {"where": where_of(record)}
        for record in reversed(_of_pretrained(found))
        for result in record["models"]
        for summary in result["methods"]
    }
    for place, model in enumerate(paper_results.MODELS):
        for method, top1 in paper_results.TOP1.items():
            names = paper_results.QFLASH_READINGS[1:] if method == "QFlash" else paper_results.METHODS[method]
            row = next((measured[model, name] for name in names if (model, name) in measured), None)
            claim = Claim(
                "Top-1 (Table 5)",
                f"Top-1 of {method} on {model}, ImageNet",
                f"{top1[place]:.2f} %",
                "points",
                why=_TOP1_MISSING,
            )
            if row:
                low, high = row["top1_interval_percent"]
                claim = dataclasses.replace(
                    claim, ours=f"{row['top1_percent']:.2f} % [{low:.2f}, {high:.2f}]", where=row["where"], why="",
                    of="the authors' code" if row["method"] == "qflash-authors" else "this library",
                    agrees=low <= top1[place] <= high, brief=f"{row['top1_percent']:.2f} %",
                )  # fmt: skip
            yield claim


def _top1_claim(found: Found) -> Claim:
    claim = Claim(
        "Top-1 (Table 5)", "Top-1 on ImageNet close to FP32 on ViT and DeiT, lower on Swin",
        "-2.0 to +1.7 points of FP32", "order",
        why=_TOP1_MISSING,
    )  # fmt: skip
    names = ("qflash-authors", "qflash-printed", "qflash-paper")
    for record in _of_pretrained(found):
        for method in names:
            change = {}
            for result in record["models"]:
                top1 = {summary["method"]: summary["top1_percent"] for summary in result["methods"]}
                if result["model"] in paper_results.MODELS and method in top1 and "fp32" in top1:
                    change[result["model"]] = top1[method] - top1["fp32"]
            if change:
                vit = [x for name, x in change.items() if not name.startswith("Swin")]
                swin = [x for name, x in change.items() if name.startswith("Swin")]
                spans = ", ".join(f"{name} {x:+.2f}" for name, x in change.items())
                return dataclasses.replace(
                    claim, ours=f"{method}: {spans} points", where=where_of(record), why="",
                    agrees=all(abs(x) <= CLOSE_POINTS for x in vit) and all(x < 0 for x in swin),
                )  # fmt: skip
    return claim


def _step_claims(found: Found) -> Iterator[Claim]:
    rows, record = gpu_rows(found, "ablate")
    speed = {row["label"]: row[col.SPEEDUP] for row in rows if row["part"] == "kernel" and row.get(col.SPEEDUP)}
    for step, percent in paper_results.STEP_SPEEDUP_PERCENT.items():
        name, paper = "V4 paper" if step == "V4" else step, 1 + percent / 100
        claim = Claim(
            "Appendix A (Figure 4)", f"{step} is {percent} % faster than V0, A2, batch 1024", f"{paper:.2f} times", "ratio",
            why="Needs a GPU run of qflash-lab ablate.",
        )  # fmt: skip
        if name in speed:
            also = "V4 is this library's kernel with recipe PAPER." if step == "V4" else "A plain Triton kernel with that step."
            claim = dataclasses.replace(
                claim, ours=f"{speed[name]:.2f} times as fast as V0", brief=f"{speed[name]:.2f} times", where=where_of(record),
                agrees=ratio_agrees(speed[name], paper), also=also,
                why="Whether the paper's percentage is a ratio or time saved is not said; it is read as a ratio.",
            )  # fmt: skip
        yield claim


def _appendix_b_claims(found: Found) -> Iterator[Claim]:
    section = "Appendix B"
    record = _with_part(found, "scales")
    claim = Claim(
        section, "Scale accumulation collapses with the number of tiles, scale release does not (B.1)", "plotted only", "order",
        why="Needs a run of qflash-lab ablate.",
    )  # fmt: skip
    if record:
        by = {(r["group"], r["tiles"]): float(r[col.SQNR_DB]) for r in record["rows"] if r["part"] == "scales"}
        wide, release = by["scale accumulation, 64 bits", 8], by["scale release (paper)", 8]
        claim = dataclasses.replace(
            claim, ours=f"8 tiles: {wide:.1f} dB (64-bit sums) against {release:.1f} dB", where=where_of(record),
            agrees=release - wide > COLLAPSE_DB,
            why=f"In 32-bit sums {by['scale accumulation, 32 bits', 2]:.1f} dB at 2 tiles.",
        )  # fmt: skip
    yield claim
    claim = Claim(
        section, "Integer division has far lower throughput than multiply and shift on a GPU (B.2)", "plotted only", "order",
        why="Needs a GPU run of qflash-lab ablate.",
    )  # fmt: skip
    record = _with_part(found, "throughput", gpu=True)
    if record:
        gops = {row["label"]: row[col.GOPS] for row in record["rows"] if row["part"] == "throughput"}
        ratio = gops["multiply and shift"] / gops["divide"]
        claim = dataclasses.replace(claim, ours=f"{ratio:.1f} times lower", where=where_of(record), agrees=ratio > FAR, why="")
    yield claim
    claim = Claim(
        section, "Per-token scales do not fit integer-only fused attention (C3, B.3)", "“limited in practice”", "order",
        why="Needs a run of qflash-lab ablate.",
    )  # fmt: skip
    record = _with_part(found, "granularity")
    if record:
        grid = {
            row["label"]: float(row[col.SQNR_DB])
            for row in record["rows"]
            if (row["part"], row["group"], row["input"]) == ("granularity", "default", "outliers")
        }
        coarse, fine = grid["Q tensor, K tensor, V tensor"], grid["Q token, K token, V channel"]
        claim = dataclasses.replace(
            claim, where=where_of(record), agrees=False, brief="they run in integers",
            ours=f"they run in integers here; outlier inputs: {coarse:.1f} dB per tensor, {fine:.1f} dB per token",
            why="Scores are brought to one fixed-point unit per row before the maximum is taken (docs/algorithm.md, step 2).",
        )  # fmt: skip
    yield claim


def _with_part(found: Found, part: str, *, gpu: bool = False) -> Record | None:
    """Return the newest ablation that holds a part."""
    records = [record for record in found.get("ablate", []) if on_gpu(record) or not gpu]
    return next((record for record in records if any(row["part"] == part for row in record["rows"])), None)


def claims(found: Found) -> list[Claim]:
    """Return every claim of the paper that results can speak to, by section."""
    return [
        _integer_claim(found),
        *_speed_claims(found),
        _fp16_claim(found),
        _mixed_claim(found),
        _utilisation_claim(found, "A2"),
        _utilisation_claim(found, "A7"),
        _energy_claim(found),
        _lowest_energy_claim(found),
        *_accuracy_claims(found),
        *_top1_claims(found),
        *_step_claims(found),
        *_appendix_b_claims(found),
    ]


def counts(items: Sequence[Claim]) -> dict[str, int]:
    """Return how many claims agree, differ and were not run."""
    return {mark: sum(item.mark == mark for item in items) for mark in ("agrees", "differs", "not run")}
