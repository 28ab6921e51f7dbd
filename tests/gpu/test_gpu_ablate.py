"""``qflash-lab ablate`` on a GPU: the kernels of the steps are compiled, timed and as accurate as their formulas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from qflash_lab.bench import ablation, ablation_formulas

pytestmark = pytest.mark.gpu


def test_steps_and_operations_are_timed(tmp_path: Path) -> None:
    ablation.run_ablate(parts=("kernel", "throughput"), device=torch.device("cuda", 0), batch=32, rounds=3, output=tmp_path)
    rows = json.loads((tmp_path / "ablate.json").read_text())["rows"]
    assert not [row for row in rows if row.get("error")]
    formula = {row["label"]: row["sqnr_db"] for row in rows if row["group"] == "formula"}
    kernels = {row["label"]: row for row in rows if row["group"] == "kernel"}
    assert {"sdpa flash", "V0", "V1", "V2", "V3", "V4 paper", "V4 default"} == set(kernels)
    for name in ("V1", "V2", "V3"):
        assert kernels[name]["sqnr_db"] == pytest.approx(formula[name], abs=0.5)
    assert kernels["V0"]["speedup"] == 1.0
    assert all(row["median_us"] > 0 for row in kernels.values())
    gops = {row["label"]: row["gops"] for row in rows if row["part"] == "throughput"}
    assert gops["divide"] < gops["multiply and shift"] < 1.2 * gops["multiply"]


def test_formulas_give_the_same_on_the_gpu() -> None:
    shape = (2, 3, 197, 64)
    generator = torch.Generator().manual_seed(3)
    inputs = [(torch.rand(shape, generator=generator) * 8 - 4).half() for _ in range(3)]
    for step in range(5):
        here = ablation_formulas.step_formula(step, *inputs)
        there = ablation_formulas.step_formula(step, *(x.cuda() for x in inputs)).cpu()
        torch.testing.assert_close(here, there, atol=2e-2, rtol=0)
    for kind in ablation_formulas.ACCUMULATIONS:
        here = ablation_formulas.accumulation(kind, *inputs)
        there = ablation_formulas.accumulation(kind, *(x.cuda() for x in inputs)).cpu()
        torch.testing.assert_close(here, there, atol=2e-2, rtol=0)
