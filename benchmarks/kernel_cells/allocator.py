"""Where fresh outputs come from, which decides whether they cost page faults."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_VARIABLES = ("LD_PRELOAD", "GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE")
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_INT_MAX = 2**31 - 1


def keep_freed_memory() -> str:
    """Have malloc keep what is freed, as the allocators of servers do; return how, if it can.

    By default glibc maps blocks above 32 MiB again in every call, and gives back the end of
    its heap whenever enough of it is free: where that is decides which contender faults its pages
    in again, at several times what a kernel takes to fill them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not (mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _INT_MAX)):
        return ""
    return f"mallopt: no mapping, trimmed from {_INT_MAX} free bytes on"


def describe_allocator(tuned_here: str) -> dict[str, str]:
    """Return the C library, what tunes its malloc here, and the kernel's huge pages."""
    tuned = [
        f"{name}={value}"
        for name, value in os.environ.items()
        if name in _VARIABLES or name.startswith("MALLOC_")
    ]
    return {
        "library": " ".join(platform.libc_ver()) or "unknown",
        "tuned by": ", ".join(filter(None, [*tuned, tuned_here])) or "nothing",
        "huge pages": _HUGE_PAGES.read_text().strip() if _HUGE_PAGES.exists() else "unknown",
    }
