"""Write docs/performance/tables.md, the speed tables of README and docs/performance.md, and docs/speed.svg.

``python benchmarks/performance_tables.py`` lays out the committed results; the figure needs matplotlib.
"""

from __future__ import annotations

import functools
import json
import posixpath
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import declared
import pages
from declared import Extreme, Group, Of, Quotient, Table, against, groups, one, quotients, span, time
from qflash_lab.bench import schema as col
from qflash_lab.bench.schema import Row
from qflash_lab.bench.tables import Column, digits, names, number

TABLES_PAGE = pages.ROOT / "docs" / "performance" / "tables.md"
"""Is written whole."""
FIGURE = pages.ROOT / "docs" / "speed.svg"
CARD = pages.CARD
"""Whose results are shown."""


def file_of(run: str) -> str:
    """Return the name of a run's result file."""
    return f"{run}_{CARD}"


def rows_of(*runs: str) -> list[Row]:
    """Return the rows of runs' result files."""
    return declared.rows(*map(file_of, runs))


def by_shape(*runs: str, bias: bool = False) -> list[Group]:
    """Return the rows of runs by shape, with a bias or without."""
    timed = (row for row in rows_of(*runs) if row[col.MODE] != "eager" and bool(row[col.BIAS]) is bias)
    return groups(timed, col.WORKLOAD, col.BATCH, col.SHAPE)


def shape_of(group: Group) -> str:
    """Return what tables call a group's shape."""
    row = declared.any_row(group)
    return f"{row[col.WORKLOAD]} b{row[col.BATCH]}" if row[col.BATCH] else str(row[col.SHAPE])


def sizes(group: Group) -> list[int]:
    """Return the numbers of a group's shape."""
    return [int(part) for part in declared.any_row(group)[col.SHAPE].split("x")]


def latencies() -> list[Group]:
    """Return every method's row, by shape: long rows have runs of their own, those of 1024 keys another."""
    return by_shape("bench", "bench_1024", "bench_long")


def other_shapes() -> list[Group]:
    """Return the run of other vision transformers, by the numbers of their shapes."""
    return sorted(by_shape("shapes"), key=sizes)


def biased() -> list[Group]:
    """Return every method's row, by shape, of the run with a bias."""
    return by_shape("bench_bias", bias=True)


def beside_peers(dtype: str) -> list[Group]:
    """Return the rows of the run beside other packages in a dtype, by shape."""
    return by_shape(f"peers_{dtype}")


def float8_file() -> str:
    """Return the run whose float8 rows are shown: the one of float8 alone where there is one."""
    own = file_of("peers_float8")
    return own if (declared.RESULTS / f"{own}.json").is_file() else file_of("peers_float16")


def beside_float8() -> list[Group]:
    """Return the rows of int8 and float8, by shape."""
    return by_shape(float8_file().removesuffix(f"_{CARD}"))


def workloads(found: Iterable[Group], numbers: str) -> list[Group]:
    """Return the groups of A1 to A7 whose number is among these."""
    return [group for group in found if shape_of(group)[0] == "A" and shape_of(group)[1] in numbers]


def long_rows(*keys: int) -> list[Group]:
    """Return the groups of shapes that are no workload, of so many keys."""
    return [group for group in latencies() if shape_of(group)[0] != "A" and sizes(group)[2] in keys]


def rows_between(found: Iterable[Group], least: int, most: int) -> list[Group]:
    """Return the groups of shapes that are no workload, of so many keys."""
    return [group for group in found if shape_of(group)[0] != "A" and least <= sizes(group)[2] <= most]


FROM_16_BITS = (*col.FP16, col.FA3, col.FA3_SPLIT, col.SAGE)
"""What takes and returns 16-bit floats: PyTorch's kernels, FlashAttention-3, and SageAttention, which quantises Q and K."""
FROM_FLOAT8 = (col.FA3_FLOAT8, col.CUDNN_FLOAT8)
"""What takes float8 that was quantised before the clock starts."""
FROM_FLOATS = {col.SDPA_FLASH: "FA2", col.SDPA_CUDNN: "cuDNN", col.SDPA_EFFICIENT: "efficient"}
FROM_INT8 = {
    col.INT_FLASH_FULL: "INT-Flash-Full", col.INT_FLASH_HALF: "INT-Flash-Half", col.QATTN: "QAttn", col.I_VIT: "I-ViT",
}  # fmt: skip
SHAPE = names("shape", shape_of)


def present(titles: dict[str, str], found: Sequence[Group]) -> dict[str, str]:
    """Return those methods that some group has."""
    return {method: title for method, title in titles.items() if any(method in group for group in found)}


def sqnr(method: str) -> Column:
    """Return the column of a method's SQNR."""
    return Column("SQNR dB", Of(method, col.SQNR_DB), digits(1))


def end_to_end(found: Sequence[Group]) -> list[Column]:
    """Return the columns of float in, float out: PyTorch's kernels and ours, quantisation included."""
    peers = [time(title, method) for method, title in present(FROM_FLOATS, found).items()]
    ours = [time("**QFlash fp16**", col.QFLASH), Column("fastest ÷ ours", against(col.FP16, col.QFLASH)), sqnr(col.QFLASH)]
    return [SHAPE, *peers, *ours]


def int8_in(found: Sequence[Group]) -> list[Column]:
    """Return the columns of tensors quantised before the clock starts: the other methods' kernels and ours."""
    peers = present(FROM_INT8, found)
    ours = [
        time("**QFlash int8**", col.QFLASH_INT8), Column("fastest ÷ ours", against(tuple(peers), col.QFLASH_INT8)),
        Column("fastest 16-bit ÷ ours", against(col.FP16, col.QFLASH_INT8)), sqnr(col.QFLASH_INT8),
    ]  # fmt: skip
    return [SHAPE, *(time(title, method) for method, title in peers.items()), *ours]


def from_16_bits(dtype: str) -> Table:
    """Return the table of 16-bit floats in and out, beside other packages."""
    title = {"float16": "fp16", "bfloat16": "bf16"}[dtype]
    return Table(
        lambda: beside_peers(dtype),
        (
            SHAPE, *(time(heading, method) for method, heading in FROM_FLOATS.items()),
            Column("FA3 (bf16)", Extreme((col.FA3, col.FA3_SPLIT)), digits(2)), time("SageAttention", col.SAGE),
            time(f"**QFlash {title}**", col.QFLASH), Column("fastest ÷ ours", against(FROM_16_BITS, col.QFLASH)),
            Column("SQNR dB: FA3", Of(col.FA3, col.SQNR_DB), digits(1)), Column("Sage", Of(col.SAGE, col.SQNR_DB), digits(1)),
            Column("ours", Of(col.QFLASH, col.SQNR_DB), digits(1)),
        ),
    )  # fmt: skip


