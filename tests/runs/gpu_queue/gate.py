"""Several jobs prepare at the same time; one that measures has the device to itself."""

from __future__ import annotations

import threading


class Gate:
    """A lock that jobs share while they prepare, and that one holds alone while it measures.

    A job that waits to measure goes before jobs that wait to start.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sharing = self._waiting = 0
        self._is_held = False

    def share(self, timeout: float) -> bool:
        """Start preparing; False: not within *timeout* seconds."""
        with self._changed:
            is_free = self._changed.wait_for(
                lambda: not self._is_held and not self._waiting, max(timeout, 0)
            )
            self._sharing += is_free
            return is_free

    def leave(self) -> None:
        """End what :meth:`share` began."""
        with self._changed:
            self._sharing -= 1
            self._changed.notify_all()

    def hold(self, timeout: float) -> bool:
        """Go on alone, after :meth:`share`; False, and still sharing: not within *timeout*."""
        with self._changed:
            self._sharing -= 1
            self._waiting += 1
            self._changed.notify_all()
            is_free = self._changed.wait_for(
                lambda: not self._is_held and not self._sharing, max(timeout, 0)
            )
            self._waiting -= 1
            self._is_held |= is_free
            self._sharing += not is_free
            self._changed.notify_all()
            return is_free

    def release(self) -> None:
        """End what :meth:`hold` began, and go on sharing."""
        with self._changed:
            self._is_held = False
            self._sharing += 1
            self._changed.notify_all()
