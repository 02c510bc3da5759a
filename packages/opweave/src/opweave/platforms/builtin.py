"""The built-in platforms, and the conditions under which they claim the machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from opweave.platforms import probes
from opweave.plugins import PLATFORM_API, Claim

_CPU_SCORE, _ACCELERATOR_SCORE = 0, 50


def cpu() -> Claim:
    """Claim any machine, with the lowest score."""
    return Claim(
        "opweave.platforms.cpu.CpuPlatform", PLATFORM_API, _CPU_SCORE, "every machine has it"
    )


def cuda() -> Claim | None:
    """Claim a machine with NVIDIA GPUs that torch can use."""
    return _claim("opweave.platforms.cuda.CudaPlatform", probes.cuda_devices(), "NVIDIA GPU")


def rocm() -> Claim | None:
    """Claim a machine with AMD GPUs that torch can use."""
    return _claim("opweave.platforms.cuda.RocmPlatform", probes.rocm_devices(), "AMD GPU")


def xpu() -> Claim | None:
    """Claim a machine with Intel GPUs that torch can use."""
    return _claim("opweave.platforms.xpu.XpuPlatform", probes.xpu_devices(), "Intel GPU")


def tpu() -> Claim | None:
    """Claim a machine with TPUs that PyTorch/XLA can use."""
    return _claim("opweave.platforms.tpu.TpuPlatform", probes.tpu_devices(), "TPU")


BUILTIN: Mapping[str, Callable[[], Claim | None]] = {
    "cpu": cpu,
    "cuda": cuda,
    "rocm": rocm,
    "tpu": tpu,
    "xpu": xpu,
}
"""Functions that return the claim of a platform, or None if the machine lacks its device."""


def _claim(name: str, devices: int, kind: str) -> Claim | None:
    if not devices:
        return None
    found = f"1 {kind}" if devices == 1 else f"{devices} {kind}s"
    return Claim(name, PLATFORM_API, _ACCELERATOR_SCORE, f"torch finds {found}")
