"""Adds up the statistics of several engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from opweave_engine.metrics.stats import EngineStats, HistogramCounts, StatCounter

_SUMS = (
    "running", "waiting", "prefix_queries", "prefix_hits", "preemptions", "prompt_tokens",
    "generation_tokens", "steps",
)  # fmt: skip


def after_death(stats: EngineStats) -> EngineStats:
    """Return the statistics of a dead engine: its counters stay, its gauges become zero."""
    return replace(stats, running=0, waiting=0, kv_usage=0.0, replicas=0)


def merged(every: Sequence[EngineStats]) -> EngineStats:
    """Return the sums of the counters.

    The cache usage is averaged over live engines, the compile time is the maximum, and each kernel
    is listed once.
    """
    replicas = sum(each.replicas for each in every)
    kernels = [kernel for each in every for kernel in each.kernels]
    usage = sum(each.kv_usage * each.replicas for each in every)
    return EngineStats(
        **_sums(every),
        kv_usage=usage / max(1, replicas),
        finished=dict(sum((Counter(each.finished) for each in every), Counter())),
        histograms=_histograms(each.histograms for each in every),
        replicas=replicas,
        kernels=tuple({(k.op, k.provider, k.tokens): k for k in kernels}.values()),
        compile_seconds=max((each.compile_seconds for each in every), default=0.0),
    )


def _sums(every: Sequence[EngineStats]) -> dict[str, Any]:
    return {name: sum(getattr(each, name) for each in every) for name in _SUMS}


def _histograms(every: Iterable[Mapping[str, HistogramCounts]]) -> dict[str, HistogramCounts]:
    found: dict[str, HistogramCounts] = {}
    for histograms in every:
        for name, counts in histograms.items():
            found[name] = _sum(found[name], counts) if name in found else counts
    return found


def _sum(one: HistogramCounts, other: HistogramCounts) -> HistogramCounts:
    counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
    return HistogramCounts(one.bounds, counts, one.total + other.total)


NOTHING = replace(merged([]), histograms=StatCounter().histograms())
"""The statistics of an engine that has not started."""