TITLES_16_BITS = FROM_FLOATS | {col.FA3: "FA3", col.FA3_SPLIT: "FA3", col.SAGE: "SageAttention"}


def fastest_16_bits(group: Group) -> str:
    """Return the title of the fastest 16-bit kernel."""
    timed = [method for method in FROM_16_BITS if Of(method)(group) is not None]
    return TITLES_16_BITS[min(timed, key=lambda method: float(Of(method)(group)))]


INT8_BESIDE_16_BITS = Table(
    lambda: beside_peers("float16"),
    (
        SHAPE, names("fastest 16-bit kernel", fastest_16_bits), Column("its time", Extreme(FROM_16_BITS), digits(2)),
        time("**QFlash int8**", col.QFLASH_INT8), Column("its ÷ ours", against(FROM_16_BITS, col.QFLASH_INT8)),
        sqnr(col.QFLASH_INT8),
    ),
)  # fmt: skip


def from_8_bits(found: Sequence[Group]) -> list[Column]:
    """Return the columns of int8 beside those float8 methods that were measured."""
    titles = present({col.FA3_FLOAT8: "FA3 float8", col.CUDNN_FLOAT8: "cuDNN float8"}, found)
    return [
        SHAPE, *(time(title, method) for method, title in titles.items()), time("**QFlash int8**", col.QFLASH_INT8),
        Column("fastest float8 ÷ ours", against(FROM_FLOAT8, col.QFLASH_INT8)),
        *(Column(f"SQNR dB: {title}", Of(method, col.SQNR_DB), digits(1)) for method, title in titles.items()),
        Column("ours", Of(col.QFLASH_INT8, col.SQNR_DB), digits(1)),
    ]  # fmt: skip


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


def by_model() -> list[Group]:
    """Return the run of other vision transformers by :data:`OTHERS`, the batch a part of a method's name."""

    def model(row: Row) -> str:
        return str(row[col.SHAPE].partition("x")[2])

    rows = [row | {col.MODEL: model(row)} for row in rows_of("shapes") if row[col.MODE] != "eager"]
    found = groups(rows, col.MODEL, by=lambda row: f"{row[col.METHOD]} b{row[col.SHAPE].partition('x')[0]}")
    order = list(OTHERS.values())
    return sorted(found, key=lambda group: order.index(one(col.MODEL)(group)))


def bold_above_one(value: float) -> str:
    """Format a ratio, bold where ours is faster."""
    return f"**{value:.2f}**" if value > 1 else number(value)


def ratios(head: str, ours: str) -> list[Column]:
    """Return the columns of a method's ratios, a batch each."""
    return [
        Column(
            head * (batch == 1) + str(batch), against([f"{x} b{batch}" for x in col.FP16], f"{ours} b{batch}"), bold_above_one
        )
        for batch in (1, 8, 64)
    ]


RATIOS = Table(
    by_model,
    (
        names("", lambda group: next(title for title, shape in OTHERS.items() if shape == one(col.MODEL)(group))),
        names("heads x tokens x channels", lambda group: one(col.MODEL)(group).replace("x", " x ")),
        *ratios("int8: batch ", col.QFLASH_INT8), *ratios("fp16: batch ", col.QFLASH),
    ),
)  # fmt: skip


def tiles(which: str) -> Callable[[Row], str]:
    """Return what makes text of a row's tiles."""
    return lambda row: ", ".join("x".join(map(str, of)) for of in row[which])


_TUNED_TITLES = {method.removesuffix(" kernel"): title for method, title in FROM_INT8.items()}
TUNED = Table(
    lambda: rows_of("baselines_tuned"),
    (
        names("method", lambda row: _TUNED_TITLES[row[col.METHOD]]), names("shape", col.LABEL),
        Column("rule, µs", col.RULE_US), Column("tuned, µs", col.BEST_US),
        Column("rule ÷ tuned", lambda row: row[col.RULE_US] / row[col.BEST_US]), names("tiles, rule", tiles(col.RULE)),
        names("tiles, tuned", lambda row: "the rule's" if row[col.BEST] == row[col.RULE] else tiles(col.BEST)(row)),
    ),
)  # fmt: skip


def bias_columns(title: str, ours: str) -> list[Column]:
    """Return the columns of Swin with its bias and shift mask: PyTorch's kernels and one of ours."""
    return [
        SHAPE, time("cuDNN", col.SDPA_CUDNN), time("efficient", col.SDPA_EFFICIENT), time(f"**{title}**", ours),
        Column("fastest ÷ ours", against(col.FP16, ours)), Column("cost of the bias", Of(ours, col.BIAS_COST)),
    ]  # fmt: skip


def packed() -> list[Group]:
    """Return the batches of packed sequences; calls without a graph are methods of their own."""
    return groups(rows_of("varlen"), col.WORKLOAD, by=lambda row: row[col.METHOD] + ", eager" * (row[col.MODE] == "eager"))


def lengths(group: Group) -> list[int]:
    """Return the tokens of a batch's sequences."""
    return [int(part) for part in declared.any_row(group)[col.LENGTHS].split()]


PACKED = Table(
    packed,
    (
        names("batch", one(col.WORKLOAD)), names("tokens", lambda group: sum(lengths(group))),
        names("heads x channels", lambda group: f"{one(col.HEADS)(group)} x {one(col.HEAD_DIM)(group)}"),
        time("FA2 varlen", col.FLASH_VARLEN, 1), time("**QFlash**", col.QFLASH, 1),
        Column("FA2 ÷ ours", against((col.FLASH_VARLEN,), col.QFLASH)),
        time("eager, FA2", f"{col.FLASH_VARLEN}, eager", 1), time("eager, QFlash", f"{col.QFLASH}, eager", 1),
    ),
)  # fmt: skip
LINEAR = Table(
    lambda: groups(rows_of("linear_layers"), col.LAYER),
    (
        names("layer", one(col.LAYER)),
        names("rows x inputs x outputs", lambda of: " x ".join(str(one(c)(of)) for c in (col.ROWS, col.INPUTS, col.OUTPUTS))),
        names("epilogue", one(col.EPILOGUE)),
        *(time(peer, peer) for peer in (col.CUBLAS_FLOAT16, col.CUBLAS_FLOAT8, col.CUBLAS_INT8)),
        time("**QFlash**", col.QFLASH), Column("float8 ÷ ours", against((col.CUBLAS_FLOAT8,), col.QFLASH)),
        Column("of int8 peak", Of(col.QFLASH, col.OF_INT8_PEAK), ".0%"),
        Column("of bandwidth", Of(col.QFLASH, col.OF_BANDWIDTH), ".0%"),
    ),
)  # fmt: skip


