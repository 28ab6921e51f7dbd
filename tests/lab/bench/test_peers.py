"""Attention of other packages: what is called with which arguments, by stand-ins that compute it; missing ones keep a row."""

from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from helpers import exact_attention
from qflash_lab.bench import latency, peers
from qflash_lab.bench import methods as bench_methods
from qflash_lab.bench import problems as bench_problems
from qflash_lab.bench import schema as col
from qflash_lab.cli import app

CPU = torch.device("cpu")
SMALL = bench_problems.Problem("2x3x9x16", None, (2, 3, 9, 16), 9)
OPTIONS: dict[str, Any] = {"kind": "uniform", "dtype": torch.float16, "device": CPU, "rounds": 2}


def rows_of(*names: str, problem: bench_problems.Problem = SMALL) -> dict[str, dict[str, Any]]:
    methods = bench_methods.make_methods(CPU, peers=("all",), only=names)
    return {row["method"]: row for row in latency.measure(problem, methods, ("kernel", "end-to-end"), **OPTIONS)}


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stand for fa3-fwd: (batch, tokens, heads, channels), no float16, a scale a batch and head; returns what calls gave."""
    given: list[dict[str, Any]] = []

    def flash_attn_func(q: Any, k: Any, v: Any, softmax_scale: Any = None, causal: bool = False, **more: Any) -> torch.Tensor:
        given.append({"dtype": q.dtype, "shape": tuple(q.shape), "causal": causal, "splits": more["num_splits"]})
        if q.dtype == torch.float16:
            raise RuntimeError("This flash attention build does not support FP16.")
        parts = []
        for x, name in ((q, "q_descale"), (k, "k_descale"), (v, "v_descale")):
            scale = more.get(name, torch.ones(q.shape[0], q.shape[2]))
            assert scale.shape == (q.shape[0], q.shape[2]) and scale.dtype == torch.float32 and scale.is_contiguous()
            parts.append(x.transpose(1, 2).double() * scale[..., None, None])
        return exact_attention(*parts, is_causal=causal).transpose(1, 2).to(torch.bfloat16)

    module = types.ModuleType("fa3_fwd_interface")
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", module)
    return given


def test_flash_attention_3(flash: list[dict[str, Any]]) -> None:
    found = rows_of(col.FA3, col.FA3_SPLIT, col.FA3_FLOAT8)
    assert {call["shape"] for call in flash} == {(2, 9, 3, 16)}
    assert {(call["dtype"], call["splits"]) for call in flash} == {
        (torch.bfloat16, 1), (torch.bfloat16, 0), (torch.float8_e4m3fn, 1),
    }  # fmt: skip
    assert [found[name]["error"] for name in found] == [None, None, None]
    assert {name: row["mode"] for name, row in found.items()} == {
        col.FA3: "end-to-end", col.FA3_SPLIT: "end-to-end", col.FA3_FLOAT8: "kernel",
    }  # fmt: skip
    assert found[col.FA3]["sqnr_db"] > 40 and found[col.FA3_SPLIT]["sqnr_db"] > 40
    # three mantissa bits
    assert 15 < found[col.FA3_FLOAT8]["sqnr_db"] < 35


def test_a_causal_problem_and_one_with_a_bias(flash: list[dict[str, Any]]) -> None:
    causal = bench_problems.Problem("x", None, (2, 3, 9, 16), 9, causal=True)
    assert rows_of(col.FA3, problem=causal)[col.FA3]["sqnr_db"] > 40
    assert all(call["causal"] for call in flash)
    biased = bench_problems.Problem("x", 1, (2, 3, 9, 16), 9, bias=True)
    assert rows_of(col.FA3, problem=biased)[col.FA3]["error"] == "NotImplementedError: FlashAttention-3 takes no attention mask"


def test_sage_attention_leaves_the_keys_of_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def sageattn(q: Any, k: Any, v: Any, is_causal: bool = False, sm_scale: Any = None, **ignored: Any) -> torch.Tensor:
        assert not ignored and q.shape[-1] == 16, "headdim should be 16"
        k -= k.mean(dim=2, keepdim=True)
        return exact_attention(q, k, v, is_causal=is_causal).to(q.dtype)

    module = types.ModuleType("sageattention")
    module.sageattn = sageattn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sageattention", module)
    inputs = bench_problems.make_inputs(SMALL, "uniform", torch.float16, CPU)
    before = inputs.key.clone()
    call = peers.PEERS[col.SAGE].prepare(inputs)
    call()
    assert torch.equal(inputs.key, before)
    assert rows_of(col.SAGE)[col.SAGE]["sqnr_db"] > 40
    narrow = bench_problems.Problem("x", None, (1, 1, 9, 32), 9)
    assert rows_of(col.SAGE, problem=narrow)[col.SAGE]["error"] == "AssertionError: headdim should be 16"


class Declared:
    """A tensor of a graph; says what it was declared as."""

    def __init__(self, **known: Any) -> None:
        self.known = known

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("set_"):
            raise AttributeError(name)

        def keep(value: Any) -> Declared:
            self.known[name.removeprefix("set_")] = value
            return self

        return keep


@pytest.mark.parametrize("with_largest", [False, True], ids=["plain", "largest values needed"])
def test_cudnn_in_float8(monkeypatch: pytest.MonkeyPatch, with_largest: bool) -> None:
    class Graph:
        def __init__(self, **known: Any) -> None:
            assert known["io_data_type"] == "e4m3"

        def tensor(self, **known: Any) -> Declared:
            return Declared(**known)

        def sdpa_fp8(self, **given: Any) -> list[Any]:
            self.given = given
            self.amax = [Declared(), Declared()]
            self.out = Declared()
            return [self.out, None, *self.amax]

        def build(self, modes: Any) -> None:
            if with_largest and not all(amax.known["output"] for amax in self.amax):
                raise RuntimeError("no engine")
            assert self.out.known["data_type"] == "e4m3" and self.out.known["dim"] == [2, 3, 9, 16]

        def get_workspace_size(self) -> int:
            return 0

        def execute(self, bound: dict[Declared, torch.Tensor], workspace: torch.Tensor, handle: int) -> None:
            def at(name: str) -> torch.Tensor:
                return bound[self.given[name]]

            for name, of in self.given.items():
                if isinstance(of, Declared):
                    assert of.known["dim"] == list(at(name).shape) and of.known["stride"] == list(at(name).stride())
            assert at("scale_s") * at("descale_s") == 1
            assert set(self.amax) <= set(bound) if with_largest else not set(self.amax) & set(bound)
            scores = (at("q").float() * at("descale_q")) @ (at("k").float() * at("descale_k")).mT * self.given["attn_scale"]
            weights = torch.softmax(scores, -1)
            product = (weights * at("scale_s")).to(peers.FLOAT8).float() * at("descale_s") @ (at("v").float() * at("descale_v"))
            assert (product * at("scale_o")).abs().max() <= torch.finfo(peers.FLOAT8).max
            bound[self.out].copy_((product * at("scale_o")).to(peers.FLOAT8))

    module = types.ModuleType("cudnn")
    module.data_type = types.SimpleNamespace(FP8_E4M3="e4m3", FLOAT="float")  # type: ignore[attr-defined]
    module.heur_mode = types.SimpleNamespace(A="A", FALLBACK="fallback")  # type: ignore[attr-defined]
    module.create_handle, module.set_stream = (lambda: 1), (lambda handle, stream: None)  # type: ignore[attr-defined]
    module.pygraph = Graph  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=0))
    row = rows_of(col.CUDNN_FLOAT8)[col.CUDNN_FLOAT8]
    assert row["error"] is None
    assert 15 < row["sqnr_db"] < 35
    inputs = bench_problems.make_inputs(SMALL, "uniform", torch.float16, CPU)
    out = peers.PEERS[col.CUDNN_FLOAT8].prepare(inputs)()
    # the output's scale makes use of all of float8
    assert out.values.float().abs().max() >= 0.9 * torch.finfo(peers.FLOAT8).max


def test_packages_that_are_missing_have_a_row_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("fa3_fwd_interface", "sageattention", "cudnn"):
        monkeypatch.setitem(sys.modules, module, None)
    options = ["bench", "--device", "cpu", "--shape", "1,1,9,16", "--rounds", "1", "--output", str(tmp_path)]
    options += [word for name in ("sdpa", *col.PEERS) for word in ("--method", name)]
    result = CliRunner().invoke(app, [*options, "--peer", "all"])
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "bench.json").read_text())
    rows = {row["method"]: row for row in record["rows"]}
    assert set(rows) == {"sdpa", *col.PEERS}
    assert rows["sdpa"]["median_us"] > 0
    for name in col.PEERS:
        assert rows[name]["median_us"] is None
        assert f"pip install {peers.PEERS[name].package}" in rows[name]["error"]
    assert set(record["packages"]) == {"fa3-fwd", "sageattention", "nvidia-cudnn-frontend"}


def test_names() -> None:
    assert tuple(peers.PEERS) == col.PEERS
    assert peers.named(("all",)) == list(col.PEERS)
    assert peers.named((col.SAGE, col.FA3)) == [col.FA3, col.SAGE]
    with pytest.raises(ValueError, match=r"peer must be NAME=module:callable, all, or one of \('fa3'.*got 'fa4'"):
        peers.named(("fa4",))
    with pytest.raises(ValueError, match=r"peer must be .*got 'cudnn float8'"):
        peers.function_of(col.CUDNN_FLOAT8)
    name, function = bench_methods.import_peer(col.FA3)
    assert (name, function) == (col.FA3, peers.flash_attention_3)


def test_float8_is_scaled_to_its_whole_range() -> None:
    x = torch.randn(50, dtype=torch.float32)
    quantised, scale = peers.to_float8(x)
    assert quantised.float().abs().max() == torch.finfo(peers.FLOAT8).max
    assert math.isclose(scale.item(), x.abs().max().item() / 448, rel_tol=1e-6)
    assert ((quantised.float() * scale - x).abs() <= x.abs() / 16 + scale / 512).all()
