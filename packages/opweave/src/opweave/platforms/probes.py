"""Hardware detection for the built-in platforms.

Except for :func:`properties`, no function starts the runtime of a device, so that a process may
call them before it forks or spawns workers.
"""

from __future__ import annotations

import os
import platform
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def cuda_devices() -> int:
    """Return the number of NVIDIA GPUs that torch can use (from NVML if it is installed)."""
    return torch.cuda.device_count() if torch.version.cuda is not None else 0


def rocm_devices() -> int:
    """Return the number of AMD GPUs that torch can use (from AMD SMI if it is installed)."""
    return torch.cuda.device_count() if torch.version.hip is not None else 0


def xpu_devices() -> int:
    """Return the number of Intel GPUs that torch can use."""
    return torch.xpu.device_count()


def tpu_devices() -> int:
    """Return the number of TPU device files, or 0 if ``torch_xla`` is not installed."""
    if find_spec("torch_xla") is None:
        return 0
    return len([*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")])


def properties(device_type: str, index: int) -> Any:
    """Return torch's properties of a device; starts its runtime."""
    return torch.get_device_module(device_type).get_device_properties(index)


@cache
def cpu_features() -> frozenset[str]:
    """Return the instruction set extensions of the CPU, by torch's names."""
    ask = getattr(torch.cpu, "get_capabilities", None)
    if ask is not None:
        return frozenset(name for name, present in ask().items() if present is True)
    older = {
        "avx2": "_is_avx2_supported",
        "avx512_bf16": "_is_avx512_bf16_supported",
        "avx512_f": "_is_avx512_supported",
        "avx512_vnni": "_is_vnni_supported",
    }
    return frozenset(name for name, test in older.items() if getattr(torch.cpu, test, bool)())


@cache
def cpu_name() -> str:
    """Return the model name of the CPU."""
    for key in ("model name", "Hardware"):
        for line in _lines(Path("/proc/cpuinfo")):
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return platform.processor() or platform.machine()


def host_memory() -> tuple[int, int]:
    """Return the available and the total host memory in bytes, within the limits of the cgroup."""
    values = {line.split(":")[0]: line.split(":")[1] for line in _lines(_MEMINFO)}
    if "MemAvailable" in values:
        free, total = (int(values[key].split()[0]) << 10 for key in ("MemAvailable", "MemTotal"))
    else:
        free = total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is not None and used is not None and limit < total:
        return min(free, max(limit - used + _page_cache(), 0)), limit
    return free, total


def _page_cache() -> int:
    """Return the size of the cgroup's page cache in bytes, which the kernel can reclaim."""
    stat = dict(line.split() for line in _lines(_CGROUP / "memory.stat"))
    return int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []  # not Linux
