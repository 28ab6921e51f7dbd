"""Write the tables of docs that show one small record each: ``python benchmarks/single_records.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import declared
from declared import FILE, Group, Of, Table, blank, groups, record
from integer_networks import shown
from qflash_lab.bench import schema as col
from qflash_lab.bench.schema import Row
from qflash_lab.bench.tables import Column, names

ROTATED, RANGES = "../archive/rotated_streams", "../archive/ranges_of_images"
WORDS, SIZES = "../archive/bfloat16_words_h200", "../archive/image_sizes"
TEXTS, BFLOAT16 = "networks_texts_h200", "networks_bfloat16_h200"


def pair(*keys: str) -> Callable[[Row], str]:
    """Return what shows two figures of a row in decibels, class token / patch tokens."""
    return lambda row: " / ".join(f"{row[key]:.1f}" for key in keys)


FORMS = {
    "nearest, not rotated": ("as they are", "to the nearest"),
    "rotated, nearest": ("rotated", "to the nearest"),
    "not rotated, error feedback, damping 0.01, whole covariances": ("as they are", "error feedback"),
    "rotated, error feedback in the patch embedding alone": ("rotated", "error feedback in the patch embedding"),
    "rotated, error feedback": ("rotated", "error feedback"),
}
"""The rows of rotated_streams that are shown: streams and weights."""


def rotated() -> list[Row]:
    """Return the rows of :data:`FORMS`, calibrated on 20 photos."""
    rows = {row["form"]: row for row in declared.rows(ROTATED) if row["calibration"].startswith("20 photos")}
    return [rows[form] | {"stripes": "stripes of 14 px"} for form in FORMS]


CALIBRATED = {
    "12 of foolbox's 20 photos (8 held out)": "20 of foolbox, 8 of them held out",
    **{f"10 of foolbox's 20 photos, draw {draw}": f"10 of foolbox, draw {draw}" for draw in range(5)},
    "foolbox's 20 photos": "20 of foolbox",
    **{f"{count} of 50 photos and pictures": f"{count} of all 50" for count in (8, 16, 32)},
    "foolbox's 20 photos and 22 other pictures": "20 of foolbox, 22 other pictures",
    "foolbox's 20 photos and 30 other pictures": "all 50",
}
"""What the table of ranges calls calibration images."""


def both(method: str, *keys: str, digits: int = 2) -> Callable[[Group], str]:
    """Return what shows two figures of a method's row, class token / patch tokens."""
    return lambda group: " / ".join(f"{group[method][key]:.{digits}f}" for key in keys)


TOKENS, WORST = ("class_db", "patch_db"), ("worst_class_db", "worst_patch_db")


def by_input() -> list[Group]:
    """Return the shapes of bfloat16_words by the inputs' type."""
    return groups(declared.rows(WORDS), "batch", "heads", "tokens", "channels", by=lambda row: str(row["input"]))


def times_of(group: Group) -> str:
    """Return a shape of bfloat16_words in words."""
    row = declared.any_row(group)
    return " x ".join(str(row[key]) for key in ("batch", "heads", "tokens", "channels"))


def side(sizes: Any) -> str:
    """Return the sizes of images that a row was calibrated at; both if there are two."""
    return "both" if len(sizes) > 1 else " x ".join(map(str, sizes[0]))


def by_size() -> list[Group]:
    """Return what was calibrated at each size, by the size it was judged at."""
    rows = [row | {"at": side(row["calibrated_at"])} for row in declared.rows(SIZES)]
    return groups(rows, "at", by=lambda row: " x ".join(map(str, row["size"])))


MODELS = {
    "all-minilm-l6-v2": "MiniLM-L6", "clip-vit-base-patch32": "CLIP-B/32's text tower",
    "clip-vit-large-patch14": "CLIP-L/14's text tower",
}  # fmt: skip


def model(group: Group) -> str:
    """Return what the table of texts calls a model."""
    name = group[col.COMPILE][col.MODEL]
    return MODELS.get(name) or shown(name)


def texts() -> list[Group]:
    """Return models in bfloat16, and text encoders."""
    of_texts = groups(declared.rows(TEXTS), col.MODEL, col.DTYPE, col.BATCH)
    return [*groups(declared.rows(BFLOAT16), col.MODEL, col.BATCH), *of_texts]


def program() -> list[Row]:
    """Return the lines of c_program: what, and the key."""
    lines = {
        "the program, stripped, bytes": "program_bytes", "`network.bin`, bytes": "file_bytes",
        "memory of a process that has opened and run it, kB": "running_kb",
        "memory of the process before, kB": "empty_kb", "`qflash_open`, ms": "open_ms",
        "of it the file's checksum, ms": "checksum_ms", "the first `qflash_compute`, ms": "first_ms",
        "later ones, ms": "later_ms",
    }  # fmt: skip
    return [{"what": what, "key": key, "value": record("c_program")[key]} for what, key in lines.items()]


def browser() -> list[Row]:
    """Return the lines of browser: ours and onnxruntime-web."""
    found = record("browser")
    lines = (("QFlash", "qflash", "network"), ("onnxruntime-web, float32", "onnxruntime_web", "float_onnx"))
    return [
        {"what": what, "key": key, "file_key": of, **found["milliseconds"][key], "bytes": found["bytes"][of]}
        for what, key, of in lines
    ]


def served() -> list[Row]:
    """Return the lines of scale_cpu's requests."""
    lines = {
        "best": f"the most with a p99 below {record('scale_cpu')['serve']['bound_ms']:.0f} ms",
        "overload": "four times as many", "killed": "a replica is killed",
    }  # fmt: skip
    rows = []
    for key, what in lines.items():
        row = record("scale_cpu")["serve"][key]
        outcomes = row["outcomes"]
        known = {"refused": "retryable: 429", "given_up": "retryable: 503", "answered": "answered"}
        rows.append(row | {"what": what, "key": key} | {name: outcomes.get(of) for name, of in known.items()})
    return rows


