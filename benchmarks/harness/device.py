"""Timing on a device that works while the host goes on, or on the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]
_RUNS = 5  # on the CPU


def synchronize(device: str) -> None:
    """Wait until the device has done everything."""
    if device == "cuda":
        torch.cuda.synchronize()


def device_time(call: Call, device: str) -> float:
    """Return the device's time for a call, in microseconds, its last cache emptied before."""
    if device == "cuda":
        from triton.testing import do_bench

        return float(do_bench(call, warmup=3, rep=12, quantiles=[0.5])) * 1e3
    call()
    return statistics.median(_seconds(call) for _ in range(_RUNS)) * 1e6


def host_time(call: Call, device: str, calls: int = 50) -> float:
    """Return the host's time for a call, in microseconds: the best of two runs of *calls*."""
    found = []
    for _ in range(2):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - start) / calls * 1e6)
    synchronize(device)
    return min(found)


def copy_speed(device: str, size: int = 2**30) -> float:
    """Return what a copy of *size* bytes moves, read and written, in GB/s."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / device_time(lambda: target.copy_(source), device) / 1e3


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
