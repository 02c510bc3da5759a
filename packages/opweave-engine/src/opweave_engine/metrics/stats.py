"""Statistics of an engine."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opweave_engine.metrics.selection_report import KernelUse
from opweave_engine.request.outputs import RequestTimings

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKENS = tuple(float(2**power) for power in range(15))


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """The counts of a histogram.

    Attributes:
        bounds: the upper bounds of the buckets, inclusive and ascending.
        counts: the number of values in each bucket, and above the last bound; not cumulative.
        total: the sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Histogram:
    """Counts values in buckets with the given upper bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts, self._total = [0] * (len(self._bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def counts(self) -> HistogramCounts:
        """Return the counts so far."""
        return HistogramCounts(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The state of an engine, and its counters since it started.

    A request with ``n`` outputs counts ``n`` times.

    Attributes:
        running: outputs that hold KV cache blocks.
        waiting: outputs that hold no KV cache blocks.
        kv_usage: the share of the KV cache in use, from 0 to 1.
        prefix_queries: tokens that were looked up in the prefix cache.
        prefix_hits: tokens that were found in the prefix cache.
        preemptions: outputs that lost their blocks, and were computed again later.
        prompt_tokens: prompt tokens that were computed or found in the prefix cache.
        generation_tokens: generated tokens.
        steps: forward passes.
        finished: outputs that ended, by finish reason; ``"error"`` if they failed.
        histograms: distributions, by name: in seconds ``time_to_first_token``,
            ``inter_token_latency``, ``queue_time``, ``prefill_time``, ``decode_time``,
            ``inference_time``, ``e2e_latency`` (of finished outputs) and ``step_time``; in tokens
            ``iteration_tokens``, of one step.
        replicas: the number of live engines that these numbers add up.
        kernels: the kernels that forward passes of several sizes ran.
        compile_seconds: compile time at startup, including the forward passes that trigger it; 0.0
            if nothing was compiled.
    """

    running: int
    waiting: int
    kv_usage: float
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    steps: int
    finished: Mapping[str, int]
    histograms: Mapping[str, HistogramCounts]
    replicas: int = 1
    kernels: tuple[KernelUse, ...] = ()
    compile_seconds: float = 0.0


class StatCounter:
    """The counters of an engine."""

    def __init__(self) -> None:
        self.prompt_tokens = self.generation_tokens = self.steps = 0
        self.finished: Counter[str] = Counter()
        self._histograms = {
            name: Histogram(TOKENS if name.endswith("tokens") else SECONDS) for name in _HISTOGRAMS
        }

    def step(self, seconds: float, num_tokens: int) -> None:
        """Count a forward pass."""
        self.steps += 1
        self._histograms["step_time"].add(seconds)
        self._histograms["iteration_tokens"].add(num_tokens)

    def token(self, seconds: float, *, is_first: bool, num_prompt_tokens: int) -> None:
        """Count a generated token, *seconds* after the previous one or the request's arrival."""
        self.generation_tokens += 1
        self.prompt_tokens += num_prompt_tokens if is_first else 0
        name = "time_to_first_token" if is_first else "inter_token_latency"
        self._histograms[name].add(seconds)

    def finish(self, reason: str, timings: RequestTimings) -> None:
        """Count an output that ended; add its timings if it has any token."""
        self.finished[reason] += 1
        if not timings.first_token:
            return
        for name, seconds in (
            ("queue_time", timings.scheduled),
            ("prefill_time", timings.first_token - timings.scheduled),
            ("decode_time", timings.finished - timings.first_token),
            ("inference_time", timings.finished - timings.scheduled),
            ("e2e_latency", timings.finished),
        ):
            self._histograms[name].add(seconds)

    def histograms(self) -> dict[str, HistogramCounts]:
        """Return all distributions, by name."""
        return {name: histogram.counts() for name, histogram in self._histograms.items()}


_HISTOGRAMS = (
    "time_to_first_token",
    "inter_token_latency",
    "queue_time",
    "prefill_time",
    "decode_time",
    "inference_time",
    "e2e_latency",
    "step_time",
    "iteration_tokens",
)
