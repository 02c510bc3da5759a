"""Executors: start the workers of an engine, and call them."""

import logging
import os
import signal
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

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
from opweave_engine.parallel.rank import (
    AGREED,
    Agreement,
    Call,
    Failure,
    Method,
    RankWorker,
    Reply,
    Start,
    follow,
    launch_of,
)
from opweave_engine.parts import part, supports
from opweave_engine.runner import ModelFacts, Worker, cpu_threads
from opweave_engine.sampling.sampler import Sampled

# The interface of executors.


T = TypeVar("T")


class Executor(ABC):
    """Runs the workers of one engine. The constructor loads the model on each worker.

    Args:
        model: the directory of a checkpoint.
        config: the engine's configuration.
        platform: names the worker.
        progress: called while loading, with the number of tensors loaded so far and in total.

    Attributes:
        facts: facts about the model; the memory is the minimum over all workers.
        overlaps: whether the next step may be launched before the tokens of one are read.

    Raises:
        EngineError, ModelError: the checkpoint is missing, damaged or not supported.
    """

    facts: ModelFacts
    overlaps: bool = False

    @abstractmethod
    def allocate(self, plan: CachePlan) -> None:
        """Allocate the caches of all workers, and warm the workers up."""

    @abstractmethod
    def execute(self, steps: Sequence[SequenceStep]) -> list[Sampled]:
        """Compute one step on all workers, and return the token of each sequence that samples."""

    def launch(self, steps: Sequence[SequenceStep]) -> Callable[[], list[Sampled]]:
        """Start one step; return a function that waits for the result of :meth:`execute`."""
        sampled = self.execute(steps)
        return lambda: sampled

    def check(self) -> None:  # noqa: B027 - a worker in this process fails in a call
        """Raise the error of a worker that died between calls.

        Raises:
            RankFailedError: a worker died.
        """

    def watch(self, call: Callable[[], None]) -> None:  # noqa: B027 - as above
        """Call *call*, in another thread, when a worker dies."""

    def interrupt(self) -> None:  # noqa: B027 - nothing interrupts a worker in this process
        """Make a step that waits for other workers raise; called from another thread.

        The workers cannot be used afterwards.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the workers, and free their resources. A second call is a no-op."""


def _running(worker: T | None) -> T:
    """Return the worker of an executor that is not shut down."""
    if worker is None:
        raise EngineDeadError("The engine is shut down.")
    return worker


# Executor with a single worker in this process.


class InProcessExecutor(Executor):
    """Runs a single worker in this process.

    Attributes:
        worker: the worker; None after :meth:`shutdown`.

    Raises:
        InvalidArgumentError: *config* asks for more ranks.
    """

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig,
        platform: Platform,
        progress: Progress | None = None,
    ) -> None:
        if config.parallel.tensor_parallel_size > 1:
            raise InvalidArgumentError(
                f"tensor_parallel_size={config.parallel.tensor_parallel_size}, but "
                f"{type(self).__name__} runs one rank. The platform {platform.name!r} chose it."
            )
        worker: type[Worker] = part(platform, "get_worker_cls", config)
        with ExitStack() as stack:
            stack.enter_context(cpu_threads(config.cpu_threads))
            self.worker: Worker | None = worker(model, config, platform)
            self.worker.init_device()
            self.worker.load_model(progress)
            self.facts = self.worker.facts()
            self._threads = stack.pop_all()  # until the engine shuts down
        parts = (self, self.worker, runner := getattr(self.worker, "runner", None))
        supported = all(supports(part, "launch", "execute") for part in parts)
        self.overlaps = supported and runner is not None and runner.overlaps

    def allocate(self, plan: CachePlan) -> None:
        worker = _running(self.worker)
        worker.allocate(plan)
        worker.warm_up()

    def execute(self, steps: Sequence[SequenceStep]) -> list[Sampled]:
        return _running(self.worker).execute(steps)

    def launch(self, steps: Sequence[SequenceStep]) -> Callable[[], list[Sampled]]:
        return _running(self.worker).launch(steps) if self.overlaps else super().launch(steps)

    def shutdown(self) -> None:
        self.worker = None
        self._threads.close()


# Processes of ranks that an engine starts on its own machine.


HOST = "127.0.0.1"


