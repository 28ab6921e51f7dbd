"""The tables of docs/performance.md and docs/performance/tables.md are those of the committed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers import load_benchmark
from qflash_lab.verify.compile import TARGETS


@pytest.fixture
def tables() -> Any:
    return load_benchmark("performance_tables")


def test_page_has_the_figures_of_the_results(tables: Any) -> None:
    for path in tables.pages.PAGES:
        page = path.read_text()
        assert tables.pages.fill(page, tables.PARTS.blocks()) == page
    assert tables.tables_page() == tables.TABLES_PAGE.read_text()


def test_aims_count_what_the_latency_table_shows(tables: Any) -> None:
    latency = next(section.table for section in tables.SECTIONS if section.title == "Latency from fp16")
    rows = [row for row in latency.markdown() if row.startswith(("| A1 ", "| A2 ", "| A3 "))]
    place = latency.markdown()[0].split("|").index(" fastest ÷ ours ")
    ratios = [float(row.split("|")[place]) for row in rows]
    aim = next(row for row in tables.AIMS.markdown() if "A1 to A3, fp16" in row)
    assert aim.endswith(
        f"| {min(ratios):.2f} to {max(ratios):.2f} | {sum(ratio >= 1.2 for ratio in ratios)} of {len(ratios)} |"
    )


def test_ratios_are_against_the_fastest_16_bit_kernel(tables: Any) -> None:
    """Swin's fastest is the memory-efficient kernel, which a ratio to FA2 and cuDNN alone would leave out."""
    found = tables.latencies()
    fastest = tables.Extreme(tables.col.FP16)
    for group in found:
        times = {method: row["median_us"] for method, row in group.items()}
        assert fastest(group) == min(times[peer] for peer in tables.col.FP16)
        assert tables.against(tables.col.FP16, "qflash")(group) == fastest(group) / times["qflash"]
    assert all(fastest(group) == group["sdpa efficient"]["median_us"] for group in tables.workloads(found, "4567"))
    some = tables.Group({"sdpa flash": {"median_us": 2.0}, "qflash": {"median_us": 1.0}, "sdpa cudnn": {"median_us": None}})
    assert fastest(some) == 2.0  # of those that were measured


def test_flash_attention_3_and_sage_attention_count_as_16_bit_kernels(tables: Any) -> None:
    line = next(line for line in tables.readme() if line.what.startswith("1024 to"))
    for dtype, shown in (("float16", line.fp16), ("bfloat16", line.bf16)):
        ratios = []
        for group in tables.beside_peers(dtype):
            times = {name: row["median_us"] for name, row in group.items() if row["median_us"]}
            assert {"fa3", "sdpa flash", "sdpa cudnn", "qflash", "qflash int8"} <= set(times)
            keys = int(group["qflash"]["shape"].split("x")[2])
            if 1024 <= keys <= 1374:
                others = ("fa3", "fa3 split", "sageattention", "sdpa flash", "sdpa cudnn", "sdpa efficient")
                ratios.append(min(times[name] for name in others if name in times) / times["qflash"])
        assert len(ratios) == 5
        assert shown == f"{min(ratios):.2f} to {max(ratios):.2f}"


def test_int8_and_fp16_never_share_a_column(tables: Any) -> None:
    for section in tables.SECTIONS:
        heading = section.table.markdown()[0]
        assert not ("QFlash fp16" in heading and "QFlash int8" in heading)
        if "QFlash int8" in heading:
            assert "FA2" not in heading
            assert "outside the clock" in section.about


def test_every_table_of_times_says_how_they_were_taken(tables: Any) -> None:
    for section in tables.SECTIONS:
        assert section.timing.startswith(("CUDA-graph replay", "Eager calls", "Nsight Compute", "Counted"))


def test_figure_is_drawn_from_every_shape(tables: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(tables, "FIGURE", tmp_path / "speed.svg")
    tables.draw()
    drawn = (tmp_path / "speed.svg").read_text()
    assert all(f">{tables.shape_of(group)}</text>" in drawn for group in tables.beside_peers("float16"))


def test_tuned_baselines_have_a_section_once_they_are_measured(
    tables: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables.declared, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "CARD", "card")
    assert tables.tuned_baselines_section() == ()
    fused = {
        "method": "qattn",
        "label": "A1 b1",
        "rule": [[64, 64, 4, 2]],
        "rule_us": 4.0,
        "best": [[32, 64, 4, 2]],
        "best_us": 3,
    }
    three = {
        "method": "i-vit",
        "label": "A1 b1",
        "rule": [[1, 2], [3, 4]],
        "rule_us": 9.0,
        "best": [[1, 2], [3, 4]],
        "best_us": 9.0,
    }
    (tmp_path / "baselines_tuned_card.json").write_text(json.dumps({"rows": [fused, three]}))
    (section,) = tables.tuned_baselines_section()
    assert section.timing.startswith("CUDA-graph replay") and "outside the clock" in section.about
    assert section.table.markdown()[2:] == [
        "| QAttn | A1 b1 | 4.00 | 3.00 | 1.33 | 64x64x4x2 | 32x64x4x2 |",
        "| I-ViT | A1 b1 | 9.00 | 9.00 | 1.00 | 1x2, 3x4 | the rule's |",
    ]


def test_every_line_of_a_declared_table_says_where_it_comes_from(tables: Any) -> None:
    measured = (table for table in tables.TABLES.values() if table is not tables.SCHEMA)
    found = [*measured, *(section.table for section in tables.SECTIONS)]
    for table in found:
        origins = table.origins()
        assert len(origins) == len(table.markdown()) - 2
        for text in origins:
            assert (tables.declared.RESULTS / text.split(":")[0].split(",")[0]).is_file(), text


def test_every_target_that_is_compiled_for_has_a_row_that_says_whether_it_was_timed(tables: Any) -> None:
    rows = [row.split(" | ") for row in tables.TARGETS.markdown()[2:]]
    assert tuple(row[0].removeprefix("| ") for row in rows) == TARGETS
    timed = {path.stem.rpartition("_")[2] for path in tables.declared.RESULTS.glob("bench_*.json")}
    assert "h200" in timed
    for target, *_, cards in rows:
        assert cards == ("H100, H200 |" if target.endswith("sm_90") else "not timed |")
