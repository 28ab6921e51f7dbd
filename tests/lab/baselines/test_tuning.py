"""Tiles of the baselines' kernels: the table, what is measured, and that every candidate computes the same."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import load_benchmark, make_inputs
from qflash.kernels.launch_recorder import KernelLaunch
from qflash_lab.baselines import float_softmax_kernels, i_vit, i_vit_kernels, tuning
from qflash_lab.baselines.integer import requantize
from qflash_lab.baselines.tuning import BaselineShape

TUNE = load_benchmark("tune_baselines")
SIZES = (1, 5, 16, 49, 64, 197, 256, 577, 1024, 1370, 4096, 16384)


# --- the table ------------------------------------------------------------------------------------------------


def test_table_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    assert tuning.read_table(path) == {}
    first, second = (tuning.table_key("card", "float_softmax", "int8", BaselineShape(heads, 9, 9, 8, 8)) for heads in (1, 2))
    tuning.write_table(path, {first: (16, 32, 2, 2)}, {"by": "test"})
    tuning.write_table(path, {second: [32, 32, 4, 3]}, {"by": "test"})
    assert tuning.read_table(path) == {first: (16, 32, 2, 2), second: (32, 32, 4, 3)}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tiles": 3}', '{"tiles": {"a": 3}}', '{"tiles": {"a": [1.5]}}'])
def test_what_is_no_table_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"table\.json"):
        tuning.read_table(path)


def test_committed_table_has_tiles_of_known_kernels() -> None:
    lengths = {"float_softmax": 4, "i_vit_scores": 5, "i_vit_shiftmax": 2, "i_vit_values": 5}
    for key, tiles in tuning.read_table(tuning.TABLE).items():
        assert len(tiles) == lengths[key.split("|")[1]]


def test_lookup_falls_back_to_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = BaselineShape(6, 197, 197, 64, 64)
    tiles = (32, 64, 4, 2)
    monkeypatch.setattr(tuning, "_table", lambda: {tuning.table_key("card", "float_softmax", "int8", shape): tiles})
    monkeypatch.setattr(tuning, "device_name", lambda index: "card")
    cuda = torch.device("cuda", 0)
    assert tuning.tuned_tiles("float_softmax", "int8", shape, cuda) == tiles
    assert tuning.tuned_tiles("float_softmax", "float16", shape, cuda) is None
    assert tuning.tuned_tiles("float_softmax", "int8", shape._replace(heads=7), cuda) is None
    assert tuning.tuned_tiles("float_softmax", "int8", shape, torch.device("cpu")) is None
    query = torch.empty((1, 6, 197, 64), dtype=torch.int8, device="meta")
    assert float_softmax_kernels.tiles_for("int8", query, query, 64) == float_softmax_kernels.choose_tiles(197, 197, 64)


# --- candidates -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [16, 32, 64, 72, 128])
def test_candidates_begin_with_the_rule(channels: int) -> None:
    for queries, keys in itertools.product(SIZES, SIZES):
        rule = float_softmax_kernels.choose_tiles(queries, keys, channels)
        found = tuning.float_softmax_candidates(rule, BaselineShape(4, queries, keys, channels, channels))
        assert found[0] == rule and 1 <= len(found) <= 40 and len(set(found)) == len(found)
        assert {tiles[1] for tiles in found} <= {32, 64, 128}
        width = i_vit_kernels.aligned_keys(keys)
        product = i_vit_kernels.choose_product_tiles(keys, channels)
        found = tuning.product_candidates(product, queries, width, channels)
        assert found[0] == product and len(set(found)) == len(found) <= 40
        shiftmax = i_vit_kernels.choose_shiftmax_tiles(width)
        assert tuning.shiftmax_candidates(shiftmax, width)[0] == shiftmax


@pytest.mark.parametrize("method", TUNE.NAMES)
def test_candidates_compute_the_same(method: str) -> None:
    shape = TUNE.Shape("small", (1, 2, 40, 32), 70)
    operands = TUNE.draw(shape, torch.device("cpu"))
    lists = TUNE.candidates(method, shape)
    expected = None
    for index in range(0, max(map(len, lists)), 5):
        calls, out = TUNE.launches(method, operands, tuple(of[min(index, len(of) - 1)] for of in lists))
        TUNE.run_all(calls)()
        if expected is None:
            expected = out.clone()
        assert bool(expected.any()) and TUNE.agrees(method, out, expected), index


def test_differences_are_found() -> None:
    ones = torch.ones(4, 4)
    assert TUNE.agrees("i-vit", ones, ones) and not TUNE.agrees("i-vit", ones + 1e-6, ones)
    assert TUNE.agrees("qattn", ones * 1.01, ones) and not TUNE.agrees("qattn", ones * 1.1, ones)
    assert not TUNE.agrees("qattn", ones * float("nan"), ones)


# --- I-ViT's kernels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [5, 49, 64, 197])
def test_rows_of_scores_are_aligned_and_zero_behind_the_keys(keys: int) -> None:
    query, key, value = ((x * 30).round().clamp(-127, 127).to(torch.int8) for x in make_inputs(1, 2, 9, keys, 24))
    out = torch.empty_like(query)
    constants = TUNE.i_vit_constants(24, keys)
    calls = i_vit.kernel_calls(query, key, value, out, constants)
    scores, weights = (calls[1].arguments[name] for name in ("x_ptr", "out_ptr"))
    for x in (scores, weights):
        x.fill_(99)
    for call in calls:
        call.run()
    assert scores.shape[-1] % i_vit_kernels.ALIGNMENT == 0
    assert not scores[..., keys:].any() and not weights[..., keys:].any()
    wanted = requantize(query.long() @ key.long().mT, *constants.scores).clamp(-128, 127)
    assert torch.equal(scores[..., :keys].long(), wanted)
    wanted, bits = i_vit.shiftmax(i_vit.Scores(wanted, torch.tensor(1 / TUNE.UNIT, dtype=torch.float64), None))
    assert bits == 7 and torch.equal(weights[..., :keys].long(), wanted)
    assert torch.equal(out.long(), requantize(wanted @ value.long(), *constants.output).clamp(-128, 127))


@pytest.mark.parametrize("shift", [24, 31, 32, 33, 34, 45, 62])
@pytest.mark.parametrize("multiplier", [1 << 30, 1518500249, (1 << 31) - 1, 1 << 31])
def test_requantisation_in_32_bits_is_that_in_64(multiplier: int, shift: int) -> None:
    generator = torch.Generator().manual_seed(shift)
    a, b = (torch.randint(-128, 128, (1, 1, *size), generator=generator, dtype=torch.int8) for size in ((32, 64), (64, 32)))
    a[..., 0, :], a[..., 1, :], b[..., 0] = 127, -128, -128  # the largest sums of either sign
    out = torch.empty((1, 1, 32, 32), dtype=torch.int8)
    i_vit_kernels.product_call(a, b, out, multiplier, shift).run()
    # a fitted ratio is at most 127, so that shift is 24 or more
    assert torch.equal(out.long(), requantize(a.long() @ b.long(), multiplier, shift).clamp(-128, 127))


# --- benchmarks/tune_baselines.py -----------------------------------------------------------------------------


def test_shapes_are_those_that_are_measured() -> None:
    shapes = TUNE.shapes_of(TUNE.measure.RUNS)
    labels = {shape.label for shape in shapes}
    assert {"A1 b1", "A7 b64", "4x32x1024x64", "2x16x16384x128", "64x16x729x72"} <= labels
    assert len(shapes) == len({(shape.query, shape.keys) for shape in shapes})
    assert all(TUNE.takes("qattn", shape) for shape in shapes)
    assert not TUNE.takes("i-vit", next(shape for shape in shapes if shape.label == "2x32x16384x64"))


def test_jobs_are_what_is_compiled_apart() -> None:
    batches = [TUNE.Shape(f"b{batch}", (batch, 3, 49, 32), 49) for batch in (2, 3)]
    one, both = TUNE.jobs_of(batches[:1], ["qattn"]), TUNE.jobs_of(batches, ["qattn"])
    assert one and one == both
    assert {job.method for job in TUNE.jobs_of(batches, TUNE.NAMES)} == set(TUNE.NAMES)


def test_methods_are_checked() -> None:
    shape = TUNE.Shape("small", (1, 1, 16, 32), 16)
    with pytest.raises(ValueError, match="method must be one of"):
        TUNE.launches("nonsense", TUNE.draw(shape, torch.device("meta")), ((16, 32, 4, 2),))


def test_row_gives_entries_of_what_differs_from_the_rule() -> None:
    row: dict[str, Any] = {"method": "i-vit", "shape": "2x3x49x32", "keys": 49}
    row |= {
        "rule": [[64, 64, 32, 4, 3], [32, 4], [64, 32, 64, 4, 3]],
        "best": [[64, 64, 32, 4, 3], [64, 4], [64, 32, 64, 4, 3]],
    }
    assert TUNE.entries(row, "card") == {"card|i_vit_shiftmax|int8|6|49x49|32x32": (64, 4)}
    row = {"method": "qattn", "shape": "2x3x49x32", "keys": 49, "rule": [[64, 64, 4, 2]], "best": [[32, 64, 2, 2]]}
    assert TUNE.entries(row, "card") == {"card|float_softmax|bfloat16|6|49x49|32x32": (32, 64, 2, 2)}


def test_tuning_measures_and_keeps_the_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that likes few queries a program; every tenth candidate would do, but the shape is small."""

    class Clock:
        def __init__(self, call: Any) -> None:
            calls: list[KernelLaunch] = call.__closure__[0].cell_contents
            self.us = float(sum(launch.arguments["BLOCK_M"] for launch in calls))

        def sample(self) -> dict[str, float]:
            return {"us": self.us}

    monkeypatch.setattr(TUNE.runner.timers, "make_timer", lambda call, *_: Clock(call))
    shape = TUNE.Shape("small", (1, 1, 40, 32), 40)
    said: list[str] = []
    for method in TUNE.NAMES:
        row = TUNE.tune(method, shape, TUNE.draw(shape, torch.device("cpu")), said.append)
        assert row["best_us"] < row["rule_us"]
        assert all(best[0] <= rule[0] for best, rule in zip(row["best"], row["rule"], strict=True))
        assert TUNE.entries(row, "card")
    assert not said
