"""The reproduction report: what it reads, its verdicts, and the page in a browser (phone and desk, light and dark)."""

from __future__ import annotations

import base64
import html
import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("matplotlib")
from qflash_lab.bench import ablation, ablation_tables, accuracy, energy, figures, latency, metrics
from qflash_lab.bench import profile as profiling
from qflash_lab.cli import app
from qflash_lab.paper import claims as paper_claims
from qflash_lab.paper import paper_results, plots, reproduction
from qflash_lab.paper import results as result_files

CPU = torch.device("cpu")
GPU = {"device_type": "cuda", "device": "NVIDIA Test", "date": "2026-01-02T03:04:05+00:00"}
SPEED = {"qflash int8": 4.0, "i-vit": 20.0, "sdpa flash": 5.0, "sdpa cudnn": 6.0}


def bench_record() -> dict[str, Any]:
    """Rows with the fields ``qflash-lab bench`` writes, for a GPU that does not exist."""
    rows = []
    for name, batch in itertools.product(("A1", "A2", "A4", "A7"), (1, 8)):
        for method, us in SPEED.items():
            row = dict.fromkeys(latency.FIELDS) | {
                "workload": name,
                "batch": batch,
                "method": method,
                "causal": False,
                "bias": False,
            }
            row |= {"mode": "kernel" if "int8" in method else "end-to-end", "input": "uniform", "dtype": "float16"}
            row |= {"median_us": us * batch, "q1_us": us * batch, "q3_us": us * batch, "ratio": 5.0 / us, "sqnr_db": 36.0}
            rows.append(row)
    return {"what": "latency of attention with its accuracy", "environment": GPU, "timing": "by hand", "rows": rows}


def energy_record(ours: float) -> dict[str, Any]:
    found = {"sdpa flash": energy.Reading(2.0, 1.0, 1000), "qflash int8": energy.Reading(ours, 1.0, 1000)}
    rows = [
        dict.fromkeys(energy.FIELDS)
        | {"workload": "A2", "batch": 8, "bias": False, "method": name}
        | energy.summarise([r], 100.0)
        for name, r in found.items()
    ]
    return {"what": "energy of one attention call", "environment": GPU, "timing": "", "idle_watts": 100.0, "rows": rows}


def profile_record() -> dict[str, Any]:
    rows = [
        dict.fromkeys(profiling.FIELDS) | {"workload": "A2", "batch": 8, "method": "qflash int8", "imma_percent": 7.5},
        dict.fromkeys(profiling.FIELDS) | {"workload": "A2", "batch": 8, "method": "sdpa flash", "hmma_percent": 11.25},
    ]
    what = "tensor-core utilisation of one attention call, percent of the peak while a multiprocessor is active"
    return {"what": what, "environment": GPU, "timing": "", "rows": rows}


