"""Where the figures in the sentences of docs come from; ``python benchmarks/trace_numbers.py`` checks each.

A figure is a decimal, or a number with a unit. It stands in a :class:`Said`: a piece of a page with the numbers that committed
results give for it, computed again; or it is defined, derived or published, and says so here. One that is in no piece is
refused, and so is a piece that its page does not have. Versions of programs are told by the program's name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import declared
import pages
from declared import record
from qflash_lab.bench import schema as col

DEFINED = "defined or derived on the page, or a bound that a test has"
PUBLISHED = "published by others"
FIGURE = re.compile(r"(?<![\w.])(?:\d+\.\d+|\d+(?= ?(?:%|dB\b|µs\b|times\b|TOPS\b)))")
NUMBER = re.compile(r"(?<![\w.^])\d+(?:\.\d+)?(?![\w^]|\.\d)")
_PROGRAMS = (
    "torch", "PyTorch", "Triton", "torchao", "onnxruntime", "NumPy", "NNCF", "OpenVINO", "gcc", "qemu", "actionlint", "Ray",
    "TVM", "Yosys", "compute-sanitizer", "ptxas", "driver", "TOSA", "tosa-tools", "Safari", "SageAttention",
    "sentence-transformers", "open_clip_torch", "transformers", "cuDNN",
)  # fmt: skip
_VERSION = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, _PROGRAMS))})(?:'s)?(?: version)?(?: of)? (\d+\.\d+)")


class Said(NamedTuple):
    """A piece of a page's prose.

    Attributes:
        page: from the repository's root.
        text: as it stands there, without code, the targets of links, and line breaks.
        source: the result files behind it, or why there are none.
        numbers: gives all numbers of the text, in their order, from these files.
    """

    page: str
    text: str
    source: str
    numbers: Callable[[], Sequence[float]] | None = None

    def wrong(self) -> str:
        """Say what in the text is not what the files give; nothing if all is."""
        if self.numbers is None:
            return ""
        shown, values = NUMBER.findall(self.text), list(self.numbers())
        if len(shown) != len(values):
            return f"{len(shown)} numbers, {len(values)} values: {self.text}"
        places = [len(text.partition(".")[2]) for text in shown]
        pairs = zip(shown, values, places, strict=True)
        bad = [f"{text} is {value:.6g}" for text, value, count in pairs if abs(float(text) - value) > 0.5001 * 10**-count]
        return f"{', '.join(bad)}: {self.text}" if bad else ""


class Figure(NamedTuple):
    """A figure of a page's prose: its line, itself with what is around it, and its source, which is empty if it has none."""

    line: int
    text: str
    source: str


def figures(name: str, text: str) -> Iterator[Figure]:
    """Yield the figures of a page, and the pieces that :data:`SAID` has of it and the page has not.

    Args:
        name: the page, from the repository's root.
        text: of the page.
    """
    prose = pages.prose_of(text)
    # single spaces, and for each character the line it was in
    letters = [(letter, line) for line, words in enumerate(prose.split("\n"), 1) for letter in " ".join(words.split()) + " "]
    flat = "".join(letter for letter, _ in letters)
    joined = [place for place in range(len(flat)) if not flat.startswith("  ", place)]
    flat, lines = "".join(flat[place] for place in joined), [letters[place][1] for place in joined]
    covered: dict[int, str] = {match.start(1): "a version" for match in _VERSION.finditer(flat)}
    for said in SAID:
        if said.page != name:
            continue
        found = [match.start() for match in re.finditer(re.escape(said.text), flat)]
        if not found:
            yield Figure(0, f"no such text: {said.text}", "")
        if wrong := said.wrong():
            yield Figure(lines[found[0]] if found else 0, wrong, "")
            continue
        for begin in found:
            covered |= dict.fromkeys(range(begin, begin + len(said.text)), said.source)
    for match in FIGURE.finditer(flat):
        near = flat[max(0, match.start() - 40) : match.end() + 25].strip()
        yield Figure(lines[match.start()], near, covered.get(match.start(), ""))


def _rows(name: str, **known: Any) -> list[dict[str, Any]]:
    """Return the rows of a result file that have certain values."""
    return [row for row in record(name)["rows"] if all(row[key] == value for key, value in known.items())]


