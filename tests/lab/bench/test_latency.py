"""``qflash-lab bench``: problems, inputs, methods, rows and files; the CPU path end to end; the GPU path where there is one."""

from __future__ import annotations

import csv
import json
import math
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import qflash
from helpers import exact_attention
from qflash_lab.bench import console, errors, latency, records, timers
from qflash_lab.bench import methods as bench_methods
from qflash_lab.bench import problems as bench_problems
from qflash_lab.bench import runner as timed_runner
from qflash_lab.bench.metrics import sqnr
from qflash_lab.bench.workloads import get_workload, paper_inputs
from qflash_lab.cli import app

runner = CliRunner()
CPU = torch.device("cpu")
GPU_BASELINES = (
    "i-vit kernel",
    *("int-flash-full kernel", "int-flash-full", "int-flash-half kernel", "int-flash-half", "qattn kernel", "qattn"),
)
SMALL = bench_problems.Problem("1x2x9x16", None, (1, 2, 9, 16), 9)


def broken_attention(query, key, value, attn_mask=None, is_causal=False, scale=None):
    raise NotImplementedError("head_dim 16 is not supported\nsecond line")


def zero_attention(query, key, value, attn_mask=None, is_causal=False, scale=None):
    return torch.zeros_like(query)


def narrow_attention(query, key, value, attn_mask=None, is_causal=False, scale=None):
    return query[..., :1]


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> str:
    module = types.ModuleType("some_peer")
    module.broken, module.zero, module.narrow = broken_attention, zero_attention, narrow_attention  # type: ignore[attr-defined]
    module.number = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_peer", module)
    return "some_peer"


# --- problems and inputs --------------------------------------------------------------------------------------


def test_shapes() -> None:
    assert bench_problems.parse_shape("2,3,197,64") == ((2, 3, 197, 64), 197)
    assert bench_problems.parse_shape("2x3x5x64x7") == ((2, 3, 5, 64), 7)


@pytest.mark.parametrize("text", ["", "1,2,3", "1,2,3,4,5,6", "1,2,x,4", "1,0,3,4", "1,-2,3,4", "1,2,3.5,4"])
def test_bad_shapes(text: str) -> None:
    with pytest.raises(ValueError, match=r"shape must be Z,H,N,D.*got"):
        bench_problems.parse_shape(text)


def test_problems() -> None:
    problems = bench_problems.make_problems((), (), (1, 8))
    assert [(p.workload, p.batch) for p in problems] == [(f"A{i}", b) for b in (1, 8) for i in range(1, 8)]
    assert problems[10].shape == (512, 3, 49, 32)
    assert problems[10].windows == 64
    assert [p.shape for p in bench_problems.make_problems(("long",), (), (1, 8))] == list(bench_problems.LONG)
    assert [p.keys for p in bench_problems.make_problems((), ("1,2,3,4,5", "1,2,3,4"), (1,))] == [5, 3]
    assert [p.bias for p in bench_problems.make_problems(("A7",), (), (1,), bias=True)] == [False, True]
    with pytest.raises(ValueError, match=r"workload must be one of A1.*'A9'"):
        bench_problems.make_problems(("A9",), (), (1,))
    with pytest.raises(ValueError, match="exclude"):
        bench_problems.make_problems((), (), (1,), bias=True, causal=True)


def test_operations() -> None:
    assert SMALL.operations == 4 * 2 * 9 * 9 * 16
    assert bench_problems.Problem("", None, (1, 1, 4, 8), 3, causal=True).operations == 4 * 8 * (1 + 2 + 3 + 3)


def test_uniform_inputs_are_the_papers() -> None:
    problem = bench_problems.make_problems(("A7",), (), (2,))[0]
    inputs = bench_problems.make_inputs(problem, "uniform", torch.float16, CPU)
    for got, expected in zip((inputs.query, inputs.key, inputs.value), paper_inputs(get_workload("A7"), 2), strict=True):
        assert torch.equal(got, expected)
    normal = bench_problems.make_inputs(problem, "normal", torch.float32, CPU).query
    assert abs(normal.std().item() - 1) < 0.02
    with pytest.raises(ValueError, match="input must be one of"):
        bench_problems.make_inputs(problem, "zeros", torch.float16, CPU)


