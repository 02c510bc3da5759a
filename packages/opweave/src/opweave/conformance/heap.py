"""glibc's heap checks: a write past the memory of a result ends the process.

Since glibc 2.34, they are in a separate library that must be loaded first; see ``mallopt(3)``,
``M_CHECK_ACTION``.
"""

from __future__ import annotations

import os
from pathlib import Path

_LIBRARY = "libc_malloc_debug.so.0"
_PRELOAD, _TUNABLES = "LD_PRELOAD", "GLIBC_TUNABLES"


def checking_environment() -> dict[str, str]:
    """Return the environment variables that enable the checks in a new process.

    Empty if the library is missing, or if an allocator or a sanitizer is already preloaded.
    """
    if os.environ.get(_PRELOAD) or os.environ.get(_TUNABLES):
        return {}
    library = _library()
    return {} if library is None else {_PRELOAD: library, _TUNABLES: "glibc.malloc.check=3"}


def leave_to_this_process() -> None:
    """Disable the checks for processes that this one starts, such as compilers."""
    if os.environ.get(_PRELOAD, "").endswith(_LIBRARY):
        del os.environ[_PRELOAD], os.environ[_TUNABLES]


def _library() -> str | None:
    """Return the path of the library, which is in the folder of the C library."""
    try:
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    files = (Path(line.split(maxsplit=5)[-1]) for line in mapped.splitlines())
    found = next((file.with_name(_LIBRARY) for file in files if file.name == "libc.so.6"), None)
    return str(found) if found and found.exists() else None
