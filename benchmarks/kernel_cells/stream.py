"""The limit: how fast this machine moves memory, measured among what it limits."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from harness import cache_bytes, interleaved, microseconds, significant
from opweave_engine.load import loader

COLD_BYTES = 4 * (cache_bytes(3) or cache_bytes(2) or 2**25)
"""So much memory, walked in a circle, is in no cache when its turn comes again."""

_CACHED = (2**18, 2**21, 2**23)


class Stream:
    """Moves memory; speeds are in GB/s.

    ``copy`` counts what it reads and what it writes, with ordinary stores, as STREAM does;
    ``update`` writes what it has read; ``read`` is a sum or a dot product, whichever is faster.

    Args:
        size: bytes of the two arrays together.
        pieces: move so much of them at a time, one piece after the other.
        repeats: move a piece so many times.
        in_huge_pages: as the engine's weights are, and faster; else as torch allocates it.
    """

    def __init__(
        self,
        size: int = COLD_BYTES,
        pieces: int = 4,
        repeats: int = 1,
        *,
        in_huge_pages: bool = False,
    ) -> None:
        shape = 2, pieces, size // 8 // pieces
        empty = loader.empty if in_huge_pages else torch.empty
        memory = empty(shape, dtype=torch.float32, device=torch.device("cpu"))
        self._sources, self._targets = memory.fill_(1)
        self._pieces, self._repeats, self._turn = pieces, repeats, 0
        self.found: dict[str, list[float]] = {what: [] for what in ("copy", "update", "read")}

    def copy(self) -> float:
        return self._measure("copy", [_copy])

    def update(self) -> float:
        return self._measure("update", [_update])

    def read(self) -> float:
        return self._measure("read", [torch.dot, _sum])

    def _measure(self, what: str, ways: Sequence[Callable[[Tensor, Tensor], object]]) -> float:
        best = 0.0
        for way in ways:
            self._turn = (self._turn + 1) % self._pieces
            pair = self._sources[self._turn], self._targets[self._turn]
            moved = (4 if what == "update" else 2) * pair[0].nbytes
            best = max(best, moved / microseconds(way, [pair] * self._repeats) / 1e3)
        self.found[what].append(best)
        return best

    def summary(self) -> dict[str, float]:
        """Return the medians of all that was measured so far."""
        return {
            what: significant(statistics.median(speeds))
            for what, speeds in self.found.items()
            if speeds
        }


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def _update(source: Tensor, target: Tensor) -> None:
    source.neg_()
    target.neg_()


def _sum(source: Tensor, target: Tensor) -> None:
    source.sum()
    target.sum()


def cached_speeds() -> dict[str, dict[str, float]]:
    """Return the speeds in arrays that fit into caches, by the size of both together."""
    found = {}
    for size in _CACHED:
        stream = Stream(size, pieces=1, repeats=_CACHED[-1] // size)
        measures = {"copy": stream.copy, "update": stream.update, "read": stream.read}
        interleaved(measures, range(15))
        found[f"{size // 1024} KiB"] = stream.summary()
    return found
