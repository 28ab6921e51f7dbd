"""Write the tables of docs/reproduction.md: the claims as ``qflash-lab report`` judges them, beside the paper's figures.

``python benchmarks/reproduction_tables.py``, from the committed results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import declared
import pages
from declared import Group, Of, Table, groups, one
from qflash_lab.bench import schema as col
from qflash_lab.bench.tables import Column, names
from qflash_lab.paper import paper_results
from qflash_lab.paper.claims import RULES, SECTIONS, claims, counts
from qflash_lab.paper.results import Found, accuracy_record, device_of, gpu_rows, on_gpu, read_results, row_of_method


@functools.cache
def found() -> Found:
    """Return the committed results, as ``qflash-lab report`` reads them; of GPUs those of the pages' card."""
    everything = read_results([declared.RESULTS])
    return {kind: [record for record in records if _is_shown(device_of(record))] for kind, records in everything.items()}


def _is_shown(device: str) -> bool:
    return "NVIDIA" not in device or pages.card(device).lower() == pages.CARD


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
    text = f"* {count['agrees']} of {total} claims agree, {count['differs']} differ, {count['not run']} were not run."
    return [line for item in (text, *(f"* {rule}" for rule in RULES.values())) for line in pages.wrap(item, "  ")]


def notes() -> list[str]:
    """What else bears on the claims that differ, and the reason, once for all that share it."""
    said: dict[tuple[str, str], dict[str, list[str]]] = {}
    for claim in claims(found()):
        if claim.mark == "differs" and (claim.also or claim.why):
            said.setdefault((claim.why, "" if claim.why else claim.also), {}).setdefault(claim.also, []).append(claim.text)
    items = (
        " ".join([*(f"{'; '.join(names)}: {also}".strip() for also, names in group.items()), why]).strip()
        for (why, _), group in said.items()
    )
    return [line for item in items for line in pages.wrap(f"* {item}", "  ")]


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
    lines.append(f"| another H200, FlashAttention-2 | | | {authors[col.SDPA_FLASH]} | 1.00 |")
    theirs = authors["authors' QFlash"]
    lines.append(f"| another H200, the authors' kernel | | | {theirs} | {theirs / authors[col.SDPA_FLASH]:.2f} |")
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


def ablated(part: str, *, gpu: bool = False) -> list[col.Row]:
    """Return the rows of the newest ablation with a part, on a GPU if that is wanted."""
    record = next(r for r in found()["ablate"] if (on_gpu(r) or not gpu) and any(row[col.PART] == part for row in r["rows"]))
    return [row | {declared.FILE: record["file"]} for row in record["rows"] if row[col.PART] == part]


def steps() -> list[Group]:
    """Figure 4: a GPU's times and the SQNR of the steps' formulas."""
    rows = ablated("kernel", gpu=True)
    kernels = {row[col.LABEL]: row for row in rows if row[col.GROUP] == "kernel"}
    lines = [
        Group(kernel=kernels["V4 paper" if row[col.LABEL] == "V4" else row[col.LABEL]], formula=row)
        for row in rows
        if row[col.GROUP] == "formula"
    ]
    return lines + [Group(kernel=kernels[label], formula=kernels[label]) for label in STEP_TITLES]


STEP_TITLES = {"V4 default": "this library's `DEFAULT`", col.SDPA_FLASH: "PyTorch's FA2"}


def step_of(line: Group) -> str:
    """Return what the table calls a step."""
    label = line["formula"][col.LABEL]
    return str(STEP_TITLES.get(label, label))


def paper_speedup(line: Group) -> str:
    """Return the paper's speed-up of a step."""
    label = line["formula"][col.LABEL]
    percent = paper_results.STEP_SPEEDUP_PERCENT.get(label)
    return "" if label in STEP_TITLES else "-" if percent is None else f"{percent} %"


def grid(part: str, by: str, *keys: str, group: str | None = None) -> list[Group]:
    """Return a part's rows in groups."""
    rows = [row for row in ablated(part) if group is None or row[col.GROUP] == group]
    return groups(rows, *keys, by=lambda row: str(row[by]))


def grid_columns(heading: str, key: str) -> Callable[[Sequence[Group]], list[Column]]:
    """Return what makes a column of SQNR for each member of the groups."""

    def columns(lines: Sequence[Group]) -> list[Column]:
        first = names(heading, one(key))
        return [first, *(Column(name, Of(name, col.SQNR_DB), ".2f") for name in lines[0])]

    return columns


GRANULARITIES = (
    "Q tensor, K tensor, V tensor", "Q head, K head, V tensor", "Q token, K token, V tensor", "Q token, K token, V channel",
)  # fmt: skip
"""Rows of appendix B.3: DEFAULT's arithmetic without preparation of the key, by what shares a scale."""


def granularities() -> list[Group]:
    """Return the lines of :data:`GRANULARITIES`."""
    by = {one(col.LABEL)(group): group for group in grid("granularity", col.INPUT, col.LABEL, group="default")}
    return [by[label] for label in GRANULARITIES]


def scales() -> list[Group]:
    """Figure 5: ways to accumulate, by tiles."""
    return [Group(sorted(group.items(), key=lambda of: int(of[0]))) for group in grid("scales", col.TILES, col.GROUP)]


def division_columns(lines: Sequence[col.Row]) -> list[Column]:
    """Figure 6, with the card in its heading."""
    record = next(r for r in found()["ablate"] if r["file"] == lines[0][declared.FILE])
    card = pages.card(record["environment"]["device"])
    return [names(f"int32, {card}", col.LABEL), Column("10⁹ a second", col.GOPS, ".0f")]


TABLES = {
    "paper:steps": Table(
        steps,
        (
            names("Step", step_of), names("Speedup over V0, paper", paper_speedup),
            Column("here", Of("kernel", col.SPEEDUP), lambda speedup: f"{100 * (speedup - 1):+.1f} %"),
            Column("µs here", Of("kernel"), ".0f"), Column("SQNR, dB", Of("formula", col.SQNR_DB), ".2f"),
        ),
    ),
    "paper:scales": Table(scales, grid_columns("Tiles", col.GROUP)),
    "paper:division": Table(lambda: ablated("throughput", gpu=True), division_columns),
    "paper:granularity": Table(granularities, grid_columns("SQNR, dB", col.LABEL)),
}  # fmt: skip
"""Declared tables between markers of the page."""


PARTS = declared.Parts(
    TABLES,
    {
        "paper:claims": claim_table,
        "paper:rules": rules,
        "paper:notes": notes,
        "paper:latency": authors_latency,
        "paper:tensor": tensor,
        "paper:energy": energy,
        "paper:sqnr": sqnr,
    },
    lambda: [record["file"] for records in found().values() for record in records],
)


if __name__ == "__main__":
    PARTS.write()
