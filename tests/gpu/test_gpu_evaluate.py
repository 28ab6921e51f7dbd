"""qflash-lab evaluate on a CUDA device: every method runs there and classifies as on the CPU."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

pytest.importorskip("timm")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
from qflash_lab.evaluation import top1
from qflash_lab.evaluation.outcome_store import load_outcomes

pytestmark = pytest.mark.gpu
IMAGES = 40


def run(output: Path, **options: Any) -> dict[str, Any]:
    console = Console(file=io.StringIO())
    return top1.run_evaluate(["digits-vit", "digits-swin"], subset=IMAGES, batch=16, output=output, console=console, **options)


def test_all_methods_agree_with_the_cpu(tmp_path: Path) -> None:
    on_gpu = run(tmp_path / "gpu", device="cuda")
    run(tmp_path / "cpu", device="cpu")
    assert on_gpu["conditions"]["device"] == torch.cuda.get_device_name(0)
    for result in on_gpu["models"]:
        assert result["methods"][0]["method"] == top1.REFERENCE
        for summary in result["methods"]:
            assert summary["not_finite"] == 0
            place = f"{result['model']}/{summary['method']}.csv"
            ours, theirs = (load_outcomes(tmp_path / where / place) for where in ("gpu", "cpu"))
            same = sum(a.predictions[:1] == b.predictions[:1] for a, b in zip(ours, theirs, strict=True))
            # the layers around the attention round differently on the two devices
            assert same >= IMAGES - 2, place


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_types(tmp_path: Path, dtype: str) -> None:
    report = run(tmp_path, device="cuda", dtype=dtype)
    for result in report["models"]:
        exact = result["methods"][0]["right"]
        assert all(summary["not_finite"] == 0 for summary in result["methods"])
        assert exact >= 0.9 * IMAGES