def ablate_record() -> dict[str, Any]:
    """Rows with the fields ``qflash-lab ablate`` writes on a GPU."""
    blank = dict.fromkeys((*ablation_tables.FIELDS, "speedup"))
    rows = []
    for label, us in {"sdpa flash": 9.0, "V0": 10.0, "V1": 8.0, "V2": 8.5, "V3": 12.5, "V4 paper": 5.0}.items():
        row = blank | {"part": "kernel", "group": "kernel", "label": label, "input": "A2, batch 1024", "speedup": 10.0 / us}
        rows.append(row | {"median_us": us, "q1_us": us, "q3_us": us} | metrics.summary([30.0]))
    for label, gops in {"multiply": 9.0, "multiply and shift": 6.0, "divide": 0.5}.items():
        rows.append(blank | {"part": "throughput", "group": "int32", "label": label, "gops": gops, "input": "by hand"})
    return {"what": "ablation of the integer attention", "environment": GPU, "timing": "by hand", "rows": rows}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small CPU results of the real commands and made-up GPU results."""
    folder = tmp_path_factory.mktemp("results")
    ablation.run_ablate(parts=("kernel", "throughput"), device=CPU, batch=1, rounds=1, output=folder)
    cases = accuracy.make_cases(("paper",), ("A7",), batch=8)
    accuracy.run_accuracy(cases, ("fp32", "qflash-paper", "qflash-default", "i-vit"), seeds=1, output=folder)
    (folder / "speed.json").write_text(json.dumps(bench_record()))
    (folder / "energy.json").write_text(json.dumps(energy_record(1.5)))
    (folder / "profile.json").write_text(json.dumps(profile_record()))
    (folder / "other.json").write_text('{"what": "something else"}')
    return folder


@pytest.fixture(scope="module")
def page(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    repository = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
    return reproduction.run_report(folder, results=results, gpu_results=repository)


def claim(found: result_files.Found, text: str) -> paper_claims.Claim:
    (one,) = [item for item in paper_claims.claims(found) if text in item.text]
    return one


def test_results_are_known_by_what_they_say(results: Path) -> None:
    found = result_files.read_results([results])
    assert set(found) == {"ablate", "accuracy", "bench", "energy", "profile"}
    assert found["bench"][0]["file"] == "speed.json"


def test_verdicts_follow_the_figures(results: Path) -> None:
    found = result_files.read_results([results])
    assert "up to 5.00 times" in (claim(found, "Swin at batch 8").ours or "")
    assert claim(found, "Swin at batch 8").mark == "differs"
    assert claim(found, "ViT/DeiT at batch 1").mark == "agrees"  # 5.00 against 4.54
    assert claim(found, "comparable to FP16").mark == "agrees"
    peak = claim(found, "tensor cores less busy than FlashAttention-2 on A2")
    assert claim(found, "tensor cores less busy than FlashAttention-2 on A7").mark == "not run"
    assert (peak.mark, peak.ours) == ("agrees", "IMMA 7.50 % against HMMA 11.25 %")
    more = profile_record()
    more["rows"][0]["imma_percent"] = 11.5
    assert claim(found | {"profile": [more]}, "tensor cores less busy than FlashAttention-2 on A2").mark == "differs"
    clean = {"float_instructions": {}, "integer": True}
    floats = {"float_instructions": {"FMUL at attention.py:1": 2}, "integer": False}
    for rows, mark in (([clean, floats], "agrees"), ([clean, floats | {"integer": True}], "differs")):
        assert claim(found | {"verify": [{"file": "v.json", "rows": rows}]}, "integer domain").mark == mark
    less = claim(found, "less energy")
    assert less.mark == "agrees"  # 0.75 against 0.81
    assert "0.75 (" in (less.ours or "")
    for uj in (1.0, 3.0):  # far more saved than the paper says is as little its figure as none saved
        assert claim(found | {"energy": [energy_record(uj)]}, "less energy").mark == "differs"
    for text in (
        "V3 is 61.0 % faster",
        "close to FP32",
        "SQNR of qattn on A2",
        "mixed-precision",
        "lowest energy",
        "above 30 dB",
    ):
        assert claim(found, text).mark == "not run"
    assert "6.7 dB" in claim(found, "better than I-ViT's").paper


@pytest.mark.parametrize(
    ("ours", "paper", "agrees"),
    [(4.6, 4.54, True), (4.1, 4.54, True), (5.0, 4.54, True), (5.1, 4.54, False), (1.057, 1.414, False)],
)
def test_one_rule_for_ratios_in_both_directions(ours: float, paper: float, agrees: bool) -> None:
    assert paper_claims.ratio_agrees(ours, paper) == agrees
    assert paper_claims.ratio_agrees(paper, ours) == agrees


def test_sqnr_agrees_among_the_seeds_or_near_their_mean() -> None:
    assert paper_claims.decibels_agree([22.5, 26.9], 25.8)
    assert paper_claims.decibels_agree([31.5, 31.6], 31.02)
    assert not paper_claims.decibels_agree([30.0, 30.2], 32.5)


def test_authors_code_decides_where_there_is_a_result_of_it(results: Path) -> None:
    found = result_files.read_results([results])
    code = {"float_instructions": {"sm_90": {"FMUL": 3}}, "triton": "3.8.0", "date": "2026-01-01"}
    verify = {"file": "v.json", "rows": [{"float_instructions": {}, "integer": True}]}
    item = claim(found | {"verify": [verify], "authors code": [code]}, "integer domain")
    assert (item.of, item.mark) == ("the authors' code", "differs")
    assert "1 of 1 compiled launches" in item.also
    names = ["sdpa flash", "sdpa cudnn", "authors' QFlash"]
    latency = {f"A{number}": {batch: [10.0, 9.0, 8.0] for batch in ("1", "8")} for number in range(1, 8)}
    energy_uj = {"sdpa flash": 100, "authors' QFlash": 80}
    authors = {"methods": names, "latency_us": latency, "energy_uj": energy_uj, "device": "NVIDIA Test", "date": "2026-01-01"}
    item = claim(found | {"authors": [authors]}, "comparable to FP16")
    assert (item.of, item.mark) == ("the authors' code", "agrees")
    # I-ViT took 20 of ours and 160 at batch 8
    item = claim(found | {"authors": [authors]}, "I-ViT on Swin at batch 8")
    assert (item.of, item.ours, item.mark) == ("the authors' code", "up to 20.00 times (A4; from 20.00)", "differs")
    assert "This library: up to 5.00 times" in item.also
    assert claim(found | {"authors": [authors]}, "lowest energy").mark == "not run"  # of the five only FA2 ran beside it
    assert (
        claim(found | {"authors": [authors | {"energy_uj": energy_uj | {"sdpa flash": 70}}]}, "lowest energy").mark == "differs"
    )
    assert claim(found | {"authors": [authors]}, "mixed-precision").mark == "not run"
    for us, mark in ((8.0, "agrees"), (7.0, "differs")):
        times = {name: {batch: [*each, us] for batch, each in by.items()} for name, by in latency.items()}
        wide = authors | {"methods": [*names, "QAttn"], "latency_us": times}
        assert claim(found | {"authors": [wide]}, "mixed-precision").mark == mark
    latency["A7"]["8"][2] = 12.0  # slower than the fastest by more than a tenth
    assert claim(found | {"authors": [authors]}, "comparable to FP16").mark == "differs"
    assert claim(found | {"authors": [authors]}, "less energy").mark == "agrees"


def test_words_about_table_4_follow_its_figures() -> None:
    """Both figures have to hold on both workloads."""
    committed = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "accuracy.json"
    for key, value, text in (
        ("sqnr_db", 29.9, "above 30 dB"), ("mse", 4e-3, "above 30 dB"), ("sqnr_db", 20.0, "above I-ViT's"),
        ("sqnr_db", 37.7, "above I-ViT's"),
    ):  # fmt: skip
        record = json.loads(committed.read_text()) | {"file": "accuracy.json"}
        assert claim({"accuracy": [record]}, text).mark == "agrees"
        for row in record["rows"]:
            if (row["method"], row["workload"], row["input"]) == ("qflash-authors", "A7", "paper"):
                row[key] = value
        assert claim({"accuracy": [record]}, text).mark == "differs", (key, value)


def test_every_row_of_table_5_is_a_claim() -> None:
    items = [item for item in paper_claims.claims({}) if item.rule == "points"]
    assert len(items) == 49
    assert len({item.text for item in items}) == 49
    summary = {"method": "i-vit", "top1_percent": 71.5, "top1_interval_percent": [71.1, 71.9]}
    record = {"models": [{"model": "DeiT-T", "methods": [summary]}], "environment": GPU, "conditions": {"weights": "w.pth"}}
    assert claim({"evaluate": [record]}, "Top-1 of I-ViT on DeiT-T").mark == "not run"
    record["conditions"] = {"weights": "pretrained"}
    item = claim({"evaluate": [record]}, "Top-1 of I-ViT on DeiT-T")
    assert (item.paper, item.ours, item.mark) == ("71.70 %", "71.50 % [71.10, 71.90]", "agrees")
    summary["top1_interval_percent"] = [71.1, 71.6]
    assert claim({"evaluate": [record]}, "Top-1 of I-ViT on DeiT-T").mark == "differs"
    assert claim({"evaluate": [record]}, "Top-1 of I-ViT on DeiT-S").mark == "not run"


def test_rules_print_their_thresholds() -> None:
    for value in (
        f"{paper_claims.TOLERANCE:.0%}", f"{paper_claims.TOLERANCE_DB:g} dB", f"{paper_claims.COLLAPSE_DB:g} dB",
        f"1/{paper_claims.FAR:g}", f"{paper_claims.CLOSE_POINTS:g} points",
    ):  # fmt: skip
        assert any(value in rule for rule in paper_claims.RULES.values()), value


def test_no_reading_needs_both_figures(results: Path) -> None:
    """QFlash's two figures are one claim: a reading that gives one of them does not agree."""
    found = result_files.read_results([results])
    committed = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "accuracy.json"
    record = json.loads(committed.read_text()) | {"file": "accuracy.json"}
    text = "QFlash on A2 and on A7"
    item = claim(found | {"accuracy": [record]}, text)
    assert item.mark == "differs"
    for row in record["rows"]:
        if row["method"] == "qflash-authors" and row["workload"] == "A7" and row["input"] == "paper":
            row["sqnr_each_db"] = [31.0, 31.1]
    assert claim(found | {"accuracy": [record]}, text).mark == "agrees"


