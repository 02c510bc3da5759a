"""Statistics of a load test."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from opweave_engine.cli.load.client import Answer

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Summary:
    """Latency and throughput of a server under load.

    Attributes:
        seconds: time from the first request to the last answer.
        completed: number of requests with an answer.
        errors: number of failed requests by reason.
        prompt_tokens, output_tokens: tokens of the completed requests.
        request_throughput: completed requests per second.
        output_throughput: generated tokens per second.
        total_throughput: prompt and generated tokens per second.
        milliseconds: mean and percentiles of ``ttft`` (time to first token), ``itl`` (time between
        two events of a stream), ``tpot`` (time per token after the first) and ``e2e`` (end-to-end
        latency), if there are any.
    """

    seconds: float
    completed: int
    errors: Mapping[str, int]
    prompt_tokens: int
    output_tokens: int
    request_throughput: float
    output_throughput: float
    total_throughput: float
    milliseconds: Mapping[str, Mapping[str, float]]


def summarize(answers: Sequence[Answer], seconds: float) -> Summary:
    """Return the statistics of *answers*, received within *seconds*."""
    good = [answer for answer in answers if answer.error is None]
    failed = Counter(answer.error for answer in answers if answer.error is not None)
    prompt = sum(answer.prompt_tokens for answer in good)
    output = sum(answer.output_tokens for answer in good)
    streamed = [answer for answer in good if answer.events]
    times = {
        "ttft": [answer.events[0] - answer.sent for answer in streamed],
        "itl": [b - a for answer in streamed for a, b in pairwise(answer.events)],
        "tpot": [
            (answer.events[-1] - answer.events[0]) / (answer.output_tokens - 1)
            for answer in streamed
            if answer.output_tokens > 1
        ],
        "e2e": [answer.ended - answer.sent for answer in good],
    }
    return Summary(
        seconds,
        len(good),
        dict(failed.most_common()),
        prompt,
        output,
        len(good) / seconds,
        output / seconds,
        (prompt + output) / seconds,
        {name: _distribution(values) for name, values in times.items() if values},
    )


def _distribution(values: Sequence[float]) -> dict[str, float]:
    """Return mean and percentiles, in milliseconds."""
    found = {"mean": statistics.fmean(values) * 1e3}
    ordered = sorted(values)
    for percent in PERCENTILES:
        found[f"p{percent}"] = _percentile(ordered, percent) * 1e3
    return found


def _percentile(ordered: Sequence[float], percent: float) -> float:
    """Interpolate linearly between the two nearest values."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
