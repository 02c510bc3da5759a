"""Replicas in this process, over engines of a test, instead of Ray's actors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from opweave_engine import EngineClient, ReplicaFailedError
from opweave_engine.parallel.ray import LoadOrder, Method, News, Replica, ReplicaLocation

Make = Callable[[int], EngineClient]


class ReplicasHere:
    """Implements ``ReplicaGroup``: every replica has a task in one event loop.

    Attributes:
        make: makes the engine of a replica, or raises.
        engines: those that were made last, by number.
        orders: what was ordered, with the number of the replica.
        is_closed: whether it is.
    """

    def __init__(self, size: int, make: Make, nodes: Sequence[str] = ("here",)) -> None:
        self.make, self._nodes = make, nodes
        self.engines: dict[int, Any] = {}
        self.orders: list[tuple[int, LoadOrder]] = []
        self.is_closed = False
        self._inbox: SimpleQueue[tuple[int, int, News]] = SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._lives = [0] * size  # how often each was renewed or killed
        self._replicas: dict[int, Replica] = {}
        self._tasks: dict[int, Any] = {}
        for number in range(size):
            self.renew(number)

    def send(self, replica: int, method: Method, *arguments: object) -> None:
        self.orders += [(replica, each) for each in arguments if isinstance(each, LoadOrder)]
        self._do(getattr(self._replicas[replica], method)(*arguments))

    def receive(self, timeout: float) -> Sequence[tuple[int, News]]:
        try:
            number, life, news = self._inbox.get(timeout=timeout)
        except Empty:
            return []
        return [(number, news)] if life == self._lives[number] else []

    def renew(self, replica: int) -> None:
        self._lives[replica] += 1
        self._tasks[replica] = self._do(self._run(replica, self._lives[replica]))

    def kill(self, replica: int) -> None:
        self._lives[replica] += 1
        self._tasks[replica].cancel()

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def die(self, replica: int) -> None:
        """Let a replica be dead, as of kill -9."""
        error = ReplicaFailedError(f"replica {replica} died: it was told to.")
        self._inbox.put((replica, self._lives[replica], error))

    def in_loop(self, call: Callable[[], object]) -> None:
        """Let *call* run where the replicas do."""
        self._loop.call_soon_threadsafe(call)

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _run(self, number: int, life: int) -> None:
        def load(order: LoadOrder, progress: Callable[[int, int], None]) -> EngineClient:
            progress(1, 2)
            self.engines[number] = engine = self.make(number)
            return engine

        replica = self._replicas[number] = Replica(load)
        self._inbox.put(
            (number, life, ReplicaLocation(self._nodes[number % len(self._nodes)], number))
        )
        while True:
            self._inbox.put((number, life, await replica.report()))

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
