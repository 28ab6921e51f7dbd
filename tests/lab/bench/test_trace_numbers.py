"""Every number in a table and every bold figure of README and docs comes from a committed result, or is no measurement."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from helpers import load_benchmark


@pytest.fixture(scope="module")
def tracer() -> Any:
    return load_benchmark("trace_numbers")


def test_no_number_is_left_over(tracer: Any) -> None:
    nowhere = [(found.page, found.place, found.example) for found in tracer.traces() if not found.source]
    assert not nowhere


def test_every_generated_part_is_used(tracer: Any) -> None:
    used = {block.name for page in tracer.PAGES for block in tracer.pages.blocks_of(page.read_text(encoding="utf-8"))}
    assert used == set(tracer.made())


def test_files_behind_generated_parts_are_there(tracer: Any) -> None:
    for part in tracer.made().values():
        for name in part.source.partition(": ")[2].split(", "):
            assert (tracer.HERE / "results" / name).is_file()


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (
            ("A1 to A3, batch 1, 8, 64 | ", "A1 to A3, batch 1, 8, 64 | 9"),
            "speed:readme",
        ),  # a generated figure that somebody edited
        (("## Use\n", "| speed | 3.7 |\n|---|---|\n\n## Use\n"), "line"),  # a table without a source
        (("## Use\n", "**4.2 times as fast**\n\n## Use\n"), "line"),
        (("## Use\n", "Swin is 4.2 times as fast.\n\n## Use\n"), "text"),
    ],
)
def test_what_comes_from_nowhere_is_found(
    tracer: Any, change: tuple[str, str], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (tracer.ROOT / "README.md").read_text(encoding="utf-8")
    assert change[0] in text
    (tmp_path / "README.md").write_text(text.replace(*change), encoding="utf-8")
    monkeypatch.setattr(tracer, "ROOT", tmp_path)
    found = [found for found in tracer.trace(tmp_path / "README.md", tracer.made()) if not found.source]
    assert found
    assert found[0].place.startswith(place)


def test_each_falsified_figure_of_the_reliability_page_is_found(
    tracer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One figure after the other gets another first digit."""
    text = (tracer.ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    by_hand = set(re.findall(r"<!-- numbers: (.*?) -->", text))
    assert by_hand <= {"definitions"}  # what is measured is generated
    parts = tracer.made()
    figures = [
        block.start + match.start()
        for block in tracer.pages.blocks_of(text)
        for match in re.finditer(r"(?<![\d.])\d", block.text)
    ]
    assert len(figures) > 150
    copy = tmp_path / "docs" / "reliability.md"
    copy.parent.mkdir()
    monkeypatch.setattr(tracer, "ROOT", tmp_path)
    for place in figures:
        copy.write_text(text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :], encoding="utf-8")
        assert any(not found.source for found in tracer.trace(copy, parts)), text[place - 40 : place + 10]


def test_each_falsified_figure_of_the_prose_is_found(tracer: Any) -> None:
    """One number after the other gets another first digit, of every piece that results give numbers for."""
    prose, count = tracer.prose, 0
    for said in prose.SAID:
        for match in prose.NUMBER.finditer(said.text) if said.numbers else ():
            digit = str((int(match[0][0]) + 1) % 10)
            false = said._replace(text=said.text[: match.start()] + digit + said.text[match.start() + 1 :])
            assert match[0][1:] in false.wrong(), false.text
            count += 1
    assert count > 80


def test_a_figure_in_a_sentence_without_a_source_is_found(tracer: Any) -> None:
    name = "docs/tosa.md"
    text = (tracer.ROOT / name).read_text(encoding="utf-8")

    def nowhere(page: str) -> list[str]:
        return [figure.text for figure in tracer.prose.figures(name, page) if not figure.source]

    assert nowhere(text) == []
    (found,) = nowhere(text + "\nIt is said to be\n4.2 times as fast.\n")
    assert "to be 4.2 times" in found
    assert nowhere(text + "\nWith Triton 3.6 it is as fast, and `4.2 times` is code.\n") == []
    # the bytes of a parameter are computed again
    assert "no such text: 1.2 bytes a parameter" in nowhere(text.replace("1.2 bytes", "1.3 bytes"))


def test_values_must_be_in_the_named_file(tracer: Any) -> None:
    table = ["| | cycles |", "|---|---|", "| one | 2.0 |", "| other | 123456.5 |"]
    assert tracer.unsupported(table, "overlap_h200.json") == ["123456.5"]
    assert tracer.unsupported(table, "overlap_h200.json; also 123456.5") == []


@pytest.mark.parametrize(
    ("page", "row", "sources"),
    [
        (
            "docs/performance/tables.md",
            "| 4x32x1024x64 |",
            ["bench_1024_h200.json", "workload = 4x32x1024x64", "median_us, sqnr_db of qflash"],
        ),
        ("README.md", "| energy (and above idle), A2 batch 8", ["energy_h200.json"]),
        ("docs/performance.md", "energy, A2 batch 8", ["energy_h200.json"]),
        (
            "docs/reliability.md",
            "reciprocal of a row sum",
            ["reliability/bounds.json", "newton['reciprocal']: tried, low, high"],
        ),
        ("docs/integer_network.md", "as they are", ["rotated_streams.json: form = nearest, not rotated"]),
        ("docs/how_to/scale.md", "a replica is killed", ["scale_cpu.json: serve['killed']"]),
        ("docs/performance/limits.md", "the product beside", ["overlap_h200.json: ", "at ["]),
        ("benchmarks/archive/experiments.md", "two programs", ["notebook"]),
    ],
)
def test_a_row_is_traced(tracer: Any, page: str, row: str, sources: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert tracer.tell(page, row) == 0
    printed = capsys.readouterr().out
    assert f"{page}:" in printed and row in printed
    assert all(source in printed for source in sources)


def test_pages_and_rows_that_are_not_there_are_refused(tracer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert tracer.tell("docs/none.md", "A2") == 2
    assert "page must be one of README.md" in capsys.readouterr().err
    assert tracer.tell("README.md", "no such row") == 1
    assert "no row of a table of README.md holds 'no such row'" in capsys.readouterr().err
