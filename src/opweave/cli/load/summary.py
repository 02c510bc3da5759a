"""Figures of many answers."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from opweave.cli.load.client import Answer

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Summary:
    """What a server did under load.

    Attributes:
        seconds: from the first request to the last answer.
        completed: requests with an answer.
        errors: how often each reason was why there is none.
        prompt_tokens, output_tokens: of those with one.
        request_throughput: requests with an answer, in a second.
        output_throughput: tokens generated in a second.
        total_throughput: those and the prompts' in a second.
        milliseconds: mean and percentiles of ``ttft`` (from sending a request to its first event),
            ``itl`` (between two events of a stream), ``tpot`` (of each token after the first) and
            ``e2e`` (of all of an answer), where there is any.
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


def summarise(answers: Sequence[Answer], seconds: float) -> Summary:
    """Return the figures of *answers*, which took *seconds* together."""
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
    """Interpolate linearly between the two values that are nearest."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
