"""What NVIDIA's management library (NVML) tells about a GPU: energy counter, power, clocks, temperature.

Through ``pynvml`` (package nvidia-ml-py), imported when asked for.
"""

from __future__ import annotations

from typing import Any

import torch

from qflash.optional_packages import install_hint


class NvmlError(RuntimeError):
    """NVML cannot be used here; the message says why and what to do."""


class Gpu:
    """NVML's view of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        """Open NVML.

        Args:
            device: a CUDA device.

        Raises:
            NvmlError: no ``pynvml``, no driver, or NVML does not know the device.
        """
        try:
            import pynvml
        except ImportError:
            raise NvmlError(f"NVML is reached through pynvml, which is not installed: {install_hint('pynvml')}") from None
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = self._find(device)
        except pynvml.NVMLError as error:
            raise NvmlError(f"NVML does not answer: {error}") from error

    def _find(self, device: torch.device) -> Any:
        # CUDA_VISIBLE_DEVICES renumbers CUDA's devices, not NVML's: the UUID is the same in both
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        if uuid is not None:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return self._nvml.nvmlDeviceGetHandleByIndex(device.index or 0)

    def energy(self) -> float:
        """Return the energy used since the driver was loaded, in joules (the counter's unit is a millijoule).

        Raises:
            NvmlError: the GPU has no such counter (it came with Volta).
        """
        try:
            return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000.0
        except self._nvml.NVMLError as error:
            raise NvmlError(f"this GPU does not report its energy: {error}") from error

    def state(self) -> dict[str, Any]:
        """Return clocks (MHz), power (W), its limit and temperature (degrees Celsius); None for what NVML does not give."""
        nvml = self._nvml
        handle = self._handle
        readings = {
            "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "sm_clock_max_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000.0,
            "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000.0,
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        }
        found: dict[str, Any] = {}
        for name, read in readings.items():
            try:
                found[name] = read()
            except nvml.NVMLError:
                found[name] = None
        return found


def snapshot(device: torch.device) -> dict[str, Any] | str:
    """Return :meth:`Gpu.state`, or why there is none."""
    try:
        return Gpu(device).state()
    except NvmlError as error:
        return str(error)
