"""Routes requests to replicas."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import count

from opweave_engine.cache.block_hash import extend_hashes

_BLOCK = 64  # tokens; computing a shorter prefix is faster than looking for it
_REMEMBERED = 16_384  # blocks for each replica: a million tokens
_SLACK = 4  # extra load that a replica may have for the sake of a cached prefix


class ReplicaRouter:
    """Chooses a replica by load and by cached prefix.

    The load of a replica is its number of unfinished outputs. Among replicas with nearly the lowest
    load, the one that got the longest prefix of the prompt before is chosen, because it probably
    has it cached. Ties go to the lowest load, then to the least recently used replica.

    Args:
        size: the number of replicas.
        finds_prefixes: whether replicas have a prefix cache.
    """

    def __init__(self, size: int, *, finds_prefixes: bool = True) -> None:
        self._finds_prefixes = finds_prefixes
        self._loads = [0] * size
        self._turns, self._last = count(1), [0] * size
        self._known: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(size)]

    @property
    def loads(self) -> tuple[int, ...]:
        """The number of unfinished outputs of each replica."""
        return tuple(self._loads)

    def choose(
        self,
        token_ids: Sequence[int],
        answers: int,
        able: Collection[int],
        cache_salt: str | None = None,
    ) -> int:
        """Return one of *able*, and add *answers* to its load.

        Args:
            token_ids: the prompt.
            answers: the number of outputs of the request.
            able: the replicas that take requests; at least one.
            cache_salt: of the prompt; prefixes with other salts do not count.
        """
        hashes = self._hashes(token_ids, cache_salt)
        least = min(self._loads[each] for each in able)
        near = [each for each in able if self._loads[each] <= least + _SLACK]
        chosen = max(near, key=lambda r: (self._length(r, hashes), -self._loads[r], -self._last[r]))
        self._loads[chosen] += answers
        self._last[chosen] = next(self._turns)
        self._remember(chosen, hashes)
        return chosen

    def release(self, replica: int, answers: int) -> None:
        """Subtract finished outputs from the load of a replica."""
        self._loads[replica] -= answers

    def forget(self, replica: int) -> None:
        """Forget the prefixes of a replica whose cache is lost."""
        self._known[replica].clear()

    def _hashes(self, token_ids: Sequence[int], cache_salt: str | None) -> list[bytes]:
        hashes: list[bytes] = []
        if self._finds_prefixes:
            with suppress(
                OverflowError, TypeError
            ):  # invalid tokens: the replica reports the error
                extend_hashes(hashes, token_ids, _BLOCK, cache_salt)
        return hashes

    def _length(self, replica: int, hashes: Sequence[bytes]) -> int:
        """Return the number of leading blocks that the replica got before."""
        known = self._known[replica]
        return next((i for i, each in enumerate(hashes) if each not in known), len(hashes))

    def _remember(self, replica: int, hashes: Sequence[bytes]) -> None:
        known = self._known[replica]
        # The end first: as in the replica's cache, the end of a prompt is evicted first.
        for each in reversed(hashes):
            known[each] = None
            known.move_to_end(each)
        while len(known) > _REMEMBERED:
            known.popitem(last=False)
