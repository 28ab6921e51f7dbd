"""Write docs/performance/tables.md, the speed tables of README and docs/performance.md, and docs/speed.svg.

``python benchmarks/performance_tables.py`` lays out the committed results; the figure needs matplotlib.
"""

from __future__ import annotations

import functools
import json
import posixpath
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import pages  # noqa: E402

PAGE = HERE.parent / "docs" / "performance.md"
README = HERE.parent / "README.md"
"""Have tables between markers."""
TABLES = HERE.parent / "docs" / "performance" / "tables.md"
"""Is written whole."""
FIGURE = HERE.parent / "docs" / "speed.svg"
FP16 = ("sdpa flash", "sdpa cudnn", "sdpa efficient")
"""PyTorch's fused 16-bit kernels. Ratios are against the fastest of them that a run has."""
FLOAT_SOFTMAX = ("int-flash-full kernel", "int-flash-half kernel", "qattn kernel")
"""This library's kernels of methods with int8 products and a float softmax."""
CARD = "h200"
"""Whose results are shown."""

READ: list[str] = []
"""Names of the result files that were read."""


@functools.cache
def results(name: str) -> Any:
    """Return a result file, by its name in ``results`` without the suffix."""
    READ.append(name)
    return json.loads((HERE / "results" / f"{name}.json").read_text())


def file_of(run: str) -> str:
    """Return the name of a run's result file."""
    return f"{run}_{CARD}"


def rows_of(run: str) -> list[dict[str, Any]]:
    """Return the rows of a run's result file."""
    rows: list[dict[str, Any]] = results(file_of(run))["rows"]
    return rows


def number(value: float | None, digits: int = 2) -> str:
    """Format a figure, ``-`` for one that is missing."""
    return "-" if value is None else f"{value:.{digits}f}" if value < 1000 else f"{value:.0f}"


