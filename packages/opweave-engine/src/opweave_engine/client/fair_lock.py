"""A fair (FIFO) lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import Lock


class FairLock:
    """A lock that a waiting thread gets before the thread that has just released it.

    A plain lock usually goes to the running thread, which is the one that released it.
    """

    def __init__(self) -> None:
        self._next, self._now = Lock(), Lock()
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()

    @contextmanager
    def take(self) -> Iterator[None]:
        """Hold the lock in the block."""
        with self._next:
            self._now.acquire()
        try:
            yield
        finally:
            self._now.release()
            self._do_calls()

    def soon(self, call: Callable[[], object]) -> None:
        """Run *call* under the lock: now, or when the current holder releases it.

        Never blocks: garbage collection may close an iterator while this thread holds the lock.
        """
        self._calls.put(call)
        self._do_calls()

    def _do_calls(self) -> None:
        # A thread that cannot get the lock leaves the calls to the holder, which comes here next.
        while not self._calls.empty() and self._now.acquire(blocking=False):
            try:
                with suppress(Empty):
                    self._calls.get_nowait()()
            finally:
                self._now.release()
