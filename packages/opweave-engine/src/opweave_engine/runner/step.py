"""The input of a worker for one step: plain data that any process can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opweave_engine.cache import NULL_BLOCK
from opweave_engine.sampling.sampling_request import SamplingRequest


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """The part of one sequence that a forward pass computes.

    Attributes:
        request_id: the sequence.
        token_ids: the new tokens; at least one.
        start: the number of tokens before them, which are in the KV cache.
        tables: the block table of each group of layers.
        sampling: how to sample the next token; None: it is known.
        targets: the tokens that follow each of the first ones of *token_ids*, if their
            log-probabilities are requested; only with *sampling*.
    """

    request_id: str
    token_ids: list[int]
    start: int
    tables: tuple[tuple[int, ...], ...]
    sampling: SamplingRequest | None
    targets: Sequence[int] = ()

    def slot(self, group: int, position: int, block_size: int) -> int:
        """Return the cache slot of the token at *position* in a group of layers."""
        return self.tables[group][position // block_size] * block_size + position % block_size


def padded_tables(steps: Sequence[SequenceStep], group: int) -> list[list[int]]:
    """Return the block tables of a group of layers, padded with the null block to one length."""
    tables = [step.tables[group] for step in steps]
    width = max(map(len, tables))
    return [[*table, *[NULL_BLOCK] * (width - len(table))] for table in tables]