def eager_group(column: str = col.MEDIAN_US) -> Group:
    """Return the rows of eager calls on A2, batch 8."""
    rows = (row for row in rows_of("bench_eager") if row[col.MODE] == "eager" and row[column] is not None)
    (found,) = groups(row for row in rows if (row[col.WORKLOAD], row[col.BATCH]) == ("A2", 8))
    return found


EAGER = Table(
    lambda: list(eager_group().values()),
    (
        names("method", col.METHOD),
        names("takes", lambda row: "int8" if row[col.METHOD] in {col.QFLASH_INT8, *FROM_INT8} else "fp16"),
        Column("until the device is done, µs", col.MEDIAN_US, digits(1)), Column("issuing, µs", col.ISSUE_US, digits(1)),
    ),
)  # fmt: skip


def issued() -> dict[str, list[float]]:
    """Return the time of issuing a call, divided by that of PyTorch's quickest kernel, by method."""
    found = groups((row for row in rows_of("eager_shapes") if row[col.MODE] == "eager"), col.SHAPE)
    return {
        ours: [1 / ratio for ratio in quotients(found, col.FP16, ours, col.ISSUE_US)] for ours in (col.QFLASH, col.QFLASH_INT8)
    }


def eager_line() -> str:
    """Return what eager calls take: on A2, batch 8, and the range of issuing over shapes."""
    of = {method: number(row[col.MEDIAN_US], 1) for method, row in eager_group().items()}
    times = ", ".join(f"{title} {of[method]}" for method, title in FROM_FLOATS.items())
    ratios = issued()
    return (
        f"* **Eager calls**, A2 batch 8, µs until the device is done: {times}, QFlash {of[col.QFLASH]} from fp16 and "
        f"{of[col.QFLASH_INT8]} from int8. To launch a call takes "
        f"{span(ratios[col.QFLASH])} (fp16) and {span(ratios[col.QFLASH_INT8])} (int8) times as long as with the "
        f"quickest of PyTorch's kernels, over {len(ratios[col.QFLASH])} shapes (`eager_shapes_{CARD}`)."
    )


def energy_group() -> Group:
    """Return the rows of energy on A2, batch 8."""
    (found,) = groups(row for row in rows_of("energy") if row[col.UJ] is not None)
    return found


def of_energy(*methods: str) -> Callable[[Row], float]:
    """Return what divides a row's energy by the least of some methods'."""
    return lambda row: row[col.UJ] / Extreme(methods, col.UJ)(energy_group())


ENERGY = Table(
    lambda: list(energy_group().values()),
    (
        names("method", col.METHOD), names("takes", lambda row: "int8" if row[col.MODE] == "kernel" else "fp16"),
        Column("µJ a call", col.UJ, ".0f"), Column("÷ FA2", of_energy(col.SDPA_FLASH), ".2f"),
        Column("÷ the least of 16 bits", of_energy(*col.FP16), ".2f"), Column("SQNR dB", col.SQNR_DB, digits(1)),
    ),
)  # fmt: skip
PROFILE = Table(
    lambda: [row for row in rows_of("profile") if row[col.METHOD] in {*FROM_FLOATS, *FROM_INT8, *col.OURS}],
    (
        names("shape", col.full_label), names("method", col.METHOD), Column("launches", col.KERNELS, "d"),
        Column("µs", col.DURATION_US, digits(1)), Column("IMMA %", col.IMMA_PERCENT, digits(1)),
        Column("HMMA %", col.HMMA_PERCENT, digits(1)), Column("tensor pipe %", col.TENSOR_PERCENT, digits(1)),
        Column("issue slots %", col.ISSUE_PERCENT, digits(1)), Column("occupancy %", col.OCCUPANCY_PERCENT, digits(1)),
        Column("registers", col.REGISTERS, ".0f"), Column("warp instructions", col.INSTRUCTIONS, ".0f"),
    ),
)  # fmt: skip


def compiled_cases() -> list[Group]:
    """Return the reports of every case that ``qflash-lab verify`` compiles, by target."""
    reports = (report | {declared.FILE: "verify_triton36.json"} for report in declared.record("verify_triton36"))
    return groups(reports, "case", by=lambda report: report["target"])


CODE = Table(
    compiled_cases,
    (
        names("case", one("case")), *(Column(of, Of(of, "per_score"), digits(1)) for of in ("sm_80", "sm_90")),
        Column("registers (sm_90)", Of("sm_90", "registers"), "d"), Column("spills (sm_90)", Of("sm_90", "spills"), "d"),
    ),
)  # fmt: skip


CARDS = {
    "sm_80": "A100", "sm_86": "A10, RTX 30", "sm_89": "L4, L40, RTX 40", "sm_90": "H100, H200", "sm_100": "B200",
    "sm_120": "RTX 50",
}  # fmt: skip
"""Cards of the targets that ``qflash-lab verify`` compiles for."""


@functools.cache
def timed_cards() -> dict[str, list[str]]:
    """Return the cards that result files, the archive's among them, are of, by target."""
    found: dict[str, set[str]] = {}
    for folder in (declared.RESULTS, declared.RESULTS.parent / "archive"):
        for path in folder.glob("*.json"):
            record = json.loads(path.read_text(encoding="utf-8"))
            where = record.get("environment") if isinstance(record, dict) else None
            if where and where.get("capability"):
                found.setdefault(where["capability"], set()).add(pages.card(where["device"]))
    return {target: sorted(cards) for target, cards in found.items()}


