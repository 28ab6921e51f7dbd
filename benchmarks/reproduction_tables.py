"""Write the tables of docs/reproduction.md: the claims as ``qflash-lab report`` judges them, beside the paper's figures.

``python benchmarks/reproduction_tables.py``, from the committed results.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from qflash_lab.bench import schema as col
from qflash_lab.paper import paper_results
from qflash_lab.paper.claims import RULES, SECTIONS, claims, counts
from qflash_lab.paper.results import Found, accuracy_record, gpu_rows, on_gpu, read_results, row_of_method

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import pages  # noqa: E402

PAGE = HERE.parent / "docs" / "reproduction.md"


@functools.cache
def found() -> Found:
    """Return the committed results, as ``qflash-lab report`` reads them."""
    return read_results([HERE / "results"])


def claim_table() -> list[str]:
    """Every claim with what was measured, of what, and the verdict."""
    lines = ["| Claim | Paper | Measured | Of | On | |", "|---|---|---|---|---|---|"]
    items = claims(found())
    for section in SECTIONS:
        lines.append(f"| **{section}** | | | | | |")
        for claim in (claim for claim in items if claim.section == section):
            mark = f"**{claim.mark}**" if claim.mark == "differs" else claim.mark
            got = (claim.of, claim.where) if claim.ours else ("", "")
            lines.append(f"| {claim.text} | {claim.paper} | {claim.ours or '-'} | {got[0]} | {got[1]} | {mark} |")
    return lines


def rules() -> list[str]:
    """How a verdict is found, and how many there are of each."""
    count = counts(claims(found()))
    total = sum(count.values())
    text = f"* {count['agrees']} of {total} claims agree, {count['differs']} differ, {count['not run']} was not run."
    return [line for item in (text, *(f"* {rule}" for rule in RULES.values())) for line in pages.wrap(item, "  ")]


def notes() -> list[str]:
    """What else bears on the claims that differ, and the reason, once for all that share it."""
    said: dict[str, list[str]] = {}
    for claim in claims(found()):
        text = " ".join(part for part in (claim.also, claim.why) if part)
        if claim.mark == "differs" and text:
            said.setdefault(text, []).append(claim.text)
    return [line for text, names in said.items() for line in pages.wrap(f"* {'; '.join(names)}: {text}", "  ")]


def authors_latency() -> list[str]:
    """The authors' kernel beside what ran with it."""
    record = found()["authors"][0]
    latency = record["latency_us"]
    lines = [f"| µs | {' | '.join(latency)} |", "|---" * (len(latency) + 1) + "|"]
    titles = {
        col.SDPA_FLASH: "FlashAttention-2, FP16",
        col.SDPA_CUDNN: "cuDNN, FP16",
        "authors' QFlash": "authors' kernel, int8",
    }
    order = sorted(range(len(record["methods"])), key=lambda index: record["methods"][index] != "authors' QFlash")
    for batch in ("1", "8"):
        for index in order:
            name = record["methods"][index]
            cells = [f"{of[batch][index]:g}" for of in latency.values()]
            lines.append(f"| batch {batch}: {titles.get(name, f'{name}, int8')} | {' | '.join(cells)} |")
    return lines


def tensor() -> list[str]:
    """Table 2 on A2."""
    rows, record = gpu_rows(found(), "profile")
    assert record is not None
    card = pages.card(record["environment"]["device"])
    lines = [f"| A2, batch 8 | IMMA %, paper | HMMA %, paper | IMMA %, {card} | HMMA %, {card} |", "|---|---|---|---|---|"]
    for method, figures in paper_results.UTILISATION.items():
        row = row_of_method(rows, method, workload="A2", batch=8)
        paper = ["-" if x is None else f"{x:.2f}" for x in figures["A2"]]
        ours = [f"{row[name]:.2f}" for name in (col.IMMA_PERCENT, col.HMMA_PERCENT)] if row else ["-", "-"]
        label = f"{method} (this library)" if method == "QFlash" else method
        lines.append(f"| {label} | {' | '.join((*paper, *ours))} |")
    return lines


def energy() -> list[str]:
    """Table 3."""
    rows, record = gpu_rows(found(), "energy")
    assert record is not None
    card = pages.card(record["environment"]["device"])
    flash = paper_results.ENERGY_UJ["Flash-2"]
    here = row_of_method(rows, "Flash-2", workload="A2", batch=8, bias=False)
    assert here is not None
    lines = [f"| µJ a call, A2, batch 8 | paper, RTX 5090 | ÷ FA2 | {card} | ÷ FA2 |", "|---|---|---|---|---|"]
    for method, uj in paper_results.ENERGY_UJ.items():
        row = row_of_method(rows, method, workload="A2", batch=8, bias=False)
        assert row is not None
        label = "QFlash (this library, from int8)" if method == "QFlash" else method
        lines.append(f"| {label} | {uj:.1f} | {uj / flash:.2f} | {row[col.UJ]:.0f} | {row[col.UJ] / here[col.UJ]:.2f} |")
    for name, label in (("qflash", "QFlash (this library, from fp16)"), (col.SDPA_CUDNN, "cuDNN, FP16")):
        row = next(row for row in rows if row["method"] == name)
        lines.append(f"| {label} | | | {row[col.UJ]:.0f} | {row[col.UJ] / here[col.UJ]:.2f} |")
    authors = found()["authors"][0]["energy_uj"]
    lines.append(f"| another H200, FlashAttention-2 | | | {authors['sdpa flash']} | 1.00 |")
    theirs = authors["authors' QFlash"]
    lines.append(f"| another H200, the authors' kernel | | | {theirs} | {theirs / authors['sdpa flash']:.2f} |")
    return lines