def test_swin_bias_is_timms() -> None:
    timm = pytest.importorskip("timm")
    block = timm.models.swin_transformer.SwinTransformerBlock(12, (14, 14), num_heads=3, window_size=7, shift_size=3)
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(169, 3, generator=generator)
    relative = table[block.attn.relative_position_index.flatten()].unflatten(0, (49, 49)).permute(2, 0, 1)
    got = bench_problems.swin_bias(4, 3, 49, 49, torch.Generator().manual_seed(5))
    assert torch.equal(got, relative + block.attn_mask[:, None])
    alone = bench_problems.swin_bias(1, 3, 49, 49, torch.Generator().manual_seed(5))
    assert torch.equal(alone, relative[None])
    assert bench_problems.swin_bias(1, 2, 5, 7, generator).shape == (1, 2, 5, 7)


@pytest.mark.parametrize("budget", [1 << 24, 9 * 9 * 6, 9 * 9 * 2, 9 * 9, 30])
@pytest.mark.parametrize("mask", ["none", "causal", "bias"])
def test_exact_part(mask: str, budget: int) -> None:
    problem = bench_problems.Problem("x", 3, (6, 3, 9, 8), 9, windows=2, causal=mask == "causal", bias=mask == "bias")
    inputs = bench_problems.make_inputs(problem, "normal", torch.float32, CPU)
    wanted, part, words = bench_problems.exact_part(inputs, budget)
    bias = None if inputs.bias is None else inputs.bias.repeat(3, 1, 1, 1)
    whole = exact_attention(inputs.query, inputs.key, inputs.value, bias, is_causal=problem.causal)
    assert torch.allclose(wanted, whole[part], atol=1e-12)
    assert (words == "whole") == (wanted.shape == whole.shape)
    assert wanted.shape[0] * wanted.shape[1] * wanted.shape[2] * 9 <= max(budget, 9 * 9 if budget >= 81 else budget)


def test_folded_and_nested_agree() -> None:
    problem = bench_problems.Problem("x", 3, (6, 2, 9, 8), 9, windows=2, bias=True)
    inputs = bench_problems.make_inputs(problem, "normal", torch.float32, CPU)
    query, key, value, mask = inputs.folded()
    assert mask is not None
    assert mask.stride(-2) == 16
    folded = exact_attention(query, key, value, mask).reshape(problem.shape)
    assert inputs.bias is not None
    nested = exact_attention(*inputs.nested(), inputs.bias).reshape(problem.shape)
    assert torch.allclose(folded, nested)
    assert query.data_ptr() == inputs.query.data_ptr()


