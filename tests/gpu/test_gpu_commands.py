"""The commands on a GPU: networks are converted there, give the CPU's bits, and are timed as CUDA graphs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import qflash
from qflash.cli import app

pytest.importorskip("timm")
pytestmark = pytest.mark.gpu
runner = CliRunner()


def test_a_network_is_converted_timed_and_asked(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (20, 3, 32, 32), dtype=np.uint8)
    np.save(tmp_path / "images.npy", images)
    words = ["convert", "test_vit", str(tmp_path / "images.npy"), "-o", str(tmp_path / "network"), "--random-weights"]
    words += ["--size", "32", "--outputs", "logits,tokens", "--device", "cuda"]
    result = runner.invoke(app, words)
    assert result.exit_code == 0, result.output
    result = runner.invoke(app, ["time", str(tmp_path / "network"), "--batch", "2", "--device", "cuda", "--format", "json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["device"] == f"{torch.cuda.get_device_name()}, CUDA graphs" and report["rows"][0]["least ms"] > 0
    for device in ("cuda", "cpu"):
        words = ["predict", str(tmp_path / "network"), str(tmp_path / "images.npy"), "--device", device]
        result = runner.invoke(app, [*words, "--output", str(tmp_path / f"{device}.npz")])
        assert result.exit_code == 0, result.output
    gpu, cpu = (np.load(tmp_path / f"{device}.npz") for device in ("cuda", "cpu"))
    assert all(np.array_equal(gpu[name], cpu[name]) for name in ("logits", "tokens"))
    model = qflash.transformers_model(qflash.load_model(tmp_path / "network", "cuda"))
    found = model(torch.from_numpy(images).cuda())
    assert model.device.type == "cuda" and np.array_equal(found.logits.cpu().numpy(), cpu["logits"])
