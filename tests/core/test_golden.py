"""Golden vectors: the committed bits, by the reference, the back ends and the independent checker; and that errors show."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import cpu_driver
from golden_cases import CHECKER, FILES, GOLDEN, cases_of, differing, make_golden, needs_golden, require_equal
from helpers import DEVICE, load_script
from qflash.network.operators import OPERATORS

pytestmark = needs_golden


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", FILES)
def test_back_end_has_the_committed_bits(name: str, backend: str) -> None:
    if backend == "cpu" and shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    require_equal(differing(cases_of(name), backend), backend)


@pytest.mark.slow
@pytest.mark.parametrize("level", cpu_driver.LEVELS)
def test_kernels_of_every_instruction_set_have_the_committed_bits(tmp_path: pathlib.Path, level: str) -> None:
    """The C kernels in a program of their own, on Arm in an emulator."""
    one = cpu_driver.LEVELS[level]
    if reason := one.missing():
        pytest.skip(reason)
    program = cpu_driver.build(one, tmp_path, (), "-O0")
    library = cpu_driver.DriverLibrary([*([one.emulator] if one.emulator else []), str(program)], dict(os.environ))
    with cpu_driver.kernels_in(library):
        for name in FILES:
            require_equal(differing(cases_of(name), "cpu"), level)
    assert library.calls > 200


TRITON = {
    "attention": (
        "exponential/linear-15-floor", "exponential/quadratic-7-nearest", "mask/default-bias", "mask/accurate-marks",
        "mask/paper-bool", "keys/default-65",
        "value-scale/output-scale",
    ),
    "floats": ("attention/default-padding", "attention/accurate-causal", "bias/marks-float32", "quantize/centred-channel"),
    "networks": (
        "linear/int8-random-1", "linear/residual-random-0", "linear/ends-int8", "gelu/40", "gelu/tail", "layer-norm/7-int8",
        "layer-norm/3-int32", "layer-norm/1101-int32",
    ),
    "activations": ("silu/40", "silu/tail", "relu/2000", "linear/silu-extreme", "gated/gelu-int16", "gated/silu-int8"),
    "rotary": ("rotary/all-heads", "rotary/each-head", "rotary/ends", "head-norm/int8"),
    "norms": ("norm/rms-int8-65", "norm/rms-residual-16", "norm/layer-residual-150", "norm/rms-4096", "narrow/int8-14"),
    "texts": ("text-attention/paper-padding", "text-attention/default-causal", "text-attention/bias"),
}  # fmt: skip
"""For the interpreter, where a case takes a tenth of a second to one: each of these computes something of its own."""


TAKE_BACK_ENDS = (
    "quantize", "quantize_with_scale", "quantize_bias", "attention", "int8_attention", "linear", "linear_gelu",
    "linear_silu", "linear_relu", "gated", "layer_norm", "head_norm", "rotary", "norm", "narrow",
    "token_embedding", "select_token", "text_attention",
)  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_triton_has_the_committed_bits(name: str) -> None:
    cases = cases_of(name)
    if DEVICE.type == "cpu":
        chosen = {case: cases[case] for case in TRITON[name]}
    else:
        chosen = {case: about for case, about in cases.items() if name == "texts" or about.operation in TAKE_BACK_ENDS}
    require_equal(differing(chosen, "triton", DEVICE), "triton")


def test_message_says_what_a_change_of_bits_needs() -> None:
    name, case = next(iter(cases_of("attention").items()))
    wrong = {role: x + 1 for role, x in case.outputs.items()}
    found = differing({name: dataclasses.replace(case, outputs=wrong)}, "reference")
    with pytest.raises(AssertionError, match="a change of bits needs a new arithmetic version"):
        require_equal(found, "reference")


def test_committed_files_are_those_of_the_script() -> None:
    script = make_golden()
    assert list(cases_of("attention")) == list({**script.step_cases(), **script.int8_cases()})
    assert list(cases_of("floats")) == list(script.float_cases())
    layers = {
        "networks": (script.network_cases(), script.NETWORKS),
        "activations": (script.activation_cases(), script.ACTIVATION_NETWORKS),
        "rotary": (script.rotary_cases(), script.ROTARY_NETWORKS),
        "norms": (script.norm_cases(), script.NORM_NETWORKS),
        "texts": (script.text_cases(), script.TEXT_NETWORKS),
    }
    operators = set()
    for file, (cases, models) in layers.items():
        networks = [f"network/{name}" for name in models]
        assert list(cases_of(file)) == [*cases, *networks]
        operators |= {node["operator"] for name in networks for node in cases_of(file)[name].parameters["nodes"]}
    assert operators == set(OPERATORS)
    operations = {case.operation for name in FILES for case in cases_of(name).values()}
    assert operations == set(script.OPERATIONS)
    assert sum((GOLDEN / f"{name}.safetensors").stat().st_size for name in FILES) < 1_500_000


def test_checker_agrees_and_needs_nothing_of_the_package() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import checker; failed = checker.main(); "
        "print({'torch', 'qflash'} & set(sys.modules)); sys.exit(failed)"
    )
    files = [str(GOLDEN / f"{name}.safetensors") for name in FILES]
    done = subprocess.run([sys.executable, "-c", code, str(GOLDEN), *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[:-1] == [f"{file}: {len(cases_of(name))} cases, 0 mismatches" for name, file in zip(FILES, files, strict=True)]
    assert lines[-1] == "set()"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Return a function that runs the checker's command on files: its exit code and what it prints."""

    def run(*files: pathlib.Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [str(CHECKER), *map(str, files)])
        return load_script(CHECKER).main(), capsys.readouterr().out

    return run


