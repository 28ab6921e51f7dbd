"""The SystemVerilog of rtl/ gives the golden integers, is lint-free and synthesisable; docs/hardware.md's commands run it."""

from __future__ import annotations

import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from safetensors import safe_open

import qflash
from helpers import load_script
from qflash.network.vectors import write_vectors

ROOT = pathlib.Path(__file__).resolve().parents[2]
RTL = ROOT / "rtl"
MODULES = ("rescale", "gelu", "layer_norm", "attention_row")

pytestmark = pytest.mark.skipif(not RTL.is_dir(), reason="only the repository has rtl/")
needs_icarus = pytest.mark.skipif(
    shutil.which("iverilog") is None, reason="iverilog is not installed (make rtl-tools): no testbench ran"
)


def run_rtl(*arguments: str | pathlib.Path, script: pathlib.Path = RTL / "run.py") -> tuple[int, str]:
    done = subprocess.run([sys.executable, str(script), *map(str, arguments)], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def summary(printed: str) -> dict[str, tuple[int, ...]]:
    """Return cases, values, mismatches and cycles by module."""
    pattern = re.compile(r"^(\w+): (\d+) cases, (\d+) values, (\d+) mismatches, (\d+) cycles$", re.MULTILINE)
    return {found[1]: tuple(map(int, found.groups()[1:])) for found in pattern.finditer(printed)}


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("vectors")
    for name in ("networks", "attention"):
        write_vectors(ROOT / "golden" / f"{name}.safetensors", folder / name, trace=True)
    return folder


def golden_operations() -> list[tuple[str, dict[str, Any]]]:
    """Return operation and parameters of all golden cases, and kind and sizes of the nodes of golden networks."""
    found = []
    for name in ("networks", "attention"):
        with safe_open(ROOT / "golden" / f"{name}.safetensors", framework="pt") as file:
            header = file.metadata()
        recipes = json.loads(header["recipes"])
        for about in json.loads(header["cases"]).values():
            parameters = about["parameters"]
            if "recipe" in parameters:
                parameters["recipe"] = recipes[parameters["recipe"]]
            if about["operation"] == "network":
                found += [(node["operator"], {"recipe": parameters["recipe"]}) for node in parameters["nodes"]]
            else:
                found.append((about["operation"], parameters))
    return found


LINEAR = ("linear", "mean", "patch_merging", "Linear", "WideLinear", "PatchEmbedding", "Mean")
GELU = ("linear_gelu", "LinearGelu")
NORM = ("layer_norm", "normalise", "patch_merging", "LayerNorm")


@needs_icarus
def test_every_golden_case_of_their_operators_is_met(golden: pathlib.Path) -> None:
    status, printed = run_rtl(golden)
    assert status == 0, printed
    found = summary(printed)
    assert list(found) == list(MODULES)
    cases = golden_operations()
    count = dict.fromkeys(MODULES, 0)
    fields = {
        "exponential": "quadratic", "probability_bits": 8, "probability_rounding": "nearest", "normalization": "two_pass",
        "output": "accumulator",
    }  # fmt: skip
    for operation, parameters in cases:
        count["rescale"] += operation in (*LINEAR, *GELU)
        count["gelu"] += operation in GELU
        count["layer_norm"] += operation in NORM
        default = operation in ("int8_attention", "Attention") and parameters["recipe"]
        # row_sum may be either: what it says of a row is an input of the module
        count["attention_row"] += bool(default) and fields == {name: default[name] for name in fields}
    assert {module: each[0] for module, each in found.items()} == count
    assert all(each[1] > 1000 and each[2] == 0 for each in found.values())
    assert count["attention_row"] >= 60 and count["gelu"] >= 18


CHANGES = [
    ("mul_round", "64'sd1 <<< (SHIFT - 1)", "64'sd0 <<< (SHIFT - 1)", "rescale", "linear/int8-random-1"),
    ("saturate", "{(OUT - 1) {~x[IN-1]}}", "{(OUT - 1) {x[IN-1]}}", "rescale", "linear/ends-int8"),
    ("rescale", "+ 33'(residual)", "", "rescale", "linear/residual-random-0"),
    ("gelu", "32'sd18588", "32'sd18589", "gelu", "gelu/tail"),
    ("gelu", "positive1 <= u < 0 ? 17'd0", "positive1 <= u < 0 ? 17'd9", "gelu", "gelu/tail"),
    ("layer_norm", "7'sd29", "7'sd28", "layer_norm", "layer-norm/7-int16"),
    ("layer_norm", "32'sd1145106637", "32'sd1045106637", "layer_norm", "layer-norm/3-int32"),
    ("layer_norm", "turn == 2'd2", "turn == 2'd1", "layer_norm", "layer-norm/7-int32"),
    ("attention_row", "34'd511", "34'd0", "attention_row", "scale/default-1e+25"),
    ("attention_row", "16'd64)", "16'd63)", "attention_row", "mask/default-none"),
    ("attention_row", "sum_w > rounded ? sum_w : rounded", "sum_w", "attention_row", "row-sum/exact-100"),
    ("attention_row", "bias1 > BIAS_LIMIT ? bias1 :", "", "attention_row", "mask/default-marks"),
    ("attention_row", "bias1 == MASKED", "1'b0", "attention_row", "mask/default-marks"),
    ("attention_row", "logic signed [24:0] score", "logic signed [14:0] score", "attention_row", "wide/default"),
]
"""A line of a module with an error in it, and a case that tells."""


@needs_icarus
@pytest.mark.parametrize(
    ("file", "line", "wrong", "module", "case"), CHANGES, ids=[f"{each[0]}: {each[2]}" for each in CHANGES]
)
def test_a_module_with_an_error_is_found_out(
    file: str, line: str, wrong: str, module: str, case: str, golden: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    shutil.copytree(RTL, tmp_path / "rtl")
    path = tmp_path / "rtl" / f"{file}.sv"
    source = path.read_text()
    assert line in source
    path.write_text(source.replace(line, wrong))
    folder = golden / ("attention" if module == "attention_row" else "networks") / case
    assert run_rtl(folder, "--module", module)[0] == 0
    status, printed = run_rtl(folder, "--module", module, script=tmp_path / "rtl" / "run.py")
    assert status == 1 and summary(printed)[module][2] > 0, printed


@needs_icarus
def test_nothing_to_run_is_no_success(golden: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert run_rtl(tmp_path)[0] == 1
    status, printed = run_rtl(golden / "networks" / "windows")
    assert status == 1 and "without a module here: 2 of windows" in printed


def test_cases_in_parts_are_refused() -> None:
    """A reference that cuts a batch shows its steps part by part; a testbench would look at the first alone."""
    script = load_script(RTL / "run.py")
    steps = [{"kind": "step", "name": name} for name in ("query", "B", "query #2")]
    manifest = {"name": "core", "tensors": steps, "constants": script.DEFAULT}
    with pytest.raises(ValueError, match="core has too many scores"):
        script.modules_of(manifest)
    assert script.modules_of({**manifest, "constants": script.DEFAULT | {"c0": 1}, "tensors": steps[:2]}) == []


SIZES: dict[str, Sequence[dict[str, int]]] = {
    "rescale": [{"OUT": 8}, {"OUT": 32}],
    "gelu": [{}],
    "layer_norm": [{}, {"CHANNELS": 1}, {"CHANNELS": 384, "OUT": 16}],
    "attention_row": [{}, {"CHANNELS": 1, "VALUES": 1, "KEYS": 1}, {"CHANNELS": 32, "VALUES": 64, "KEYS": 197}],
}


def sources(module: str) -> list[str]:
    return [str(RTL / f"{each}.sv") for each in ("mul_round", "saturate", module)]


@pytest.mark.skipif(shutil.which("verilator") is None, reason="verilator is not installed (make rtl-tools): nothing was linted")
@pytest.mark.parametrize("module", MODULES)
def test_verilator_has_no_complaint(module: str) -> None:
    for sizes in SIZES[module]:
        given = [f"-G{name}={size}" for name, size in sizes.items()]
        command = ["verilator", "--lint-only", "-Wall", "-sv", "--top-module", module, *given, *sources(module)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr, (sizes, done.stderr)


@pytest.mark.skipif(shutil.which("yosys") is None, reason="yosys is not installed (make rtl-tools): nothing was synthesised")
@pytest.mark.parametrize("module", MODULES)
def test_yosys_synthesises(module: str) -> None:
    small = {"layer_norm": "-chparam CHANNELS 4", "attention_row": "-chparam CHANNELS 2 -chparam VALUES 2 -chparam KEYS 4"}
    script = f"read_verilog -sv {' '.join(sources(module))}; hierarchy -check -top {module} {small.get(module, '')}; "
    # to cells without a latch; the rest of synthesis takes minutes and knows no more about the source
    script += "proc; flatten; opt; check -assert; select -assert-none t:$dlatch t:$_DLATCH_*; stat"
    done = subprocess.run(["yosys", "-p", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert "Number of cells" in done.stdout


@needs_icarus
def test_the_page_leads_to_passing_testbenches(made: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    """The second and third command of docs/hardware.md on a smaller network; tests of the examples run the first."""
    text = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")
    commands = re.search(r"```sh\n(python examples/integer_network.py.*?)```", text, re.DOTALL)
    assert commands is not None
    first, *others = [shlex.split(line, comments=True) for line in commands[1].splitlines()]
    assert len(others) == 2 and first[:2] == ["python", "examples/integer_network.py"]
    made("class token")[1].save(tmp_path / first[2])
    assert qflash.load_model(tmp_path / first[2]).nodes
    for program, *arguments in others:
        name = {"qflash": ["-m", "qflash"], "python": [str(ROOT / arguments[0])]}[program]
        rest = arguments if program == "qflash" else arguments[1:]
        done = subprocess.run([sys.executable, *name, *rest], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    found = summary(done.stdout)
    kinds = [type(made("class token")[1].part(node.name)).__name__ for node in made("class token")[1].nodes]
    assert {module: each[0] for module, each in found.items()} == {
        "rescale": sum(kind in (*LINEAR, *GELU) for kind in kinds), "gelu": kinds.count("LinearGelu"),
        "layer_norm": kinds.count("LayerNorm"), "attention_row": kinds.count("Attention"),
    }  # fmt: skip
    assert set(kinds) - {*LINEAR, *GELU, *NORM, "Attention"} == {"First"}
    assert done.stdout.endswith("without a module here: 1 of First\n")