def _one(name: str, column: str, **known: Any) -> float:
    """Return a column of the only such row."""
    (row,) = _rows(name, **known)
    return float(row[column])


def _ends(values: Sequence[float]) -> list[float]:
    return [min(values), max(values)]


# --- what the functions of single pieces share -------------------------------------------------------------------------


def _step(label: str, on: str, group: str = "arithmetic") -> float:
    """Return the SQNR of a step of ladder.json on some inputs."""
    place = group, label, on
    (row,) = (row for row in record("ladder")["steps"] if (row["group"], row["label"], row["input"]) == place)
    return float(row[col.SQNR_DB])


def _float_softmax(on: str) -> float:
    return _step("per-tensor scales", on, "float64 softmax on the same int8 tensors")


def _accuracy(method: str, workload: str, kind: str = "paper") -> float:
    return _one("accuracy", col.SQNR_DB, method=method, workload=workload, input=kind)


def _losses(*methods: str) -> list[float]:
    """Return the points of Top-1 that methods lose on Fashion-MNIST, over both models."""
    return [
        -pair["difference_points"]
        for name in ("evaluate_fashion", "evaluate_fashion_integer")
        for model in record(name)["models"]
        for pair in model["pairs"]
        if pair["first"] == "fp32" and pair["second"] in methods
    ]


def _probe(method: str, column: str) -> float:
    (row,) = (
        row for row in record("real_fashion_h100")["top1"] if (row["classifier"], row["method"]) == ("linear probe", method)
    )
    return float(row[column])


def _at_518(form: str, *columns: str) -> list[float]:
    (row,) = (row for row in record("../archive/ranges_of_images")["rows_518_px"] if row["form"] == form)
    return [row[column] for column in columns or ("class_db", "patch_db")]


def _repeated() -> list[float]:
    """Return by how much the first row of ranges_of_images and the row that it repeats differ at most."""
    first = record("../archive/ranges_of_images")["rows"][0]
    (again,) = (
        row
        for row in record("../archive/rotated_streams")["rows"]
        if row["form"] == "rotated, error feedback" and row["calibration"].startswith("20 photos")
    )
    return [max(abs(first[column] - again[column]) for column in ("class_db", "patch_db"))]


def _logits() -> list[float]:
    """Return the SQNR of logits on a CPU: static QDQ, dynamic quantisation and ours, DeiT-S and Swin-T each, at batch 1."""
    methods = ("onnxruntime int8 static", "onnxruntime int8 dynamic", col.INTEGER)
    models = ("DeiT-S", "Swin-T")
    return [_one("models_integer_cpu", col.SQNR_DB, model=model, batch=1, method=name) for name in methods for model in models]


def _layers() -> list[declared.Group]:
    return declared.groups(declared.rows("linear_layers_h200"), col.LAYER)


def _against_float8(epilogue: str) -> list[float]:
    """Return the least and greatest ratio to float8 of layers of at least 768 inputs with an epilogue."""
    quotient = declared.against((col.CUBLAS_FLOAT8,), col.QFLASH)
    wide = [of for of in _layers() if of[col.QFLASH][col.INPUTS] >= 768 and of[col.QFLASH][col.EPILOGUE] == epilogue]
    return _ends([quotient(of) for of in wide])


def _narrow() -> list[float]:
    quotient = declared.against((col.CUBLAS_FLOAT8,), col.QFLASH)
    return _ends([quotient(of) for of in _layers() if of[col.QFLASH][col.INPUTS] < 768])


def _as_fast_as_float16() -> list[float]:
    quotient = declared.against((col.CUBLAS_FLOAT16,), col.QFLASH)
    return [sum(quotient(of) >= 1 for of in _layers()), len(_layers())]


def _earlier_minilm() -> list[float]:
    """Return microseconds of a compiled MiniLM-L6 in an earlier run, at batch 1, 8 and 64, and these over ours today."""
    rows = record("../archive/networks_bfloat16_texts_h200")["rows"]
    times = [row["compiled_us"] for row in rows if (row["model"], row["dtype"]) == ("all-minilm-l6-v2", "float16")]
    ours = [
        _one("networks_texts_h200", col.MEDIAN_US, model="all-minilm-l6-v2", batch=batch, dtype="float16", method=col.INTEGER)
        for batch in (1, 8, 64)
    ]
    return [*times, *(time / own for time, own in zip(times, ours, strict=True))]


