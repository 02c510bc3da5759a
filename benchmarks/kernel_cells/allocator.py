"""Where fresh outputs come from, which decides whether they cost page faults."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_VARIABLES = ("LD_PRELOAD", "GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE")


def describe_allocator() -> dict[str, str]:
    """Return the C library, what tunes its malloc here, and the kernel's huge pages.

    Untuned, glibc maps and unmaps anything above 32 MiB anew in every call.
    """
    tuned = {
        name: value
        for name, value in os.environ.items()
        if name in _VARIABLES or name.startswith("MALLOC_")
    }
    return {
        "library": " ".join(platform.libc_ver()) or "unknown",
        "tuned by": ", ".join(f"{name}={value}" for name, value in tuned.items()) or "nothing",
        "huge pages": _HUGE_PAGES.read_text().strip() if _HUGE_PAGES.exists() else "unknown",
    }
