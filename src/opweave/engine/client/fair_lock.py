"""How threads share what only one of them at a time may use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import Lock


class FairLock:
    """Gives one thread at a time its turn; who waits comes before who has just had one.

    A lock alone would go to the thread that runs, which is the one that has just released it.
    """

    def __init__(self) -> None:
        self._next, self._now = Lock(), Lock()
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait for a turn, and have it inside the block."""
        with self._next:
            self._now.acquire()
        try:
            yield
        finally:
            self._now.release()
            self._do_calls()

    def soon(self, call: Callable[[], object]) -> None:
        """Let *call* run in a turn: now, or when the present one ends.

        It never waits: iterators are closed by the collection of garbage, too, which may come in
        the middle of this thread's own turn.
        """
        self._calls.put(call)
        self._do_calls()

    def _do_calls(self) -> None:
        # Who cannot have a turn leaves the rest to the one who has it, and looks here afterwards.
        while not self._calls.empty() and self._now.acquire(blocking=False):
            try:
                with suppress(Empty):
                    self._calls.get_nowait()()
            finally:
                self._now.release()
