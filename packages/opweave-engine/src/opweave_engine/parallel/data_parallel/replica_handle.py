"""The engine's view of one replica."""

from __future__ import annotations

import time

from opweave_engine.errors import ReplicaFailedError
from opweave_engine.metrics.stats import EngineStats
from opweave_engine.parallel.data_parallel.merged_stats import NOTHING, after_death, merged
from opweave_engine.parallel.data_parallel.messages import ReplicaLocation, ReplicaReport

_STARTING = 300.0  # seconds to import opweave and its plugins on a busy machine


class ReplicaHandle:
    """The state of a replica: its process, whether it has loaded, and its statistics.

    Args:
        number: its number.
        timeout: seconds without a report after which it counts as dead.
        past: the statistics of its predecessors.

    Attributes:
        place: its process; None: not started yet.
        is_ordered: whether its load order was sent.
        max_model_len: the limit of its engine; None: not loaded yet.
        vocab_size: the size of its vocabulary; 0: not loaded yet.
        failure: the error that it died of; None: it is alive.
    """

    def __init__(self, number: int, timeout: float, past: EngineStats = NOTHING) -> None:
        self.number = number
        self.place: ReplicaLocation | None = None
        self.is_ordered = False
        self.max_model_len: int | None = None
        self.vocab_size = 0
        self.failure: ReplicaFailedError | None = None
        self._timeout, self._heard = timeout, time.monotonic()
        self._past, self._stats = past, NOTHING

    @property
    def is_loaded(self) -> bool:
        """Whether it takes requests."""
        return self.max_model_len is not None and self.failure is None

    @property
    def stats(self) -> EngineStats:
        """Its statistics, with those of its predecessors."""
        return merged([self._past, self._stats])

    @property
    def silence(self) -> str | None:
        """How it missed its timeout; None: it did not."""
        if self.failure is not None:
            return None
        silent = time.monotonic() - self._heard
        if self.place is None and silent > _STARTING:
            return f"did not start within {_STARTING:g} s: Ray has no room, or does not answer"
        if self.place is not None and silent > self._timeout:
            return f"has not reported for {self._timeout:g} s"
        return None

    def put(self, place: ReplicaLocation) -> None:
        """Record its process."""
        self.place, self._heard = place, time.monotonic()

    def report(self, report: ReplicaReport) -> None:
        """Record a report."""
        self._heard, self.max_model_len = time.monotonic(), report.max_model_len
        self.vocab_size = report.vocab_size
        if report.stats is not None:
            self._stats = report.stats

    def die(self, failure: ReplicaFailedError) -> None:
        """Record its death."""
        self.failure, self._stats = failure, after_death(self._stats)

    def successor(self) -> ReplicaHandle:
        """Return the handle of its replacement."""
        return ReplicaHandle(self.number, self._timeout, self.stats)
