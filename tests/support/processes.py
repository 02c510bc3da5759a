"""Waiting for other processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(happened: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for something, but not for ever."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "too late"
        time.sleep(0.002)
