"""Timing that a noisy machine cannot bias: what is compared is measured in turns."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any


def interleaved(
    measures: Mapping[str, Callable[[], float]], rounds: Iterable[object]
) -> dict[str, list[float]]:
    """Call every measure once a round, in a new order each; return what each gave, by round."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    for _ in rounds:
        for name in random.sample(list(measures), len(measures)):
            found[name].append(measures[name]())
    return found


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
