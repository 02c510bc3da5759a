"""Prompts and arrival times of a load test, determined by a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from opweave.cli.errors import CliError

# Common words, nearly all one token in any vocabulary.
_WORDS = (
    "the", "of", "and", "to", "in", "that", "is", "was", "he", "for", "it", "with", "as", "his",
    "on", "be", "at", "by", "had", "not", "are", "but", "from", "or", "have", "they", "which",
    "one", "you", "were", "all", "her", "she", "there", "would", "their", "we", "him", "been",
    "has", "when", "who", "will", "no", "more", "if", "out", "so", "up", "said", "what", "about",
    "than", "into", "them", "can", "only", "other", "time", "new", "some", "could", "these", "two",
)  # fmt: skip


@dataclass(frozen=True)
class Load:
    """A Poisson process of requests, independent of the responses.

    Attributes:
        requests: number of requests.
        rate: mean number of requests per second; infinite: all at once.
        prompt_length: random words per prompt, so that prompts do not share a prefix.
        max_tokens: tokens per answer.
        ignore_eos: ask the server to ignore end-of-text tokens, so that answers have that length.
        vocab_size: prompts are token ids below this number; None: prompts are words.
        seed: seed of prompts and arrival times.

    Raises:
        CliError: a number is out of range.
    """

    requests: int
    rate: float
    prompt_length: int
    max_tokens: int
    ignore_eos: bool = True
    vocab_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "prompt_length", "max_tokens", "vocab_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                option = name.replace("_", "-")
                raise CliError(f"--{option} must be at least 1; it is {value}.")
        if not self.rate > 0:
            raise CliError(
                f"--rate must be a positive number, or inf for all at once; it is {self.rate}."
            )


def arrivals(load: Load) -> list[float]:
    """Return the arrival time of each request in seconds; the first is 0."""
    if math.isinf(load.rate):
        return [0.0] * load.requests
    draw = random.Random(load.seed)
    gaps = (draw.expovariate(load.rate) for _ in range(load.requests - 1))
    return [0.0, *accumulate(gaps)]


def prompts(load: Load) -> Sequence[str | list[int]]:
    """Return the prompt of each request: text or token ids."""
    # A seed of their own: prompts do not depend on the rate.
    draw, length = random.Random(f"prompts {load.seed}"), load.prompt_length
    if load.vocab_size is not None:
        ids = range(load.vocab_size)
        return [draw.choices(ids, k=length) for _ in range(load.requests)]
    return [" ".join(draw.choices(_WORDS, k=length)) for _ in range(load.requests)]