Check = Callable[..., tuple[int, str]]


def test_checker_agrees_on_random_cases(tmp_path: pathlib.Path, check: Check) -> None:
    path = tmp_path / "random.safetensors"
    make_golden().write(path, make_golden().random_cases(12))
    assert check(path) == (0, f"{path}: 18 cases, 0 mismatches\n")


def changed(path: pathlib.Path, tensor: str = "", flip: int = 0, **entries: str) -> pathlib.Path:
    """Write a copy of the attention vectors with bits of a tensor's first byte flipped, or other entries in the header."""
    with safe_open(GOLDEN / "attention.safetensors", framework="numpy") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if tensor:
        tensors[tensor].view(np.uint8).reshape(-1)[0] ^= flip
    save_file(tensors, path, metadata=header | entries)
    return path


@pytest.mark.parametrize(
    ("name", "flip"), [("mask/default-bool/out/output", 1), ("output/float32/out/output", 1), ("step/reciprocal/in/D", 64)]
)
def test_checker_finds_a_flipped_bit(name: str, flip: int, tmp_path: pathlib.Path, check: Check) -> None:
    path = changed(tmp_path / "flipped.safetensors", name, flip)
    failed, text = check(path)
    assert failed == 1
    case = name.rsplit("/", 2)[0]
    assert text.count("MISMATCH") == 1 and text.startswith(f"MISMATCH {path}: {case} (")
    assert text.endswith(f"{path}: {len(cases_of('attention'))} cases, 1 mismatches\n")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"arithmetic_version": "99"}, "arithmetic version 99, this checker computes version 3"),
        ({"format": "another"}, "no golden vectors"),
        ({"cases": "{}"}, "0 cases"),
    ],
)
def test_checker_refuses_other_files(entries: dict[str, str], message: str, tmp_path: pathlib.Path, check: Check) -> None:
    failed, text = check(changed(tmp_path / "other.safetensors", **entries))
    assert failed == 1
    assert message in text


def test_checker_refuses_what_is_no_file(tmp_path: pathlib.Path, check: Check) -> None:
    (tmp_path / "text").write_text("no vectors")
    failed, text = check(tmp_path / "text", tmp_path / "missing")
    assert failed == 1
    assert text.count("ERROR") == 2