BIASED = {
    "samvit_base_patch16": "SAM-B", "beit_base_patch16_224": "BEiT-B, 224 px", "beit_base_patch16_384": "BEiT-B, 384 px",
}  # fmt: skip
"""What the table of models with a bias calls them."""


def times_as_fast(group: Group) -> float:
    """Return how many times as fast as with SDPA a patched model of biased_models is."""
    return float(group["sdpa"][col.MEDIAN_US] / group["qflash"][col.MEDIAN_US])


TABLES = {
    "record:biased": Table(
        lambda: groups(declared.rows("biased_models_h200"), col.MODEL, col.DTYPE, col.BATCH),
        (
            names("Model", lambda group: BIASED[declared.any_row(group)[col.MODEL]]), names("Batch", declared.one(col.BATCH)),
            names("Type", declared.one(col.DTYPE)), Column("SDPA", Of("sdpa"), ".0f"),
            Column("**qflash**", Of("qflash"), ".0f"), Column("qflash, portable kernels", Of("qflash, before"), blank(".0f")),
            Column("SDPA ÷ qflash", times_as_fast, ".2f"), Column("SQNR dB", Of("qflash", col.SQNR_DB), ".1f"),
        ),
    ),
    "record:rotated": Table(
        rotated,
        (
            names("Streams", lambda row: FORMS[row["form"]][0]), names("Weights", lambda row: FORMS[row["form"]][1]),
            Column("Class token", "class_db", ".2f"), Column("Patch tokens", "patch_db", ".2f"),
            Column("Worst photo", pair(*WORST), str),
            Column("Stripes of 14 px", lambda row: " / ".join(f"{db:.1f}" for db in row["patterns_db"][row["stripes"]]), str),
        ),
        lambda row: f"{row[FILE]}: form = {row['form']}, calibration = {row['calibration']}",
    ),
    "record:ranges": Table(
        lambda: groups(declared.rows(RANGES), "calibration"),
        (
            names("Calibration images", lambda group: CALIBRATED[declared.any_row(group)["calibration"]]),
            *(
                column
                for method in ("minmax", "expected")
                for column in (
                    Column(f"`{method}`", both(method, *TOKENS), str),
                    Column("worst photo", both(method, *WORST, digits=1), str),
                )
            ),
        ),
        lambda group: f"{declared.any_row(group)[FILE]}: calibration = {declared.any_row(group)['calibration']}",
    ),
    "record:texts": Table(
        texts,
        (
            names("Model", model), names("Tokens", lambda group: group[col.COMPILE].get("tokens")),
            names("Batch", declared.one(col.BATCH)), names("Type", lambda group: group[col.COMPILE][col.DTYPE]),
            Column("compiled, µs", Of(col.COMPILE), ".0f"), Column("integer, µs", Of(col.INTEGER), ".0f"),
            Column("compiled ÷ integer", Of(col.INTEGER, col.RATIO), ".2f"),
        ),
    ),
    "record:words": Table(
        by_input,
        (
            names("Batch x heads x tokens x channels", times_of), Column("float16", Of("float16", "after_us"), ".1f"),
            Column("bfloat16", Of("bfloat16", "after_us"), ".1f"),
            Column("bfloat16 by `.to`", Of("bfloat16", "before_us"), ".1f"),
        ),
        lambda group: f"{declared.any_row(group)[FILE]}: {times_of(group)}",
    ),
    "record:sizes": Table(
        by_size,
        (
            names("Calibrated at", declared.one("at")), Column("336 x 448", Of("336 x 448", col.SQNR_DB), ".1f"),
            Column("224 x 224", Of("224 x 224", col.SQNR_DB), ".1f"),
        ),
        lambda group: f"{declared.any_row(group)[FILE]}: calibrated_at = {declared.one('at')(group)}",
    ),
    "record:program": Table(
        program, (names("What", "what"), Column("Measured", "value", "")), lambda row: f"c_program.json: {row['key']}",
    ),
    "record:browser": Table(
        browser,
        (
            names("", "what"), Column("Milliseconds, median", "median", ".1f"), Column("Least", "least", ".1f"),
            Column("Bytes of weights", "bytes", "d"),
        ),
        lambda row: f"browser.json: milliseconds[{row['key']!r}], bytes[{row['file_key']!r}]",
    ),
    "record:dense": Table(
        lambda: declared.rows("dense_head"),
        (
            names("", col.METHOD), Column("Right pixels, %", "right_percent", ".1f"),
            Column("Mean IoU, %", "mean_iou_percent", ".1f"),
            Column("Same class as all in floating point, % of pixels", "same_percent", ".1f"),
        ),
    ),
    "record:served": Table(
        served,
        (
            Column("Requests a second", "rate", ".1f"), names("What happens", "what"), Column("Requests", "requests", "d"),
            Column("Answered", "answered", blank("d")), Column("Refused", "refused", blank("d")),
            Column("Given up", "given_up", blank("d")), Column("Median, ms", "p50_ms", ".1f"),
            Column("p99, ms", "p99_ms", ".1f"),
        ),
        lambda row: f"scale_cpu.json: serve[{row['key']!r}]",
    ),
}  # fmt: skip
"""Between markers of the pages."""


PARTS = declared.Parts(TABLES, reads=("browser.json", "c_program.json", "scale_cpu.json"))


if __name__ == "__main__":
    PARTS.write()
