"""Engine statistics, stat loggers and the kernel selection report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from opweave import ir
from opweave.config import EngineConfig
from opweave.plugins import STAT_LOGGER_PLUGINS, load_plugins_by_group
from opweave.plugins.entry import PluginTypeError
from opweave_engine.outputs import RequestTimings

# Selection report: the kernels that the forward passes of a model run.


@dataclass(frozen=True, slots=True)
class KernelUse:
    """A kernel that runs in a model's forward passes.

    Attributes:
        op: the op.
        provider: the kernel's provider.
        tokens: the size class of the forward passes, which have at least this many tokens and fewer
            than twice as many; None: any size, for calls in a compiled graph.
        calls: the number of calls in one forward pass.
    """

    op: str
    provider: str
    tokens: int | None
    calls: int


class SelectionReport:
    """Records the kernels of an engine's forward passes, once for each size class.

    Recording makes a forward pass slower, because each call goes through the full selection. Size
    classes are powers of two, so there are few of them. May be read while another thread records.

    Attributes:
        kernels: sorted by op, size and provider.
        compile_seconds: compile time; 0.0 if nothing was compiled.
    """

    def __init__(self) -> None:
        self.kernels: tuple[KernelUse, ...] = ()
        self.compile_seconds = 0.0
        self._seen: set[int] = set()

    @contextmanager
    def watch(self, num_tokens: int) -> Iterator[None]:
        """Record the forward pass in the block, unless its size class is known."""
        size = 1 << (num_tokens.bit_length() - 1)
        if size in self._seen:
            yield
            return
        with ir.record() as record:
            yield
        self._seen.add(size)
        self._add(record.selected_impls, size)

    def add_graph(self) -> None:
        """Record the calls of the graph that was compiled last."""
        from opweave.compile import report

        calls: dict[str, Counter[str]] = {}
        for node in report().nodes:
            calls.setdefault(node.op, Counter())[node.chosen] += 1
        self._add(calls, None)

    def _add(self, calls: Mapping[str, Mapping[str, int]], size: int | None) -> None:
        """Add the calls of a forward pass: their number, by op and provider."""
        new = [
            KernelUse(op, provider, size, count)
            for op, by_provider in calls.items()
            for provider, count in by_provider.items()
        ]
        kernels = sorted([*self.kernels, *new], key=lambda k: (k.op, k.tokens or 0, k.provider))
        self.kernels = tuple(kernels)


# Statistics of an engine.


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

    def __add__(self, other: HistogramCounts) -> HistogramCounts:
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return HistogramCounts(self.bounds, counts, self.total + other.total)


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

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    finished: Mapping[str, int] = field(default_factory=dict)
    histograms: Mapping[str, HistogramCounts] = field(default_factory=dict)
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

    def stats(self) -> EngineStats:
        """Return the statistics of an engine with these counters, which runs nothing."""
        return EngineStats(
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            steps=self.steps,
            finished=dict(self.finished),
            histograms={name: values.counts() for name, values in self._histograms.items()},
        )


_HISTOGRAMS = (
    "time_to_first_token", "inter_token_latency", "queue_time", "prefill_time", "decode_time",
    "inference_time", "e2e_latency", "step_time", "iteration_tokens",
)  # fmt: skip


# Adds up the statistics of several engines.


_SUMS = (
    "running", "waiting", "prefix_queries", "prefix_hits", "preemptions", "prompt_tokens",
    "generation_tokens", "steps",
)  # fmt: skip


def after_death(stats: EngineStats) -> EngineStats:
    """Return the statistics of a dead engine: its counters stay, its gauges become zero."""
    return replace(stats, running=0, waiting=0, kv_usage=0.0, replicas=0)


def merged(engines: Sequence[EngineStats]) -> EngineStats:
    """Return the sums of the counters.

    The cache usage is averaged over live engines, the compile time is the maximum, and each kernel
    is listed once.
    """
    replicas = sum(stats.replicas for stats in engines)
    kernels = [kernel for stats in engines for kernel in stats.kernels]
    usage = sum(stats.kv_usage * stats.replicas for stats in engines)
    sums: dict[str, Any] = {n: sum(getattr(stats, n) for stats in engines) for n in _SUMS}
    histograms: dict[str, HistogramCounts] = {}
    for stats in engines:
        for name, counts in stats.histograms.items():
            histograms[name] = histograms[name] + counts if name in histograms else counts
    return EngineStats(
        **sums,
        kv_usage=usage / max(1, replicas),
        finished=dict(sum((Counter(stats.finished) for stats in engines), Counter())),
        histograms=histograms,
        replicas=replicas,
        kernels=tuple({(k.op, k.provider, k.tokens): k for k in kernels}.values()),
        compile_seconds=max((stats.compile_seconds for stats in engines), default=0.0),
    )


NOTHING = replace(StatCounter().stats(), replicas=0)
"""The statistics of an engine that has not started."""


# Stat loggers: plugins that receive an engine's statistics.


class StatLogger(ABC):
    """Base class of stat loggers. A plugin's entry point is a class derived from this one.

    Args:
        config: the engine's configuration.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @abstractmethod
    def record(self, stats: EngineStats) -> None:
        """Receive the statistics since the engine started; called after each step.

        Runs in the engine's loop, so it must not block.
        """

    def shutdown(self) -> None:  # noqa: B027 - most have nothing left
        """Flush the log, because the engine has shut down."""


def stat_loggers(config: EngineConfig) -> list[StatLogger]:
    """Return an instance of each installed stat logger, sorted by the name of its plugin.

    Raises:
        PluginTypeError: (a TypeError) an entry point is not a subclass of :class:`StatLogger`.
        PluginError: a plugin failed.
    """
    loggers = []
    for name, kind in sorted(load_plugins_by_group(STAT_LOGGER_PLUGINS).items()):
        if not (isinstance(kind, type) and issubclass(kind, StatLogger)):
            raise PluginTypeError(
                f"stat logger plugin {name!r} is {kind!r}; its entry point should be a class "
                f"derived from {StatLogger.__module__}.StatLogger. To go on without it: "
                f"OPWEAVE_PLUGINS=-{name}"
            )
        loggers.append(kind(config))
    return loggers
