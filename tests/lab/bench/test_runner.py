"""The runner, the schema, tables and reports: what every command that measures shares."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import BENCHMARKS
from qflash_lab.bench import report, runner, tables, timers
from qflash_lab.bench import schema as col

CPU = torch.device("cpu")


class Clock:
    """Samples that are given; it notes when it was asked."""

    calls = 7

    def __init__(self, name: str, order: list[str], us: float = 1.0, fails_at: int | None = None) -> None:
        self.name, self.order, self.us, self.fails_at = name, order, us, fails_at

    def sample(self) -> dict[str, float]:
        self.order.append(self.name)
        if self.order.count(self.name) == self.fails_at:
            raise RuntimeError("out of luck")
        return {"us": self.us}


# --- turns ----------------------------------------------------------------------------------------------------


def test_turns_are_reversed_in_every_second_round() -> None:
    order: list[str] = []
    found = runner.by_turns({name: Clock(name, order) for name in "abc"}, 3, CPU)
    assert "".join(order) == "abccbaabc"
    assert {name: len(samples) for name, samples in found.items()} == {"a": 3, "b": 3, "c": 3}


def test_what_fails_is_left_out_and_the_rest_goes_on() -> None:
    order: list[str] = []
    failed: list[tuple[str, str]] = []
    clocks = {"a": Clock("a", order), "b": Clock("b", order, fails_at=2), "c": Clock("c", order)}
    found = runner.by_turns(clocks, 4, CPU, failed=lambda name, error: failed.append((name, str(error))))
    assert failed == [("b", "out of luck")]
    assert {name: len(samples) for name, samples in found.items()} == {"a": 4, "b": 1, "c": 4}
    assert "".join(order) == "abc" + "cba" + "ac" + "ca"
    with pytest.raises(RuntimeError, match="out of luck"):
        runner.by_turns({"b": Clock("b", [], fails_at=1)}, 1, CPU)


def test_on_a_cpu_slow_methods_get_few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(runner.time, "monotonic", lambda: now[0])

    def sample(clock: Clock) -> float:
        now[0] += clock.us
        return clock.us

    clocks = {"fast": Clock("fast", [], 0.1), "slow": Clock("slow", [], runner.CPU_SECONDS)}
    found = runner.by_turns(clocks, 9, CPU, sample=sample)
    assert (len(found["fast"]), len(found["slow"])) == (9, runner.LEAST_SAMPLES)
    on_gpu = runner.by_turns(clocks, 9, torch.device("cuda"), sample=sample)
    assert len(on_gpu["slow"]) == 9


# --- methods --------------------------------------------------------------------------------------------------


def method(name: str, **options: Any) -> runner.TimedMethod[None]:
    return runner.TimedMethod(name, "end-to-end", lambda _: lambda: None, **options)


def test_methods_are_chosen_by_device_package_and_name() -> None:
    every = [method("both"), method("gpu", devices=("cuda",)), method("lacks", needs=("no_such_package_here",))]
    assert [each.name for each in runner.choose(every, CPU)] == ["both"]
    assert [each.name for each in runner.choose(every, torch.device("cuda"))] == ["both", "gpu"]
    assert [each.name for each in runner.choose(every, CPU, ("both",))] == ["both"]
    with pytest.raises(ValueError, match="method 'gpu' runs on a GPU, and the device is 'cpu'"):
        runner.choose(every, CPU, ("gpu",))
    with pytest.raises(ValueError, match=r"method must be one of \['both', 'lacks'\], got 'none'"):
        runner.choose(every, CPU, ("none",))
    with pytest.raises(ImportError, match="method 'lacks' also needs no_such_package_here"):
        runner.choose(every, CPU, ("lacks",))
    with pytest.raises(ValueError, match="two methods are called 'both'"):
        runner.choose([*every, method("both")], CPU)
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        runner.check_rounds(0)


# --- rows -----------------------------------------------------------------------------------------------------

FIELDS = col.pick(col.METHOD, col.MEDIAN_US, col.SAMPLES, col.CALLS, col.RATIO, col.BEST_SDPA, col.SQNR_DB, col.ERROR)


def run(name: str, prepare: runner.Prepared) -> runner.Run:
    return runner.Run(col.empty(FIELDS, method=name), prepare)


def test_rows_have_what_was_found_and_their_own_columns_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    times = iter((4.0, 2.0, 8.0))
    monkeypatch.setattr(timers, "make_timer", lambda *_: Clock("x", order, next(times)))

    def refuses() -> Any:
        raise NotImplementedError("no kernel\nsecond line")

    taken: list[float] = []

    def read(clock: Clock) -> float:
        taken.append(clock.us)
        if clock.us == 2.0:
            raise RuntimeError("no counter")
        return clock.us

    after = runner.Series(3, read, lambda readings: {col.SQNR_DB: sum(readings), col.WATTS: 1.0})
    runs = [run("a", lambda: (print, {col.SQNR_DB: 30.0})), run("b", refuses), *(run(n, lambda: (print, {})) for n in "cd")]
    seen: list[str] = []
    rows = runner.measure(runs, CPU, 2, after=after, tick=seen.append)
    assert seen == ["a", "b", "c", "d"]
    assert [row[col.MEDIAN_US] for row in rows] == [4.0, None, 2.0, 8.0]
    assert taken == [4.0, 2.0, 8.0, 8.0, 4.0, 4.0, 8.0]  # by turns, backwards in the second round
    assert [row[col.SQNR_DB] for row in rows] == [12.0, None, None, 24.0]
    assert [row[col.ERROR] for row in rows] == [None, "NotImplementedError: no kernel", "RuntimeError: no counter", None]
    assert all(tuple(row) == FIELDS for row in rows)
    assert rows[0][col.SAMPLES] == 2 and rows[0][col.CALLS] == 7
    assert all(each.timer is None for each in runs)  # nothing outlives the measurement
    runner.compare(rows, lambda row: row[col.METHOD] in ("a", "b", "d"), name=col.BEST_SDPA)
    assert [row[col.RATIO] for row in rows] == [1.0, None, 2.0, 0.5]
    assert [row[col.BEST_SDPA] for row in rows] == ["a", None, "a", "a"]


def test_columns_are_known_and_in_one_order() -> None:
    assert col.pick(col.ERROR, col.MEDIAN_US, col.WORKLOAD) == (col.WORKLOAD, col.MEDIAN_US, col.ERROR)
    with pytest.raises(ValueError, match=r"column must be one of .*, got 'median'"):
        col.pick("median")
    assert col.full_label({col.WORKLOAD: "A4", col.BATCH: 8, col.BIAS: True}) == "A4 bias b8"
    assert col.full_label({col.MODEL: "DeiT-S", col.BATCH: None}) == "DeiT-S"


OTHERS = {
    "accuracy.json": {"sqnr_each_db", "mse_each"},
    "accuracy_i_vit.json": {"seed", "inverse_scale", "temperature_percent"},
    "accuracy_real.json": {"sqnr_each_db", "mse_each"},
    "export_times.json": None,
    "integer_networks.json": None,
    "dense_head.json": {"right_percent", "mean_iou_percent", "same_percent"},
    "biased_models_h200.json": {"pixels"},
    "networks_texts_h200.json": {"tokens"},
    "openvino_cpu.json": None,
    "overlap_h200.json": None,
    "peers_real.json": None,
    "profile_h200.json": {"launches"},
    "static_attention.json": {"images", "calibration", "cosine_mean"},
    "tosa_reference_model.json": None,
}
"""Keys of rows that are no columns of times, energy or SQNR; None where rows are of another kind."""


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results").glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_have_the_columns(path: Path) -> None:
    record = json.loads(path.read_text())
    rows = record.get("rows", []) if isinstance(record, dict) else []
    others = OTHERS.get(path.name, set())
    if others is not None:
        for row in rows:
            assert set(row) <= set(col.COLUMNS) | others
    table = path.with_suffix(".csv")
    if rows and table.is_file():
        with table.open() as file:
            read = list(csv.DictReader(file))
        assert len(read) == len(rows) and set(read[0]) <= set(col.COLUMNS)


# --- tables and reports ---------------------------------------------------------------------------------------

COLUMNS = (
    tables.names("problem", col.full_label), tables.names("method", col.METHOD), tables.Column("µs", col.MEDIAN_US),
    tables.Column("quartiles", tables.quartiles), tables.Column("dB", col.SQNR_DB, ".1f"),
)  # fmt: skip


def rows_of_two_methods() -> list[col.Row]:
    fields = col.pick(col.WORKLOAD, col.BATCH, col.METHOD, *col.TIMES, col.SQNR_DB, col.ERROR)
    here = col.empty(fields, workload="A1", batch=1)
    return [
        here | {"method": "a", "median_us": 1234.5, "q1_us": 1.0, "q3_us": 2, "sqnr_db": 36.26},
        here | {"method": "b", "error": "RuntimeError: out of luck"},
    ]


def test_one_layout_for_console_markdown_and_html() -> None:
    frame = tables.lay_out(rows_of_two_methods(), COLUMNS, groups=1)
    cells = [["A1 b1", "a", "1234", "1.00 - 2.00", "36.3"], ["", "b", "failed", "", ""]]
    assert frame.values.tolist() == cells
    assert tables.markdown(frame)[2:] == ["| A1 b1 | a | 1234 | 1.00 - 2.00 | 36.3 |", "| | b | failed | | |"]
    shown = tables.console(frame, "title", left=2, groups=1)
    assert [list(column.cells) for column in shown.columns] == [list(of) for of in zip(*cells, strict=True)]
    page = tables.page(frame)
    assert page.count("<tr>") == 3 and "<td>1.00 - 2.00</td>" in page and "<th>µs</th>" in page


def test_missing_figures_are_marks() -> None:
    assert tables.number(None) == tables.number(float("nan")) == "-" and tables.number("inf") == "inf"
    assert tables.number(999.994) == "999.99" and tables.number(1000) == "1000" and tables.number(2, 0) == "2"
    assert tables.Column("", "x").cell({}) == "-" and tables.names("", "x").cell({}) == ""


def test_a_report_is_written_as_it_grows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, failed = rows_of_two_methods()
    done = report.Report("some", "something", CPU, tuple(first), tmp_path / "new", timing="median of two calls")
    done.begin()
    done.add([first])
    assert json.loads((tmp_path / "new" / "some.json").read_text())["rows"] == [first]
    done.add([failed])

    def nothing() -> Any:
        raise ValueError("there is nothing to draw")

    record = done.finish(tables.render(done.rows, COLUMNS, "title"), draw=nothing)
    assert list(record) == ["what", "environment", "timing", "rows"] and len(record["rows"]) == 2
    with (tmp_path / "new" / "some.csv").open() as file:
        assert [row["method"] for row in csv.DictReader(file)] == ["a", "b"]
    printed = capsys.readouterr().out
    assert "median of two calls." in printed and "failed: A1 b1, b: RuntimeError: out of luck" in printed
    assert "some.json, some.csv; no plot: there is nothing to draw" in " ".join(printed.split())
