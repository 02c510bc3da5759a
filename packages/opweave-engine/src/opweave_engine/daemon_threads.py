"""A thread pool that does not keep the process alive."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any


class DaemonThreads(Executor):
    """A pool of daemon threads. Unlike with Python's own pools, the process does not wait for them.

    A thread ends when there is no more work.

    Args:
        max_threads: the maximum number of threads.
        name: the name of the threads.
    """

    def __init__(self, max_threads: int, name: str) -> None:
        self._max_threads, self._name = max_threads, name
        self._lock = threading.Lock()
        self._count = 0
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call *fn* in a thread."""
        future: Future[Any] = Future()
        with self._lock:
            self._waiting.append((future, partial(fn, *args, **kwargs)))
            if self._count < self._max_threads:
                self._count += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def _work(self) -> None:
        while (item := self._next()) is not None:
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # the future must get any error
                future.set_exception(error)

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._count -= 1
            return None
