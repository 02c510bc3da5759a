"""One process that is the second rank of one engine after another: importing torch takes seconds.

Engines start a process for each rank; ``test_parallel.py`` tests that. Here it is the same loop,
:func:`opweave_engine.parallel.rank.follow`, in a process that stays.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import multiprocessing
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from opweave_engine.parallel.executor import HOST
from opweave_engine.parallel.rank import follow

_ENDING = 60.0  # seconds


def _follow_each(orders: Connection, ends: Connection) -> None:
    torch.set_num_threads(1)
    while (order := orders.recv()) is not None:
        connection, port = order
        torch.compiler.reset()
        code = follow(connection, partial(TCPStore, HOST, port, is_master=False))
        with socket.socket(fileno=os.dup(connection.fileno())) as ended:
            ended.shutdown(socket.SHUT_RDWR)  # as at the end of a process, for who still reads it
        ends.send(code)


class SharedRank:
    """The process; another one, if it was killed.

    Attributes:
        orders: to it: the connection to an engine and the port of its store, or None to end.
        ends: from it: the exit code of each rank that it was.
    """

    def __init__(self) -> None:
        self._start()

    def rank(self, port: int) -> SharedRankProcess:
        """Become a rank, as a process of ``opweave_engine.parallel.executor`` does."""
        if not self.process.is_alive():
            self._start()
        return SharedRankProcess(self, port)

    def stop(self) -> None:
        with suppress(BrokenPipeError):
            self.orders.send(None)
        self.process.join(_ENDING)
        self.process.kill()  # if it still runs

    def _start(self) -> None:
        context: Any = multiprocessing.get_context("spawn")
        its_orders, self.orders = context.Pipe(duplex=False)
        self.ends, its_ends = context.Pipe(duplex=False)
        self.process = context.Process(target=_follow_each, args=(its_orders, its_ends))
        self.process.start()


class SharedRankProcess:
    """The view of an engine."""

    def __init__(self, shared: SharedRank, port: int) -> None:
        self._shared, self.pid = shared, shared.process.pid
        self.connection, its = multiprocessing.Pipe()
        shared.orders.send((its, port))

    def end(self, timeout: float) -> str:
        with suppress(EOFError):
            if self._shared.ends.poll(timeout):
                return f"exited with code {self._shared.ends.recv()}"
        self.kill()
        return "was killed"

    def kill(self) -> None:
        self._shared.process.kill()


@contextmanager
def shared_rank() -> Iterator[Callable[[int], SharedRankProcess]]:
    """Run the process inside the block; yield what starts a rank in it."""
    shared = SharedRank()
    try:
        yield shared.rank
    finally:
        shared.stop()
