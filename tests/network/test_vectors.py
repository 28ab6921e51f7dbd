"""Vectors for hardware: the files hold the golden cases' and the networks' integers, and the steps between them."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import qflash
from qflash.cli import app
from qflash.network import vectors
from qflash.network.vectors import Quantity, hex_lines, write_vectors
from qflash.specification import layers as op
from small_networks import build, draw

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "golden"
FILES = ("attention", "floats", "networks", "activations", "rotary", "norms", "texts")
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="only the repository has the golden vectors")


def manifest(folder: pathlib.Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def read_hex(folder: pathlib.Path, entry: dict[str, Any]) -> np.ndarray:
    """Return what a testbench reads: a width's bits, as a number by the manifest's word about the sign."""
    width = entry["width"]
    numbers = [int(line, 16) for line in (folder / entry["files"]["hex"]).read_text().split()]
    assert all(0 <= number < 1 << width for number in numbers)
    if entry["signed"]:
        numbers = [number - (number >> (width - 1) << width) for number in numbers]
    return np.array(numbers, dtype=np.int64).reshape(entry["shape"])


def read_all(folder: pathlib.Path) -> dict[tuple[str, str], np.ndarray]:
    """Return the tensors of a case by kind and name, each within its bounds."""
    found = {}
    for entry in manifest(folder)["tensors"]:
        x = read_hex(folder, entry)
        if entry["bounds"] and x.size:
            assert entry["bounds"][0] <= x.min() and x.max() <= entry["bounds"][1], entry["name"]
        found[entry["kind"], entry["name"]] = x
    return found


def bits_of(x: torch.Tensor) -> np.ndarray:
    """Return a stored tensor as files of vectors hold it."""
    if x.is_floating_point():
        kind = {2: torch.int16, 4: torch.int32}[x.element_size()]
        return x.view(kind).numpy().astype(np.int64) & ((1 << 8 * x.element_size()) - 1)
    return x.numpy().astype(np.int64)


@pytest.mark.parametrize("name", FILES)
def test_files_hold_what_the_golden_file_holds(name: str, tmp_path: pathlib.Path) -> None:
    source = GOLDEN / f"{name}.safetensors"
    written = write_vectors(source, tmp_path / "out")
    with safe_open(source, framework="pt") as file:
        about = json.loads(file.metadata()["cases"])
    stored = load_file(source)
    single = [case for case in written if not case.startswith("network/")]
    assert single == [case for case in about if about[case]["operation"] != "network"]
    for case in single[::7]:
        found = read_all(tmp_path / "out" / case)
        parts = {"in": "input", "out": "output"}
        wanted = {key[len(case) + 1 :]: x for key, x in stored.items() if key.startswith((f"{case}/in/", f"{case}/out/"))}
        assert {f"{'in' if kind == 'input' else 'out'}/{role}" for kind, role in found} == set(wanted)
        for key, x in wanted.items():
            part, role = key.split("/", 1)
            bits = bits_of(x)
            # a golden file has bfloat16 as int16
            is_output = part == "out" and role == "output" and about[case]["parameters"].get("output") == "bfloat16"
            if is_output or (part == "in" and role in about[case].get("bfloat16", ())):
                bits &= 0xFFFF
            assert np.array_equal(found[parts[part], role], bits), (case, key)
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert [each["name"] for each in index["cases"]] == written


def test_steps_of_gelu_are_those_of_the_document(tmp_path: pathlib.Path) -> None:
    write_vectors(GOLDEN / "networks.safetensors", tmp_path / "out", cases=["gelu/40"], trace=True)
    found = read_all(tmp_path / "out" / "gelu" / "40")
    parameters = manifest(tmp_path / "out" / "gelu" / "40")["parameters"]
    step = {name: x for (kind, name), x in found.items() if kind == "step"}
    given = {name: x for (kind, name), x in found.items() if kind == "input"}
    # docs/integer_network.md, written down once more
    acc = given["x"] @ given["weight"].T
    u = (((acc << parameters["left"]) + given["bias"]) * given["multiplier"] + (1 << 31)) >> 32
    r = np.maximum(4096 - abs(u), 0)
    z = (r * r + 256) >> 9
    w = (z * (59898 - 10 * r) + (1 << 14)) >> 15
    h = (w << 2) + (18588 - 23 * r)
    g = np.clip(u, 0, 2**17 - 1) - ((w * h + (1 << 19)) >> 20)
    wide = g * given["gelu_multiplier"] + given["gelu_offset"]
    y = np.clip(wide >> parameters["gelu_shift"], -128, 127)
    names = "acc", "GELU: u", "GELU: r", "GELU: z", "GELU: w", "GELU: h", "GELU: g", "f M + B", "y"
    for name, x in zip(names, (acc, u, r, z, w, h, g, wide, y), strict=True):
        assert np.array_equal(step[name], x), name
    assert np.array_equal(found["output", "output"], y)
    assert list(step) == ["acc", "(acc << left) + b", "rescale(acc)", *names[1:]]


def test_steps_of_attention_lead_to_its_output(tmp_path: pathlib.Path) -> None:
    write_vectors(GOLDEN / "attention.safetensors", tmp_path / "out", cases=["keys/default-65"], trace=True)
    folder = tmp_path / "out" / "keys" / "default-65"
    step = {name: x for (kind, name), x in read_all(folder).items() if kind == "step"}
    constants = manifest(folder)["constants"]
    scores = step["query"] @ step["key"].swapaxes(-1, -2)
    assert np.array_equal(step["S"], scores) and np.array_equal(step["m"], scores.max(-1, keepdims=True))
    t = (step["m"] - scores) * step["M"] + (((constants["c0"] << step["F"]) + 511) >> 9)
    assert np.array_equal(step["t"], t)
    rounded = (step["w"] + 64) >> 7
    assert np.array_equal(step["l"], rounded.sum(-1, keepdims=True))
    assert np.array_equal(step["L"], step["w"].sum(-1, keepdims=True))
    assert np.array_equal(step["O"], rounded @ step["value"])
    missing = (step["L or l"] - 128 * step["l"]) >> 8
    wide = step["O"] + missing * step["twice the mean of V"]
    assert np.array_equal(step["O with the missing mass"], wide)
    aligned = np.where(step["B"] <= 24, wide << np.maximum(24 - step["B"], 0), wide >> np.maximum(step["B"] - 24, 0))
    assert np.array_equal(step["O << (24 - B)"], aligned)
    assert np.array_equal(step["mul(x, R, 32)"], (step["x"] * step["R"] + (1 << 31)) >> 32)
    high, shift = (aligned * step["mul(x, R, 32)"]) >> 32, step["e - 11"]
    out = np.clip(np.where(shift > 0, ((high >> np.maximum(shift - 1, 0)) + 1) >> 1, high), -128, 127)
    assert np.array_equal(step["out"], out)


def test_every_golden_operation_with_steps_is_traced(tmp_path: pathlib.Path) -> None:
    """Those without are steps themselves, or move elements: the documents name nothing inside them."""
    without = set()
    for name in FILES:
        write_vectors(GOLDEN / f"{name}.safetensors", tmp_path / name, trace=True)
        for path in (tmp_path / name).rglob("manifest.json"):
            case = manifest(path.parent)
            if not any(entry["kind"] == "step" for entry in case["tensors"]):
                without.add(case["operation"])
    assert without == {
        "score_multiplier", "column_multiplier", "exponential", "reciprocal", "output_ratio", "multiply_add", "quantize",
        "quantize_with_scale", "quantize_bias", "inverse_root", "row_constants", "patches", "windows", "First", "Join", "Widen",
        "Tokens", "token_embedding", "select_token", "SelectToken",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["class token", "swin", "query and key norms"])
def test_nodes_of_a_network(kind: str, made: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    model, network = made(kind)[:2]
    images = draw(model, 2, seed=3)
    network.save(tmp_path / "network.safetensors")
    np.save(tmp_path / "images.npy", images.numpy())
    names = write_vectors(
        tmp_path / "network.safetensors", tmp_path / "out", images=tmp_path / "images.npy", trace=True, formats=["hex", "npy"]
    )
    assert names == [node.name for node in network.nodes]
    seen: dict[str, torch.Tensor] = {"images": images}
    network.run(images, lambda name, x: seen.update({name: x.clone()}))
    for node in network.nodes:
        folder = tmp_path / "out" / node.name
        about, found = manifest(folder), read_all(folder)
        assert about["operation"] == type(network.part(node.name)).__name__
        assert np.array_equal(found["output", "output"], seen[node.name].numpy())
        inputs = [x for (kind, _), x in found.items() if kind == "input"]
        assert len(inputs) == len(node.inputs) == len(about["parameters"]["inputs"])
        for x, name in zip(inputs, node.inputs, strict=True):
            assert np.array_equal(x, seen[name].numpy())
        constants = {name: x for (kind, name), x in found.items() if kind == "constant"}
        assert constants.keys() == network.part(node.name).tensors().keys()
        for entry in about["tensors"]:
            saved = np.load(folder / entry["files"]["npy"])
            assert np.array_equal(saved.astype(np.int64), read_hex(folder, entry))
    norm = next(node.name for node in network.nodes if type(network.part(node.name)).__name__ == "LayerNorm")
    by = op.row_constants(network.part(norm).gain.numel())
    assert manifest(tmp_path / "out" / norm)["constants"]["row_inverse"] == by.inverse


def test_without_images_a_network_gets_one_by_the_formula(made: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    network = made("class token")[1]
    network.save(tmp_path / "network.safetensors")
    assert write_vectors(tmp_path / "network.safetensors", tmp_path / "out", cases=["head*"]) == ["head"]
    from qflash.network.onnx_check import self_test_images

    logits = network(self_test_images(1, *network.image))
    assert np.array_equal(read_all(tmp_path / "out" / "head")["output", "output"], logits.numpy())


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_c_program_reads_the_same_numbers(tmp_path: pathlib.Path) -> None:
    write_vectors(
        GOLDEN / "networks.safetensors", tmp_path / "out", cases=["layer-norm/7-int32"], trace=True, formats=["hex", "c"]
    )
    folder = tmp_path / "out" / "layer-norm" / "7-int32"
    (tmp_path / "main.c").write_text(
        '#include <stdio.h>\n#include "case.h"\nint main(void) {\n'
        '    for (int i = 0; i < STEP_V_SIZE; i++) printf("%lld ", (long long)step_V[i]);\n'
        '    for (int i = 0; i < OUT_output_SIZE; i++) printf("%lld ", (long long)out_output[i]);\n'
        "    return PARAM_shift != 4 || STEP_V_WIDTH != 47;\n}\n"
    )
    program = tmp_path / "main"
    subprocess.run(["cc", "-Wall", "-I", folder, tmp_path / "main.c", "-o", program], check=True)
    printed = [int(word) for word in subprocess.run([program], capture_output=True, check=True).stdout.split()]
    found = read_all(folder)
    assert printed == [*found["step", "V"].ravel().tolist(), *found["output", "output"].ravel().tolist()]


@pytest.mark.parametrize(
    ("width", "signed", "values", "lines"),
    [
        (19, True, [-1, -(1 << 18), 5], "7ffff\n40000\n00005\n"),
        (1, False, [1, 0], "1\n0\n"),
        (8, True, [-128, 127], "80\n7f\n"),
    ],
)
def test_hex_is_twos_complement_of_the_width(width: int, signed: bool, values: list[int], lines: str) -> None:
    assert hex_lines(Quantity("step", "x", None, np.array(values), width, signed, None)) == lines


def test_the_least_numbers_have_literals_in_c() -> None:
    for bits, literal in ((8, "-128"), (32, "(-2147483647 - 1)"), (64, "(-9223372036854775807LL - 1)")):
        x = Quantity("step", "x", None, np.array([-(1 << (bits - 1))], dtype=np.int64), bits, True, None)
        assert vectors._c_array("x", x) == f"static const int{bits}_t x[1] = {{\n    {literal}\n}};\n"


def test_a_damaged_golden_file_is_named(tmp_path: pathlib.Path) -> None:
    source = GOLDEN / "networks.safetensors"
    tensors = load_file(source)
    with safe_open(source, framework="pt") as file:
        header = file.metadata()
    tensors["gelu/40/out/output"][0, 0] ^= 1
    save_file(tensors, tmp_path / "golden.safetensors", metadata=header)
    write_vectors(tmp_path / "golden.safetensors", tmp_path / "untraced", cases=["gelu/40"])
    with pytest.raises(ValueError, match="gelu/40 of the golden file has other outputs"):
        write_vectors(tmp_path / "golden.safetensors", tmp_path / "out", cases=["gelu/*"], trace=True)


def test_bad_arguments_are_named(made: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    golden = GOLDEN / "networks.safetensors"
    made("class token")[1].save(tmp_path / "network.safetensors")
    (tmp_path / "text").write_text("no vectors")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    np.save(tmp_path / "small.npy", np.zeros((1, 3, 8, 8), dtype=np.uint8))
    np.save(tmp_path / "floats.npy", np.zeros((1, 3, 32, 32), dtype=np.float32))
    new = tmp_path / "new"
    for arguments, options, message in [
        ((tmp_path / "text", new), {}, "neither golden vectors nor an integer network"),
        ((golden, tmp_path / "full"), {}, "output must be a new or an empty folder"),
        ((golden, new), {"formats": ["vhdl"]}, "formats must be of hex, npy, c, got 'vhdl'"),
        ((golden, new), {"formats": []}, "formats must name at least one"),
        ((golden, new), {"images": tmp_path / "small.npy"}, "images are for networks"),
        ((golden, new), {"cases": ["gelu/40", "relu/*"]}, "has a name like 'relu/\\*'"),
        ((tmp_path / "network.safetensors", new / "a"), {"images": tmp_path / "small.npy"}, "images must"),
        ((tmp_path / "network.safetensors", new / "b"), {"images": tmp_path / "text"}, "images must be a .npy file"),
    ]:
        with pytest.raises(ValueError, match=message):
            write_vectors(*arguments, **options)
    with pytest.raises(TypeError, match="images"):
        write_vectors(tmp_path / "network.safetensors", new / "c", images=tmp_path / "floats.npy")
    with pytest.raises(FileNotFoundError, match="no file of golden vectors"):
        write_vectors(tmp_path / "missing", new)


def test_the_command(tmp_path: pathlib.Path) -> None:
    source = str(GOLDEN / "networks.safetensors")
    arguments = [
        "vectors",
        source,
        "-o",
        str(tmp_path / "out"),
        "--case",
        "gelu/*",
        "--trace",
        "--format",
        "hex",
        "--format",
        "c",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and result.output.strip() == f"4 cases in {tmp_path / 'out'}"
    assert (tmp_path / "out" / "gelu" / "3" / "case.h").is_file() and (tmp_path / "out" / "gelu" / "3" / "case.svh").is_file()
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 1 and "output must be a new or an empty folder" in again.output


def test_a_network_with_parts_in_floating_point_is_refused(tmp_path: pathlib.Path) -> None:
    model = build("vit", num_classes=10)
    network = qflash.quantize_model(model, [draw(model, 4)], keep_float=["blocks.1.mlp"])
    network.save(tmp_path / "network.safetensors")
    with pytest.raises(ValueError, match="integers only"):
        write_vectors(tmp_path / "network.safetensors", tmp_path / "out")
