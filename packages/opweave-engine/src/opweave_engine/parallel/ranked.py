"""Executor with several ranks: the first in this process, each other one in its own."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from opweave import platforms
from opweave.config import EngineConfig
from opweave.config.child_process import ChildProcess
from opweave.ir.errors import OpweaveError, described
from opweave.platforms import Platform
from opweave_engine.decode_graphs import SequenceStep
from opweave_engine.errors import (
    CommunicatorError,
    EngineDeadError,
    InvalidArgumentError,
    NonFiniteLogitsError,
    RankFailedError,
)
from opweave_engine.kv_cache import CachePlan
from opweave_engine.load.checkpoint import Progress
from opweave_engine.load.loader import check_ranks
from opweave_engine.parallel.executor import Executor, Launch
from opweave_engine.parallel.rank import (
    AGREED,
    Agreement,
    Call,
    Failure,
    Method,
    RankWorker,
    Reply,
    Start,
    Stop,
    follow,
)
from opweave_engine.runner import ModelFacts
from opweave_engine.sampling.sampler import Sampled

# Processes of ranks that an engine starts on its own machine.


HOST = "127.0.0.1"
_MODULE = "opweave_engine.parallel.spawned_rank"


class Process(ChildProcess):
    """The process of a rank.

    Args:
        port: the port of the rendezvous store on this machine.
    """

    def __init__(self, port: int) -> None:
        super().__init__(_MODULE, str(port))

    def end(self, timeout: float) -> str:
        """Wait for its end, and kill it after *timeout* seconds; return how it ended, in words."""
        code = self.wait(timeout)
        if code >= 0:
            return f"exited with code {code}"
        return f"was killed by {signal.Signals(-code).name}"


# The other ranks, as seen by the first one: calls, replies and failures.


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


# The executor.


_LAST_WORDS = 2.0  # seconds in which a rank that fails is heard


class RankedExecutor(Executor):
    """Runs a worker for each rank of a tensor-parallel model.

    The first rank is in this process. It starts the others, unless ``torchrun`` has. With
    ``torchrun``, every process runs the same program; in the other ranks, the constructor follows
    the first rank, and raises ``SystemExit`` when that shuts down.

    A failure of one rank ends all ranks within the configured timeout. Every method then raises
    :class:`~opweave_engine.errors.RankFailedError`, which names the rank.

    Raises:
        InvalidArgumentError: the number of launched processes differs, or *platform* is not the
            current one, which the other ranks use.
        ShardingError: the model cannot be divided over the ranks; no process is started.
        RankFailedError: a rank does not start, or would run on another platform, with other
            plugins, versions or priorities.
    """

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig,
        platform: Platform,
        progress: Progress | None = None,
    ) -> None:
        _check_platform(platform)
        launch, timeout = Launch.from_environment(), config.parallel.timeout
        size = config.parallel.tensor_parallel_size
        local = size
        if launch is not None:
            launch.check_size(size)
        check_ranks(model, size, config.model_impl)
        if launch is None:
            store: Store = _own_store()
            processes = {rank: Process(_port(store)) for rank in range(1, size)}
            peers = Peers({rank: each.connection for rank, each in processes.items()}, processes)
        else:
            store, local = launch.store(timeout, platform.dist_backend), launch.local_size
            if launch.rank:
                sys.exit(follow(launch.connect(store), lambda: store))
            peers = Peers(launch.accept(store, timeout), {})
        start = Start(0, size, 0, Path(model), config, timeout, _threads(config, platform, local))
        self._rank: RankWorker | None = None
        self._peers, self._is_interrupted = peers, False
        try:
            self._rank = RankWorker(start, platform, store)
            self._stop = weakref.finalize(self, _shut_down, peers, self._rank)
            peers.start(
                Agreement.here(),
                {r: replace(start, rank=r, local_rank=r % local) for r in range(1, size)},
            )
            self.facts = self._load(progress, local)
        except BaseException:
            peers.kill()
            self.shutdown()
            raise

    @property
    def pids(self) -> dict[int, int]:
        """The process ids of the ranks that this process has started, by rank."""
        return self._peers.pids

    def allocate(self, plan: CachePlan) -> None:
        rank = self._running()
        with self._together():
            numbers = [self._peers.call("allocate", plan), self._peers.call("warm_up")]
            rank.allocate(plan)
            rank.warm_up()
            for number in numbers:
                self._peers.replies(number)

    def execute(self, steps: Sequence[SequenceStep]) -> list[Sampled]:
        rank = self._running()
        with self._together():
            self._peers.call("execute", steps)
            return rank.execute(steps)

    def check(self) -> None:
        self._peers.check()

    def watch(self, call: Callable[[], None]) -> None:
        self._peers.watch(call)

    def interrupt(self) -> None:
        silent = ", ".join(map(str, self._peers.silent()))
        self._peers.fail(f"the engine shuts down, and ranks have not finished the step: {silent}.")

    def shutdown(self) -> None:
        if self._rank is not None:
            self._rank = None
            self._stop()

    def _load(self, progress: Progress | None, local: int) -> ModelFacts:
        rank, peers = self._running(), self._peers
        # Here the ranks wait for each other without a collective: who fails must be heard first.
        peers.watch(rank.abort)
        with self._together():
            joined, loaded = peers.call("join"), peers.call("load_model")
            rank.join()
            peers.replies(joined)
            rank.load_model(progress)
            peers.replies(loaded)
            told = peers.replies(peers.call("facts"))
            facts = rank.facts()
        memory = min(facts.memory, *(each.memory for each in told))
        free = min(facts.free, *(each.free for each in told))
        if rank.worker.platform.capabilities.unified_memory:  # all have found the same
            free //= local
            if rank.worker.config.cache.memory_bytes is None:
                memory //= local
        return replace(facts, memory=memory, free=free)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """End all ranks if the block, which runs on all of them, raises."""
        try:
            yield
        except NonFiniteLogitsError:
            raise
        except (CommunicatorError, RuntimeError) as error:
            raise self._why(error) from error
        except BaseException as error:
            # Wherever the others are now, they are no longer where this one is.
            self._peers.fail(f"rank 0 stopped in the middle of a step: {type(error).__name__}")
            raise

    def _why(self, error: Exception) -> Exception:
        """Return the error of the rank that failed first, which may not be this one's."""
        failure = self._peers.failure(_LAST_WORDS)
        if failure is not None:
            return failure
        if isinstance(error, CommunicatorError | distributed.DistError):
            silent = ", ".join(map(str, self._peers.silent()))
            return self._peers.fail(f"{error} Ranks that have not finished the step: {silent}.")
        self._peers.fail(f"rank 0 failed: {described(error)}")
        return error

    def _running(self) -> RankWorker:
        if self._rank is None:
            raise EngineDeadError("The engine is shut down.")
        return self._rank


def _check_platform(platform: Platform) -> None:
    current = platforms.current_platform
    if platform is not current:
        raise InvalidArgumentError(
            f"platform {platform.name!r} was given, but the current one is {current.name!r}, on "
            "which the processes of the other ranks are. Choose it with OPWEAVE_PLATFORM."
        )


def _own_store() -> TCPStore:
    if distributed.is_initialized():
        raise InvalidArgumentError(
            "This process is in a group of torch.distributed already, and an engine with several "
            "ranks makes one: shut the other engine down, or launch all ranks with torchrun."
        )
    return TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


def _port(store: Store) -> int:
    assert isinstance(store, TCPStore), store
    return store.port


def _threads(config: EngineConfig, platform: Platform, local: int) -> int | None:
    """Return the number of threads for each rank on this machine; None: unchanged."""
    if config.cpu_threads is not None:
        return config.cpu_threads
    if platform.device_type != "cpu" or os.environ.get("OMP_NUM_THREADS"):
        return None
    return max(1, torch.get_num_threads() // local)


def _shut_down(peers: Peers, rank: RankWorker) -> None:
    peers.stop()
    try:
        rank.close()
    except OpweaveError as error:
        _log.warning("leaving the group of ranks: %s", error)
    finally:
        peers.close()