TARGETS = Table(
    lambda: groups(
        (report | {declared.FILE: "verify_triton36.json"} for report in declared.record("verify_triton36")), "target",
        by=lambda report: report["case"],
    ),
    (
        names("Target", one("target")), names("Cards", lambda group: CARDS[one("target")(group)]),
        names("Cases compiled", len),
        names("Float instructions in them", lambda of: sum(report["float_count"] for report in of.values())),
        names("Timed", lambda group: ", ".join(timed_cards().get(one("target")(group), ())) or "not timed"),
    ),
    lambda group: f"{one(declared.FILE)(group)}: target = {one('target')(group)}",
)  # fmt: skip


def newer() -> list[Row]:
    """Return the times of Triton 3.9's machine code over those of Triton 3.6's, by shape."""
    found: dict[str, Row] = {}
    for row in rows_of("../archive/triton39"):
        if used_by := row.get("used_by"):
            column = row["kind"] if used_by == "3.6" else f"{row['kind']}, form for 3.9"
            line = found.setdefault(row[col.SHAPE], {declared.FILE: row[declared.FILE], col.SHAPE: row[col.SHAPE]})
            line.setdefault(column, row["triton39_us"] / row["triton36_us"])
    return list(found.values())


NEWER = Table(
    newer, (names("shape", col.SHAPE), *(Column(of, of) for of in ("int8", "fp16", "int8, form for 3.9", "fp16, form for 3.9")))
)


MODEL_NAMES = {
    "vit_large_patch14_clip_224": "CLIP ViT-L/14",
    "vit_base_patch14_dinov2": "DINOv2-B, 518 px",
    "vit_base_patch14_dinov2 224 px": "DINOv2-B, 224 px",
    "eva02_small_patch14_224": "EVA-02-S",
    "swin_base_patch4_window7_224": "Swin-B",
    "swinv2_tiny_window8_256": "Swin V2-T",
}
"""What tables call timm's models."""


def images(*methods: str) -> Extreme:
    """Return the most images a second of some ways to run a model."""
    return Extreme(methods, col.IMAGES_PER_S, max)


UNPATCHED, PATCHED = images(col.TIMM, *col.FP16), images(col.QFLASH, col.KEPT_BIAS)
COMPILED, COMPILED_PATCHED = images(col.COMPILE, col.COMPILE_SDPA), images(col.COMPILE_QFLASH, col.COMPILE_KEPT_BIAS)
"""The fastest of PyTorch's ways to run a model's own attention, and the faster of ours with a bias kept or not; a model that
has no bias, or calls SDPA anyway, has one way less."""
RATIO, COMPILED_RATIO = Quotient(PATCHED, UNPATCHED), Quotient(COMPILED_PATCHED, COMPILED)


def whole_models() -> list[Group]:
    """Return whole models, patched and not, by model and batch."""
    return groups(rows_of("models"), col.MODEL, col.BATCH)


def model_of(group: Group) -> str:
    """Return what tables call a group's model and batch."""
    model = one(col.MODEL)(group)
    return f"{MODEL_NAMES.get(model, model)} b{one(col.BATCH)(group)}"


MODELS = Table(
    whole_models,
    (
        names("model", model_of), Column("timm", Of(col.TIMM, col.IMAGES_PER_S), digits(0)),
        Column("fastest SDPA", UNPATCHED, digits(0)), Column("**qflash**", PATCHED, digits(0)),
        Column("ratio", RATIO, digits(3)), Column("compiled", COMPILED, digits(0)),
        Column("**compiled qflash**", COMPILED_PATCHED, digits(0)), Column("ratio", COMPILED_RATIO, digits(3)),
        Column("SQNR dB of logits", Of(col.QFLASH, col.SQNR_DB), digits(1)),
    ),
)  # fmt: skip


class Aim(NamedTuple):
    """What this library set out to reach, and what was measured."""

    what: str
    aim: float
    values: list[float]
    file: str
    at_most: bool = False

    def reached(self) -> str:
        """Count the values that reach the aim, as far as the figures that are shown go."""
        shown = [round(value, 2) for value in self.values]
        count = sum(value <= self.aim if self.at_most else value >= self.aim for value in shown)
        return f"{count} of {len(shown)}"

    def measured(self) -> str:
        """Return the least and the greatest."""
        ends = min(self.values), max(self.values)
        return " to ".join(f"{value:.2f}" for value in dict.fromkeys(ends))


def aims() -> list[Aim]:
    """What this library set out to reach on this GPU, and what was measured."""
    found = latencies()
    runs = biased()
    issue, joules = eager_group(), energy_group()
    bench, long = "bench", "bench_1024, bench_long"
    result = []
    for head, keep in (("A1 to A3", "123"), ("A4 to A7", "4567")):
        for kind, dtype in (("fp16", "float16"), ("bf16", "bfloat16")):
            mine = workloads(beside_peers(dtype), keep)
            what = f"{head}, {kind} in and out, against the fastest 16-bit kernel"
            result.append(Aim(what, 1.2, quotients(mine, FROM_16_BITS, col.QFLASH), f"peers_{dtype}"))
        best = quotients(workloads(found, keep), (*col.FP16, *col.FLOAT_SOFTMAX), col.QFLASH_INT8)
        what = f"{head}, int8, against the fastest of PyTorch's kernels, INT-Flash and QAttn"
        result.append(Aim(what, 1.5, best, bench))

    def wide(head_dim: int, *keys: int) -> list[Group]:
        return [group for group in long_rows(*keys) if sizes(group)[3] == head_dim]

    for head_dim, aim, fa2 in ((64, 1.15, 1.7), (128, 1.4, 2.4)):
        rows = wide(head_dim, 1024, 4096, 16384)
        for text, least, peer in (
            (f"1024, 4096 and 16384 keys, d = {head_dim}, int8, against cuDNN", aim, col.SDPA_CUDNN),
            (f"the same against FA2, d = {head_dim}", fa2, col.SDPA_FLASH),
        ):
            result.append(Aim(text, least, quotients(rows, (peer,), col.QFLASH_INT8), long))
    for head_dim, aim in ((64, 1.05), (128, 1.25)):
        values = quotients(wide(head_dim, 4096, 16384), (col.SDPA_CUDNN,), col.QFLASH)
        result.append(Aim(f"4096 and 16384 keys, d = {head_dim}, fp16, against cuDNN", aim, values, "bench_long"))
    for method, kind in ((col.QFLASH_INT8, "int8"), (col.QFLASH, "fp16")):
        costs = [Of(method, col.BIAS_COST)(group) for group in runs]
        result.append(Aim(f"A4 to A7, {kind}: time with a bias ÷ without", 1.25, costs, "bench_bias", at_most=True))
        values = quotients(runs, (col.SDPA_CUDNN, col.SDPA_EFFICIENT), method)
        result.append(Aim(f"the same against the fastest SDPA with the bias, {kind}", 2, values, "bench_bias"))
    uj = joules[col.QFLASH_INT8][col.UJ] / joules[col.SDPA_FLASH][col.UJ]
    result.append(Aim("energy, A2 batch 8, int8 ÷ FA2", 0.6, [uj], "energy", at_most=True))
    for method, kind in ((col.QFLASH, "fp16"), (col.QFLASH_INT8, "int8")):
        values = [issue[method][col.ISSUE_US] / issue[col.SDPA_FLASH][col.ISSUE_US]]
        result.append(Aim(f"issuing an eager call, A2 batch 8, {kind} ÷ FA2", 2, values, "bench_eager", at_most=True))
    return result