def sqnr() -> list[str]:
    """Table 4: the paper's figure and ours, with the range over seeds."""
    record = accuracy_record(found())
    assert record is not None
    rows = {(row["workload"], row["method"]): row for row in record["rows"] if row["input"] == "paper"}
    lines = ["| SQNR, dB | A2, paper | A2, here | A7, paper | A7, here |", "|---|---|---|---|---|"]
    for method in dict.fromkeys(name for _, name in paper_results.TABLE4):
        cells = []
        for workload in ("A2", "A7"):
            row = rows[workload, method]
            ours = f"{row[col.SQNR_DB]:.2f} [{row[col.SQNR_MIN_DB]:.1f}, {row[col.SQNR_MAX_DB]:.1f}]"
            cells += [f"{paper_results.TABLE4[workload, method][0]:.2f}", ours]
        lines.append(f"| {rows['A2', method]['title']} | {' | '.join(cells)} |")
    return lines


def steps() -> list[str]:
    """Figure 4: a GPU's times and the SQNR of the steps' formulas."""
    record = next(
        record for record in found()["ablate"] if on_gpu(record) and any(r["part"] == "kernel" for r in record["rows"])
    )
    kernels = {row["label"]: row for row in record["rows"] if row["group"] == "kernel"}
    formulas = {row["label"]: row for row in record["rows"] if row["group"] == "formula"}
    lines = ["| Step | Speedup over V0, paper | here | µs here | SQNR, dB |", "|---|---|---|---|---|"]
    for step, formula in formulas.items():
        row = kernels["V4 paper" if step == "V4" else step]
        percent = paper_results.STEP_SPEEDUP_PERCENT.get(step)
        paper = "-" if percent is None else f"{percent} %"
        change = f"{100 * (row[col.SPEEDUP] - 1):+.1f} %"
        lines.append(f"| {step} | {paper} | {change} | {row[col.MEDIAN_US]:.0f} | {formula[col.SQNR_DB]:.2f} |")
    for label in ("V4 default", col.SDPA_FLASH):
        row = kernels[label]
        title = {"V4 default": "this library's `DEFAULT`", col.SDPA_FLASH: "PyTorch's FA2"}[label]
        lines.append(
            f"| {title} | | {100 * (row[col.SPEEDUP] - 1):+.1f} % | {row[col.MEDIAN_US]:.0f} | {row[col.SQNR_DB]:.2f} |"
        )
    return lines


def scales() -> list[str]:
    """Figure 5: ways to accumulate, by tiles."""
    record = next(record for record in found()["ablate"] if any(row["part"] == "scales" for row in record["rows"]))
    rows = [row for row in record["rows"] if row["part"] == "scales"]
    tiles = sorted({row["tiles"] for row in rows})
    lines = [f"| Tiles | {' | '.join(map(str, tiles))} |", "|---" * (len(tiles) + 1) + "|"]
    for group in dict.fromkeys(row["group"] for row in rows):
        by = {row["tiles"]: row[col.SQNR_DB] for row in rows if row["group"] == group}
        lines.append(f"| {group} | {' | '.join(f'{by[count]:.2f}' for count in tiles)} |")
    return lines


def division() -> list[str]:
    """Figure 6."""
    record = next(r for r in found()["ablate"] if on_gpu(r) and any(row["part"] == "throughput" for row in r["rows"]))
    card = pages.card(record["environment"]["device"])
    lines = [f"| int32, {card} | 10⁹ a second |", "|---|---|"]
    lines += [f"| {row['label']} | {row[col.GOPS]:.0f} |" for row in record["rows"] if row["part"] == "throughput"]
    return lines


def granularity() -> list[str]:
    """Appendix B.3: DEFAULT's arithmetic without preparation of the key, by what shares a scale."""
    record = next(record for record in found()["ablate"] if any(row["part"] == "granularity" for row in record["rows"]))
    rows = [row for row in record["rows"] if row["part"] == "granularity" and row["group"] == "default"]
    inputs = list(dict.fromkeys(row["input"] for row in rows))
    lines = [f"| SQNR, dB | {' | '.join(inputs)} |", "|---" * (len(inputs) + 1) + "|"]
    by = {(row["label"], row["input"]): row[col.SQNR_DB] for row in rows}
    for label in (
        "Q tensor, K tensor, V tensor",
        "Q head, K head, V tensor",
        "Q token, K token, V tensor",
        "Q token, K token, V channel",
    ):
        lines.append(f"| {label} | {' | '.join(f'{by[label, name]:.2f}' for name in inputs)} |")
    return lines


def blocks() -> dict[str, list[str]]:
    """Return the lines between markers of the page, by the markers' names."""
    return {
        "paper:claims": claim_table(), "paper:rules": rules(), "paper:notes": notes(), "paper:latency": authors_latency(),
        "paper:tensor": tensor(), "paper:energy": energy(), "paper:sqnr": sqnr(), "paper:steps": steps(),
        "paper:scales": scales(), "paper:division": division(), "paper:granularity": granularity(),
    }  # fmt: skip


def files() -> list[str]:
    """Return the result files that were read."""
    return [record["file"] for records in found().values() for record in records]


def main() -> None:
    """Write the page's tables."""
    PAGE.write_text(pages.fill(PAGE.read_text(), blocks()))


if __name__ == "__main__":
    main()