class Process(ChildProcess):
    """The process of a rank.

    Args:
        port: the port of the rendezvous store on this machine.
    """

    def __init__(self, port: int) -> None:
        super().__init__("opweave_engine.parallel.spawned_rank", str(port))

    def end(self, timeout: float) -> str:
        """Wait for its end, and kill it after *timeout* seconds; return how it ended, in words."""
        code = self.wait(timeout)
        if code >= 0:
            return f"exited with code {code}"
        return f"was killed by {signal.Signals(-code).name}"


# The other ranks, as seen by the first one: calls, replies and failures.


_log = logging.getLogger(__name__)

_START_SECONDS = 300.0  # to import opweave and its plugins, on a busy machine
_STOP_SECONDS = 5.0  # for ranks to end


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
        self._connections, self.processes = dict(connections), dict(processes)
        self._numbers, self._changed = count(1), threading.Condition()
        self._replies: dict[int, dict[int, Any]] = {}
        self._last: dict[int, int] = dict.fromkeys(connections, 0)
        self._failure: RankFailedError | None = None
        self._is_closed = False
        self._on_failure: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._listen, name="opweave-ranks", daemon=True)

    def start(self, agreement: Agreement, starts: Mapping[int, Start]) -> None:
        """Check that all ranks agree, and start each.

        Raises:
            RankFailedError: a rank disagrees, or does not answer.
        """
        for connection in self._connections.values():
            with suppress(OSError):  # the missing answer is reported below
                connection.send_bytes(agreement.to_json().encode())
        for rank, connection in self._connections.items():
            if not connection.poll(_START_SECONDS):
                raise RankFailedError(f"rank {rank} did not start within {_START_SECONDS:g} s.")
            try:
                answer = connection.recv_bytes()
            except (EOFError, OSError):
                raise RankFailedError(f"rank {rank} did not start: it {self._end(rank)}.") from None
            if answer != AGREED:
                raise RankFailedError(f"rank {rank} refused to start: {answer.decode()}")
        self._thread.start()
        for rank, start in starts.items():
            with suppress(OSError):  # the listening thread reports the error
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
            failure = self.failure(_STOP_SECONDS)
            raise failure or EngineDeadError("The engine is shut down.") from error
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
            by_rank = self._replies.pop(number)
        return [by_rank[rank] for rank in sorted(by_rank)]

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
        with self._changed:
            if self._failure is not None:
                return self._failure
            self._failure = failure = RankFailedError(reason)
            calls = list(self._on_failure)
            self._changed.notify_all()
        for process in self.processes.values():
            process.kill()
        for call in calls:
            call()
        return failure

    def silent(self) -> str:
        """Return the ranks whose replies are missing, for an error."""
        newest = max(self._last.values())
        late = [rank for rank, number in self._last.items() if number < newest]
        return ", ".join(map(str, late or self._last))

    def watch(self, call: Callable[[], None]) -> None:
        """Call *call*, in another thread, when a rank fails, or at once if one has."""
        with self._changed:
            self._on_failure.append(call)
        if self._failure is not None:
            call()

    def stop(self) -> None:
        """Ask all ranks to stop."""
        self._is_closed = True
        for connection in self._connections.values():
            with suppress(OSError):
                connection.send(None)

    def kill(self) -> None:
        """End the processes that were started, at once."""
        self._is_closed = True
        for process in self.processes.values():
            process.kill()

    def close(self) -> None:
        """Wait until all ranks have ended, after :meth:`stop`."""
        for process in self.processes.values():
            process.end(_STOP_SECONDS)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_STOP_SECONDS)
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
                        self.fail(f"rank {rank} died: it {self._end(rank)}.")

    def _receive(self, rank: int, message: Reply | Failure) -> None:
        if isinstance(message, Failure):
            if message.trace is not None:
                _log.error("rank %d failed:\n%s", rank, message.trace)
            self.fail(f"rank {rank} failed: {message.error}")
            return
        with self._changed:
            self._last[rank] = message.number
            if (awaited := self._replies.get(message.number)) is not None:
                awaited[rank] = message.value
            self._changed.notify_all()

    def _end(self, rank: int) -> str:
        process = self.processes.get(rank)
        return "closed its connection" if process is None else process.end(_STOP_SECONDS)


