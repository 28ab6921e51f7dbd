"""Write the rows that are worse for this library into docs/performance/limits.md: ``python benchmarks/worse_rows.py``.

A row is worse if a peer of the same run takes less time, or if an earlier state of this library did in a run of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import declared
import integer_networks
import openvino_networks
import performance_tables as speed
from declared import FILE, Group, Of, Quotient, Table, one
from qflash_lab.bench import schema as col
from qflash_lab.bench.schema import Row
from qflash_lab.bench.tables import Column, names

EARLIER = {
    "captured_graph_h200": ("before_us", "after_us", "before rows that nobody reads were left out"),
    "arithmetic_3_h200": ("arithmetic_2_us", "arithmetic_3_us", "with arithmetic 2"),
}
"""Records of benchmarks/archive that timed two states in one run: the keys of both times, and what the earlier one is."""


def lost(groups: Sequence[Group], ours: dict[str, str], peers: dict[str, str], what: Callable[[Group], str]) -> Iterator[Row]:
    """Yield a line for each of our methods and each peer that takes less time."""
    for group in groups:
        for method, title in ours.items():
            for peer, name in peers.items():
                ratio = Quotient(Of(peer), Of(method))(group)
                if ratio is not None and ratio < 1:
                    row = declared.any_row(group)
                    yield {
                        "what": f"{what(group)}, {title}",
                        "peer": name,
                        "ratio": ratio,
                        FILE: group[method].get(FILE, row[FILE]),
                    }


OURS = {col.QFLASH: "from fp16", col.QFLASH_INT8: "on int8"}
BRAIN = {col.QFLASH: "from bf16"}
INT8 = {col.QFLASH_INT8: "on int8"}
FP16 = {col.SDPA_FLASH: "FlashAttention-2", col.SDPA_CUDNN: "cuDNN", col.SDPA_EFFICIENT: "memory-efficient"}
PACKAGES = FP16 | {col.FA3: "FlashAttention-3", col.FA3_SPLIT: "FlashAttention-3", col.SAGE: "SageAttention"}
FLOAT8 = {col.FA3_FLOAT8: "FlashAttention-3 float8", col.CUDNN_FLOAT8: "cuDNN float8"}
MIXED = {name: name.removesuffix(" kernel") for name in col.FLOAT_SOFTMAX}


def attention() -> Iterator[Row]:
    """Yield calls of attention, the fastest peer alone where several are faster."""
    half, brain = speed.beside_peers("float16"), speed.beside_peers("bfloat16")
    pytorch = (OURS, FP16), (INT8, MIXED)
    compared: tuple[tuple[Sequence[Group], str, Sequence[tuple[dict[str, str], dict[str, str]]]], ...] = (
        (half, "", ((OURS, PACKAGES),)), (brain, "", ((BRAIN, PACKAGES),)), (speed.beside_float8(), "", ((INT8, FLOAT8),)),
        (speed.latencies(), "", pytorch), (speed.other_shapes(), "", pytorch), (speed.biased(), " with a bias", pytorch),
    )  # fmt: skip
    for groups, suffix, pairs in compared:
        for ours, peers in pairs:
            best: dict[str, Row] = {}
            for row in lost(groups, ours, peers, lambda group: speed.shape_of(group) + suffix):  # noqa: B023
                if row["what"] not in best or row["ratio"] < best[row["what"]]["ratio"]:
                    best[row["what"]] = row
            yield from best.values()
    eager = speed.eager_group()
    yield from lost([eager], OURS, FP16, lambda group: f"{speed.shape_of(group)}, eager call")


def models() -> Iterator[Row]:
    """Yield whole models: patched, in integers on a GPU, and in integers on a CPU."""
    for group in speed.whole_models():
        for quotient, title in ((speed.RATIO, "patched"), (speed.COMPILED_RATIO, "patched and compiled")):
            ratio = quotient(group)
            if ratio < 1:
                row = declared.any_row(group)
                yield {"what": f"{speed.model_of(group)}, {title}", "peer": "not patched", "ratio": ratio, FILE: row[FILE]}
    for group in integer_networks.models(integer_networks.SPEED):
        ratio = group[col.INTEGER][col.RATIO]
        if ratio < 1:
            what = f"{integer_networks.shown(one(col.MODEL)(group))} b{one(col.BATCH)(group)}, integer network"
            yield {"what": what, "peer": "compiled float16", "ratio": ratio, FILE: group[col.INTEGER][FILE]}
    for group in openvino_networks.problems():
        for method in openvino_networks.OTHERS:
            if method in group and group[method][col.RATIO] < 1:
                what = (
                    f"{one(col.MODEL)(group)} b{one(col.BATCH)(group)}, integer network, {openvino_networks.processor(group)}"
                )
                yield {"what": what, "peer": method, "ratio": group[method][col.RATIO], FILE: group[method][FILE]}


def earlier() -> Iterator[Row]:
    """Yield integer networks that an earlier state ran in less time."""
    for name, (before, after, state) in EARLIER.items():
        for row in declared.record(f"../archive/{name}")["rows"]:
            if row.get("card", 0) == 0 and row[before] < row[after]:
                what = f"{row['model']} b{row['batch']}, integer network"
                yield {"what": what, "peer": state, "ratio": row[before] / row[after], FILE: f"../archive/{name}.json"}


TABLES = {
    "speed:worse": Table(
        lambda: [*attention(), *models(), *earlier()],
        (names("Row", "what"), names("Against", "peer"), Column("its time ÷ ours", "ratio", ".3f")),
        lambda row: f"{row[FILE]}: {row['what']}",
    )
}  # fmt: skip
"""Between markers of the page."""


PARTS = declared.Parts(TABLES)


if __name__ == "__main__":
    PARTS.write()