def _lost_by_others() -> float:
    """Return the points of Top-1 that integer networks of Fashion-MNIST lose, calibrated on the first training images."""
    rows = [row for row in record("integer_networks")["rows"] if row["network"] in ("Fashion-MNIST vit", "Fashion-MNIST swin")]
    top1 = {(row["network"], row[col.METHOD]): row["top1_percent"] for row in rows}
    return max(top1[name, "float32"] - right for (name, method), right in top1.items() if method.startswith("QFlash"))


def _long_rows(shape: str, inputs: str) -> list[float]:
    """Return microseconds of attention before and after keys began at lines of memory."""
    return [_one("../archive/long_rows_h200", key, shape=shape, inputs=inputs) for key in ("before_us", "after_us")]


def _few_heads() -> list[float]:
    """Return the batch, and microseconds of a DINOv2-S whose few heads take a block a processor, and before."""
    rows = record("../archive/long_rows_h200")["models"]
    times = {row["state"]: row[col.MEDIAN_US] for row in rows if row[col.METHOD] == col.INTEGER}
    return [1, times["after"], times["before"]]


def _tuned() -> list[float]:
    """Return the batch, and microseconds of three models with max-autotune and without."""
    models = [f"deit_{size}_patch16_224" for size in ("tiny", "small", "base")]
    methods = "compile max-autotune", col.COMPILE
    return [8, *(_one("networks_tuned_h200", col.MEDIAN_US, model=of, batch=8, method=by) for of in models for by in methods)]


def _beside_energy() -> list[float]:
    """Return by how many per cent a method takes less, and more, time while its energy is read than when it is timed."""
    times = [
        (1e3 * row[col.MJ_PER_IMAGE] * row[col.BATCH] / row[col.WATTS], row[col.MEDIAN_US]) for row in _rows("networks_h200")
    ]
    least, most = _ends([100 * (while_read / timed - 1) for while_read, timed in times])
    return [-least, most]


def _dinov3() -> list[float]:
    """Return DINOv3-B's time compiled over that in integers at batch 64."""
    known = {"model": "vit_base_patch16_dinov3", "batch": 64}
    compiled, ours = (_one("networks_h200", col.MEDIAN_US, method=method, **known) for method in (col.COMPILE, col.INTEGER))
    return [compiled / ours]


def _above_the_limit() -> list[float]:
    """Return how many methods drew more than the card's limit, the least and the greatest of them, and the limit."""
    limit = record("networks_h200")["environments"][0]["nvml"]["power_limit_w"]
    found = [row[col.WATTS] for row in _rows("networks_h200") if row[col.WATTS] > limit]
    return [len(found), *_ends(found), limit]


def _shape(shape: str, method: str) -> float:
    return _one("shapes_h200", col.MEDIAN_US, shape=shape, method=method)


def _packed_sizes(images: int) -> float:
    """Return the time of one call with images of several sizes over that of a call for each size, the mean of two runs."""
    rows = [row for row in record("../archive/mixed_sizes")["rows"] if row["images"] == images]
    return sum(row["packed_ms"] / row["by_size_ms"] for row in rows) / len(rows)


def _per_score(shape: str) -> float:
    batch, heads, tokens, _ = map(int, shape.split("x"))
    return _shape(shape, col.QFLASH_INT8) / (batch * heads * tokens**2)


def _patched() -> list[float]:
    """Return microseconds of a compiled DINOv2-S and -B at 518 pixels, batch 1, each patched and not."""
    models = {row["model"]: row for row in record("../archive/cluster_quantise_h200")["models"]}
    names = [f"vit_{size}_patch14_dinov2" for size in ("small", "base")]
    return [models[name][key] for name in names for key in ("patched_after_us", "unpatched_us")]


def _quantising() -> list[float]:
    """Return microseconds of quantising 8x16x1024x128 by clusters, and by two launches."""
    (row,) = _rows("../archive/cluster_quantise_h200", shape="8x16x1024x128")
    states = row["kernels_after_us"], row["kernels_before_us"]
    return [sum(time for name, time in kernels.items() if "hopper" not in name) for kernels in states]


def _masked() -> list[float]:
    """Return a call's shape and microseconds: with a bias, with the portable kernels, and cuDNN's."""
    (row,) = _rows("../archive/masks_h200", shape="1x12x4096x64", dtype="float16")
    return [row[key] for key in ("after_us", "before_us", "cudnn_us")]


