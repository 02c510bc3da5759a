"""What an engine needs of its replicas, wherever they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from opweave.engine.errors import ReplicaFailedError
from opweave.engine.parallel.data_parallel.messages import ReplicaLocation, ReplicaReport

Method = Literal["start", "ask", "abort", "stop"]
News = ReplicaLocation | ReplicaReport | ReplicaFailedError


class ReplicaGroup(Protocol):
    """Some replicas, by number.

    Each first sends its :class:`ReplicaLocation`, then its reports, and last the error that it died
    of.
    """

    def tell(self, replica: int, method: Method, *arguments: object) -> None:
        """Let a replica do something; to one that has died, it means nothing. From any thread."""

    def receive(self, timeout: float) -> Sequence[tuple[int, News]]:
        """Return what is new, with the numbers of the replicas, within so many seconds."""

    def renew(self, replica: int) -> None:
        """Put another one in the place of one that has died.

        Raises:
            ReplicaFailedError: none can come.
        """

    def kill(self, replica: int) -> None:
        """End a replica at once; no news of it come any more."""

    def close(self) -> None:
        """Let all replicas stop, and free what they hold. A second call does nothing."""
