"""The interface between an engine and its replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from opweave_engine.errors import ReplicaFailedError
from opweave_engine.parallel.data_parallel.messages import ReplicaLocation, ReplicaReport

Method = Literal["start", "ask", "abort", "stop"]
News = ReplicaLocation | ReplicaReport | ReplicaFailedError


class ReplicaGroup(Protocol):
    """Replicas, identified by number.

    Each first sends its :class:`ReplicaLocation`, then its reports, and last the error that it died
    of.
    """

    def tell(self, replica: int, method: Method, *arguments: object) -> None:
        """Call a replica's method; a no-op if it has died. May be called from any thread."""

    def receive(self, timeout: float) -> Sequence[tuple[int, News]]:
        """Return new messages with the numbers of their replicas; wait for at most *timeout* s."""

    def renew(self, replica: int) -> None:
        """Replace a replica that has died.

        Raises:
            ReplicaFailedError: it cannot be replaced.
        """

    def kill(self, replica: int) -> None:
        """Kill a replica; :meth:`receive` returns no more messages from it."""

    def close(self) -> None:
        """Stop all replicas, and free their resources. A second call is a no-op."""