AIMS = Table(
    aims,
    (
        names("", lambda aim: aim.what), names("aim", lambda aim: f"{'≤' if aim.at_most else '≥'} {aim.aim}"),
        names("measured, least to most", Aim.measured), names("reached", Aim.reached),
    ),
    lambda aim: ", ".join(f"{file_of(run)}.json" for run in aim.file.split(", ")),
)  # fmt: skip


class Speeds(NamedTuple):
    """A line of README's table: ratios to the fastest 16-bit kernel, from floats and on int8, and to the fastest in float8."""

    what: str
    fp16: str
    int8: str
    file: str
    bf16: str = ""
    float8: str = ""


def readme() -> list[Speeds]:
    """Return the lines of README's table."""
    result = []
    half, brain = beside_peers("float16"), beside_peers("bfloat16")

    def add_beside_peers(what: str, keep: Callable[[list[Group]], list[Group]]) -> None:
        of = keep(half)
        eight = [group for group in keep(beside_float8()) if Extreme(FROM_FLOAT8)(group) is not None]
        ratios = {
            "fp16": quotients(of, FROM_16_BITS, col.QFLASH), "bf16": quotients(keep(brain), FROM_16_BITS, col.QFLASH),
            "int8": quotients(of, FROM_16_BITS, col.QFLASH_INT8), "float8": quotients(eight, FROM_FLOAT8, col.QFLASH_INT8),
        }  # fmt: skip
        runs = ("peers_float16", "peers_bfloat16", float8_file().removesuffix(f"_{CARD}"))
        result.append(Speeds(what, file=", ".join(dict.fromkeys(runs)), **{key: span(found) for key, found in ratios.items()}))

    def add(what: str, of: Iterable[Group], file: str) -> None:
        of = list(of)
        fp16, int8 = (span(quotients(of, col.FP16, ours)) for ours in (col.QFLASH, col.QFLASH_INT8))
        result.append(Speeds(what, fp16, int8, file))

    add_beside_peers("A1 to A3, batch 1, 8, 64", lambda found: workloads(found, "123"))
    add_beside_peers("A4 to A7, batch 1, 8, 64", lambda found: workloads(found, "4567"))
    for least, most in ((197, 729), (1024, 1374), (4096, 4608), (16384, 16384)):
        keep = functools.partial(rows_between, least=least, most=most)
        channels = (sizes(group)[3] for group in keep(half))
        add_beside_peers(f"{span((least, most), 0)} keys, {span(channels, 0)} channels", keep)
    add("A4 to A7 with Swin's bias and mask ¹", biased(), "bench_bias")
    add("eager call without a graph, A2 batch 8, until the device is done ¹", [eager_group()], "bench_eager")
    joules = [
        " (".join(span(quotients([energy_group()], col.FP16, ours, column)) for column in (col.UJ, col.UJ_ABOVE_IDLE)) + ")"
        for ours in (col.QFLASH, col.QFLASH_INT8)
    ]
    result.append(Speeds("energy (and above idle), A2 batch 8 ¹", joules[0], joules[1], "energy"))
    for begin, which in (("Swin-T", "Swin-T, `keep_bias=True`,"), ("DeiT", "DeiT-T, -S, -B")):
        mine = [group for group in whole_models() if one(col.MODEL)(group).startswith(begin)]
        eager, compiled = (span(map(ratio, mine)) for ratio in (RATIO, COMPILED_RATIO))
        result.append(Speeds(f"{which} as a whole, batch 1, 8, 64 ¹", f"{eager}; compiled {compiled}", "", "models"))
    return result


SPEEDS = Table(
    readme,
    (
        names(f"{CARD.upper()}, CUDA-graph replay", lambda line: line.what), names("from fp16", lambda line: line.fp16),
        names("from bf16", lambda line: line.bf16), names("on int8, against 16 bits", lambda line: line.int8),
        names("on int8, against float8", lambda line: line.float8),
    ),
    lambda line: ", ".join(f"{file_of(run)}.json" for run in line.file.split(", ")),
)  # fmt: skip


def decibels(methods: Sequence[str], found: Sequence[Group] | None = None) -> str:
    """Return the least and the greatest SQNR of some methods, of int8 and float8 if not of other rows."""
    values = [Of(name, col.SQNR_DB)(group) for group in found or beside_float8() for name in methods]
    return span([value for value in values if value is not None], 1)


