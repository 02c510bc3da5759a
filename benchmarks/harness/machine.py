"""The machine that a benchmark ran on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def describe_machine() -> dict[str, Any]:
    """Return the `machine` object of a benchmark's JSON."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
    }


def cache_bytes(level: int) -> int | None:
    """Return the size of the data cache of *level* (1 to 3), or None where Linux does not say."""
    for folder in sorted(_CACHES.glob("index*")):
        if _read(folder / "type") != "Instruction" and _read(folder / "level") == str(level):
            size = _read(folder / "size")
            return int(size[:-1]) * _UNITS[size[-1]] if size else None
    return None


def _processor() -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
