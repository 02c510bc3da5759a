"""A model that is a hash of its tokens, over a cache that is a dict: for tests of scheduling."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from opweave_engine.kv_cache import EveryToken, Retention, Window
from opweave_engine.scheduler import Scheduled

VOCABULARY = 7  # small, so that prefixes repeat


def next_token(token_ids: Sequence[int]) -> int:
    return crc32(bytes(token_ids)) % VOCABULARY


def alone(prompt: Sequence[int], count: int) -> list[int]:
    """Return the tokens that follow *prompt*."""
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


class SimulatedModel:
    """Writes tokens where the tables say, and reads back what a real model would read.

    Args:
        retentions: of the groups.
        block_size: tokens in a block.
    """

    def __init__(self, retentions: Sequence[Retention], block_size: int) -> None:
        self._retentions, self._block_size = retentions, block_size
        self._slots: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._states: dict[int, list[int]] = {}

    def forward(self, step: Sequence[Scheduled]) -> list[int | None]:
        """Return the token after each sequence that is complete."""
        for item in step:
            self._write(item)
        for item in step:
            self._check(item)
        return [
            next_token(item.request.token_ids)
            if item.num_tokens == item.request.num_uncomputed_tokens
            else None
            for item in step
        ]

    def _write(self, item: Scheduled) -> None:
        start = item.request.num_computed_tokens
        for position in range(start, start + item.num_tokens):
            token = item.request.token_ids[position]
            for group, table in enumerate(item.tables):
                if self._is_paged(group):
                    block = table[position // self._block_size]
                    assert block != 0, "a token is written to the null block"
                    self._slots[group, block, position % self._block_size] = (position, token)
                else:
                    (slot,) = table
                    assert slot != 0
                    state = self._states.setdefault(slot, [])
                    if position == 0:
                        state.clear()
                    state.append(token)

    def _check(self, item: Scheduled) -> None:
        request, start = item.request, item.request.num_computed_tokens
        end = start + item.num_tokens
        for group, table in enumerate(item.tables):
            if not self._is_paged(group):
                assert self._states[table[0]] == request.token_ids[:end]
                continue
            retention = self._retentions[group]
            first = max(0, start + 1 - retention.size) if isinstance(retention, Window) else 0
            for position in range(first, end):
                slot = group, table[position // self._block_size], position % self._block_size
                assert self._slots[slot] == (position, request.token_ids[position])

    def _is_paged(self, group: int) -> bool:
        return isinstance(self._retentions[group], EveryToken | Window)
