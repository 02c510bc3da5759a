"""One replica, as the engine sees it."""

from __future__ import annotations

import time

from opweave.engine.errors import ReplicaFailedError
from opweave.engine.metrics.stats import EngineStats
from opweave.engine.parallel.data_parallel.merged_stats import NOTHING, after_death, merged
from opweave.engine.parallel.data_parallel.messages import ReplicaLocation, ReplicaReport

_STARTING = 300.0  # seconds to import opweave and its plugins, on a machine that is busy


class ReplicaHandle:
    """What is known of a replica: where it is, whether it has loaded, and its numbers.

    Args:
        number: its place among the others.
        timeout: seconds without a sign after which it counts as dead.
        past: the numbers of those that had its place before.

    Attributes:
        place: its process; None: it has none yet.
        is_ordered: whether it was told what to load.
        max_model_len: of its engine; None: that is not loaded.
        vocab_size: of its model; 0: that is not loaded.
        failure: what it died of; None: it did not.
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
        """Its numbers, with those of the replicas that were in its place before."""
        return merged([self._past, self._stats])

    @property
    def silence(self) -> str | None:
        """In which way it has not been heard of for too long; None: it has."""
        if self.failure is not None:
            return None
        silent = time.monotonic() - self._heard
        if self.place is None and silent > _STARTING:
            return f"did not start within {_STARTING:g} s: Ray has no room, or does not answer"
        if self.place is not None and silent > self._timeout:
            return f"has not reported for {self._timeout:g} s"
        return None

    def put(self, place: ReplicaLocation) -> None:
        """Take note of where it is."""
        self.place, self._heard = place, time.monotonic()

    def report(self, report: ReplicaReport) -> None:
        """Take note of what it says."""
        self._heard, self.max_model_len = time.monotonic(), report.max_model_len
        self.vocab_size = report.vocab_size
        if report.stats is not None:
            self._stats = report.stats

    def die(self, failure: ReplicaFailedError) -> None:
        """Take note that it is there no longer."""
        self.failure, self._stats = failure, after_death(self._stats)

    def successor(self) -> ReplicaHandle:
        """Return the replica that comes into its place."""
        return ReplicaHandle(self.number, self._timeout, self.stats)