# Executor with several ranks: the first in this process, each other one in its own.


_FAILURE_SECONDS = 2.0  # for the message of a rank that fails to arrive


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
        if platform is not (current := platforms.current_platform):
            raise InvalidArgumentError(
                f"platform {platform.name!r} was given, but the current one is {current.name!r}, "
                "on which the processes of the other ranks are. Choose it with OPWEAVE_PLATFORM."
            )
        local = size = config.parallel.tensor_parallel_size
        launch, timeout = launch_of(size), config.parallel.timeout
        check_ranks(model, size, config.model_impl)
        store: Store
        if launch is None:
            store = own_store = _own_store()
            processes = {rank: Process(own_store.port) for rank in range(1, size)}
            connections = {rank: process.connection for rank, process in processes.items()}
        else:
            store, local = launch.store(timeout, platform.dist_backend), launch.local_size
            if launch.rank:
                sys.exit(follow(launch.connect(store), lambda: store))
            connections, processes = launch.accept(store, timeout), {}
        start = Start(0, size, 0, Path(model), config, timeout, _threads(config, platform, local))
        self._rank: RankWorker | None = None
        self._peers = peers = Peers(connections, processes)
        try:
            self._rank = RankWorker(start, platform, store, progress)
            self._stop = weakref.finalize(self, _shut_down, peers, self._rank)
            others = {r: replace(start, rank=r, local_rank=r % local) for r in range(1, size)}
            peers.start(Agreement.here(), others)
            self.facts = self._load(self._rank, local)
        except BaseException:
            peers.kill()
            self.shutdown()
            raise

    def allocate(self, plan: CachePlan) -> None:
        rank = _running(self._rank)
        with self._together():
            self._call(rank, "allocate", plan)
            self._call(rank, "warm_up")

    def execute(self, steps: Sequence[SequenceStep]) -> list[Sampled]:
        rank = _running(self._rank)
        with self._together():
            self._peers.call("execute", steps)
            return rank.worker.execute(steps)

    def check(self) -> None:
        self._peers.check()

    def watch(self, call: Callable[[], None]) -> None:
        self._peers.watch(call)

    def interrupt(self) -> None:
        silent = self._peers.silent()
        self._peers.fail(f"the engine shuts down, and ranks have not finished the step: {silent}.")

    def shutdown(self) -> None:
        if self._rank is not None:
            self._rank = None
            self._stop()

    def _call(self, rank: RankWorker, method: Method, *arguments: Any) -> list[Any]:
        """Call a method on all ranks at once, and return the results by rank."""
        number = self._peers.call(method, *arguments)
        return [rank.do(method, *arguments), *self._peers.replies(number)]

    def _load(self, rank: RankWorker, local: int) -> ModelFacts:
        # Ranks wait for each other without a collective here, so the failure of one must end it.
        self._peers.watch(rank.abort)
        with self._together():
            self._call(rank, "join")
            self._call(rank, "load_model")
            facts: list[ModelFacts] = self._call(rank, "facts")
        memory, free = min(f.memory for f in facts), min(f.free for f in facts)
        if rank.worker.platform.capabilities.unified_memory:  # all ranks report the same memory
            free //= local
            if rank.worker.config.cache.memory_bytes is None:
                memory //= local
        return replace(facts[0], memory=memory, free=free)

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
            # The other ranks may be at another collective by now.
            self._peers.fail(f"rank 0 stopped in the middle of a step: {type(error).__name__}")
            raise

    def _why(self, error: Exception) -> Exception:
        """Return the error of the rank that failed first, which may not be this one's."""
        failure = self._peers.failure(_FAILURE_SECONDS)
        if failure is not None:
            return failure
        if isinstance(error, CommunicatorError | distributed.DistError):
            silent = self._peers.silent()
            return self._peers.fail(f"{error} Ranks that have not finished the step: {silent}.")
        self._peers.fail(f"rank 0 failed: {described(error)}")
        return error


def _own_store() -> TCPStore:
    if distributed.is_initialized():
        raise InvalidArgumentError(
            "This process is in a group of torch.distributed already, and an engine with several "
            "ranks makes one: shut the other engine down, or launch all ranks with torchrun."
        )
    return TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


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