def test_the_papers_inputs_come_first(results: Path) -> None:
    """A newer result on other inputs does not hide those of the paper."""
    (drawn,) = result_files.read_results([results])["accuracy"]
    other = drawn | {"file": "real.json", "rows": [row | {"input": "real"} for row in drawn["rows"]]}
    assert result_files.accuracy_record({"accuracy": [other, drawn]}) is drawn
    assert result_files.accuracy_record({"accuracy": [other]}) is other
    assert result_files.accuracy_record({}) is None


def test_counts_are_of_the_papers_claims_alone(results: Path) -> None:
    """What the paper does not claim, for instance Top-1 of digits, is no claim here."""
    found = result_files.read_results([results])
    items = paper_claims.claims(found)
    assert sum(paper_claims.counts(items).values()) == len(items)
    assert not any("digits" in item.text for item in items)
    assert {item.section for item in items} == set(paper_claims.SECTIONS)
    assert {item.rule for item in items} <= set(paper_claims.RULES)


def test_report_and_document_say_the_same() -> None:
    repository = Path(__file__).resolve().parents[3]
    found = result_files.read_results([repository / "benchmarks" / "results"])
    page = (repository / "docs" / "reproduction.md").read_text()
    for item in paper_claims.claims(found):
        assert f"| {item.text} | {item.paper} | {item.ours or '-'} |" in page