# --- methods --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("some_peer:zero", "NAME=module:callable"),
        ("x=some_peer", "NAME=module:callable"),
        ("=some_peer:zero", "NAME=module:callable"),
        ("x=no_such_module_here:f", "cannot be imported.*no_such_module_here"),
        ("x=some_peer:nothing", "cannot be imported.*nothing"),
        ("x=some_peer:number", "is a int, not a callable"),
    ],
)
def test_bad_peers(peers: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench_methods.load_peers([text])


def test_methods() -> None:
    names = [m.name for m in bench_methods.make_methods(CPU)]
    assert names[0] == "sdpa"
    assert {"qflash reference", "qflash int8 reference"} <= set(names)
    assert not any("triton" in name for name in names)
    assert [m.name for m in bench_methods.make_methods(CPU, only=("sdpa",))] == ["sdpa"]
    many = {m.name for m in bench_methods.make_methods(CPU, ("paper", "per-tensor"))}
    assert {"qflash int8 reference paper", "qflash reference paper", "qflash reference per-tensor"} <= many
    with pytest.raises(ValueError, match="method must be one of"):
        bench_methods.make_methods(CPU, only=("nothing",))
    with pytest.raises(ValueError, match="recipe must be one of"):
        bench_methods.make_methods(CPU, ("nothing",))
    with pytest.raises(ValueError, match="two methods are called 'sdpa'"):
        bench_methods.make_methods(CPU, peers=("sdpa=torch:add",))


def test_gpu_methods_by_name() -> None:
    names = [m.name for m in bench_methods.make_methods(torch.device("cuda"))]
    assert names == [
        "sdpa flash", "sdpa cudnn", "sdpa efficient", "sdpa math", "sdpa math fp32", *GPU_BASELINES, "qflash int8", "qflash",
    ]  # fmt: skip
    kept = [m.name for m in bench_methods.select(bench_methods.make_methods(torch.device("cuda")), ())]
    assert kept == ["sdpa flash", "sdpa cudnn", "sdpa efficient", *GPU_BASELINES, "qflash int8", "qflash"]


@pytest.mark.parametrize("mask", ["none", "causal", "bias"])
def test_every_cpu_method_computes_attention(mask: str) -> None:
    problem = bench_problems.Problem("x", 2, (4, 2, 9, 16), 9, windows=2, causal=mask == "causal", bias=mask == "bias")
    inputs = bench_problems.make_inputs(problem, "normal", torch.float32, CPU)
    wanted, part, _ = bench_problems.exact_part(inputs)
    for method in bench_methods.make_methods(CPU, ("default", "accurate", "per-tensor")):
        out = bench_problems.as_tensor(method.prepare(inputs)(), problem)[part]
        assert sqnr(wanted, out) > (100 if method.is_sdpa else 10 if method.is_baseline else 25), method.name


def test_baselines_are_timed_in_the_modes_asked_for() -> None:
    methods = bench_methods.make_methods(CPU, only=("sdpa", "qattn", "i-bert"))
    options = {"kind": "uniform", "dtype": torch.float32, "device": CPU, "rounds": 1}
    for modes, expected in (
        (("end-to-end",), ["sdpa", "i-bert", "qattn"]),
        (("eager",), ["sdpa", "i-bert", "qattn"]),
        (("kernel",), ["sdpa"]),
    ):
        rows = latency.measure(SMALL, methods, modes, **options)  # type: ignore[arg-type]
        assert [row["method"] for row in rows] == expected
        assert all(row["error"] is None and row["sqnr_db"] > 15 for row in rows)


def test_int8_call_is_int8_to_int8() -> None:
    inputs = bench_problems.make_inputs(SMALL, "uniform", torch.float32, CPU)
    method = next(m for m in bench_methods.make_methods(CPU) if m.name == "qflash int8 reference")
    out = method.prepare(inputs)()
    assert isinstance(out, qflash.QuantizedTensor)
    assert 120 <= out.values.abs().max().item() <= 127


def test_scores_that_do_not_fit_are_refused() -> None:
    problem = bench_problems.Problem("x", None, (1, 1, 2, 1), 2)
    inputs = bench_problems.make_inputs(problem, "normal", torch.float32, CPU)
    wide = [x.expand(100, 1000, 2, 1).unsqueeze(3).expand(100, 1000, 2, 100, 1).flatten(2, 3) for x in (inputs.query,) * 3]
    with pytest.raises(MemoryError, match="scores need about"):
        bench_methods._prepare_sdpa(bench_problems.Inputs(problem, *wide, None), materialises=True)


def test_sdpa_says_why_it_has_no_kernel() -> None:
    def refuse(message: str) -> None:
        warnings.warn("Flash attention kernel not used because:", stacklevel=1)
        warnings.warn("needs another GPU (Triggered internally at sdp.h:1.)", stacklevel=1)
        raise RuntimeError(message)

    with pytest.raises(RuntimeError, match=r"^needs another GPU$"), errors.explained():
        refuse("No available kernel. Aborting execution.")
    with pytest.raises(RuntimeError, match=r"^something else$"), errors.explained():
        refuse("something else")


def test_output_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"returned shape \(1, 2, 9, 1\)"):
        bench_problems.as_tensor(torch.zeros(1, 2, 9, 1), SMALL)
    with pytest.raises(TypeError, match="returned tuple"):
        bench_problems.as_tensor((1,), SMALL)


# --- rows -----------------------------------------------------------------------------------------------------


def test_summary() -> None:
    got = timed_runner.summarise([{"us": float(x), "cpu_us": 2.0 * x} for x in (5, 1, 2, 3, 4)])
    assert got == {"median_us": 3.0, "q1_us": 2.0, "q3_us": 4.0, "min_us": 1.0, "max_us": 5.0, "cpu_us": 6.0}
    assert timed_runner.summarise([{"us": 7.0}])["q1_us"] == 7.0


