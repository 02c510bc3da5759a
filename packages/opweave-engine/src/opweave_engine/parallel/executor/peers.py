"""The other ranks, as seen by the first one: calls, replies and failures."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection, wait
from typing import Any

from opweave_engine.errors import EngineDeadError, RankFailedError
from opweave_engine.parallel.executor.agreement import Agreement
from opweave_engine.parallel.executor.follower import AGREED
from opweave_engine.parallel.executor.messages import Call, Failure, Method, Reply, Start, Stop
from opweave_engine.parallel.executor.processes import Process

_log = logging.getLogger(__name__)

_STARTING = 300.0  # seconds to import opweave and its plugins, on a machine that is busy
_ENDING = 5.0  # seconds to end after being told to


class Peers:
    """All ranks but the first.

    A thread reads their messages. If one rank fails or dies, the others are stopped, because they
    would wait for it forever.

    Args:
        connections: the connection to each rank.
        processes: the ranks' processes that this process has started.
    """

    def __init__(
        self, connections: Mapping[int, Connection], processes: Mapping[int, Process]
    ) -> None:
        self._connections, self._processes = dict(connections), dict(processes)
        self._numbers, self._changed = count(1), threading.Condition()
        self._replies: dict[int, dict[int, Any]] = {}
        self._last: dict[int, int] = dict.fromkeys(connections, 0)
        self._failure: RankFailedError | None = None
        self._is_closed = False
        self._on_failure: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._listen, name="opweave-ranks", daemon=True)

    @property
    def pids(self) -> dict[int, int]:
        """The processes that were started, by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def start(self, agreement: Agreement, starts: Mapping[int, Start]) -> None:
        """Check that all ranks agree, and start each.

        Raises:
            RankFailedError: a rank disagrees, or does not answer.
        """
        for connection in self._connections.values():
            with suppress(OSError):  # one that has gone gives no answer, either
                connection.send_bytes(agreement.to_json().encode())
        for rank, connection in self._connections.items():
            if not connection.poll(_STARTING):
                raise RankFailedError(f"rank {rank} did not start within {_STARTING:g} s.")
            try:
                answer = connection.recv_bytes()
            except (EOFError, OSError):
                raise RankFailedError(f"rank {rank} did not start: it {self._end(rank)}.") from None
            if answer != AGREED:
                raise RankFailedError(f"rank {rank} refused to start: {answer.decode()}")
        self._thread.start()
        for rank, start in starts.items():
            with suppress(OSError):  # who listens finds out why
                self._connections[rank].send(start)

    def call(self, method: Method, *arguments: Any) -> int:
        """Send a call to all ranks; return its number, for :meth:`replies`.

        Nothing waits for the replies to a step, because the first rank samples the same tokens.

        Raises:
            RankFailedError: a rank has failed.
        """
        self.check()
        number = next(self._numbers)
        if method != "execute":
            self._replies[number] = {}
        try:
            for connection in self._connections.values():
                connection.send(Call(number, method, arguments))
        except OSError as error:
            raise self.failure(_ENDING) or EngineDeadError("The engine is shut down.") from error
        return number

    def replies(self, number: int) -> list[Any]:
        """Wait for the results of a call, and return them by rank.

        Raises:
            RankFailedError: a rank has failed.
        """
        with self._changed:
            while len(self._replies[number]) < len(self._connections):
                self.check()
                self._changed.wait()
            found = self._replies.pop(number)
        return [found[rank] for rank in sorted(found)]

    def check(self) -> None:
        """Raise :class:`RankFailedError` if a rank has failed."""
        if self._failure is not None:
            raise self._failure

    def failure(self, within: float) -> RankFailedError | None:
        """Return the failure of a rank, if there is one within this number of seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, within)
        return self._failure

    def fail(self, reason: str) -> RankFailedError:
        """End all ranks because of *reason*, unless one has already failed; return the error."""
        self._fail(RankFailedError(reason))
        assert self._failure is not None  # just now, if not before
        return self._failure

    def silent(self) -> list[int]:
        """Return the ranks whose replies are missing."""
        most = max(self._last.values())
        return [rank for rank, number in self._last.items() if number < most] or list(self._last)

    def watch(self, call: Callable[[], None]) -> None:
        """Call *call*, in another thread, when a rank fails, or at once if one has."""
        with self._changed:
            self._on_failure.append(call)
        if self._failure is not None:
            call()

    def stop(self) -> None:
        """Tell all ranks to stop."""
        self._is_closed = True
        for connection in self._connections.values():
            with suppress(OSError):
                connection.send(Stop())

    def kill(self) -> None:
        """End the processes that were started, at once."""
        self._is_closed = True
        for process in self._processes.values():
            process.kill()

    def close(self) -> None:
        """Wait until all ranks have ended, after :meth:`stop`."""
        for process in self._processes.values():
            process.end(_ENDING)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_ENDING)
        for connection in self._connections.values():
            connection.close()

    # In the thread that listens

    def _listen(self) -> None:
        ranks = {connection: rank for rank, connection in self._connections.items()}
        while ranks and self._failure is None:
            for connection in wait(list(ranks)):
                assert isinstance(connection, Connection)
                try:
                    self._receive(ranks[connection], connection.recv())
                except (EOFError, OSError):
                    rank = ranks.pop(connection)
                    if not self._is_closed:
                        self._fail(RankFailedError(f"rank {rank} died: it {self._end(rank)}."))

    def _receive(self, rank: int, message: Reply | Failure) -> None:
        if isinstance(message, Failure):
            if message.trace is not None:
                _log.error("rank %d failed:\n%s", rank, message.trace)
            self._fail(RankFailedError(f"rank {rank} failed: {message.error}"))
            return
        with self._changed:
            self._last[rank] = message.number
            if (awaited := self._replies.get(message.number)) is not None:
                awaited[rank] = message.value
            self._changed.notify_all()

    def _fail(self, failure: RankFailedError) -> None:
        with self._changed:
            if self._failure is not None:
                return
            self._failure = failure
            calls = list(self._on_failure)
            self._changed.notify_all()
        for process in self._processes.values():
            process.kill()
        for call in calls:
            call()

    def _end(self, rank: int) -> str:
        process = self._processes.get(rank)
        return "closed its connection" if process is None else process.end(_ENDING)
