"""Timing that a noisy machine cannot bias: what is compared is measured in turns."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from opweave.tuning.timing import interleaved

__all__ = ["interleaved", "microseconds", "within"]


def microseconds(call: Callable[..., Any], batch: Sequence[tuple[Any, ...]]) -> float:
    """Return microseconds per call of *call* with each of the arguments in *batch*."""
    start = time.perf_counter_ns()
    for arguments in batch:
        call(*arguments)
    return (time.perf_counter_ns() - start) / len(batch) / 1e3


def within(
    rounds: int,
    *,
    fewest: int,
    least: float,
    most: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[int]:
    """Count *rounds*: more of them in less than *least* seconds, down to *fewest* in *most*."""
    start = clock()
    for count in itertools.count():
        seconds = clock() - start
        if (count >= rounds and seconds >= least) or (count >= fewest and seconds > most):
            return
        yield count