def test_measure_on_the_cpu(peers: str) -> None:
    methods = bench_methods.make_methods(CPU, peers=(f"broken={peers}:broken", f"zero={peers}:zero", f"narrow={peers}:narrow"))
    options = {"kind": "uniform", "dtype": torch.float32, "device": CPU, "rounds": 3}
    done: list[str] = []
    rows = latency.measure(SMALL, methods, ("kernel", "end-to-end"), **options, tick=done.append)  # type: ignore[arg-type]
    assert done == [method.name for method in methods]
    assert all(tuple(row) == latency.FIELDS for row in rows)
    by_name = {row["method"]: row for row in rows}
    assert by_name["broken"]["error"] == "NotImplementedError: head_dim 16 is not supported"
    assert by_name["broken"]["median_us"] is None
    assert "returned shape" in by_name["narrow"]["error"]
    assert by_name["zero"]["sqnr_db"] == 0.0
    sdpa = by_name["sdpa"]
    assert (sdpa["best_sdpa"], sdpa["ratio"], sdpa["mode"]) == ("sdpa", 1.0, "end-to-end")
    assert sdpa["sqnr_db"] > 100
    ours = by_name["qflash int8 reference"]
    assert ours["mode"] == "kernel"
    assert 30 < ours["sqnr_db"] < 50
    assert ours["ratio"] == pytest.approx(sdpa["median_us"] / ours["median_us"], abs=1e-3)
    assert ours["tops"] == pytest.approx(SMALL.operations / ours["median_us"] / 1e6, abs=0.01)
    assert ours["q1_us"] <= ours["median_us"] <= ours["q3_us"]
    only = latency.measure(SMALL, methods, ("kernel",), **options)  # type: ignore[arg-type]
    assert {"sdpa", "qflash int8 reference"} <= {row["method"] for row in only}
    assert "qflash reference" not in {row["method"] for row in only}


def test_a_method_that_fails_later_keeps_its_row() -> None:
    calls = []

    def prepare(inputs: bench_problems.Inputs) -> timers.TimedCall:
        def call() -> torch.Tensor:
            calls.append(1)
            if len(calls) > 20:
                raise RuntimeError("out of luck")
            return inputs.query

        return call

    methods = [bench_methods.TimedMethod("late", "end-to-end", prepare), *bench_methods.make_methods(CPU, only=("sdpa",))]
    rows = latency.measure(SMALL, methods, ("end-to-end",), kind="normal", dtype=torch.float32, device=CPU, rounds=2)
    assert rows[0]["error"] == "RuntimeError: out of luck"
    assert rows[0]["median_us"] is None
    assert rows[1]["error"] is None


def test_bias_cost() -> None:
    base = dict.fromkeys(latency.FIELDS) | {"workload": "A4", "batch": 1, "mode": "kernel", "method": "m", "bias": False}
    rows = [base | {"median_us": 4.0}, base | {"median_us": 5.0, "bias": True}, base | {"bias": True, "method": "other"}]
    latency.add_bias_costs(rows)
    assert [row["bias_cost"] for row in rows] == [None, 1.25, None]


# --- the command ----------------------------------------------------------------------------------------------


