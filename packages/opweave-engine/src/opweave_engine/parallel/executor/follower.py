"""A rank that executes the calls of the first rank."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue

from torch.distributed.distributed_c10d import Store

from opweave.ir.errors import OpweaveError, described
from opweave.platforms import Platform
from opweave_engine.parallel.executor.agreement import Agreement
from opweave_engine.parallel.executor.messages import Call, Failure, Reply, Start, Stop
from opweave_engine.parallel.executor.rank import RankWorker

_log = logging.getLogger(__name__)

AGREED = b"agreed"
_GRACE = 5.0  # seconds to finish after the first rank has gone


def follow(connection: Connection, open_store: Callable[[], Store]) -> int:
    """Execute the first rank's calls until it stops; return the exit code of the process.

    If the first rank goes away, the process ends, even in the middle of a step. Ctrl-C and SIGTERM,
    which a terminal or a service sends to all processes, are left to the first rank.

    Args:
        connection: to the first rank.
        open_store: opens the rendezvous store; may wait long if the first rank has gone.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    try:
        agreement = Agreement.from_json(connection.recv_bytes().decode())
        platform = agreement.impose()
        with agreement.selection():
            connection.send_bytes(AGREED)
            return _serve(connection, platform, open_store)
    except (EOFError, ConnectionError):  # the first rank has gone
        return 1
    except Exception as error:  # the first rank must be told of any error
        return _refuse(connection, error)


def _refuse(connection: Connection, error: Exception) -> int:
    try:
        connection.send_bytes(described(error).encode())
    except OSError:  # it has gone
        _log.exception("a rank failed, and the first rank has gone")
    return 1


def _serve(connection: Connection, platform: Platform, open_store: Callable[[], Store]) -> int:
    inbox: SimpleQueue[Call | Stop] = SimpleQueue()
    start = connection.recv()
    assert isinstance(start, Start), start
    finished = threading.Event()
    threading.Thread(target=_read, args=(connection, inbox, finished), daemon=True).start()
    rank = None
    try:
        rank = RankWorker(start, platform, open_store())
        while isinstance(call := inbox.get(), Call):
            connection.send(Reply(call.number, _do(rank, call)))
        return 0
    except Exception as error:
        trace = None if isinstance(error, OpweaveError) else traceback.format_exc()
        connection.send(Failure(described(error), trace))
        return 1
    finally:
        if rank is not None:
            rank.close()
        finished.set()


def _do(rank: RankWorker, call: Call) -> object:
    method = rank.follow if call.method == "execute" else getattr(rank, call.method)
    value: object = method(*call.arguments)
    return value


def _read(
    connection: Connection, inbox: SimpleQueue[Call | Stop], finished: threading.Event
) -> None:
    """Pass on messages; exit the process when the connection ends."""
    try:
        while True:
            message = connection.recv()
            inbox.put(message)
    except (EOFError, OSError, pickle.UnpicklingError):
        inbox.put(Stop())
        if not finished.wait(_GRACE):
            os._exit(1)
