"""Idle connections, and the limit of connections."""

from __future__ import annotations

import logging
import os
import resource
import sys
from typing import Protocol

_log = logging.getLogger(__name__)

_RESERVE = 64  # files opened later, by the engine and for connections being accepted


class Closable(Protocol):
    """A connection that can be closed at once."""

    def hang_up(self) -> None:
        """Close it."""


class IdleConnections:
    """The connections without a request. If there are too many, the oldest is closed.

    Args:
        limit: the maximum number of connections, with or without a request.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._was_full = limit, False
        self._waiting: dict[Closable, None] = {}  # oldest first

    def enter(self, connection: Closable) -> None:
        """Add a connection that waits for a request."""
        self._waiting[connection] = None

    def leave(self, connection: Closable) -> None:
        """Remove a connection, because it got a request or was closed."""
        self._waiting.pop(connection, None)

    def make_room(self, count: int) -> None:
        """Close the oldest idle connection if *count* exceeds the limit."""
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
    """Return the number of connections that the limit of open files allows."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(1, limit - len(os.listdir("/dev/fd")) - _RESERVE)
