"""``qflash-lab energy``: the arithmetic with a counter of its own; NVML's where there is a GPU."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from typer.testing import CliRunner

from qflash_lab.bench import console, energy, nvml
from qflash_lab.bench import methods as bench_methods
from qflash_lab.bench import problems as bench_problems
from qflash_lab.cli import app


class FakeGpu:
    """A GPU of constant power whose counter moves every ``tick`` seconds; a call takes ``call`` seconds."""

    def __init__(self, watts: float, tick: float, call: float) -> None:
        self.watts, self.tick, self.call, self.now = watts, tick, call, 0.0371

    def read(self) -> float:
        return self.watts * self.tick * int(self.now / self.tick)

    def clock(self) -> float:
        return self.now

    def work(self) -> int:
        self.now += 10 * self.call
        return 10


@pytest.mark.parametrize(("watts", "tick"), [(300.0, 0.1), (700.0, 0.02), (120.0, 0.0001)])
def test_energy_per_call(watts: float, tick: float) -> None:
    gpu = FakeGpu(watts, tick, call=10e-6)
    reading = energy.integrate(gpu.read, gpu.work, 2.0, gpu.clock)
    assert reading.seconds >= 2.0
    assert reading.calls == pytest.approx(reading.seconds / 10e-6, abs=1)
    # one piece of work (100 us) at either end, not one tick (up to 100 ms)
    assert reading.joules / reading.calls == pytest.approx(watts * 10e-6, rel=2e-4)
    assert reading.watts == pytest.approx(watts, rel=2e-4)


def test_counter_that_stands_still() -> None:
    gpu = FakeGpu(0.0, 1.0, call=1e-3)
    with pytest.raises(nvml.NvmlError, match="stood still"):
        energy.integrate(gpu.read, gpu.work, 1.0, gpu.clock)


def test_the_device_is_busy_while_the_counter_is_read() -> None:
    queued: list[int] = []
    done: list[int] = []

    class Marker:
        def __init__(self) -> None:
            self.place = len(queued)

        def synchronize(self) -> None:
            done.extend(queued[len(done) : self.place])

    work = energy.Busy(lambda: queued.append(1), 7, Marker)
    calls = 0
    for _ in range(5):
        calls += work()
        assert len(queued) > len(done) and calls == 7 * len(done)


def test_summary_and_ratio() -> None:
    readings = [
        energy.Reading(600.0, 2.0, 1_000_000),
        energy.Reading(660.0, 2.0, 1_000_000),
        energy.Reading(620.0, 2.0, 1_000_000),
    ]
    row = energy.summarise(readings, idle_watts=100.0)
    assert (row["uj"], row["uj_min"], row["uj_max"], row["uj_above_idle"]) == (620.0, 600.0, 660.0, 420.0)
    assert (row["median_us"], row["watts"], row["calls"]) == (2.0, 310.0, 3_000_000)
    base = dict.fromkeys(energy.FIELDS) | {"workload": "A2", "batch": 8, "bias": False}
    rows = [base | {"method": "sdpa flash", "uj": 1000.0}, base | {"method": "ours", "uj": 600.0}, base | {"method": "failed"}]
    energy.add_ratios(rows)
    assert [row["ratio"] for row in rows] == [1.0, 0.6, None]


def test_needs_a_gpu() -> None:
    result = CliRunner().invoke(app, ["energy", "--device", "cpu"])
    assert result.exit_code == 2
    assert "there is no GPU here" in result.output


def test_missing_pynvml_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(nvml.NvmlError, match="pip install nvidia-ml-py"):
        nvml.Gpu(torch.device("cuda", 0))
    assert "not installed" in nvml.snapshot(torch.device("cuda", 0))


def test_state_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def refuse(*_: object) -> int:
        raise NVMLError("Not Supported")

    library = types.SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetClockInfo=lambda handle, which: 1000 * which,
        nvmlDeviceGetMaxClockInfo=lambda handle, which: 1980,
        nvmlDeviceGetPowerUsage=lambda handle: 123_400,
        nvmlDeviceGetEnforcedPowerLimit=refuse,
        nvmlDeviceGetTemperature=lambda handle, which: 33,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: 5_500 if handle == "GPU-abc" else 0,
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="abc"))
    gpu = nvml.Gpu(torch.device("cuda", 0))
    assert gpu.energy() == 5.5
    state = gpu.state()
    assert (state["power_w"], state["memory_clock_mhz"], state["power_limit_w"]) == (123.4, 2000, None)
    library.nvmlDeviceGetTotalEnergyConsumption = refuse
    with pytest.raises(nvml.NvmlError, match="does not report its energy: Not Supported"):
        gpu.energy()


@pytest.mark.gpu
def test_energy_on_the_gpu() -> None:
    pytest.importorskip("pynvml")
    device = console.pick_device("cuda")
    methods = bench_methods.select(bench_methods.make_methods(device), ("sdpa flash", "qflash int8"))
    problems = bench_problems.make_problems(("A2",), (), (8,))
    record = energy.run_energy(problems, methods, dtype=torch.float16, device=device, seconds=0.5, rounds=1)
    assert 10 < record["idle_watts"] < 500
    for row in record["rows"]:
        assert row["error"] is None
        assert row["uj"] > row["uj_above_idle"] > 0
        assert row["watts"] > record["idle_watts"]
    assert record["rows"][1]["ratio"] == pytest.approx(record["rows"][1]["uj"] / record["rows"][0]["uj"], abs=1e-3)
