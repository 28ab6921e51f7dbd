"""Files of attention calls: what is written is read, and what does not fit is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qflash_lab.bench.layer_calls import LayerCall, read_calls, write_calls


def tensors(queries: int = 5, keys: int = 7) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, n, 8, generator=generator) for n in (queries, keys, keys))
    return {"query": query, "key": key, "value": value[..., :4].contiguous()}


def test_calls_are_kept(tmp_path: Path) -> None:
    inputs = tensors()
    keep = torch.ones(1, 1, 1, 7, dtype=torch.bool)
    calls = {
        "b.layer 1": LayerCall(*inputs.values()),
        "a": LayerCall(inputs["query"].mT.contiguous().mT.half(), inputs["key"].half(), inputs["value"].half(), keep, 0.3),
    }
    write_calls(tmp_path / "x.safetensors", calls, {"origin": "made up"})
    found = read_calls(tmp_path / "x.safetensors")
    assert list(found) == ["a", "b.layer 1"]
    for label, call in calls.items():
        for name in ("query", "key", "value"):
            got, wanted = getattr(found[label], name), getattr(call, name)
            assert torch.equal(got, wanted) and got.dtype == wanted.dtype
        assert found[label].scale == call.scale and found[label].rows is None
    assert found["b.layer 1"].attn_mask is None
    assert found["a"].attn_mask is not None and torch.equal(found["a"].attn_mask, keep)
    with pytest.raises(ValueError, match=r"calls with rows cannot be written, a has \(1, 5\)"):
        write_calls(tmp_path / "y.safetensors", {"a": LayerCall(*inputs.values(), rows=keep[0, 0, :, :5])})


def test_a_call_without_label_is_named_after_its_file(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "layer3.safetensors")
    assert list(read_calls(tmp_path / "layer3.safetensors")) == ["layer3"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": None}, "x.safetensors, x: value must be in the file, too"),
        ({"query": None, "key": None}, "query, key must be in the file, too"),
        ({"layer.weight": torch.ones(2)}, "names of tensors must be or end in one of query, key, value, .*got 'layer.weight'"),
        ({"layer.scale": torch.ones(())}, "x.safetensors, layer: query, key, value must be in the file, too"),
        ({"query": torch.ones(1, 2, 5, 8, dtype=torch.int8)}, "query must be floating point like query, got torch.int8"),
        ({"key": torch.ones(1, 2, 7, 8).half()}, "key must be floating point like query, got torch.float16 and torch.float32"),
        ({"query": torch.ones(2, 5, 8)}, r"query must be \(batch, heads, tokens, channels\), none of them 0, got \(2, 5, 8\)"),
        ({"value": torch.ones(1, 2, 0, 8)}, r"value must be .*none of them 0, got \(1, 2, 0, 8\)"),
        ({"key": torch.full((1, 2, 7, 8), float("nan"))}, "key must be finite"),
        (
            {"key": torch.ones(1, 1, 7, 8)},
            r"batch and heads must be the same.*got \(1, 2, 5, 8\), \(1, 1, 7, 8\) and \(1, 2, 7, 4\)",
        ),
        ({"key": torch.ones(1, 2, 7, 6)}, "query's and key's channels"),
        ({"value": torch.ones(1, 2, 6, 8)}, "key's and value's tokens"),
        ({"attn_mask": torch.ones(5, 6)}, r"attn_mask must broadcast to \(1, 2, 5, 7\), got \(5, 6\)"),
        ({"attn_mask": torch.ones(3, 1, 1, 5, 7)}, r"attn_mask must broadcast to \(1, 2, 5, 7\), got \(3, 1, 1, 5, 7\)"),
        ({"attn_mask": torch.ones(5, 7, dtype=torch.int8)}, "attn_mask must be bool or floating point, got torch.int8"),
        ({"scale": torch.ones(2)}, r"scale must be one positive number, got \[1.0, 1.0\]"),
        ({"scale": torch.zeros(())}, "scale must be one positive number, got 0.0"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str) -> None:
    parts = {name: x for name, x in (tensors() | changes).items() if x is not None}
    save_file(parts, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=message):
        read_calls(tmp_path / "x.safetensors")


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file .*x\.safetensors"):
        read_calls(tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"x\.safetensors must be a safetensors file: "):
        read_calls(tmp_path / "x.safetensors")
    save_file({}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="it holds no tensor"):
        read_calls(tmp_path / "x.safetensors")