def summary() -> list[str]:
    """Return what the tables say beside README's and that of aims."""
    found, others = latencies(), other_shapes()
    vit, swin = workloads(found, "123"), workloads(found, "4567")
    long, thousand = long_rows(1024, 4096, 16384), long_rows(1024)
    fp16, int8 = col.QFLASH, col.QFLASH_INT8
    from_fp16 = beside_peers("float16")

    def times(of: Iterable[Group], ours: str, peers: Sequence[str] = col.FP16) -> str:
        return span(quotients(of, peers, ours))

    ahead = sum(ratio > 1 for ratio in quotients(others, col.FP16, fp16))

    def packed_times(chosen: Callable[[Group], bool]) -> str:
        return span(quotients(filter(chosen, packed()), (col.FLASH_VARLEN,), fp16))

    slower = [
        f"{model_of(group)} ({RATIO(group):.3f}, {COMPILED_RATIO(group):.3f})"
        for group in whole_models()
        if min(RATIO(group), COMPILED_RATIO(group)) < 1
    ]
    lines = [
        f"* {ahead} of the {len(others)} **other ViT shapes** and batches are ahead from fp16.",
        f"* **Against int8 products with a float softmax** (INT-Flash, QAttn, from int8 tensors): A1 to A3 "
        f"{times(vit, int8, col.FLOAT_SOFTMAX)}, A4 to A7 {times(swin, int8, col.FLOAT_SOFTMAX)}, 1024 keys and "
        f"more {times(long, int8, col.FLOAT_SOFTMAX)}. Hopper issues float multiply-adds at "
        f"twice the rate of integer ones and has an exponential unit. I-ViT, the other integer-only method, takes "
        f"{times([*vit, *swin], int8, (col.I_VIT,))} times as long as ours.",
        f"* **SQNR beside other packages**, uniform inputs: from fp16 ours has {decibels((fp16,), from_fp16)} dB, "
        f"SageAttention {decibels((col.SAGE,), from_fp16)} dB (it is ahead from 577 keys on). From tensors that are "
        f"quantised before: int8 {decibels((int8,))} dB, float8 {decibels(FROM_FLOAT8)} dB.",
        f"* **1024 keys of 64 and 128 channels**: a call from fp16 takes {times(thousand, int8, (fp16,))} times as long "
        f"as on int8.",
        f"* **Packed sequences** of several lengths from fp16, against FA2's `varlen_attn`: heads of 64 channels "
        f"{packed_times(lambda of: one(col.HEAD_DIM)(of) == 64)}, windows of 64 patches "
        f"{packed_times(lambda of: max(lengths(of)) <= 64)}, longer sequences with 72 or 80 channels "
        f"{packed_times(lambda of: one(col.HEAD_DIM)(of) != 64 and max(lengths(of)) > 64)}.",
        f"* **Whole models** that are slower (patched; patched and compiled): {', '.join(slower) or 'none'}.",
        eager_line(),
    ]
    cpus = []
    for file, title in (
        ("cpu_zen4", "Zen 4 with VNNI"),
        ("cpu_vnni", "in an earlier state Zen 5 with VNNI"),
        ("cpu", "AVX2 only"),
    ):
        of = processor(file)
        floats, int8s = (span(quotients(of, (col.SDPA,), ours, col.MIN_US)) for ours in (CPU_FLOAT, CPU_INT8))
        cpus.append(f"{title} {floats} from float32 and {int8s} on int8")
    lines.append(f"* **CPU**, two threads, against SDPA in float32: {'; '.join(cpus)}.")
    return [line for paragraph in lines for line in pages.wrap(paragraph, indent="  ")]


def draw() -> None:
    """Draw how many times as fast as the fastest 16-bit kernel we are, shape by shape."""
    import matplotlib
    from matplotlib.figure import Figure

    half, brain = beside_peers("float16"), beside_peers("bfloat16")
    panels = (
        (half, col.QFLASH, "fp16 in and out, quantisation included"),
        (brain, col.QFLASH, "bf16 in and out, quantisation included"),
        (half, col.QFLASH_INT8, "int8 in and out, quantised beforehand"),
    )
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "qflash", "font.size": 9}):
        figure = Figure(figsize=(9.5, 7.4), layout="constrained")
        for axes, (found, method, title) in zip(figure.subplots(3, 1, sharex=True), panels, strict=True):
            of = {shape_of(group): group for group in found}
            shapes = sorted(of, key=lambda shape: shape[:2] if shape.startswith("A") else "B")
            heights = quotients((of[shape] for shape in shapes), FROM_16_BITS, method)
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
        figure.suptitle(
            f"Speed on one {CARD.upper()} against the fastest 16-bit kernel (PyTorch's, FlashAttention-3, SageAttention), "
            "CUDA-graph replay", fontsize=10,
        )  # fmt: skip
        figure.savefig(FIGURE, metadata={"Date": None})


CPU_INT8, CPU_FLOAT, CPU_REFERENCE = f"{col.QFLASH_INT8} cpu", f"{col.QFLASH} cpu", f"{col.QFLASH} reference"


def processor(file: str) -> list[Group]:
    """Return one CPU's run by shape."""
    return groups(declared.rows(file), col.WORKLOAD, col.BATCH)


def milliseconds(heading: str, method: str) -> Column:
    """Return the column of a method's lowest time."""

    def form(us: float) -> str:
        return f"{us / 1000:.3g}" if us < 1e6 else f"{us / 1000:.0f}"

    return Column(heading, Of(method, col.MIN_US), form)


PROCESSOR = (
    names("shape", lambda group: col.full_label(declared.any_row(group))), milliseconds("SDPA ms", col.SDPA),
    milliseconds("int8 ms", CPU_INT8), Column("ratio", against((col.SDPA,), CPU_INT8, col.MIN_US)),
    Column("SQNR dB", Of(CPU_INT8, col.SQNR_DB)), milliseconds("float32 ms", CPU_FLOAT),
    Column("ratio", against((col.SDPA,), CPU_FLOAT, col.MIN_US)), Column("SQNR dB", Of(CPU_FLOAT, col.SQNR_DB)),
    milliseconds("reference ms", CPU_REFERENCE),
)  # fmt: skip
"""Columns of a CPU's run: SDPA in float32, the CPU back end and the reference, lowest of the rounds."""


def linked(file: str) -> str:
    """Return a link to a result file, and the day of its run where it says so."""
    record = declared.record(file)
    day = f" ({(record.get('environment') or record)['date'][:10]})" if isinstance(record, dict) else ""
    return f"[{Path(file).name}](../../{posixpath.normpath(f'benchmarks/results/{file}.json')}){day}"


def tuned_baselines_section() -> tuple[Section, ...]:
    """Return the section of :data:`TUNED`; none where that was not measured."""
    file = file_of("baselines_tuned")
    if not (declared.RESULTS / f"{file}.json").is_file():
        return ()
    about = """Quantisation is outside the clock. Medians of replays of the rule's tiles and of others in alternation
([how](../baselines.md#tiles)). Tiles are queries x keys x warps x stages of the fused kernels; of I-ViT rows x columns x
sum x warps x stages of the first product, rows x warps of Shiftmax, and the second product's."""
    return (Section("Baselines before and after tuning", REPLAY, about, TUNED, (file,)),)


class Section(NamedTuple):
    """A heading of the page of tables, how its figures were timed, what is said about them, and the table.

    Attributes:
        timing: the first words under the heading.
        files: result files.
    """

    title: str
    timing: str
    about: str
    table: Table
    files: tuple[str, ...]


