"""Timing that is robust to noise, and the machine that a measurement is valid for."""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Self

import torch

from opweave import native, platforms
from opweave.packages import __version__

# The machine and software that a measurement is valid for.


_SPIN_SECONDS = 0.05  # many time slices of a scheduler
_LEAST_CORE_SHARE = 0.9


def busy() -> str | None:
    """Return why times cannot be compared now, since other processes use the cores; or None.

    Call it before the work of this program, which is a part of the load.
    """
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load >= cores:
        return f"this machine is busy (load {load:.0f} on {cores} cores)"
    return disturbance()


def disturbance() -> str | None:
    """Return that other processes take a core from this thread at this moment; or None."""
    start, used = time.perf_counter(), time.thread_time()
    while (wall := time.perf_counter() - start) < _SPIN_SECONDS:
        pass
    share = (time.thread_time() - used) / wall
    is_disturbed = share < _LEAST_CORE_SHARE
    return f"this machine is busy (a process gets {share:.0%} of a core)" if is_disturbed else None


@dataclass(frozen=True)
class Machine:
    """A device, and the software on it.

    Attributes:
        platform: the platform, such as ``cpu``.
        device: the name of the device.
        isa: the instruction set of the C++ kernels, or an empty string.
        threads: the number of CPU threads.
        torch, opweave: the versions.
    """

    platform: str
    device: str
    isa: str
    threads: int
    torch: str
    opweave: str

    @classmethod
    def here(cls) -> Self:
        """Return this machine."""
        return cls(
            platforms.current_platform.name,
            platforms.current_platform.get_device_name(),
            native.status().isa or "",
            torch.get_num_threads(),
            torch.__version__,
            __version__,
        )

    def differences(self, other: Machine) -> str:
        """Return the fields in which *other* differs, in words."""
        mine, theirs = asdict(self), asdict(other)
        return ", ".join(
            f"{name} {theirs[name]!r} instead of {mine[name]!r}"
            for name in mine
            if mine[name] != theirs[name]
        )

    @classmethod
    def parse(cls, data: Any) -> Self | None:
        """Return the machine in a tuning file, or None if it is malformed."""
        values: dict[str, Any] = data if isinstance(data, dict) else {}
        kinds = {f.name: int if f.name == "threads" else str for f in fields(cls)}
        if not all(isinstance(values.get(name), kind) for name, kind in kinds.items()):
            return None
        return cls(**{name: values[name] for name in kinds})


# Timing that is robust to noise: contenders take turns, and each has an estimate of its noise.


_LEAST_GAIN = 0.02
_COPY_BYTES = 2**27  # more than the caches hold


@dataclass(frozen=True)
class Time:
    """The time of a call.

    Attributes:
        microseconds: the median of all rounds.
        noise: half the 95 % confidence interval of that median, as a share of it; infinite for
            one round.
    """

    microseconds: float
    noise: float


@dataclass(frozen=True)
class Effort:
    """How thoroughly to measure.

    Attributes:
        rounds: the number of rounds; each contender runs once per round, in random order.
        seconds: the minimum duration of a contender's turn.
    """

    rounds: int = 15
    seconds: float = 0.003


def compare(
    calls: Mapping[str, Callable[[], object]],
    effort: Effort | None = None,
    turn: Callable[[str], object] = lambda name: None,
) -> dict[str, Time]:
    """Time several calls against each other, see :func:`rounds_of`."""
    return {name: time_of(rounds) for name, rounds in rounds_of(calls, effort, turn).items()}


def rounds_of(
    calls: Mapping[str, Callable[[], object]],
    effort: Effort | None = None,
    turn: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """Time several calls against each other; return the seconds of each call by round.

    Args:
        calls: the contenders by name.
        effort: how thoroughly to measure.
        turn: called with the name of a contender before each of its turns.
    """
    effort = effort or Effort()
    with torch.inference_mode():
        repeats: dict[str, int] = {}
        for name, call in calls.items():
            turn(name)
            _elapsed(call, 1)
            repeats[name] = max(1, int(effort.seconds / max(_elapsed(call, 1), 1e-7)))

        def measure(name: str) -> float:
            turn(name)
            return _elapsed(calls[name], repeats[name])

        measures = {name: partial(measure, name) for name in calls}
        return interleaved(measures, range(effort.rounds))


def chance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the probability that equally fast calls differ as *one* and *other* by chance.

    It is the p-value of a sign test over the rounds, which assumes nothing about the distribution
    of the noise: under load, some rounds take many times as long. *one* wins a round if it is
    faster by :data:`_LEAST_GAIN`.
    """
    wins = sum(a * (1 + _LEAST_GAIN) < b for a, b in zip(one, other, strict=True))
    return sum(math.comb(len(one), k) for k in range(wins, len(one) + 1)) / (1 << len(one))


def copy_speed(size: int | None = None) -> float:
    """Return the bandwidth of a large copy in bytes per second, reads and writes."""
    size = size or _COPY_BYTES
    source = torch.ones(size, dtype=torch.uint8, device=platforms.current_platform.device_type)
    target = torch.empty_like(source)
    times = compare({"copy": lambda: target.copy_(source)}, Effort(rounds=5))
    return 2e6 * size / times["copy"].microseconds


def interleaved(
    measures: Mapping[str, Callable[[], float]], rounds: Iterable[object]
) -> dict[str, list[float]]:
    """Call every measure once per round, in random order; return the results by round."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    for _ in rounds:
        for name in random.sample(list(measures), len(measures)):
            found[name].append(measures[name]())
    return found


def _elapsed(call: Callable[[], object], repeats: int) -> float:
    """Return seconds per call."""
    platforms.current_platform.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    platforms.current_platform.synchronize()
    return (time.perf_counter() - start) / repeats


def time_of(seconds: list[float]) -> Time:
    """Return the time of a call from its seconds in each round."""
    middle = statistics.median(seconds)
    if len(seconds) < 2:
        return Time(middle * 1e6, math.inf)
    low, _, high = statistics.quantiles(seconds, n=4)
    # Of a normal distribution, the quartiles are 1.35 standard deviations apart, and the standard
    # error of the median is 1.25 standard deviations over the root of the number of values.
    error = 1.25 * (high - low) / 1.35 / math.sqrt(len(seconds))
    return Time(middle * 1e6, 1.96 * error / middle)