def test_command_on_the_cpu(peers: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = [
        "bench",
        "--device",
        "cpu",
        "--shape",
        "2,2,9,16",
        "--workload",
        "A7",
        "--batch",
        "1",
        "--bias",
        "--rounds",
        "2",
    ]
    names = ["sdpa", "qattn", "qflash int8 reference", "qflash reference", "broken"]
    arguments += [word for name in names for word in ("--method", name)]
    result = runner.invoke(app, [*arguments, "--peer", f"broken={peers}:broken", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "no GPU was measured" in " ".join(result.output.split())
    assert "NotImplementedError: head_dim 16 is not supported" in result.output
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["environment"]["device_type"] == "cpu"
    assert record["environment"]["torch"] == torch.__version__
    with (tmp_path / "bench.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(record["rows"]) == 4 * len(names)
    assert tuple(rows[0]) == latency.FIELDS
    for row in record["rows"]:
        assert (row["error"] is None) == (row["median_us"] is not None)
        assert row["sqnr_db"] is not None or row["error"]
        assert (row["bias_cost"] is not None) == (row["bias"] and row["error"] is None)
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    drawing = (tmp_path / "bench.svg").read_text()
    assert "<svg" in drawing


def test_figure_has_a_bar_a_method() -> None:
    pytest.importorskip("matplotlib")
    base = dict.fromkeys(latency.FIELDS) | {"mode": "kernel", "causal": False, "bias": False, "q1_us": 1.0, "q3_us": 3.0}
    rows = [
        base | {"workload": name, "batch": batch, "method": method, "median_us": 2.0}
        for name in ("A1", "A2")
        for batch in (1, 8)
        for method in ("sdpa flash", "qflash")
    ]
    figure = latency.draw(rows, "title")
    taken = "int8 in, quantised beforehand"
    assert [axes.get_title(loc="left") for axes in figure.axes] == [f"batch 1, {taken}", f"batch 8, {taken}"]
    # what takes int8 tensors and what takes floats have panels of their own
    mixed = latency.draw([*rows, *(row | {"mode": "end-to-end"} for row in rows)], "title")
    assert len(mixed.axes) == 4
    for axes in figure.axes:
        assert [len(container) for container in axes.containers if hasattr(container, "patches")] == [2, 2]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["A1", "A2"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["sdpa flash", "qflash"]
    with pytest.raises(ValueError, match="nothing to draw"):
        latency.draw([base | {"median_us": None}], "title")


def test_what_json_has_no_word_for(tmp_path: Path) -> None:
    records.write_json(tmp_path / "new" / "x.json", {"rows": [{"sqnr_db": math.inf, "ratio": math.nan, "us": 1.5}]})
    assert json.loads((tmp_path / "new" / "x.json").read_text())["rows"] == [{"sqnr_db": "inf", "ratio": "nan", "us": 1.5}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "1,2"], "shape must be"),
        (["--mode", "fast"], "mode must be one of"),
        (["--dtype", "int8"], "dtype must be one of"),
        (["--device", "meta"], "device must be cuda or cpu"),
        (["--device", "foo"], "device must be one that PyTorch knows"),
        (["--output", __file__], "'--output'"),
        (["--peer", "x=no_such_module_here:f"], "cannot be imported"),
        (["--input", "zeros"], "input must be one of"),
    ],
)
def test_command_refuses(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["bench", *(["--device", "cpu"] if "--device" not in arguments else []), *arguments])
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu_is_said() -> None:
    for command in ("bench", "energy", "profile"):
        result = runner.invoke(app, [command, "--device", "cuda"])
        assert result.exit_code == 2
        assert "finds no NVIDIA GPU" in result.output


# --- on a GPU -------------------------------------------------------------------------------------------------


def synchronising(query, key, value, attn_mask=None, is_causal=False, scale=None):
    return query * float(query.abs().amax().item() > 0)


@pytest.mark.gpu
def test_measure_on_the_gpu() -> None:
    device = console.pick_device("cuda")
    prepare = lambda inputs: lambda: synchronising(inputs.query, inputs.key, inputs.value)  # noqa: E731
    methods = [*bench_methods.make_methods(device), bench_methods.TimedMethod("waits", "end-to-end", prepare)]
    problems = bench_problems.make_problems(("A7",), ("2,3,300,64",), (2,), bias=True)
    for problem in problems:
        with torch.inference_mode():
            rows = latency.measure(
                problem, methods, latency.MODES, kind="uniform", dtype=torch.float16, device=device, rounds=3
            )  # fmt: skip
        found = {(row["method"], row["mode"]): row for row in rows}
        assert "synchroniz" in found["waits", "end-to-end"]["error"]
        assert found["waits", "eager"]["error"] is None  # a failed capture spoils nothing after it
        for name, mode in (
            ("qflash int8", "kernel"),
            ("qflash", "end-to-end"),
            ("qflash", "eager"),
            ("sdpa efficient", "eager"),
        ):
            row = found[name, mode]
            assert row["error"] is None, (problem, row)
            assert row["sqnr_db"] > 30
            assert 0.5 < row["median_us"] < 5000
        assert found["qflash", "eager"]["issue_us"] <= found["qflash", "eager"]["median_us"]
        assert found["qflash", "end-to-end"]["ratio"] is not None
        failed = {name for (name, _), row in found.items() if row["error"]} - {"waits"}
        assert failed <= ({"sdpa flash", "sdpa cudnn"} if problem.bias else set()), failed


@pytest.mark.gpu
def test_graph_time_agrees_with_the_work() -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    one, two = timers.GraphTimer(lambda: x @ x), timers.GraphTimer(lambda: (x @ x, x @ x))
    ratio = min(two.sample()["us"] for _ in range(9)) / min(one.sample()["us"] for _ in range(9))
    assert 1.6 < ratio < 2.4


def test_calls_of_a_sample_do_not_depend_on_a_disturbed_beginning() -> None:
    """A sample costs some microseconds of its own; what disturbs the first ones may cost a hundred."""

    def settle(call: float, own: float, disturbed: float = 0.0) -> int:
        return timers.settle_calls(lambda calls: call + own / calls + (disturbed if calls == 1 else 0.0))

    assert settle(3.0, 9.0) == settle(3.0, 9.0, disturbed=100.0) == settle(0.0, 9.0) == 200
    assert settle(50.0, 9.0) in (17, 18, 19, 20) and settle(50.0, 9.0, disturbed=100.0) in (19, 20)
    assert settle(700.0, 9.0) == settle(2e4, 9.0) == 1
