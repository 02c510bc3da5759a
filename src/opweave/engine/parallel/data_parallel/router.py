"""Which replica answers a request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import count

from opweave.engine.cache.block_hash import extend_hashes

_BLOCK = 64  # tokens; a shorter prefix is computed sooner than it is looked for
_REMEMBERED = 16_384  # blocks for each replica: a million tokens
_SLACK = 4  # answers that a replica may have more than another, for the sake of a prefix


class ReplicaRouter:
    """Sends each request where it meets the fewest others, or its own prefix.

    A replica has a load: the answers that it owes. Of those whose load is near the least, the one
    is chosen that was sent the longest prefix of the prompt before, and so has most likely computed
    it; among equals the one with the least load, and then the one that was chosen the longest ago.

    Args:
        size: how many replicas there are.
        finds_prefixes: whether they reuse what they have computed of other prompts.
    """

    def __init__(self, size: int, *, finds_prefixes: bool = True) -> None:
        self._finds_prefixes = finds_prefixes
        self._loads = [0] * size
        self._turns, self._last = count(1), [0] * size
        self._known: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(size)]

    @property
    def loads(self) -> tuple[int, ...]:
        """The answers that each replica owes."""
        return tuple(self._loads)

    def choose(self, token_ids: Sequence[int], answers: int, able: Collection[int]) -> int:
        """Return one of *able*, which owes so many more answers from now on.

        Args:
            token_ids: of the prompt.
            answers: how many it gets.
            able: the replicas that take requests; at least one.
        """
        hashes = self._hashes(token_ids)
        least = min(self._loads[each] for each in able)
        near = [each for each in able if self._loads[each] <= least + _SLACK]
        chosen = max(near, key=lambda r: (self._length(r, hashes), -self._loads[r], -self._last[r]))
        self._loads[chosen] += answers
        self._last[chosen] = next(self._turns)
        self._remember(chosen, hashes)
        return chosen

    def release(self, replica: int, answers: int) -> None:
        """Take note that a replica owes so many answers less."""
        self._loads[replica] -= answers

    def forget(self, replica: int) -> None:
        """Take note that a replica has lost all that it computed."""
        self._known[replica].clear()

    def _hashes(self, token_ids: Sequence[int]) -> list[bytes]:
        hashes: list[bytes] = []
        if self._finds_prefixes:
            with suppress(OverflowError, TypeError):  # no tokens at all: the replica says so
                extend_hashes(hashes, token_ids, _BLOCK)
        return hashes

    def _length(self, replica: int, hashes: Sequence[bytes]) -> int:
        """Return how many blocks at the beginning the replica was sent before."""
        known = self._known[replica]
        return next((i for i, each in enumerate(hashes) if each not in known), len(hashes))

    def _remember(self, replica: int, hashes: Sequence[bytes]) -> None:
        known = self._known[replica]
        # The end first: what is forgotten first is the end of a prompt, as in the replica's cache.
        for each in reversed(hashes):
            known[each] = None
            known.move_to_end(each)
        while len(known) > _REMEMBERED:
            known.popitem(last=False)