MUTATIONS = [
    ("attention", "return np.where(n > 0, ((a >> np.maximum(n - 1, 0)) + 1) >> 1, a)", "return a >> n"),
    ("attention", "(64 if rounding", "(63 if rounding"),
    ("attention", '"quadratic": {7: 303, 8: 301, 15: 299}', '"quadratic": {7: 303, 8: 303, 15: 299}'),
    ("attention", "(511 - f) ** 2 + 2**17", "(511 - f) ** 2 + 2**17 - 1"),
    ("attention", "((((m_K * m_C) >> 22) * m_Q) >> 22) << 3", "((((m_K * m_Q) >> 22) * m_C) >> 22) << 3"),
    ("attention", "1515870810", "1515870811"),
    ("attention", "((O * alpha) >> 24)", "-((-O * alpha) >> 24)"),
    ("attention", "and keys > 64", "and keys > 65"),
    ("attention", "missing = (L - 128 * l) >> 8", "missing = (L - 128 * l + 128) >> 8"),
    (
        "attention",
        "out = fused_multiply_add(average, value_scale, per_query_head(offset, heads))",
        "out = average * value_scale + per_query_head(offset, heads)",
    ),
    ("floats", "np.rint(np.where(np.isnan(exact)", "np.floor(0.5 + np.where(np.isnan(exact)"),
    ("floats", "np.rint(np.where(np.isnan(product)", "np.floor(0.5 + np.where(np.isnan(product)"),
    ("floats", "float32(1 / 127)", "float32(1 / 127.00001)"),
    ("attention", "hidden % len(tokens)", "(hidden + 1) % len(tokens)"),
    ("attention", "mul(x, R, 32)", "mulhi(x, R)"),
    ("networks", "return mul((acc << left) + b, R, 32)", "return mulhi((acc << left) + b, R)"),
    ("networks", "mul(r, r, 9)", "(r * r) >> 9"),
    ("networks", "mul(z, 59898 - 10 * r, 15)", "(z * (59898 - 10 * r)) >> 15"),
    ("networks", "654339257", "654339258"),
    ("networks", "mul(mul(x, x, 30), v, 30)", "mul((x * x) >> 30, v, 30)"),
    ("networks", "mul(inverse_root(v), K, 30)", "(inverse_root(v) * K) >> 30"),
    ("networks", "m = mul(S, I, i)", "m = (S * I) >> i"),
    ("networks", "(2 ** (i + 3) // C + 1) // 2", "2 ** (i + 2) // C"),
    ("networks", "// C) + 1) // 2", "// C)) // 2"),
    ("networks", "e & 511", "e & 510"),
    ("networks", "mul(C * h - S, 1 << (l + 5), 5)", "(((C * h - S) << (l + 5)) >> 5)"),
    ("networks", "mul(N, G, 28)", "((N * G) >> 28)"),
    ("networks", "59898", "59899"),
    ("norms", "S = h.sum(axis=-1, keepdims=True) if centred else 0", "S = h.sum(axis=-1, keepdims=True)"),
    ("norms", "m = mul(S, I, i) if centred else 0", "m = mul(h.sum(axis=-1, keepdims=True), I, i)"),
    ("norms", "saturate(out if residual is None else residual + out, bits)", "saturate(out, bits)"),
    ("norms", "rescale(h.astype(np.int64), left, b, R)", "rescale(h.astype(np.int64) + b, left, 0 * b, R)"),
    ("networks", "for column in (0, 1) for row in (0, 1)", "for row in (0, 1) for column in (0, 1)"),
    ("texts", "np.maximum(ids, 0) if padded", "np.abs(ids) % len(table) if padded"),
    ("texts", "positions[: ids.shape[1]]", "positions[-ids.shape[1] :]"),
    ("texts", "saturate(rows + positions", "saturate(rows + 0 * positions"),
    ("texts", "if is_it), 0)", "if is_it), len(row) - 1)"),
    ("texts", "for t, is_it in enumerate(row)", "for t, is_it in reversed([*enumerate(row)])"),
    ("texts", "(ids >= 0)[:, None, None, :", "(ids > -2)[:, None, None, :"),
    ("texts", "query[:, :, : first or tokens]", "query[:, :, -(first or tokens) :]"),
    ("texts", 'sizes.get("causal", False)', "False"),
    ("texts", "*parts, ids = parts", "*parts, _ = parts"),
]
"""A file, and a line of the checker with an error in it."""


@pytest.mark.parametrize(("name", "line", "wrong"), MUTATIONS, ids=[line for _, line, _ in MUTATIONS])
def test_checker_with_an_error_is_found_out(name: str, line: str, wrong: str) -> None:
    source = CHECKER.read_text(encoding="utf-8")
    assert line in source
    module = ModuleType("wrong_checker")
    exec(compile(source.replace(line, wrong), str(CHECKER), "exec"), module.__dict__)
    with np.errstate(all="ignore"):
        assert any(
            module.compare(outputs, module.OPERATIONS[operation](parameters, inputs))
            for _, operation, parameters, inputs, outputs in module.read(GOLDEN / f"{name}.safetensors")
        )