def _onnx(batch: int) -> list[float]:
    """Return how many times as long the integer graph takes in onnxruntime, the batch, and both times in milliseconds."""
    ours, theirs = (
        _one("onnx_speed", col.MIN_US, batch=batch, method=f"onnxruntime {kind}") for kind in ("integer", "float32")
    )
    return [ours / theirs, batch, ours / 1e3, theirs / 1e3]


def _quartiles(method: str) -> float:
    """Return how far apart, in per cent of the median, quartiles of rows of 16384 keys lie at most."""
    rows = [row for row in _rows("bench_long_h200", keys=16384) if row[col.MEDIAN_US] and row[col.METHOD] == method]
    return max(100 * (row[col.Q3_US] - row[col.Q1_US]) / row[col.MEDIAN_US] for row in rows)


def _loops(case: str) -> list[float]:
    """Return the instructions a score of a case's passes on Hopper: those of its loops over a warp's 128 scores."""
    (report,) = (report for report in record("verify_triton36") if (report["case"], report["target"]) == (case, "sm_90"))
    return [count / 128 for count in report["hot_loops"]]


def _within(shown: float, *found: float) -> float:
    """Return a bound that a page shows if all values are within it, and else what no page shows."""
    return shown if max(map(abs, found)) <= shown else math.inf


def _ahead_on_patterns() -> float:
    """Return by how much torchao, dynamic with SmoothQuant, is ahead on the worst pattern's class token."""
    rows = [row for row in record("peers_real")["rows"] if "draw" not in row["calibration"]]
    found = {row[col.METHOD]: row["pattern_class_db"] for row in rows}
    return float(found["torchao int8 dynamic, SmoothQuant (linear layers)"] - found["QFlash integer network"])


def _sentences(column: str) -> float:
    (row,) = (row for row in record("real_integer_cpu")["integer"] if row["network"] == "MiniLM-L6")
    return float(row[column])


def _least_loss_of_the_paper() -> float:
    """Return by how much PAPER is behind DEFAULT at least, on N(0, 1) and long rows."""
    rows = [row for row in record("accuracy")["rows"] if row[col.INPUT] in ("normal", "long")]
    found = declared.groups(rows, col.INPUT, col.WORKLOAD)
    return min(of["qflash-default"][col.SQNR_DB] - of["qflash-paper"][col.SQNR_DB] for of in found)


def _bytes_a_parameter(model: str, method: str) -> float:
    (row,) = _rows("export_times", model=model, method=method)
    return float(row["bytes"] / row["parameters"])


ALGORITHM, BASELINES, EVALUATION = "docs/algorithm.md", "docs/baselines.md", "docs/evaluation.md"
NETWORK, LIMITS, TABLES = "docs/integer_network.md", "docs/performance/limits.md", "docs/performance/tables.md"
ROTATED, RANGES = "../archive/rotated_streams.json", "../archive/ranges_of_images.json"