def by_shape(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, bool], dict[str, dict[str, Any]]]:
    """Group rows by shape (and bias), then by method."""
    found: dict[tuple[str, bool], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["mode"] == "eager":
            continue
        name = f"{row['workload']} b{row['batch']}" if row["batch"] else str(row["shape"])
        found.setdefault((name, bool(row["bias"])), {})[row["method"]] = row
    return found


def medians(methods: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the microseconds of every method that ran on a shape."""
    return {method: row["median_us"] for method, row in methods.items() if row["median_us"] is not None}


def fastest(time: dict[str, float], names: Iterable[str]) -> float:
    """Return the least time of those methods that were measured; at least one was."""
    return min(time[method] for method in names if method in time)


def fastest_fp16(time: dict[str, float]) -> float:
    """Return the time of the fastest of PyTorch's 16-bit kernels."""
    return fastest(time, FP16)


def span(values: Iterable[float], digits: int = 2) -> str:
    """Format the least and the greatest of some figures."""
    ordered = sorted(values)
    return " to ".join(dict.fromkeys(number(value, digits) for value in (ordered[0], ordered[-1])))


def unbiased(*names: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return every method's row, by shape, of runs without a bias, the last that has a shape."""
    return {name: methods for run in names for (name, bias), methods in by_shape(rows_of(run)).items() if not bias}


def latencies() -> dict[str, dict[str, dict[str, Any]]]:
    """Return every method's row, by shape: long rows have runs of their own, those of 1024 keys another."""
    return unbiased("bench", "bench_1024", "bench_long")


FROM_FLOATS = {"sdpa flash": "FA2", "sdpa cudnn": "cuDNN", "sdpa efficient": "efficient"}
FROM_INT8 = {
    "int-flash-full kernel": "INT-Flash-Full", "int-flash-half kernel": "INT-Flash-Half", "qattn kernel": "QAttn",
    "i-vit kernel": "I-ViT",
}  # fmt: skip


def end_to_end(found: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Float in, float out, by shape: PyTorch's kernels and ours, quantisation included."""
    peers = {name: title for name, title in FROM_FLOATS.items() if any(name in methods for methods in found.values())}
    lines = [
        f"| shape | {' | '.join(peers.values())} | **QFlash fp16** | fastest ÷ ours | SQNR dB |",
        "|" + "---|" * (len(peers) + 4),
    ]
    for name, methods in found.items():
        time = medians(methods)
        cells = [number(time.get(peer)) for peer in peers]
        cells += [number(time["qflash"]), number(fastest_fp16(time) / time["qflash"]), number(methods["qflash"]["sqnr_db"], 1)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def int8_in(found: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Tensors quantised before the clock starts, by shape: the other methods' kernels and ours."""
    peers = {name: title for name, title in FROM_INT8.items() if any(name in methods for methods in found.values())}
    heading = f"| shape | {' | '.join(peers.values())} | **QFlash int8** | fastest ÷ ours | fastest 16-bit ÷ ours | SQNR dB |"
    lines = [heading, "|" + "---|" * (len(peers) + 5)]
    for name, methods in found.items():
        time = medians(methods)
        ours = time["qflash int8"]
        cells = [*(number(time.get(peer)) for peer in peers), number(ours), number(fastest(time, peers) / ours)]
        cells += [number(fastest_fp16(time) / ours), number(methods["qflash int8"]["sqnr_db"], 1)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def latency() -> list[str]:
    """From fp16 to fp16 on every shape."""
    return end_to_end(latencies())


def int8_latency() -> list[str]:
    """From int8 tensors on every shape."""
    return int8_in(latencies())


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


def other_shapes() -> dict[str, dict[str, dict[str, Any]]]:
    """Return every method's row, by shape, of the run of other vision transformers."""
    return unbiased("shapes")


def ratios() -> list[str]:
    """The fastest 16-bit kernel's time divided by ours, by model."""
    found = other_shapes()
    lines = ["| | heads x tokens x channels | int8: batch 1 | 8 | 64 | fp16: batch 1 | 8 | 64 |", "|" + "---|" * 8]
    for name, shape in OTHERS.items():
        cells = []
        for method in ("qflash int8", "qflash"):
            for batch in (1, 8, 64):
                time = medians(found[f"{batch}x{shape}"])
                ratio = fastest_fp16(time) / time[method]
                cells.append(f"**{ratio:.2f}**" if ratio > 1 else number(ratio))
        lines.append(f"| {name} | {shape.replace('x', ' x ')} | {' | '.join(cells)} |")
    return lines


def by_size(found: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Sort shapes by their numbers."""
    return dict(sorted(found.items(), key=lambda of: [int(part) for part in of[0].split("x")]))


def shapes() -> list[str]:
    """Other shapes of vision transformers from fp16."""
    return end_to_end(by_size(other_shapes()))


def int8_shapes() -> list[str]:
    """Other shapes of vision transformers from int8 tensors."""
    return int8_in(by_size(other_shapes()))


def tuned_baselines() -> list[str]:
    """The baselines' kernels with their rules' tiles and with the best that were measured."""
    titles = {name.removesuffix(" kernel"): title for name, title in FROM_INT8.items()}
    lines = ["| method | shape | rule, µs | tuned, µs | rule ÷ tuned | tiles, rule | tiles, tuned |", "|" + "---|" * 7]
    for row in rows_of("baselines_tuned"):
        before, after = row["rule_us"], row["best_us"]
        rule, best = (", ".join("x".join(map(str, tiles)) for tiles in row[which]) for which in ("rule", "best"))
        cells = [titles[row["method"]], row["label"], number(before), number(after), number(before / after)]
        cells += [rule, "the rule's" if best == rule else best]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def tuned_baselines_section() -> tuple[Section, ...]:
    """Return the section of :func:`tuned_baselines`; none where that was not measured."""
    name = file_of("baselines_tuned")
    if not (HERE / "results" / f"{name}.json").is_file():
        return ()
    about = """Quantisation is outside the clock. `python benchmarks/tune_baselines.py` measures every kernel of the compared
methods with its rule's tiles and with others ([baselines](../baselines.md#tiles)); these are medians of replays of the two in
alternation. A candidate has to be 2 % faster to displace the rule. Tiles are queries x keys x warps x stages of the fused
kernels; of I-ViT rows x columns x sum x warps x stages of the first product, rows x warps of Shiftmax, and the second
product's."""
    return (Section("Baselines before and after tuning", REPLAY, about, tuned_baselines, (name,)),)


def biased() -> dict[str, dict[str, dict[str, Any]]]:
    """Return every method's row, by shape, of the run with a bias."""
    return {name: methods for (name, bias), methods in by_shape(rows_of("bench_bias")).items() if bias}


def biased_times(method: str) -> list[str]:
    """Swin with its bias and shift mask: PyTorch's kernels and one of ours."""
    title = {"qflash": "QFlash fp16", "qflash int8": "QFlash int8"}[method]
    lines = [f"| shape | cuDNN | efficient | **{title}** | fastest ÷ ours | cost of the bias |", "|" + "---|" * 6]
    for name, methods in biased().items():
        time = medians(methods)
        cells = [number(time[peer]) for peer in ("sdpa cudnn", "sdpa efficient")]
        cells += [number(time[method]), number(fastest_fp16(time) / time[method]), number(methods[method]["bias_cost"])]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def bias() -> list[str]:
    """Swin with its bias and shift mask from fp16."""
    return biased_times("qflash")


def int8_bias() -> list[str]:
    """Swin with its bias and shift mask from int8 tensors; PyTorch's kernels take fp16."""
    return biased_times("qflash int8")


def packed_sequences() -> list[str]:
    """Attention of packed sequences beside FlashAttention 2."""
    lines = [
        "| batch | tokens | heads x channels | FA2 varlen | **QFlash** | FA2 ÷ ours | eager, FA2 | eager, QFlash |",
        "|" + "---|" * 8,
    ]
    for row in rows_of("varlen"):
        flash, ours, slow, eager = (row[of].get(name) for of in ("us", "eager_us") for name in ("flash varlen", "qflash"))
        cells = [str(sum(row["lengths"])), f"{row['heads']} x {row['head_dim']}", number(flash, 1), number(ours, 1)]
        cells += [number(flash / ours if flash and ours else None), number(slow, 1), number(eager, 1)]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return lines


def packed_ratios(chosen: Callable[[dict[str, Any]], bool]) -> str:
    """Return FlashAttention 2's times over ours of some batches of packed sequences."""
    return span(row["us"]["flash varlen"] / row["us"]["qflash"] for row in rows_of("varlen") if chosen(row))


def linear_layers() -> list[str]:
    """Linear layers of integer networks with their epilogues, beside cuBLAS without."""
    peers = ("cuBLAS float16", "cuBLAS float8", "cuBLAS int8 to int32")
    lines = [
        f"| layer | rows x inputs x outputs | epilogue | {' | '.join(peers)} | **QFlash** | float8 ÷ ours | of int8 peak "
        "| of bandwidth |",
        "|" + "---|" * (len(peers) + 7),
    ]
    for row in rows_of("linear_layers"):
        time = row["us"]
        cells = [f"{row['rows']} x {row['inputs']} x {row['outputs']}", row["epilogue"]]
        cells += [number(time.get(name)) for name in (*peers, "qflash")]
        cells += [number(time["cuBLAS float8"] / time["qflash"]) if "cuBLAS float8" in time else "-"]
        cells += [f"{row[name]:.0%}" for name in ("of_int8_peak", "of_bandwidth")]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return lines


def eager_rows() -> dict[str, dict[str, Any]]:
    """Return the rows of eager calls on A2, batch 8, by method."""
    rows = (row for row in rows_of("bench_eager") if row["mode"] == "eager" and row["median_us"] is not None)
    return {row["method"]: row for row in rows if (row["workload"], row["batch"]) == ("A2", 8)}


def eager() -> list[str]:
    """Eager calls on A2, batch 8."""
    lines = ["| method | takes | until the device is done, µs | issuing, µs |", "|---|---|---|---|"]
    for name, row in eager_rows().items():
        takes = "int8" if name.endswith("kernel") or name == "qflash int8" else "fp16"
        lines.append(f"| {name} | {takes} | {number(row['median_us'], 1)} | {number(row['issue_us'], 1)} |")
    return lines


def issued() -> dict[str, list[float]]:
    """Return the time of issuing a call, divided by that of the one of PyTorch's kernels which is issued soonest, by method."""
    found: dict[str, dict[str, float]] = {}
    for row in rows_of("eager_shapes"):
        if row["mode"] == "eager" and row["issue_us"] is not None:
            found.setdefault(row["shape"], {})[row["method"]] = row["issue_us"]
    return {ours: [times[ours] / fastest_fp16(times) for times in found.values()] for ours in ("qflash", "qflash int8")}


def eager_line() -> str:
    """What eager calls take, in a sentence: on A2, batch 8, and the range of issuing over shapes."""
    of = eager_rows()
    times = ", ".join(f"{title} {number(of[name]['median_us'], 1)}" for name, title in FROM_FLOATS.items())
    ours = f"QFlash {number(of['qflash']['median_us'], 1)} from fp16 and {number(of['qflash int8']['median_us'], 1)} from int8"
    ratios = issued()
    return (
        f"Eager calls, A2 batch 8, µs until the device is done: {times}, {ours}; issuing a call takes "
        f"{span(ratios['qflash'])} (fp16) and {span(ratios['qflash int8'])} (int8) times as long as the one of PyTorch's "
        f"kernels that is issued soonest, over {len(ratios['qflash'])} shapes (`eager_shapes_{CARD}`)."
    )


def energy() -> list[str]:
    """Microjoules a call."""
    rows = rows_of("energy")
    uj = {row["method"]: row["uj"] for row in rows if row["uj"] is not None}
    lines = ["| method | takes | µJ a call | ÷ FA2 | ÷ the least of 16 bits | SQNR dB |", "|---|---|---|---|---|---|"]
    for row in rows:
        if row["uj"] is not None:
            takes = "int8" if row["mode"] == "kernel" else "fp16"
            cells = f"{row['uj']:.0f} | {row['uj'] / uj['sdpa flash']:.2f} | {row['uj'] / fastest(uj, FP16):.2f}"
            lines.append(f"| {row['method']} | {takes} | {cells} | {number(row['sqnr_db'], 1)} |")
    return lines


def profile() -> list[str]:
    """What Nsight Compute says."""
    lines = [
        "| shape | method | launches | µs | IMMA % | HMMA % | tensor pipe % | issue slots % | occupancy % "
        "| registers | warp instructions |",
        "|" + "---|" * 11,
    ]
    percents = ("duration_us", "imma_percent", "hmma_percent", "tensor_percent", "issue_percent")
    for row in rows_of("profile"):
        if row["method"] not in {*FROM_FLOATS, *FROM_INT8, "qflash int8", "qflash"}:
            continue
        cells = [number(row[field], 1) for field in percents]
        cells += [number(row["occupancy_percent"], 1), f"{row['registers']:.0f}", f"{row['instructions']:.0f}"]
        lines.append(f"| {row['workload']} b{row['batch']} | {row['method']} | {row['kernels']} | {' | '.join(cells)} |")
    return lines


def instructions() -> list[str]:
    """Instructions a score of every case that ``qflash-lab verify`` compiles, with Triton 3.6."""
    lines = ["| case | sm_80 | sm_90 | registers (sm_90) | spills (sm_90) |", "|---|---|---|---|---|"]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for report in results("verify_triton36"):
        found.setdefault(report["case"], {})[report["target"]] = report
    for case, targets in found.items():
        cells = [number(targets.get(target, {}).get("per_score"), 1) for target in ("sm_80", "sm_90")]
        lines.append(f"| {case} | {' | '.join(cells)} | {targets['sm_90']['registers']} | {targets['sm_90']['spills']} |")
    return lines


def newer() -> list[str]:
    """Triton 3.9's machine code against Triton 3.6's."""
    columns = "int8", "fp16", "int8, form for 3.9", "fp16, form for 3.9"
    lines = [f"| shape | {' | '.join(columns)} |", "|" + "---|" * (1 + len(columns))]
    found: dict[str, dict[str, float]] = {}
    for row in rows_of("../archive/triton39"):
        if used_by := row.get("used_by"):
            column = row["kind"] if used_by == "3.6" else f"{row['kind']}, form for 3.9"
            found.setdefault(row["shape"], {}).setdefault(column, row["triton39_us"] / row["triton36_us"])
    for shape, of in found.items():
        lines.append(f"| {shape} | {' | '.join(number(of.get(column)) for column in columns)} |")
    return lines


MODEL_NAMES = {
    "vit_large_patch14_clip_224": "CLIP ViT-L/14",
    "vit_base_patch14_dinov2": "DINOv2-B, 518 px",
    "vit_base_patch14_dinov2 224 px": "DINOv2-B, 224 px",
    "eva02_small_patch14_224": "EVA-02-S",
    "swin_base_patch4_window7_224": "Swin-B",
    "swinv2_tiny_window8_256": "Swin V2-T",
}
"""What tables call timm's models."""


def whole_models() -> dict[tuple[str, int], dict[str, float]]:
    """Return images a second and SQNR of whole models, patched and not, by model and batch.

    ``eager`` and ``compiled`` are the fastest of PyTorch's ways to run a model's own attention, ``patched`` the faster of ours
    with a bias kept or not; a model that has no bias, or calls SDPA anyway, has one way less. ``ratio`` and ``compiled ratio``
    are patched over unpatched.
    """
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in rows_of("models"):
        found.setdefault((row["model"], row["batch"]), {})[row["method"]] = row
    result = {}
    for key, methods in found.items():
        speed = {name: row["images_s"] for name, row in methods.items() if row["images_s"] is not None}
        of = {
            "timm": speed["timm"],
            "eager": max(speed[name] for name in ("timm", *FP16) if name in speed),
            "patched": max(speed[name] for name in ("qflash", "qflash kept bias") if name in speed),
            "compiled": max(speed[name] for name in ("compile", "compile sdpa") if name in speed),
            "compiled patched": max(speed[name] for name in ("compile qflash", "compile qflash kept bias") if name in speed),
            "sqnr": methods["qflash"]["sqnr_db"],
        }
        ratios = {"ratio": of["patched"] / of["eager"], "compiled ratio": of["compiled patched"] / of["compiled"]}
        result[key] = of | ratios
    return result


def models() -> list[str]:
    """Whole models: images a second, patched and not, in graphs of eager calls and compiled."""
    columns = ["model", "timm", "fastest SDPA", "**qflash**", "ratio", "compiled", "**compiled qflash**", "ratio"]
    columns.append("SQNR dB of logits")
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for (model, batch), of in whole_models().items():
        digits = {"ratio": 3, "compiled ratio": 3, "sqnr": 1}
        names = ("timm", "eager", "patched", "ratio", "compiled", "compiled patched", "compiled ratio", "sqnr")
        cells = [number(of[name], digits.get(name, 0)) for name in names]
        lines.append(f"| {MODEL_NAMES.get(model, model)} b{batch} | {' | '.join(cells)} |")
    return lines


def begins(name: str, model: str) -> bool:
    """Tell whether a model's name begins like this."""
    return model.startswith(name)


def is_swin(model: str) -> bool:
    """Tell whether it is a Swin or a Swin V2."""
    return model.lower().startswith("swin")


def is_swin_v2(model: str) -> bool:
    """Tell whether it is a Swin V2."""
    return model.lower().startswith("swinv2")


FAMILIES: dict[str, Callable[[str], bool]] = {
    "Swin": lambda model: is_swin(model) and not is_swin_v2(model),
    "Swin V2": is_swin_v2,
    "other transformers": lambda model: not is_swin(model),
}
"""Models whose ratios the summary gives together."""


def patched_ratios(chosen: Callable[[str], bool], *, compiled: bool) -> str:
    """Return least and most of patched models' images a second over the fastest unpatched ones'."""
    ratio = "compiled ratio" if compiled else "ratio"
    return span(of[ratio] for (model, _), of in whole_models().items() if chosen(model))


def aims() -> list[str]:
    """What this library set out to reach on this GPU, and what was measured."""
    found = {name: medians(methods) for name, methods in latencies().items()}
    vit = {name: time for name, time in found.items() if name.startswith("A")}
    energy_of = {row["method"]: row["uj"] for row in rows_of("energy")}
    issue_of = {row["method"]: row["issue_us"] for row in rows_of("bench_eager") if row["mode"] == "eager"}

    def long_rows(head_dim: int, least: int) -> list[dict[str, float]]:
        shapes = {name: [int(part) for part in name.split("x")] for name in found if name not in vit}
        return [found[name] for name, shape in shapes.items() if shape[3] == head_dim and shape[2] >= least]

    lines = ["| | aim | measured, least to most | reached |", "|---|---|---|---|"]

    def add(what: str, aim: float, values: Iterable[float], *, at_most: bool = False) -> None:
        values = sorted(values)
        # as far as the figures that are shown go
        reached = sum(round(value, 2) <= aim if at_most else round(value, 2) >= aim for value in values)
        spread = " to ".join(f"{value:.2f}" for value in dict.fromkeys((values[0], values[-1])))
        lines.append(f"| {what} | {'≤' if at_most else '≥'} {aim} | {spread} | {reached} of {len(values)} |")

    def ratio(times: Iterable[dict[str, float]], ours: str, *others: str) -> list[float]:
        return [min(time[other] for other in others) / time[ours] for time in times]

    for head, keep in (("A1 to A3", "123"), ("A4 to A7", "4567")):
        times = {name: time for name, time in vit.items() if name[1] in keep}
        add(f"{head}, fp16 in and out, against the fastest 16-bit kernel", 1.2, ratio(times.values(), "qflash", *FP16))
        best = ratio(times.values(), "qflash int8", *FP16, *FLOAT_SOFTMAX)
        add(f"{head}, int8, against the fastest of all methods here", 1.5, best)
    for head_dim, aim, fa2 in ((64, 1.15, 1.7), (128, 1.4, 2.4)):
        rows = long_rows(head_dim, 1024)
        add(f"rows of 1024 keys and more, d = {head_dim}, int8, against cuDNN", aim, ratio(rows, "qflash int8", "sdpa cudnn"))
        add(f"the same against FA2, d = {head_dim}", fa2, ratio(rows, "qflash int8", "sdpa flash"))
    for head_dim, aim in ((64, 1.05), (128, 1.25)):
        rows = long_rows(head_dim, 4096)
        add(f"rows of 4096 keys and more, d = {head_dim}, fp16, against cuDNN", aim, ratio(rows, "qflash", "sdpa cudnn"))
    runs = biased().values()
    rows = [medians(methods) for methods in runs]
    for method, name in (("qflash int8", "int8"), ("qflash", "fp16")):
        costs = [methods[method]["bias_cost"] for methods in runs]
        add(f"A4 to A7, {name}: time with a bias ÷ without", 1.25, costs, at_most=True)
        add(f"the same against the fastest SDPA with the bias, {name}", 2, ratio(rows, method, "sdpa cudnn", "sdpa efficient"))
    add("energy, A2 batch 8, int8 ÷ FA2", 0.6, [energy_of["qflash int8"] / energy_of["sdpa flash"]], at_most=True)
    for method, name in (("qflash", "fp16"), ("qflash int8", "int8")):
        add(f"issuing an eager call, A2 batch 8, {name} ÷ FA2", 2, [issue_of[method] / issue_of["sdpa flash"]], at_most=True)
    record = results("authors_kernel_h200")
    column = record["methods"].index("authors' QFlash")
    theirs = {f"{name} b{batch}": times[column] for name, of in record["latency_us"].items() for batch, times in of.items()}
    for head, keep, aim in (("A1 to A3", "123", 3), ("A4 to A7", "4567", 2)):
        quotients = [theirs[name] / time["qflash int8"] for name, time in vit.items() if name[1] in keep]
        add(f"{head}, int8, against the paper authors' kernel, in a run of its own", aim, quotients)
    return lines


def readme() -> list[str]:
    """README's table: ratios to the fastest 16-bit kernel, the two ways of calling apart."""
    found = {name: medians(methods) for name, methods in latencies().items()}
    lines = [
        f"| {CARD.upper()}, CUDA-graph replay | fp16 in and out, quantisation included "
        "| int8 in and out, quantised before the clock starts |",
        "|---|---|---|",
    ]

    def add(what: str, times: Iterable[dict[str, float]], peers: Iterable[str] = FP16) -> None:
        times = list(times)
        cells = [span(fastest(time, peers) / time[ours] for time in times) for ours in ("qflash", "qflash int8")]
        lines.append(f"| {what} | {' | '.join(cells)} |")

    add("A1 to A3, batch 1, 8, 64", (time for name, time in found.items() if name[:2] in ("A1", "A2", "A3")))
    add("A4 to A7, batch 1, 8, 64", (time for name, time in found.items() if name[:2] in ("A4", "A5", "A6", "A7")))
    add("A4 to A7 with Swin's bias and mask", (medians(methods) for methods in biased().values()))
    others = [medians(methods) for methods in other_shapes().values()]
    add("12 other ViT shapes, batch 1, 8, 64", others)
    for keys in ("1024", "4096", "16384"):
        add(f"{keys} keys, 64 and 128 channels", (time for name, time in found.items() if name.split("x")[2:3] == [keys]))
    eager_of = {name: row["median_us"] for name, row in eager_rows().items()}
    add("eager call without a graph, A2 batch 8, until the device is done", [eager_of])
    uj = {row["method"]: row["uj"] for row in rows_of("energy") if row["uj"] is not None}
    add("energy, A2 batch 8", [uj])
    for name, which in (("Swin-T", "Swin-T, `keep_bias=True`,"), ("DeiT", "DeiT-T, -S, -B")):
        is_one = functools.partial(begins, name)
        eager, compiled = (patched_ratios(is_one, compiled=of) for of in (False, True))
        lines.append(f"| {which} as a whole, batch 1, 8, 64 | {eager}; compiled {compiled} | |")
    return lines


def summary() -> list[str]:
    """What the tables say, in a few sentences with their figures."""
    found = {name: medians(methods) for name, methods in latencies().items()}
    vit = [time for name, time in found.items() if name[:2] in ("A1", "A2", "A3")]
    swin = [time for name, time in found.items() if name[:2] in ("A4", "A5", "A6", "A7")]
    others = [medians(methods) for methods in other_shapes().values()]

    def against(times: Iterable[dict[str, float]], ours: str, peers: Iterable[str] = FP16) -> str:
        return span(fastest(time, peers) / time[ours] for time in times)

    def ahead(times: list[dict[str, float]], ours: str) -> str:
        return f"{sum(fastest_fp16(time) > time[ours] for time in times)} of the {len(times)}"

    def keys(*counts: str) -> list[dict[str, float]]:
        return [time for name, time in found.items() if name.split("x")[2:3] and name.split("x")[2] in counts]

    runs = biased().values()
    rows = [medians(methods) for methods in runs]
    uj = {row["method"]: row["uj"] for row in rows_of("energy") if row["uj"] is not None}
    slower = [
        f"{MODEL_NAMES.get(model, model)} b{batch} ({of['ratio']:.3f}, {of['compiled ratio']:.3f})"
        for (model, batch), of in whole_models().items()
        if min(of["ratio"], of["compiled ratio"]) < 1
    ]
    families = [
        f"{title} {' and '.join(patched_ratios(chosen, compiled=compiled) for compiled in (False, True))}"
        for title, chosen in FAMILIES.items()
    ]
    lines = [
        f"* **From fp16, quantisation included**: A1 to A3 {against(vit, 'qflash')} times as fast as the fastest of FA2, cuDNN "
        f"and the memory-efficient kernel, A4 to A7 {against(swin, 'qflash')}; with Swin's bias and mask "
        f"{against(rows, 'qflash')}. {ahead(others, 'qflash').capitalize()} other ViT shapes and "
        f"batches are ahead ({against(others, 'qflash')}).",
        f"* **On int8 tensors, quantised before the clock starts**: A1 to A3 {against(vit, 'qflash int8')}, A4 to A7 "
        f"{against(swin, 'qflash int8')}, with the bias {against(rows, 'qflash int8')}, other ViT shapes"
        f" {against(others, 'qflash int8')} times as fast as those kernels from fp16.",
        f"* **Against int8 products with a float softmax** (INT-Flash, QAttn, from int8 tensors): A1 to A3 "
        f"{against(vit, 'qflash int8', FLOAT_SOFTMAX)}, A4 to A7 {against(swin, 'qflash int8', FLOAT_SOFTMAX)}, 1024 keys and "
        f"more {against(keys('1024', '4096', '16384'), 'qflash int8', FLOAT_SOFTMAX)}. Hopper issues float multiply-adds at "
        f"twice the rate of integer ones and has an exponential unit. I-ViT, the other integer-only method, takes "
        f"{against([*vit, *swin], 'qflash int8', ('i-vit kernel',))} times as long as ours.",
        f"* **Long rows**: 4096 and 16384 keys {against(keys('4096', '16384'), 'qflash')} from fp16 and "
        f"{against(keys('4096', '16384'), 'qflash int8')} on int8; at 1024 keys {against(keys('1024'), 'qflash')} and "
        f"{against(keys('1024'), 'qflash int8')}; from fp16 a call takes "
        f"{span(time['qflash'] / time['qflash int8'] for time in keys('1024'))} times as long as on int8 there.",
        f"* **Packed sequences** of several lengths from fp16, against FA2's `varlen_attn`: heads of 64 channels "
        f"{packed_ratios(lambda row: row['head_dim'] == 64)}, windows of 64 patches "
        f"{packed_ratios(lambda row: max(row['lengths']) <= 64)}, longer sequences with 72 or 80 channels "
        f"{packed_ratios(lambda row: row['head_dim'] != 64 and max(row['lengths']) > 64)}.",
        f"* **Swin's bias and shift mask** cost {span(of['qflash']['bias_cost'] for of in runs)} times from fp16 and "
        f"{span(of['qflash int8']['bias_cost'] for of in runs)} on int8.",
        f"* **Whole models**, patched against the fastest of timm's choice and SDPA's back ends, and both compiled: "
        f"{'; '.join(families)}. Slower (patched, compiled): {', '.join(slower) or 'none'}.",
        f"* **{eager_line().split(',')[0]}**,{eager_line().split(',', 1)[1]}",
        f"* **Energy**, A2 batch 8: an int8 call takes {uj['qflash int8'] / uj['sdpa flash']:.2f} of FA2's and "
        f"{uj['qflash int8'] / fastest(uj, FP16):.2f} of cuDNN's, the least of 16 bits; from fp16 "
        f"{uj['qflash'] / uj['sdpa flash']:.2f} and {uj['qflash'] / fastest(uj, FP16):.2f}.",
    ]
    cpus = []
    for name, title in (
        ("cpu_zen4", "Zen 4 with VNNI"),
        ("cpu_vnni", "in an earlier state Zen 5 with VNNI"),
        ("cpu", "AVX2 only"),
    ):
        of = results(name)["results"].values()
        both = [
            span(row["sdpa float32"]["lowest_ms"] / row[method]["lowest_ms"] for row in of)
            for method in ("cpu float32", "cpu int8")
        ]
        cpus.append(f"{title} {both[0]} from float32 and {both[1]} on int8")
    lines.append(f"* **CPU**, two threads, against SDPA in float32: {'; '.join(cpus)}.")
    return [line for paragraph in lines for line in pages.wrap(paragraph, indent="  ")]


def draw() -> None:
    """Draw how many times as fast as the fastest of PyTorch's 16-bit kernels we are, shape by shape."""
    import matplotlib
    from matplotlib.figure import Figure

    found = {name: medians(methods) for name, methods in latencies().items()}
    shapes = sorted(found, key=lambda name: name[:2] if name.startswith("A") else "B")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "qflash", "font.size": 9}):
        figure = Figure(figsize=(9.5, 5.2), layout="constrained")
        for axes, (method, title) in zip(
            figure.subplots(2, 1, sharex=True),
            (("qflash", "fp16 in and out, quantisation included"), ("qflash int8", "int8 in and out, quantised beforehand")),
            strict=True,
        ):
            heights = [fastest_fp16(found[name]) / found[name][method] for name in shapes]
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
            f"Speed on one {CARD.upper()} against the fastest 16-bit kernel of PyTorch, CUDA-graph replay", fontsize=10
        )
        figure.savefig(FIGURE, metadata={"Date": None})


def processor(name: str) -> list[str]:
    """One CPU's run: SDPA in float32, the CPU back end and the reference, lowest of the rounds."""
    lines = [
        "| shape | SDPA ms | int8 ms | ratio | SQNR dB | float32 ms | ratio | SQNR dB | reference ms |",
        "|" + "---|" * 9,
    ]

    def time(milliseconds: float) -> str:
        return f"{milliseconds:.3g}" if milliseconds < 1000 else f"{milliseconds:.0f}"

    for shape, row in results(name)["results"].items():
        sdpa, int8, floats, slow = (
            row[method]["lowest_ms"] for method in ("sdpa float32", "cpu int8", "cpu float32", "reference float32")
        )
        cells = [time(sdpa), time(int8), number(sdpa / int8), number(row["sqnr_db"]["cpu int8"])]
        cells += [time(floats), number(sdpa / floats), number(row["sqnr_db"]["cpu float32"]), time(slow)]
        lines.append(f"| {shape} | {' | '.join(cells)} |")
    return lines


def when(name: str) -> str:
    """Return the day of a run."""
    record = results(name)
    about = record.get("environment") or record.get("conditions") or record
    return about["date"][:10]


class Section(NamedTuple):
    """A heading of the page of tables, how its figures were timed, what is said about them, and the table.

    Attributes:
        timing: the first words under the heading.
        files: result files.
    """

    title: str
    timing: str
    about: str
    table: Callable[[], list[str]]
    files: tuple[str, ...]


REPLAY = "CUDA-graph replay, microseconds"
BEFORE_EXACT_SUMS = "PyTorch 2.15.0, and an earlier state of QFlash, whose row sums were not exact yet."
LATENCY_FILES = (file_of("bench"), file_of("bench_1024"), file_of("bench_long"))

SECTIONS = (
    Section(
        "Latency from fp16",
        REPLAY,
        """All methods in alternation in one run, median of 15 rounds. Quantisation is inside the clock: `qflash.attention` with
the default recipe. FA2, cuDNN and efficient are PyTorch's `scaled_dot_product_attention` in fp16. **fastest ÷ ours** is
the least of the three divided by ours: above 1 we are faster. Shapes are batch x heads x tokens x channels; A1 to A7
are the paper's workloads ([what they are](../performance.md#workloads)). The rows of 16384 keys reach the power limit:
their quartiles lie up to 5 % apart, on int8 up to 15 %.""",
        latency,
        LATENCY_FILES,
    ),
    Section(
        "Latency from int8 tensors",
        REPLAY,
        """The same runs. Quantisation is outside the clock: `qflash.int8_attention`, int8 in and out, one scale per tensor,
fitted output scale. INT-Flash, QAttn and I-ViT are this library's kernels of those methods on tensors quantised beforehand
([baselines](../baselines.md)); INT-Flash returns fp16, QAttn and I-ViT int8 at a fitted scale. **fastest ÷ ours** is
against these; the last ratio is against PyTorch's fp16 kernels of the table above, which take and return fp16.""",
        int8_latency,
        LATENCY_FILES,
    ),
    *tuned_baselines_section(),
    Section(
        "Swin with its bias and shift mask, from fp16",
        REPLAY,
        """An additive bias (windows, heads, N, N) in fp16 that repeats over the images, its rows aligned (`qflash.align_bias`)
for every method. FA2 takes no bias. The cost of the bias is the time with it divided by the time without it.""",
        bias,
        (file_of("bench_bias"),),
    ),
    Section(
        "Swin with its bias and shift mask, from int8 tensors",
        REPLAY,
        "The same run; quantisation is outside the clock, PyTorch's kernels take fp16.",
        int8_bias,
        (file_of("bench_bias"),),
    ),
    Section(
        "Other vision transformers, ratios",
        "CUDA-graph replay, the fastest of FA2, cuDNN and the memory-efficient kernel in fp16 divided by ours",
        "Medians of nine rounds; the int8 columns leave quantisation out.",
        ratios,
        (file_of("shapes"),),
    ),
    Section(
        "Other vision transformers, from fp16",
        REPLAY,
        "The run of the table above, quantisation inside the clock.",
        shapes,
        (file_of("shapes"),),
    ),
    Section(
        "Other vision transformers, from int8 tensors",
        REPLAY,
        "The same run, quantisation outside the clock.",
        int8_shapes,
        (file_of("shapes"),),
    ),
    Section(
        "Packed sequences of several lengths",
        "CUDA-graph replay, microseconds; the last two columns eager, until the device is done",
        """`qflash.varlen_attention` beside PyTorch's `varlen_attn` (FlashAttention 2), both in fp16, quantisation inside the
clock, medians of nine rounds by turns ([what runs](../models.md#sequences-of-several-lengths)). The images' sides are drawn
evenly between the two ends (`benchmarks/varlen.py`); each result was equal to the reference's before it was timed. Sequences
of up to 256 keys (384 with 72 to 96 channels) are one launch, and where there are many, up to 768 (640); others are
quantised before. One launch takes the longest sequences first ([with and without, and other
batches](../../benchmarks/archive/varlen_order_h100.json)). Slower than FA2: heads of 72 channels by a twentieth and,
not in the table, those of 72 and 80 with other mixes of lengths by up to a seventh
([data](../../benchmarks/archive/wide_heads_h200.json)) and heads of 128 with 64 to 256 patches (0.72, on
an H100). Eager calls are repeated ones, whose plan is kept.""",
        packed_sequences,
        (file_of("varlen"),),
    ),
    Section(
        "Linear layers of integer networks",
        "CUDA-graph replay, microseconds",
        """Ours with everything behind the product inside the clock: bias and requantisation to int8, GELU as well, or the
residual added in int16. cuBLAS without any of that: float16 with a bias, float8 (e4m3, one scale, float16 out) and int8 with
int32 out, as PyTorch calls them (`benchmarks/linear_layers.py`, medians of nine rounds by turns). The last two columns are
ours: operations against the card's dense int8 peak, and bytes that have to move against its bandwidth, by its data sheet.""",
        linear_layers,
        (file_of("linear_layers"),),
    ),
    Section(
        "Whole models",
        "CUDA-graph replay, images per second",
        """Images a second of timm's models in fp16, one to three forward passes a graph (`qflash-lab models`, median of 11
rounds by turns). **Fastest SDPA** is the fastest of timm's choice and SDPA's three back ends, with every attention module
made to call SDPA, which timm does not do in Swin; Swin V2 cannot. **qflash** is `qflash.patch`, in Swin and Swin V2 with
`keep_bias=True`, which is faster there than without, compiled too. **Compiled** is `torch.compile` in its default mode, of
Swin the faster with and without SDPA; each ratio is the patched model's images over those in the column before it. Weights
are random: they change no kernel's speed. The SQNR is of the logits, or features of DINOv2, against float32.""",
        models,
        (file_of("models"),),
    ),
    Section(
        "Eager calls",
        "Eager calls, no CUDA graph, A2 batch 8",
        """Issuing is the time until the last call has returned, divided by the number of calls. Methods that take int8 leave
quantisation out; `int-flash-full`, `int-flash-half` and `qattn` quantise in launches of their own.""",
        eager,
        (file_of("bench_eager"),),
    ),
    Section(
        "Energy",
        "CUDA-graph replay, microjoules a call, A2 batch 8",
        """NVML's energy counter over two seconds of replay, two rounds, idle power included. Methods that take int8 leave
quantisation out.""",
        energy,
        (file_of("energy"),),
    ),
    Section(
        "Utilisation",
        "Nsight Compute, one launch each at its own clocks",
        """Durations are Nsight Compute's, most of them longer than under replay. Methods are as in the tables of latency:
`kernel` and `qflash int8` take int8
tensors. Which counters: [benchmarking](../benchmarking.md#tensor-core-use-qflash-lab-profile).""",
        profile,
        (file_of("profile"),),
    ),
    Section(
        "Instructions per score",
        "Counted in the machine code of Triton 3.6, 2026-11-29",
        """By `qflash-lab verify`: warp instructions of a whole kernel where a program computes
all scores of its queries at once, else of one iteration of its loops over the keys, divided by its scores.

* `vit-257`, `vit-257-80`, `vit-577`, `vit-1370` and `vit-729-72` take the sm_90 resident kernel on Hopper. Elsewhere
  such rows take the streaming kernel, of which the usual loops are counted. `vit-577` is 0.7 in the first pass and
  8.8 in the second, which includes a maximum that seldom runs. `vit-1370` and `vit-729-72` are persistent programs.
* `vit-80` has few heads: two warps share each row, so its code is half of each warp's work and an exchange between
  them.
* `vit-hundreds` and `vit-257-80` contain code for tail queries as well as for a block, and per-channel scales.
* `swin`, `swin-windows` and `swin-thousands` are the windows kernel: one tile of 16 queries per warp and all that
  precedes it, so few scores share the cost of keys and values; with thousands of windows half a tile more. With a
  bias the code is there twice, for tiles with and without marks.
* Of the streaming kernel, the loops that usually run are counted: 1.0 in the first pass and 8.5 in the second at d =
  64. At d = 128 the maxima that clamp scores are included, one per score, which seldom run. `long-64` has per-channel
  scales and exact row sums, for which registers are short; where its 120 spills are was not counted.""",
        instructions,
        ("verify_triton36",),
    ),
    Section(
        "Machine code of Triton 3.9",
        "CUDA-graph replay, time divided by the time with Triton 3.6's code",
        """What Triton 3.9 (ptxas 13.4) makes of the same kernels was put in place of 3.6's machine code in the launcher's cache
and timed in the same session. All launches returned the reference's bits (from 456 to 512 keys they were compared
with the output of Triton 3.6's code, which tests compare with the reference). `form for 3.9` is the form that is used
with Triton 3.9, where it is another one
([why](limits.md#register-pressure-and-ptxas)).""",
        newer,
        ("../archive/triton39_h200",),
    ),
    *(
        Section(
            f"CPU: {title}",
            "Eager calls on two threads, milliseconds",
            """Inputs uniform in [-4, 4) float32, all methods in alternation in every round, **lowest** of nine rounds
(three for the reference); the file has medians, too. `python benchmarks/cpu.py OUT.json` measures again. `float32` is
`qflash.attention`, default recipe, quantisation inside the clock; `int8` is int8 in and out, quantisation outside.
A ratio is SDPA's time in float32 divided by ours."""
            + note,
            functools.partial(processor, name),
            (name,),
        )
        for title, name, note in (
            ("Zen 4 EPYC with VNNI", "cpu_zen4", " PyTorch 2.14.1."),
            ("Zen 5 EPYC with VNNI", "cpu_vnni", f" {BEFORE_EXACT_SUMS}"),
            (
                "EPYC with AVX2 only",
                "cpu",
                f" {BEFORE_EXACT_SUMS} Its two cores were shared with other work: ratios of a few per cent mean nothing.",
            ),
        )
    ),
)

HEADER = """# Measured tables

Written by `python benchmarks/performance_tables.py` from the result files named under each heading, which also have
quartiles and the environment; do not edit. Aims and a summary: [performance](../performance.md). Why the numbers are
what they are: [limits](limits.md). What was tried: [experiments](../../benchmarks/archive/experiments.md).

Unless a section says otherwise: one of four NVIDIA H200 (141 GB, HBM3e) of one host, kernels of commit a01eb12, torch
2.11.0+cu130, Triton 3.6.0, driver 580.159; inputs uniform in [-4, 4) fp16; CUDA-graph replay of about a millisecond
of calls behind an untimed replay. Other shapes of vision transformers and eager calls were measured the day after on
two H200 of another host, with the same kernels, and so were the baselines' tiles for 64 images of 16 heads with 72 or
80 channels. Other runs, among them an H100's of most tables, in earlier states, are in `benchmarks/archive/`.
"""


def tables_page() -> str:
    """Return docs/performance/tables.md."""
    parts = [HEADER]
    for section in SECTIONS:
        links = ", ".join(f"[{Path(name).name}](../../{link_to(name)})" + day(name) for name in section.files)
        parts.append(f"\n## {section.title}\n\n" + "\n".join(pages.wrap(f"{section.timing}: {links}.")) + "\n")
        if section.title == "Latency from fp16":
            parts.append("\n" + "\n".join(pages.wrap(eager_line())) + "\n")
        parts.append(f"\n{pages.flow(section.about)}\n\n" + "\n".join(section.table()) + "\n")
    return "".join(parts)


def link_to(name: str) -> str:
    """Return a result file's place from the repository's root."""
    return posixpath.normpath(f"benchmarks/results/{name}.json")


def day(name: str) -> str:
    """Return the day of a run in brackets, or nothing where the file has none."""
    record = results(name)
    return f" ({when(name)})" if isinstance(record, dict) else ""


def blocks() -> dict[str, list[str]]:
    """Return the lines between markers of pages, by the markers' names."""
    return {"speed:readme": readme(), "speed:aims": aims(), "speed:summary": summary(), "speed:eager": pages.wrap(eager_line())}


def files() -> list[str]:
    """Return the result files that were read."""
    return [f"{name}.json" for name in READ]


def main() -> None:
    """Write the pages' tables and the figure."""
    for page in (PAGE, README):
        page.write_text(pages.fill(page.read_text(), blocks()))
    TABLES.write_text(tables_page())
    draw()


if __name__ == "__main__":
    main()
