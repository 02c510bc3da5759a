"""What a worker is told to compute: plain data, which any process can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opweave.engine.sampling.sampling_request import SamplingRequest


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """What one forward computes of one sequence.

    Attributes:
        request_id: whose it is.
        token_ids: the new tokens; at least one.
        start: how many tokens before them are in the cache.
        tables: its blocks, by group of layers.
        sampling: how to choose the token after them; None: it is known.
        targets: the tokens after the first ones of *token_ids*, if their log-probabilities are
            wanted; not longer than *token_ids*, and only with *sampling*.
    """

    request_id: str
    token_ids: list[int]
    start: int
    tables: tuple[tuple[int, ...], ...]
    sampling: SamplingRequest | None
    targets: Sequence[int] = ()
