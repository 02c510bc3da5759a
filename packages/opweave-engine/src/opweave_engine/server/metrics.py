"""Prometheus metrics of the engine and of HTTP; the ops and plugins in use."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from http import HTTPMethod
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.types import Scope

from opweave.ir import IrOp, current_registry, policy_for
from opweave.ir.explain import describe
from opweave.plugins import plugin_report
from opweave_engine import EngineClient, HistogramCounts, KernelUse

# The plugins, as plain data.


def plugins() -> list[dict[str, Any]]:
    """Return every installed plugin: its state, its registrations, and its error."""
    return [asdict(record) for record in plugin_report()]


# The ops, with their preferred kernels and the kernels that ran.


def ops(kernels: Iterable[KernelUse]) -> list[dict[str, Any]]:
    """Return every op as plain data, with its preferred provider and its calls in *kernels*."""
    used: dict[str, list[dict[str, Any]]] = {}
    for use in kernels:
        row = asdict(use)
        used.setdefault(row.pop("op"), []).append(row)
    return [
        {**describe(op), "preferred": _first_available(op)[0], "ran": used.get(op.name, [])}
        for op in _all_ops()
    ]


def _all_ops() -> list[IrOp]:
    registry = current_registry()
    registry.ensure_ready()
    return list(registry.ops.values())


def _first_available(op: IrOp) -> tuple[str, str]:
    """Return the first provider of the op's priority that is available, and its plugin."""
    for entry in policy_for(op).priority:
        impl = op.impls[entry.provider]
        if impl.supported:
            return impl.provider, "" if impl.owner is None else impl.owner.plugin
    return "", ""  # no provider has a required trait


# Prometheus metrics of the engine, collected on request, and of HTTP.


# The fields of EngineStats, with the names for dashboards and descriptions.
_GAUGES = {
    "running": ("num_requests_running", "Number of running outputs."),
    "waiting": ("num_requests_waiting", "Number of waiting answers."),
    "kv_usage": ("kv_cache_usage_perc", "Fraction of the KV cache in use, from 0 to 1."),
    "compile_seconds": ("compile_seconds", "Duration of compilation at startup."),
    "replicas": ("num_replicas", "Number of live replicas."),
}
_COUNTERS = {
    "prefix_queries": ("prefix_cache_queries", "Tokens looked up in the prefix cache."),
    "prefix_hits": ("prefix_cache_hits", "Tokens found in the prefix cache."),
    "preemptions": ("num_preemptions", "Preempted answers, which are recomputed later."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens."),
    "generation_tokens": ("generation_tokens", "Generated tokens."),
    "steps": ("engine_steps", "Engine steps."),
}
_HISTOGRAMS = {
    "time_to_first_token": ("time_to_first_token_seconds", "Time to first token of an answer."),
    "inter_token_latency": ("inter_token_latency_seconds", "Time between two tokens."),
    "queue_time": ("request_queue_time_seconds", "Time that an answer waits to be scheduled."),
    "prefill_time": ("request_prefill_time_seconds", "Time from scheduling to the first token."),
    "decode_time": ("request_decode_time_seconds", "Time from the first token to the last."),
    "inference_time": ("request_inference_time_seconds", "Time of prefill and decode."),
    "e2e_latency": ("e2e_request_latency_seconds", "Time from arrival to the last token."),
    "step_time": ("engine_step_seconds", "Duration of an engine step."),
    "iteration_tokens": ("iteration_tokens", "Tokens in an engine step."),
}
PREFIX = "opweave_"


class Metrics:
    """The metrics of one server, in a separate registry.

    Args:
        engine: the engine.
        model: the value of the label ``model_name``.
    """

    def __init__(self, engine: EngineClient, model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model))
        self._requests = Counter(
            f"{PREFIX}http_requests", "HTTP responses.", ("method", "path", "status"),
            registry=self._registry,
        )  # fmt: skip
        self._seconds = Histogram(
            f"{PREFIX}http_request_duration_seconds", "Duration of HTTP requests.", ("path",),
            registry=self._registry,
        )  # fmt: skip

    def observe(self, scope: Scope, status: int, seconds: float) -> None:
        """Count one response; unknown paths and methods share a label."""
        path = getattr(scope.get("route"), "path", "unknown")
        is_known = path != "unknown" and scope["method"] in HTTPMethod.__members__
        method = scope["method"] if is_known else "any"
        self._requests.labels(method, path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, engine: EngineClient, model: str) -> None:
        self._engine, self._model = engine, model

    def describe(self) -> list[Metric]:
        return []  # the metrics are known only when they are collected

    def collect(self) -> Iterator[Metric]:
        stats, model = self._engine.stats(), self._model
        for kind, names in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for field, (name, doc) in names.items():
                yield _family(kind, name, doc, ["model_name"], {(model,): getattr(stats, field)})
        yield _family(
            CounterMetricFamily,
            "request_success",
            "Finished answers, by finish reason.",
            ["model_name", "finished_reason"],
            {(model, reason): count for reason, count in stats.finished.items()},
        )
        for field, counts in stats.histograms.items():
            yield self._histogram(field, counts)
        yield _family(
            GaugeMetricFamily,
            "op_calls",
            "Calls of an op in one forward pass, by provider and number of tokens.",
            ["model_name", "op", "provider", "tokens"],
            {
                (model, k.op, k.provider, "any" if k.tokens is None else str(k.tokens)): k.calls
                for k in stats.kernels
            },
        )
        yield _family(
            InfoMetricFamily,
            "op_selection",
            "The preferred available provider of each op.",
            ["op", "provider", "plugin"],
            {(op.name, *_first_available(op)): {} for op in _all_ops()},
        )
        labels = ["name", "group", "distribution", "version", "state"]
        yield _family(
            InfoMetricFamily,
            "plugin",
            "Plugins that were found.",
            ["plugin", *labels[1:]],
            {tuple(str(plugin[label]) for label in labels): {} for plugin in plugins()},
        )

    def _histogram(self, field: str, counts: HistogramCounts) -> Metric:
        name, doc = _HISTOGRAMS.get(field, (field, "As the engine counts it."))
        bounds = [*map(str, counts.bounds), "+Inf"]
        family = HistogramMetricFamily(PREFIX + name, doc, labels=["model_name"])
        family.add_metric(
            [self._model], list(zip(bounds, accumulate(counts.counts), strict=True)), counts.total
        )
        return family


def _family(
    kind: Callable[..., Any],
    name: str,
    doc: str,
    labels: Sequence[str],
    values: Mapping[tuple[str, ...], Any],
) -> Metric:
    """Return a family of metrics with a value for each tuple of labels."""
    family: Any = kind(PREFIX + name, doc, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    metric: Metric = family
    return metric
