"""qflash.warmup: what it notes of a model, its processes, and the lengths that it keeps."""

from __future__ import annotations

import io
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

import qflash
from helpers import same_bits
from qflash import precompile
from qflash.kernels import launch_recorder, lengths

ECHO = "import sys\nfor line in sys.stdin: print('' if 'good' in line else 'odd', flush=True)"


def layer(qkv: torch.Tensor) -> torch.Tensor:
    """Attention of packed query, key and value (batch, tokens, 3, heads, channels), twice."""
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return qflash.attention(query, key, value) + qflash.attention(query, key, value, backend="triton")


def packed(tokens: int) -> torch.Tensor:
    return torch.randn(1, tokens, 3, 2, 16)


@pytest.fixture
def no_lengths(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("_first", "_expected"):
        monkeypatch.setattr(lengths, name, set())
    monkeypatch.setattr(lengths, "_all", False)
    lengths._kept.cache_clear()
    return tmp_path / "qflash" / "lengths.json"


def test_calls_are_noted_and_not_made(plans: dict[object, object], monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []
    found = precompile.note_calls(lambda x: outputs.append(layer(x)), (packed(70), (packed(33),), packed(70)))
    assert not plans and all(not out.any() for out in outputs)
    calls = [json.loads(call) for call in found]
    assert [name for name, _ in calls] == ["qflash.attention.default"] * 4
    assert precompile.rows_of(found) == {33, 70}
    query = calls[0][1][0]
    assert query == {"shape": [1, 2, 70, 16], "stride": [70 * 96, 16, 96, 1], "dtype": "float32"}
    assert {str(device) for device in found.values()} == {"cpu"}


def test_what_a_call_launches_is_compiled_and_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(
        launch_recorder.KernelLaunch,
        "launcher",
        lambda self: compiled.append(self.kernel.__name__),  # no GPU to load it
    )
    calls = [call for call in precompile.note_calls(layer, (packed(20),)) if '"triton"' in call]
    assert len(calls) == 1
    assert precompile.compile_call(calls[0], torch.device("cpu")) == len(compiled) > 0


def echo(device: torch.device, program: str = ECHO) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("processes", [1, 3, 8])
def test_processes_share_the_calls(processes: int) -> None:
    ticks: list[None] = []
    calls = dict.fromkeys([f"good {i}" for i in range(5)] + ["bad"], torch.device("cpu"))
    wrong = precompile.compile_in_processes(calls, processes, lambda: ticks.append(None), echo)
    assert wrong == ["odd"] and len(ticks) == len(calls)


def test_a_process_answers_each_call_with_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made: list[Any] = []

    def compile_call(call: str, device: torch.device) -> int:
        made.append((call, device))
        if "bad" in call:
            raise ValueError("no room\nfor it")
        return 1

    monkeypatch.setattr(precompile, "compile_call", compile_call)
    monkeypatch.setattr(lengths, "expect_all", lambda: made.append("every length"))
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    monkeypatch.setattr(sys, "argv", ["-c", "cuda:1"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("good\nbad\ngood\n"))
    precompile.serve()
    device = torch.device("cuda", 1)
    assert made == ["every length", device, ("good\n", device), ("bad\n", device), ("good\n", device)]
    assert capsys.readouterr().out == "\nValueError: no room for it\n\n"


def test_arguments_are_read_as_they_were_spelled() -> None:
    x = torch.zeros(3, 4, dtype=torch.int8).mT
    arguments = [x, torch.float16, (1, [2, torch.int8]), None, 0.5, "auto", True]
    got = precompile._read(json.loads(json.dumps(precompile._spell(arguments))), torch.device("meta"))
    assert (got[0].shape, got[0].stride(), got[0].dtype, got[0].device.type) == (x.shape, x.stride(), x.dtype, "meta")
    assert got[1:] == [torch.float16, [1, [2, torch.int8]], None, 0.5, "auto", True]


def test_a_process_that_ends_is_told_of() -> None:
    calls = dict.fromkeys(["good 0", "good 1"], torch.device("cpu"))
    wrong = precompile.compile_in_processes(calls, 1, lambda: None, lambda device: echo(device, "pass"))
    assert wrong == ["the process ended"]


def test_on_a_cpu_the_model_just_runs(no_lengths: pathlib.Path) -> None:
    x, seen = packed(40), []
    assert qflash.warmup(lambda x: seen.append(layer(x)), x, progress=False) == 0
    assert not seen[0].any() and same_bits(seen[1], layer(x))
    assert not no_lengths.exists()


def test_a_gpus_calls_go_to_processes_and_their_lengths_are_kept(
    no_lengths: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[Any] = []

    def compile_all(calls: dict[str, torch.device], processes: int, tick: Any) -> list[str]:
        handed.append((list(calls), processes))
        return []

    noted = precompile.note_calls(layer, (packed(601), packed(402)))
    on_gpu = dict.fromkeys(noted, torch.device("cuda", 0))
    monkeypatch.setattr(precompile, "note_calls", lambda *of: on_gpu)
    monkeypatch.setattr(precompile, "compile_in_processes", compile_all)
    assert qflash.warmup(layer, packed(20), processes=3, progress=False) == 4
    assert handed == [(list(noted), 3)]
    assert json.loads(no_lengths.read_text()) == {"lengths": [402, 601]}
    monkeypatch.setattr(lengths, "MOST_LENGTHS", 0)
    monkeypatch.setattr(lengths, "_expected", set())  # as in a later process
    assert [lengths.worth_compiling(keys) for keys in (601, 402, 403)] == [True, True, False]
    lengths.keep([700])
    assert json.loads(no_lengths.read_text()) == {"lengths": [402, 601, 700]}


@pytest.mark.parametrize("text", ["", "[]", '{"lengths": 3}', '{"lengths": ["577"]}', '{"lengths": [true]}', "{" * 9])
def test_a_damaged_list_is_ignored(text: str, no_lengths: pathlib.Path) -> None:
    no_lengths.parent.mkdir()
    no_lengths.write_text(text)
    with pytest.warns(UserWarning, match="is no list of lengths and is ignored"):
        assert lengths.worth_compiling(577)  # one of the first
    lengths.keep([577])
    assert json.loads(no_lengths.read_text()) == {"lengths": [577]}


def test_a_folder_that_cannot_be_written_to_is_told_of(no_lengths: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = dict.fromkeys(precompile.note_calls(layer, (packed(601),)), torch.device("cuda", 0))
    monkeypatch.setattr(precompile, "note_calls", lambda *of: on_gpu)
    monkeypatch.setattr(precompile, "compile_in_processes", lambda *of: ["CompilationError: no"])
    no_lengths.parent.write_text("a file")
    with pytest.warns(UserWarning, match="calls|lengths") as told:
        qflash.warmup(layer, packed(20), progress=False)
    texts = " ".join(str(each.message) for each in told)
    assert "2 of 2 calls were not compiled" not in texts and "1 of 2 calls were not compiled for beforehand: Comp" in texts
    assert "later processes will not know the lengths" in texts
    assert lengths.worth_compiling(601)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3, packed(20)), TypeError, "model must be a module or function, got int"),
        ((layer,), ValueError, "examples must be inputs of the model, at least one"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        qflash.warmup(*arguments)


@pytest.mark.parametrize("processes", [0, -1, 1.0, True])
def test_bad_numbers_of_processes(processes: Any) -> None:
    with pytest.raises(ValueError, match="processes must be an integer of at least 1 or None"):
        qflash.warmup(layer, packed(20), processes=processes)


def test_tensors_on_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = precompile.note_calls(layer, (packed(20),))
    monkeypatch.setattr(precompile, "note_calls", lambda *of: {call: torch.device("cuda", i) for i, call in enumerate(noted)})
    with pytest.raises(ValueError, match="model must be on one GPU, got cuda:0, cuda:1"):
        qflash.warmup(layer, packed(20))