def test_of_several_records_the_newest_counts(results: Path) -> None:
    found = result_files.read_results([results])
    older = json.loads(json.dumps(found["accuracy"][0]))
    for row in older["rows"]:
        row["sqnr_db"] = 0.0
    text = "SQNR of i-vit on A7"
    assert claim(found | {"accuracy": [*found["accuracy"], older]}, text).ours == claim(found, text).ours


def test_steps_on_a_gpu_come_before_those_without(results: Path) -> None:
    found = result_files.read_results([results])
    found["ablate"].append(ablate_record())
    assert "1.25 times" in (claim(found, "V1 is 41.4 % faster").ours or "")
    assert claim(found, "V1 is 41.4 % faster").mark == "differs"
    assert claim(found, "V3 is 61.0 % faster").mark == "differs"
    assert "2.00 times" in (claim(found, "V4 is 62.4 % faster").ours or "")
    assert claim(found, "Integer division").ours == "12.0 times lower"
    committed = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "ablate_cpu.json"
    found["ablate"].append(json.loads(committed.read_text()))
    assert claim(found, "Scale accumulation collapses").mark == "agrees"
    assert claim(found, "Per-token scales").mark == "differs"
    text = reproduction.render(found)
    assert "kernel, integer exponential" in text
    assert "NVIDIA Test, 2026-01-02. by hand." in text


def test_nothing_found_is_said_to_be_not_run() -> None:
    items = paper_claims.claims({})
    assert {item.mark for item in items} == {"not run"}
    text = reproduction.render({})
    for command in ("bench", "profile", "energy", "accuracy", "evaluate", "ablate"):
        assert f"qflash-lab {command}" in text


def test_published_tables_are_whole() -> None:
    assert all(len(row) == len(paper_results.MODELS) for row in paper_results.TOP1.values())
    assert set(paper_results.TOP1) | {"Flash-2"} == set(paper_results.METHODS)
    assert set(paper_results.UTILISATION) | set(paper_results.ENERGY_UJ) <= set(paper_results.METHODS)
    assert paper_results.ENERGY_UJ["QFlash"] / paper_results.ENERGY_UJ["Flash-2"] - 1 == pytest.approx(-0.188, abs=5e-4)