REPLAY = "CUDA-graph replay, microseconds"
"""What the head of the page says of all tables; a heading has no line for it."""
PACKAGES = {
    "fa3-fwd": {col.FA3, col.FA3_SPLIT, col.FA3_FLOAT8},
    "sageattention": {col.SAGE},
    "nvidia-cudnn-frontend": {col.CUDNN_FLOAT8},
}
"""The rows of each package."""


def methods_of(run: str) -> set[str]:
    """Return the methods that a run has rows of."""
    return {row[col.METHOD] for row in declared.record(run)["rows"]}


BEFORE_EXACT_SUMS = "PyTorch 2.15.0, and an earlier state of QFlash, whose row sums were not exact yet."


def peers_run(dtype: str) -> str:
    """Say what the run beside other packages is: how it was timed, the packages, and whose kernels are ours."""
    record = declared.record(file_of(f"peers_{dtype}"))
    # a package whose rows are left out is not one of them
    shown = {name for name, rows in PACKAGES.items() if rows & methods_of(file_of(f"peers_{dtype}"))}
    packages = ", ".join(f"`{name} {version}`" for name, version in record["packages"].items() if name in shown)
    where = record["environment"]
    return f"""Beside other packages ({packages}), median of 15 rounds. Kernels of commit
{where["commit"]}, cuDNN {cudnn(where["cudnn"])}."""


def cudnn(number: int) -> str:
    """Return cuDNN's version as its name has it: 9.19.0 for 91900."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


LATENCY_FILES = (file_of("bench"), file_of("bench_1024"), file_of("bench_long"))

SECTIONS = (
    Section(
        "Latency from fp16",
        REPLAY,
        peers_run("float16")
        + """ Quantisation is inside the clock, SageAttention's, too. **fastest ÷ ours** is the least of the methods before it
divided by ours: above 1 we are faster. FA3 is FlashAttention-3, the faster of its default and of keys split as it chooses; its
package has no fp16, so it takes the inputs in bf16. SageAttention takes 64, 96 and 128 channels. Methods and A1 to A7:
[workloads](../performance.md#workloads). Shapes are batch x heads x tokens x channels.""",
        from_16_bits("float16"),
        (file_of("peers_float16"),),
    ),
    Section(
        "Latency from bf16",
        REPLAY,
        peers_run("bfloat16") + " All methods take and return bf16.",
        from_16_bits("bfloat16"),
        (file_of("peers_bfloat16"),),
    ),
    Section(
        "Latency from 8 bits",
        REPLAY,
        (peers_run("float8") if float8_file() == file_of("peers_float8") else "The run of the first table.")
        + """ Quantisation is outside the clock. FA3 float8 takes e4m3 with one scale a tensor, of a multiple of 16 channels,
and returns bf16. cuDNN takes multiples of 16 channels, too.""",
        Table(beside_float8, from_8_bits),
        (float8_file(),),
    ),
    Section(
        "Latency from int8 tensors, beside 16 bits",
        REPLAY,
        "The run of the first table: quantisation is outside the clock for ours, the 16-bit kernels take fp16 (FA3 bf16).",
        INT8_BESIDE_16_BITS,
        (file_of("peers_float16"),),
    ),
    Section(
        "Latency from fp16, PyTorch's kernels",
        REPLAY,
        """Median of 15 rounds, quantisation inside the clock. **fastest ÷ ours** is the least of FA2, cuDNN and efficient
divided by ours. The rows of 16384 keys reach the power limit: their quartiles lie up to 5 % apart, on int8 up to 13 %.""",
        Table(latencies, end_to_end),
        LATENCY_FILES,
    ),
    Section(
        "Latency from int8 tensors",
        REPLAY,
        """The same runs. Quantisation is outside the clock, of INT-Flash, QAttn and I-ViT, too ([baselines](../baselines.md));
INT-Flash returns fp16, QAttn and I-ViT int8. **fastest ÷ ours** is against these; the last ratio is against the fp16 kernels
of the table above.""",
        Table(latencies, int8_in),
        LATENCY_FILES,
    ),
    *tuned_baselines_section(),
    Section(
        "Swin with its bias and shift mask, from fp16",
        REPLAY,
        """The bias is fp16 and aligned for every method ([how](../benchmarking.md#latency-qflash-lab-bench)). FA2 takes none.
The cost of the bias is the time with it divided by the time without it.""",
        Table(biased, bias_columns("QFlash fp16", col.QFLASH)),
        (file_of("bench_bias"),),
    ),
    Section(
        "Swin with its bias and shift mask, from int8 tensors",
        REPLAY,
        "The same run; quantisation is outside the clock, PyTorch's kernels take fp16.",
        Table(biased, bias_columns("QFlash int8", col.QFLASH_INT8)),
        (file_of("bench_bias"),),
    ),
    Section(
        "Other vision transformers, ratios",
        "CUDA-graph replay, the fastest of FA2, cuDNN and the memory-efficient kernel in fp16 divided by ours",
        "Medians of nine rounds; the int8 columns leave quantisation out.",
        RATIOS,
        (file_of("shapes"),),
    ),
    Section(
        "Other vision transformers, from fp16",
        REPLAY,
        "The run of the table above, quantisation inside the clock.",
        Table(other_shapes, end_to_end),
        (file_of("shapes"),),
    ),
    Section(
        "Other vision transformers, from int8 tensors",
        REPLAY,
        "The same run, quantisation outside the clock.",
        Table(other_shapes, int8_in),
        (file_of("shapes"),),
    ),
    Section(
        "Packed sequences of several lengths",
        "CUDA-graph replay, microseconds; the last two columns eager, until the device is done",
        """`qflash.varlen_attention` beside PyTorch's `varlen_attn` (FlashAttention 2), both in fp16, quantisation inside the
clock, medians of nine rounds ([what runs](../models.md#sequences-of-several-lengths)). The images' sides are drawn evenly
between the two ends (`benchmarks/varlen.py`). Slower than FA2: heads of 72 channels by a twentieth
and, not in the table, those of 72 and 80 with other mixes of lengths by up to a seventh
([data](../../benchmarks/archive/wide_heads_h200.json)) and heads of 128 with 64 to 256 patches, these on an H100.""",
        PACKED,
        (file_of("varlen"),),
    ),
    Section(
        "Linear layers of integer networks",
        REPLAY,
        """Ours with its epilogue: bias and requantisation to int8, GELU as well, or the residual added in int16. cuBLAS
without: float16 with a bias, float8 (e4m3, one scale, float16 out) and int8 with int32 out (`benchmarks/linear_layers.py`,
medians of nine rounds). The last two columns are our operations against the card's dense int8 peak, and bytes
that have to move against its bandwidth, by its data sheet.""",
        LINEAR,
        (file_of("linear_layers"),),
    ),
    Section(
        "Whole models",
        "CUDA-graph replay, images per second",
        """timm's models in fp16, one to three forward passes a graph
([how](../benchmarking.md#whole-models-qflash-lab-models)), median of 11 rounds. **Fastest SDPA** is the fastest
of timm's choice and SDPA's three back ends; Swin V2 cannot call SDPA. **qflash** is `qflash.patch`, in Swin and Swin V2 with
`keep_bias=True`. **Compiled** is of Swin the faster with and without SDPA; each ratio is the patched model's images over those
in the column before it. The SQNR is of the logits, or features of DINOv2, against float32.""",
        MODELS,
        (file_of("models"),),
    ),
    Section(
        "Eager calls",
        "Eager calls, no CUDA graph, A2 batch 8",
        """Issuing is the time until the last call has returned, divided by the number of calls. Methods that take int8 leave
quantisation out.""",
        EAGER,
        (file_of("bench_eager"),),
    ),
    Section(
        "Energy",
        "CUDA-graph replay, microjoules a call, A2 batch 8",
        """NVML's energy counter over two seconds of replay, two rounds, idle power included. Methods that take int8 leave
quantisation out.""",
        ENERGY,
        (file_of("energy"),),
    ),
    Section(
        "Utilisation",
        "Nsight Compute, one launch each at its own clocks",
        """Most durations are longer than under replay. `kernel` and `qflash int8` take int8 tensors. Which counters:
[benchmarking](../benchmarking.md#tensor-core-use-qflash-lab-profile).""",
        PROFILE,
        (file_of("profile"),),
    ),
    Section(
        "Instructions per score",
        "Counted in the machine code of Triton 3.6, 2026-11-29",
        """By `qflash-lab verify`: warp instructions divided by scores, of a whole kernel where a program computes all scores
of its queries at once, else of one iteration of its loops over the keys.

* `vit-257`, `vit-257-80`, `vit-577`, `vit-1370` and `vit-729-72` take the sm_90 resident kernel on Hopper, elsewhere the
  streaming kernel. `vit-577` is 0.7 in the first pass and 8.8 in the second.
* `vit-80` has few heads: two warps share each row. `vit-hundreds` and `vit-257-80` contain code for tail queries too.
* `swin`, `swin-windows` and `swin-thousands` are one tile of 16 queries per warp and all that precedes it;
  with a bias the code is there twice, for tiles with and without marks.
* Of the streaming kernel, the loops that usually run are counted: 1.0 in the first pass and 8.5 in the second at d = 64.
  `long-64` has per-channel scales and exact row sums, and 120 spills.""",
        CODE,
        ("verify_triton36",),
    ),
    Section(
        "Machine code of Triton 3.9",
        "CUDA-graph replay, time divided by the time with Triton 3.6's code",
        """Triton 3.9's machine code (ptxas 13.4) of the same kernels, timed in the same session. All launches returned the
reference's bits. `form for 3.9` is the form that is used with Triton 3.9, where it is another one
([why](limits.md#register-pressure-and-ptxas)).""",
        NEWER,
        ("../archive/triton39_h200",),
    ),
    *(
        Section(
            f"CPU: {title}",
            "Eager calls on two threads, milliseconds",
            note,
            Table(functools.partial(processor, file), PROCESSOR),
            (file,),
        )
        for title, file, note in (
            (
                "Zen 4 EPYC with VNNI",
                "cpu_zen4",
                """Inputs uniform in [-4, 4) float32, **lowest** of nine rounds (three for the reference). `float32` has
quantisation inside the clock, `int8` outside. A ratio is SDPA's time in float32 divided by ours. PyTorch 2.14.1.""",
            ),
            ("Zen 5 EPYC with VNNI", "cpu_vnni", f"As above; {BEFORE_EXACT_SUMS}"),
            (
                "EPYC with AVX2 only",
                "cpu",
                f"As above; {BEFORE_EXACT_SUMS} Its cores were shared with other work: ratios of a few per cent mean nothing.",
            ),
        )
    ),
)

