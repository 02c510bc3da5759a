"""The connections that wait for a request, and how many connections there may be."""

from __future__ import annotations

import logging
import os
import resource
import sys
from typing import Protocol

_log = logging.getLogger(__name__)

_RESERVE = 64  # files that are opened later: what is being accepted, and what the engine opens


class Closable(Protocol):
    """A connection that can be closed at once."""

    def hang_up(self) -> None:
        """Close it."""


class IdleConnections:
    """Keeps connections that nobody uses from taking the room of those that are used.

    Args:
        limit: how many connections there may be, used or not.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._was_full = limit, False
        self._waiting: dict[Closable, None] = {}  # in the order in which they came

    def enter(self, connection: Closable) -> None:
        """Note that *connection* waits for a request from now on."""
        self._waiting[connection] = None

    def leave(self, connection: Closable) -> None:
        """Note that it does not."""
        self._waiting.pop(connection, None)

    def make_room(self, count: int) -> None:
        """Of *count* connections, close the one that has waited longest if they are too many."""
        if count <= self._limit or not self._waiting:
            return
        if not self._was_full:
            self._was_full = True
            _log.warning(
                "There are %d connections, as many as the limit of open files allows (ulimit -n). "
                "From now on, each new one ends the one that has waited longest for a request.",
                self._limit,
            )
        oldest = next(iter(self._waiting))
        self.leave(oldest)
        oldest.hang_up()


def most_connections() -> int:
    """Return how many connections this process may have, as many files as it has open now."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(1, limit - len(os.listdir("/dev/fd")) - _RESERVE)