def test_page_names_every_table_and_loads_nothing(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for title in ("Figure 3", "Table 2", "Table 3", "Table 5", "appendix A", "SQNR and MSE", "NVIDIA Test", "2026-01-02"):
        assert title in text
    assert text.count("<svg") >= 3
    assert not any(word in text for word in ("<script", "<link", "src=", "@import", "url(http", "#123456"))


def test_page_has_a_summary_contents_and_a_filter(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.index('<h2 id="summary"') < text.index("<nav") < text.index('<h2 id="claims"')
    anchors = re.findall(r'id="([^"]+)"', text)
    assert len(anchors) == len(set(anchors))
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(anchors)
    marks = {"all", "agrees", "differs", "open"}
    assert {name for name in marks if f'id="show-{name}"' in text} == marks
    for section in paper_claims.SECTIONS:
        assert text.count(f">{section}</h3>") == 1
    for rule in paper_claims.RULES.values():
        assert html.escape(rule) in text
    # every caption about timing once
    timing = json.loads((Path(__file__).resolve().parents[3] / "benchmarks/results/bench_h200.json").read_text())["timing"]
    assert text.count(html.escape(timing)) == 1


def test_the_papers_workloads_come_before_other_shapes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    latency_part = text[text.index('id="figure-3-latency"') : text.index('id="table-2-tensor-core-utilisation"')]
    assert latency_part.index("A1 to A7") < latency_part.index("Other shapes")
    heads = re.findall(r"<thead><tr>(.*?)</tr>", latency_part)
    assert not any("<th>qflash</th>" in head and "<th>qflash int8</th>" in head for head in heads)


def test_ratio_dots_are_against_the_fastest_16_bit_kernel() -> None:
    times = {"sdpa flash": 6.0, "sdpa efficient": 4.0, "qflash": 2.0, "qflash int8": 1.0}
    rows = [
        {"method": name, "mode": "kernel" if "int8" in name else "end-to-end", "median_us": us, "workload": "A1"}
        for name, us in times.items()
    ]
    figure = plots.ratio_dots(rows, "end-to-end", lambda row: row["workload"])
    drawn = {line.get_label(): line.get_xdata()[0] for line in figure.axes[0].lines if not line.get_label().startswith("_")}
    assert drawn == {"FlashAttention-2": 4 / 6, "memory-efficient": 1.0, "QFlash, fp16": 2.0}
    colours = {line.get_label(): line.get_color() for line in figure.axes[0].lines}
    assert colours["QFlash, fp16"] == figures.COLOURS["qflash-default"]
    (ours,) = [line for line in plots.ratio_dots(rows, "kernel", lambda row: "A1").axes[0].lines if "int8" in line.get_label()]
    assert ours.get_xdata()[0] == 4.0
    assert plots.ratio_dots(rows[2:], "kernel", lambda row: "A1") is None


def test_command_refuses_bad_folders(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", "--results", str(tmp_path / "none"), "--output", str(tmp_path)])
    assert result.exit_code == 1
    assert "results must be a folder" in result.output
    (tmp_path / "bad.json").write_text("{")
    result = CliRunner().invoke(app, ["report", "--results", str(tmp_path), "--output", str(tmp_path)])
    assert result.exit_code == 1
    assert "bad.json is not JSON" in result.output


class Browser:
    """Headless Chromium over its debugging pipe: JSON messages ended by a zero byte."""

    def __init__(self, program: str, profile: Path) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()

        def wire() -> None:  # the program reads from descriptor 3 and writes to 4
            first, second = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(first, 3)
            os.dup2(second, 4)

        options = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
        )
        self._process = subprocess.Popen(
            [program, *options, "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}"],
            pass_fds=(3, 4),
            preexec_fn=wire,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._numbers = itertools.count(1)
        self._rest = b""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session: str | None = None
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._in, 1 << 16)
            if not piece:
                raise RuntimeError("the browser ended")
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        message = {"id": next(self._numbers), "method": method, "params": parameters}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == message["id"]:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def wait(self, method: str) -> None:
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._read())

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._in)
        os.close(self._out)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if program is None:
        pytest.skip("no Chromium or Chrome on this machine")
    opened = Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_page_in_a_browser(browser: Browser, page: Path, width: int, scheme: str) -> None:
    for domain in ("Page", "Network", "Runtime", "Log"):
        browser.call(f"{domain}.enable")
    phone = width < 600
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=phone)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.events.clear()
    browser.call("Page.navigate", url=page.as_uri())
    browser.wait("Page.loadEventFired")

    def value(expression: str) -> Any:
        return browser.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"]["value"]

    assert value("window.innerWidth") == width  # a page wider than a phone would be zoomed out
    assert value("document.documentElement.scrollWidth") <= width
    assert (
        value("getComputedStyle(document.body).backgroundColor")
        == {"light": "rgb(252, 252, 251)", "dark": "rgb(21, 24, 28)"}[scheme]
    )
    assert value("document.querySelectorAll('svg').length") >= 3
    said = [
        e
        for e in browser.events
        if e.get("method") in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
    ]
    assert not said
    asked = [e["params"]["request"]["url"] for e in browser.events if e.get("method") == "Network.requestWillBeSent"]
    assert asked == [page.as_uri()]
    if folder := os.environ.get("QFLASH_SCREENSHOTS"):
        height = value("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = browser.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        Path(folder, f"report-{width}-{scheme}.png").write_bytes(base64.b64decode(shot["data"]))


def test_rows_of_another_gpu_fill_nothing(tmp_path: Path) -> None:
    """Two runs of one day: the newest is taken by the clock, whatever the files' names, and the other's rows are left out."""
    source = Path(__file__).resolve().parents[3] / "benchmarks/results/bench_h200.json"
    record = json.loads(source.read_text())
    for name, device, hour, row in (("a", "NVIDIA A", "01", 0), ("b", "NVIDIA B", "22", 1)):
        about = record["environment"] | {"device": device, "date": f"2026-11-28T{hour}:00:00+00:00"}
        part = record | {"environment": about, "rows": record["rows"][row : row + 1]}
        (tmp_path / f"{name}.json").write_text(json.dumps(part))
    rows, newest = result_files.gpu_rows(result_files.read_results([tmp_path]), "bench")
    assert rows == record["rows"][1:2]
    assert newest is not None and newest["environment"]["device"] == "NVIDIA B"


def test_ratios_are_of_the_run_of_most_workloads(tmp_path: Path) -> None:
    """A later run of a single workload has another clock and host than the figures that it would stand beside."""
    source = Path(__file__).resolve().parents[3] / "benchmarks/results/bench_h200.json"
    record = json.loads(source.read_text())
    (tmp_path / "whole.json").write_text(source.read_text())
    rows = [row | {"median_us": 1.0} for row in record["rows"] if (row["workload"], row["batch"]) == ("A2", 8)]
    later = record["environment"] | {"date": "2100-01-01T00:00:00+00:00"}
    (tmp_path / "later.json").write_text(json.dumps(record | {"environment": later, "rows": rows}))
    found, main_run = result_files.gpu_rows(result_files.read_results([tmp_path]), "bench")
    assert main_run is not None and main_run["environment"] == record["environment"]
    row = result_files.row_of_method(found, "QFlash", workload="A2", batch=8)
    assert row is not None and row["median_us"] > 1


def test_a_newer_run_of_other_methods_is_not_the_main_one(tmp_path: Path) -> None:
    record = bench_record()
    (tmp_path / "bench.json").write_text(json.dumps(record))
    rows = [row | {"median_us": 1.0} for row in record["rows"] if row["method"] in ("qflash int8", "sdpa cudnn")]
    newer = record | {"environment": GPU | {"date": "2027-01-02T03:04:05+00:00"}, "rows": rows}
    (tmp_path / "peers.json").write_text(json.dumps(newer))
    found, main_run = result_files.gpu_rows(result_files.read_results([tmp_path]), "bench")
    assert main_run is not None and main_run["file"] == "bench.json"
    assert found[: len(record["rows"])] == record["rows"]
