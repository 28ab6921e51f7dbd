"""What the package says of the machine it is on: GPUs, drivers, back ends and packages, there or not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qflash import backends, info, optional_packages, versions

GPUS = [
    SimpleNamespace(name="Large", major=9, minor=0, total_memory=141 << 30),
    SimpleNamespace(name="Old", major=7, minor=5, total_memory=3 << 29),
]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(GPUS))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: GPUS[torch.device(device).index])
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(backends, "_capability", lambda index: (GPUS[index].major, GPUS[index].minor))
    monkeypatch.setattr(backends, "triton_missing", lambda: None)


@pytest.mark.usefixtures("two_gpus")
def test_gpus_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    found = info.collect_info()
    assert found["cuda_unavailable"] is None
    _, large, old = found["devices"]
    assert (large["device"], large["name"], large["architecture"], large["memory_gib"]) == ("cuda:0", "Large", "sm_90", 141.0)
    assert (large["auto"], large["triton_unavailable"]) == ("triton", None)
    assert large["cpu_unavailable"] == "it runs on the CPU, not on cuda"
    assert (old["architecture"], old["memory_gib"], old["auto"]) == ("sm_75", 1.5, "reference")
    assert old["triton_unavailable"] == "sm_75 has no supported int8 tensor-core path (sm_80 or newer needed)"
    info.print_info()
    printed = capsys.readouterr().out
    assert 'cuda:0: Large, sm_90, 141.0 GiB; backend="auto" is triton\n' in printed
    assert "    triton: sm_75 has no supported int8 tensor-core path (sm_80 or newer needed)\n" in printed
    assert "No CUDA device" not in printed


@pytest.mark.usefixtures("two_gpus")
def test_gpus_of_others_take_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    chosen, reason = backends.auto_backend(torch.device("cuda", 0))
    assert chosen == "reference" and reason is not None and "ROCm" in reason
    assert backends.auto_backend(torch.device("mps")) == ("reference", None)
    with pytest.raises(ValueError, match=r"backend='triton' cannot run on mps: the kernels run on CUDA devices, not on mps"):
        backends.resolve_backend("triton", torch.device("mps"))
    with pytest.raises(ValueError, match=r"backend='cpu' cannot run on cuda:0: it runs on the CPU, not on cuda"):
        backends.resolve_backend("cpu", torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("built_with", "said"), [(None, "this build of PyTorch has no CUDA"), ("12.8", "PyTorch finds no NVIDIA GPU with a")]
)
def test_why_there_is_no_gpu(
    built_with: str | None, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_with)
    info.print_info()
    assert f"No CUDA device: {said}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 12.2.0",
            "580.159.04",
        ),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54", "535.54"),
        ("something else", None),
        (None, None),
    ],
)
def test_the_drivers_version_is_read(text: str | None, version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_text(path: pathlib.Path, **options: Any) -> str:
        assert str(path) == "/proc/driver/nvidia/version"
        if text is None:
            raise FileNotFoundError
        return text

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "read_text", read_text)
        assert versions.driver_version() == version


def not_there(name: str) -> Any:
    raise importlib.metadata.PackageNotFoundError(name)


def test_a_version_of_triton_without_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    silent = tmp_path / "__init__.py"
    silent.write_text("")
    for origin in (None, str(silent)):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, origin=origin: SimpleNamespace(origin=origin))
        with monkeypatch.context() as patch:
            patch.setattr(importlib.metadata, "version", lambda name: f"{name} 3.7")
            assert backends.triton_version() == "triton 3.7"
            patch.setattr(importlib.metadata, "version", not_there)
            assert backends.triton_version() is None
    assert versions.package_version("no-such-package") is None


def test_packages_are_named_as_pip_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["timm>=1.0.15; extra == 'timm'", "diffusers"])
    assert optional_packages.install_hint("timm", "diffusers", "sklearn") == 'pip install "timm>=1.0.15" diffusers scikit-learn'
    monkeypatch.setattr(importlib.metadata, "requires", not_there)
    assert optional_packages.install_hint("timm", "PIL") == "pip install timm pillow"