SAID = (
    Said(ALGORITHM, "126.5 leaves room for", DEFINED),
    Said(ALGORITHM, "1/17, 3.5·10⁻³, 1.2·10⁻⁵", DEFINED),
    Said(ALGORITHM, "within 2 % of the bounds of", DEFINED),
    Said(ALGORITHM, "0 … 6.4 % too large", DEFINED),
    Said(
        ALGORITHM, "within 1.2 dB (A2) and 0.6 dB (A7) of", "ladder.json",
        lambda: [_float_softmax(on) - _step("quadratic exponential", on) for on in ("A2", "A7")],
    ),
    Said(
        ALGORITHM, "to within 0.1 dB", "ladder.json",
        lambda: [_within(0.1, *(_float_softmax(on) - _step("P has 15 bits", on) for on in ("A2", "A7")))],
    ),
    Said(
        ALGORITHM, "tail: 0.8 dB on", "ladder.json",
        lambda: [_step("row sum before rounding", "A2") - _step("quadratic exponential", "A2")],
    ),
    Said(BASELINES, "has to be 2 % faster", DEFINED),
    Said(
        BASELINES, "wrong by up to 10 %", "accuracy_i_vit.json",
        lambda: [max(abs(row["temperature_percent"]) for row in record("accuracy_i_vit")["rows"])],
    ),
    Said(BASELINES, "25.80 and 25.22 lie", PUBLISHED),
    Said(
        BASELINES, "lies 0.5 to 0.8 dB higher", "accuracy.json",
        lambda: _ends([_accuracy("i-vit-16", on) - _accuracy("i-vit", on) for on in ("A2", "A7")]),
    ),
    Said(BASELINES, "32.50 and 31.02. The", PUBLISHED),
    Said(
        BASELINES, "is within 0.6 dB of A7's and 2.4 dB below", "accuracy.json, the paper's 31.02 and 32.50",
        lambda: [_within(0.6, _accuracy("qflash-printed", "A7") - 31.02), 32.5 - _accuracy("qflash-printed", "A2")],
    ),
    Said(
        BASELINES, "is within 0.3 dB of A2's and 2.2 dB above", "accuracy.json, the paper's 32.50 and 31.02",
        lambda: [_within(0.3, _accuracy("qflash-authors", "A2") - 32.5), _accuracy("qflash-authors", "A7") - 31.02],
    ),
    Said(
        "docs/performance/cpu.md", "DeiT-S and Swin-T take 5 to 12 % less on the EPYC", "../archive/cpu_vectors_epyc.json",
        lambda: _ends([100 - 100 / row["ratio"] for row in record("../archive/cpu_vectors_epyc")["rows"]]),
    ),
    Said("docs/benchmarking.md", "at least 2 % less time", DEFINED),
    Said(EVALUATION, "Wilson's 95 % interval", DEFINED),
    Said(EVALUATION, "only 137.3 is printed as 137.0", PUBLISHED),
    Said(EVALUATION, "Top-1 [95 % interval]", DEFINED),
    Said(
        EVALUATION, "are within 0.03 points of float", "evaluate_fashion.json, evaluate_fashion_integer.json",
        lambda: [max(map(abs, _losses("qflash-default", "integer-default", "integer-accurate")))],
    ),
    Said(EVALUATION, "integer networks lose up to 0.07", "integer_networks.json", lambda: [_lost_by_others()]),
    Said(EVALUATION, "loses 1 to 2.6 points", "evaluate_fashion.json", lambda: _ends(_losses("i-vit"))),
    Said(EVALUATION, "up to 0.7. ###", "evaluate_fashion.json", lambda: [max(_losses("i-bert", "fq-vit"))]),
    Said(EVALUATION, "One image is 0.19 points", "100 / 540", lambda: [100 / 540]),
    Said(
        EVALUATION, "on 99.32 % of the images with the probe, and is 0.10 points", "real_fashion_h100.json",
        lambda: [_probe("qflash-default", column) for column in ("agreement_percent", "difference_points")],
    ),
    Said(
        EVALUATION, "I-BERT loses 26 points", "real_fashion_h100.json",
        lambda: [-_probe("i-bert", "difference_points")],
    ),
    Said(
        EVALUATION, "arithmetic 0.45, the authors' reading 0.04", "real_fashion_h100.json",
        lambda: [-_probe(name, "difference_points") for name in ("qflash-paper", "qflash-authors")],
    ),
    Said(EVALUATION, "package 0.1.1", "a version"),
    Said(EVALUATION, "package 3.3.4", "a version"),
    Said(EVALUATION, "3 dB ahead on the worst pattern", "peers_real.json", lambda: [_ahead_on_patterns()]),
    Said(EVALUATION, "floors 0.3 dB below", DEFINED),
    Said("docs/explanation/bounds.md", "0.128 of the range", "1 - 32640 * 57344 / 2^31", lambda: [1 - 32640 * 57344 / 2**31]),
    Said("docs/hardware.md", "\u2212128 times", DEFINED),
    Said("docs/how_to/scale.md", "after 80 % of the deadline", DEFINED),
    Said(
        "docs/how_to/scale.md", "119.3 images a second, of which decoding and resizing is 24.4 %; without Ray 115.5 and 27.1 %",
        "scale_cpu.json",
        lambda: [
            record("scale_cpu")[part][key]
            for part in ("features", "loader")
            for key in ("images_per_second", "decode_percent")
        ],
    ),
    Said(
        "docs/how_to/deploy.md", "show: 0.6 % of the pixels", "dense_head.json",
        lambda: [100 - _one("dense_head", "same_percent", method="integer features, integer head")],
    ),
    Said(NETWORK, "in the unit 3.28 / 4096", DEFINED),
    Said(NETWORK, "0 from 3.28 on: g is within 0.0023 of GELU", DEFINED),
    Said(NETWORK, "0 from 8 on: g is within 0.0039 of SiLU", DEFINED),
    Said(NETWORK, "an error of 0.0039 / s. QuickGELU has s = 1.702", DEFINED),
    Said(NETWORK, "(a, f) is (0.7, 0.75) for query, key and value, (0.5, 0) for", DEFINED),
    Said(NETWORK, "(1, 0.98) for fc2, (0.5, 0.9) for the head", DEFINED),
    Said(NETWORK, "less 2.5 of their deviations", DEFINED),
    Said(NETWORK, "plus 2.5 of theirs", DEFINED),
    Said(NETWORK, "at least 60 dB", DEFINED),
    Said(NETWORK, "below 20 dB, and where", DEFINED),
    Said(
        NETWORK, "takes 25 s in place of 17 s", ROTATED,
        lambda: [record("../archive/rotated_streams")["conversion"][state][0] for state in ("after", "before")],
    ),
    Said(NETWORK, "conversions that should be equal differ by up to 0.5 dB", f"{RANGES}, {ROTATED}", _repeated),
    Said(
        NETWORK, "photos have 29.2 / 30.3 with and 29.0 / 30.1 with", RANGES,
        lambda: [*_at_518("minmax"), *_at_518("expected")],
    ),
    Said(
        NETWORK, "the worst has 22.3 / 24.3 with and 20.3 / 21.6 with", RANGES,
        lambda: [x for form in ("minmax", "expected") for x in _at_518(form, "worst_class_db", "worst_patch_db")],
    ),
    Said(NETWORK, "the median of five readings of 0.5 s in alternation", DEFINED),
    Said(NETWORK, "takes 6 % less to 11 % more time than timed", "networks_h200.json", _beside_energy),
    Said(NETWORK, "DINOv3-B (1.6998)", "networks_h200.json", _dinov3),
    Said(
        NETWORK, "In 6 places a method draws 700 to 725 W over half a second; the card's limit is 700 W", "networks_h200.json",
        _above_the_limit,
    ),
    Said(NETWORK, "1.35 times as fast as compiled", DEFINED),
    Said(NETWORK, "at 64 1.7, Swin 2.3", DEFINED),
    Said(
        NETWORK, "a DINOv2-S at batch 1 takes 435 µs in place of 474", "../archive/long_rows_h200.json", _few_heads,
    ),
    Said(
        NETWORK, "at batch 8 a DeiT-T takes 475 and 464 µs, a DeiT-S 727 and 620, a DeiT-B 1210 and 1023",
        "networks_tuned_h200.json", _tuned,
    ),
    Said(
        NETWORK, "compiled in float16, took 211, 271 and 836 µs, beside which ours is 1.74, 1.60 and 1.54 times as fast",
        "networks_texts_h200.json, ../archive/networks_bfloat16_texts_h200.json", _earlier_minilm,
    ),
    Said(
        NETWORK,
        "is 10 dB (DeiT-S) and 28 dB (Swin-T) with static QDQ, 29 and 32 dB with dynamic quantisation, 31 and 35 dB as",
        "models_integer_cpu.json", _logits,
    ),
    Said(NETWORK, "in 37 of 48 layers", "linear_layers_h200.json", _as_fast_as_float16),
    Said(
        NETWORK, "are 1.09 to 1.34 times as fast, with GELU 0.69 to 0.90, with a residual 0.70 to 1.14",
        "linear_layers_h200.json",
        lambda: [end for epilogue in ("int8", "gelu", "residual") for end in _against_float8(epilogue)],
    ),
    Said(NETWORK, "those of fewer inputs 0.56 to 1.49", "linear_layers_h200.json", _narrow),
    Said(NETWORK, "network of at least 24 dB", DEFINED),
    Said(
        "docs/models.md", "keep 25.8 dB of the float model's on 24 sentences", "real_integer_cpu.json",
        lambda: [_sentences(column) for column in ("sqnr_db", "samples")],
    ),
    Said(
        "docs/models.md", "least cosine 0.9977, all 24 nearest", "real_integer_cpu.json",
        lambda: [_sentences("cosine_min"), _sentences("samples")],
    ),
    Said(
        "docs/models.md", "take a DeiT-T 0.62 of the time of a call for each size, eight images 0.73",
        "../archive/mixed_sizes.json", lambda: [_packed_sizes(4), _packed_sizes(8)],
    ),
    Said(
        "docs/models.md", "19.1 s in all with empty caches and 1.1 s with filled ones", "first_call_h200.json",
        lambda: [record("first_call_h200")["total"][column] for column in (col.EMPTY_S, col.WARM_S)],
    ),
    Said("docs/onnx.md", "asks for 30 dB in place", DEFINED),
    Said(
        "docs/onnx.md", "takes 2.6 times as long as its float32 model at batch 1 (156 and 60 ms)", "onnx_speed.json",
        lambda: _onnx(1),
    ),
    Said("docs/onnx.md", "2.9 times at batch 8 (1500 and 518 ms", "onnx_speed.json", lambda: _onnx(8)),
    Said(LIMITS, "takes 7.0 instructions: 3.75 on one integer pipe and 3.25 on the other", DEFINED),
    Said(LIMITS, "7.5 cycles per warp: 5.0 µs for A2 at batch 64", DEFINED),
    Said(LIMITS, "its products 4.7 µs at 1000 TOPS", DEFINED),
    Said(
        LIMITS, "of 14.3 µs for", "bench_h200.json",
        lambda: [_one("bench_h200", col.MEDIAN_US, workload="A2", batch=64, method=col.QFLASH_INT8)],
    ),
    Said(LIMITS, "of 168 µs; the rest", "shapes_h200.json", lambda: [_shape("64x12x577x64", col.QFLASH_INT8)]),
    Said(
        LIMITS, "4x16x4096x80 takes 1081 µs from fp16, not 799", "../archive/long_rows_h200.json",
        lambda: _long_rows("4x16x4096x80", "fp16"),
    ),
    Said(
        LIMITS, "a patched DINOv2-S takes 699 µs, unpatched 724; a DINOv2-B 1059 and 1004",
        "../archive/cluster_quantise_h200.json", _patched,
    ),
    Said(
        LIMITS, "1x12x4096x64, a bias for each head, takes 319 µs, the portable kernels 2420, cuDNN 223",
        "../archive/masks_h200.json", _masked,
    ),
    Said(
        LIMITS, "at 8x16x1024x128 takes 36.5 µs; two launches took 52.2", "../archive/cluster_quantise_h200.json",
        _quantising,
    ),
    Said(
        LIMITS, "take 1.4 times the time per score", "shapes_h200.json",
        lambda: [_per_score("64x16x729x72") / _per_score("64x12x785x64")],
    ),
    Said(LIMITS, "the aim, 1.4 times cuDNN's speed, leaves", DEFINED),
    Said(
        TABLES, "lie up to 5 % apart, on int8 up to 13 %", "bench_long_h200.json",
        lambda: [_quartiles(col.QFLASH), _quartiles(col.QFLASH_INT8)],
    ),
    Said(TABLES, "is 0.7 in the first pass and 8.8 in the second", "verify_triton36.json", lambda: _loops("vit-577")),
    Said(TABLES, "are counted: 1.0 in the first pass and 8.5 in the second", "verify_triton36.json", lambda: _loops("long-64")),
    Said("docs/performance.md", "20 dB more is a tenth", DEFINED),
    Said("docs/performance.md", "3.35 instead of 4.8 TB/s", PUBLISHED),
    Said("docs/reproduction.md", "section 5.1, Figure 3", PUBLISHED),
    Said("docs/reproduction.md", "is 19 dB or more below", "accuracy.json", lambda: [_least_loss_of_the_paper()]),
    Said("docs/tosa.md", "1.2 bytes a parameter", "export_times.json", lambda: [_bytes_a_parameter("DeiT-T", "TOSA")]),
    Said("docs/tosa.md", "NumPy below 2.2", "a version"),
    Said("docs/tosa.md", "5.2.0 compiled", "a version"),
    Said("docs/tosa.md", "2^19 times that of its outputs", DEFINED),
    Said("docs/tutorials/attention.md", "about 1.5 % here", DEFINED),
)  # fmt: skip
"""Every figure of the pages' prose, README's apart, which is checked by a list of its own."""