HEADER = """# Measured tables

Written by `python benchmarks/performance_tables.py` from the result files named under each heading, which also have
quartiles and the environment; do not edit. Summary: [performance](../performance.md), reasons: [limits](limits.md).

Unless a section says otherwise: microseconds of CUDA-graph replay, methods in alternation in one run
([how](../benchmarking.md)), on one of four NVIDIA H200 (141 GB, HBM3e) of one host
([others](../performance.md#aims-and-results)), kernels of commit a01eb12, torch 2.11.0+cu130, Triton 3.6.0, driver
580.159; inputs uniform in [-4, 4) fp16. Runs of earlier states, among them an H100's of most tables, are in
`benchmarks/archive/`.
"""


def tables_page() -> str:
    """Return docs/performance/tables.md."""
    parts = [HEADER]
    for section in SECTIONS:
        timing = "" if section.timing == REPLAY else f"{section.timing}: "
        links = timing + ", ".join(map(linked, section.files))
        parts.append(f"\n## {section.title}\n\n" + "\n".join(pages.wrap(f"{links}.")) + "\n")
        parts.append(f"\n{pages.flow(section.about)}\n\n" + "\n".join(section.table.markdown()) + "\n")
    return "".join(parts)


SCHEMA = Table(
    lambda: list(col.COLUMNS.items()),
    (names("column", lambda line: f"`{line[0]}`"), names("what it holds", lambda line: line[1])),
    lambda _: "qflash_lab.bench.schema",
)
TABLES = {"speed:readme": SPEEDS, "speed:aims": AIMS, "speed:cards": TARGETS, "bench:columns": SCHEMA}
"""Declared tables between markers of pages."""


PARTS = declared.Parts(
    TABLES,
    {"speed:summary": summary},
    [f"{file}.json" for section in SECTIONS for file in section.files] + [f"{file_of('eager_shapes')}.json"],
)


def main() -> None:
    """Write the pages' tables and the figure."""
    PARTS.write()
    TABLES_PAGE.write_text(tables_page())
    draw()


if __name__ == "__main__":
    main()
