"""Scores on which ScaleRelease's two floors leave |O| above 128 l: a search over online softmax found them."""

import json
import pathlib

import pytest
import torch

import qflash

SCORES = json.loads((pathlib.Path(__file__).parent / "online_scores.json").read_text())


@pytest.mark.parametrize("output", ["value_scale", "accumulator"])
def test_online_output_never_wraps(output: str) -> None:
    scores = torch.tensor(SCORES)
    query, key = torch.zeros(1, 1, 1, 16, dtype=torch.int8), torch.zeros(1, 1, len(SCORES), 16, dtype=torch.int8)
    query[..., :2] = 1
    key[0, 0, :, 0] = scores.clamp(-128, 127).to(torch.int8)
    key[0, 0, :, 1] = (scores - scores.clamp(-128, 127)).to(torch.int8)
    value = torch.full((1, 1, len(SCORES), 16), -128, dtype=torch.int8)
    one = torch.ones(())
    tensors = (
        qflash.QuantizedTensor(query, torch.tensor(2.0**-5)),
        qflash.QuantizedTensor(key, one),
        qflash.QuantizedTensor(value, one),
    )
    recipe = qflash.PAPER.replace(key_block=32, output=output)
    for backend in ("reference", "triton"):
        got = qflash.int8_attention(*tensors, scale=1.0, recipe=recipe, backend=backend, out_dtype=torch.float32)
        assert (got == -128).all(), backend
