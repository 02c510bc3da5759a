"""Replicas of an engine in processes of their own, and their supervision."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from logging import LogRecord
from logging.handlers import QueueHandler
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal, Protocol

from opweave import platforms
from opweave.config import EngineConfig
from opweave.ir.errors import OpweaveError, described
from opweave.packages import PROJECT
from opweave_engine.async_engine import engine_class
from opweave_engine.client import EngineClient
from opweave_engine.errors import (
    EngineDeadError,
    EngineError,
    InvalidArgumentError,
    ReplicaFailedError,
)
from opweave_engine.load.checkpoint import Progress
from opweave_engine.metrics import NOTHING, EngineStats, after_death, merged
from opweave_engine.outputs import EmbeddingOutput, PoolingParams, RequestOutput
from opweave_engine.parallel.rank import Agreement
from opweave_engine.prompts import Prompt
from opweave_engine.request import merge_deltas
from opweave_engine.runner import share_of_host
from opweave_engine.sampling.params import SamplingParams

# Messages between an engine and its replicas.


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """The model and the configuration that a replica loads.

    Attributes:
        agreement: the settings of the sending process, as JSON.
        model: the directory of a checkpoint; the same on every machine.
        config: the engine's configuration.
        model_name: the model's name in requests.
        neighbors: the number of replicas on its machine, including itself.
        log_level: the lowest level of log records that it reports.
    """

    agreement: str
    model: Path
    config: EngineConfig
    model_name: str
    neighbors: int
    log_level: int


@dataclass(frozen=True, slots=True)
class Submission:
    """A request: a prompt to continue, or to embed.

    Attributes:
        request_id: the name of the request.
        prompt: a text, token ids, or a dict with one of them.
        params: sampling or pooling parameters.
        priority: the scheduling priority; lower numbers go first.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams | PoolingParams
    priority: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaLocation:
    """The process of a replica.

    Attributes:
        node: the name of its machine.
        pid: its process id there.
    """

    node: str
    pid: int


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """A request failed.

    Attributes:
        request_id: the name of the request.
        error: the reason.
    """

    request_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The news of a replica since its last report.

    Attributes:
        answers: what requests have got: outputs as deltas, vectors, and
            refusals.
        stats: statistics of its engine, once that is loaded.
        max_model_len: the engine's limit, once that is loaded.
        vocab_size: the size of the vocabulary, once the model is loaded.
        progress: the number of tensors loaded so far and in total; None: unchanged.
        records: log records.
        failure: the error that it died of.
    """

    answers: Sequence[RequestOutput | EmbeddingOutput | RequestFailure] = ()
    stats: EngineStats | None = None
    max_model_len: int | None = None
    vocab_size: int = 0
    progress: tuple[int, int] | None = None
    records: Sequence[LogRecord] = ()
    failure: Exception | None = None


# The interface between an engine and its replicas.


Method = Literal["start", "ask", "abort", "stop"]
News = ReplicaLocation | ReplicaReport | ReplicaFailedError


class ReplicaGroup(Protocol):
    """Replicas, identified by number.

    Each first sends its :class:`ReplicaLocation`, then its reports, and last the error that it died
    of.
    """

    def tell(self, replica: int, method: Method, *arguments: object) -> None:
        """Call a replica's method; a no-op if it has died. May be called from any thread."""

    def receive(self, timeout: float) -> Sequence[tuple[int, News]]:
        """Return new messages with the numbers of their replicas; wait for at most *timeout* s."""

    def renew(self, replica: int) -> None:
        """Replace a replica that has died.

        Raises:
            ReplicaFailedError: it cannot be replaced.
        """

    def kill(self, replica: int) -> None:
        """Kill a replica; :meth:`receive` returns no more messages from it."""

    def close(self) -> None:
        """Stop all replicas, and free their resources. A second call is a no-op."""


# Placement: divides the resources of a cluster between replicas.


CPU = "CPU"
_RESOURCES = {"cuda": "GPU", "xpu": "GPU"}


def resource_name(device_type: str) -> str:
    """Return Ray's resource name for torch's *device_type*, such as ``GPU`` for ``cuda``."""
    return _RESOURCES.get(device_type, device_type.upper())


def replica_resources(
    nodes: Sequence[Mapping[str, float]], replicas: int, devices: Mapping[str, int]
) -> dict[str, int]:
    """Return the resources of each replica: its devices, and the most CPUs that all can have.

    Args:
        nodes: the resources of each machine.
        replicas: the number of replicas; each runs on a single machine.
        devices: the devices that each replica needs, in addition to at least one CPU.

    Raises:
        InvalidArgumentError: the machines have too few resources.
    """
    need = {name: count for name, count in devices.items() if name != CPU}
    least = max(1, devices.get(CPU, 1))
    most = max((int(node.get(CPU, 0)) for node in nodes), default=0)
    for processors in range(most, least - 1, -1):
        room = {**need, CPU: processors}
        if sum(_count(node, room) for node in nodes) >= replicas:
            return room
    wanted = ", ".join(f"{count} {name}" for name, count in {**need, CPU: least}.items())
    found = "; ".join(
        ", ".join(f"{node.get(name, 0):g} {name}" for name in {**need, CPU: least})
        for node in nodes
    )
    raise InvalidArgumentError(
        f"data_parallel_size={replicas}: each replica needs {wanted} on one machine, but Ray's "
        f"machines have: {found or 'nothing'}. Lower data_parallel_size or tensor_parallel_size, "
        "or add machines to the cluster."
    )


def _count(node: Mapping[str, float], room: Mapping[str, int]) -> int:
    return min(int(node.get(name, 0) // count) for name, count in room.items())


# A replica: runs an engine in its process, and reports its news.


_log = logging.getLogger(__name__)

REPORTS_WITHIN = 1.0  # seconds; longer silence means that the replica hangs

Load = Callable[[LoadOrder, Progress], EngineClient]


class Replica:
    """An engine in a process of its own, driven by one event loop.

    Its methods return nothing; results are in :meth:`report`.

    Args:
        load: creates the engine.
    """

    def __init__(self, load: Load | None = None) -> None:
        self._load = load or load_engine
        self._engine: EngineClient | None = None
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._records: SimpleQueue[LogRecord] = SimpleQueue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._deltas: dict[str, list[RequestOutput]] = {}  # since the last report
        self._others: list[EmbeddingOutput | RequestFailure] = []
        self._progress: tuple[int, int] | None = None
        self._failure: BaseException | None = None

    async def start(self, order: LoadOrder) -> None:
        """Load the engine in a thread, so that the loop is not blocked."""
        threading.Thread(target=self._start, args=(order,), name="opweave-replica").start()

    async def ask(self, ask: Submission) -> None:
        """Run a request."""
        if self._engine is None:  # it was sent to the previous replica of this number
            gone = EngineDeadError("The replica died before the request came to it. Ask again.")
            self._refuse(ask.request_id, gone)
            return
        params = ask.params
        if isinstance(params, SamplingParams):
            work = self._answer(ask, params)
        else:
            work = self._embed(ask, params)
        self._tasks[ask.request_id] = asyncio.create_task(work)

    async def abort(self, request_id: str) -> None:
        """Abort a request; a no-op if it is unknown or has finished."""
        if self._engine is not None:
            await asyncio.sleep(0)  # lets a request that has just arrived start
            await self._engine.abort(request_id)

    async def report(self) -> ReplicaReport:
        """Return the news as soon as there are any, or after a second."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REPORTS_WITHIN):
                await self._news.wait()
        self._news.clear()
        engine, progress, others = self._engine, self._progress, self._others
        if engine is not None and engine.dead_with is not None:
            self._failure = engine.dead_with
        self._progress, self._others = None, []
        return ReplicaReport(
            answers=[*self._take_deltas(), *others],
            stats=None if engine is None else engine.stats(),
            max_model_len=None if engine is None else engine.max_model_len,
            vocab_size=0 if engine is None else engine.vocab_size,
            progress=progress,
            records=self._logged(),
            failure=None if self._failure is None else portable(self._failure),
        )

    async def stop(self) -> None:
        """Stop the engine."""
        self._news.set()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.shutdown)

    def take_log(self, level: int) -> None:
        """Report the log records of this process from now on, from *level* up."""
        for name in PROJECT:
            logger = logging.getLogger(name)
            logger.setLevel(level)
            logger.addHandler(QueueHandler(self._records))

    # In the thread that loads

    def _start(self, order: LoadOrder) -> None:
        try:
            self._engine = self._load(order, self._loading)
        except Exception as error:  # the engine must be told of any error
            if not isinstance(error, OpweaveError):
                _log.exception("the model cannot be loaded")
            self._failure = error
        self._wake()

    def _loading(self, done: int, most: int) -> None:
        self._progress = done, most
        self._wake()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._news.set)

    # In the event loop

    async def _answer(self, ask: Submission, params: SamplingParams) -> None:
        assert self._engine is not None, "it is loaded"
        try:
            outputs = self._engine.generate_deltas(
                ask.prompt, params, request_id=ask.request_id, priority=ask.priority
            )
            async for output in outputs:
                self._deltas.setdefault(ask.request_id, []).append(output)
                self._news.set()
        except Exception as error:  # the engine must be told of any error
            self._refuse(ask.request_id, error)
        finally:
            del self._tasks[ask.request_id]

    async def _embed(self, ask: Submission, params: PoolingParams) -> None:
        assert self._engine is not None, "it is loaded"
        try:
            vector = await self._engine.embed(ask.prompt, params, request_id=ask.request_id)
            self._others.append(vector)
            self._news.set()
        except asyncio.CancelledError:
            self._refuse(ask.request_id, EngineError("The request was given up."))
        except Exception as error:
            self._refuse(ask.request_id, error)
        finally:
            del self._tasks[ask.request_id]

    def _refuse(self, request_id: str, error: Exception) -> None:
        if not isinstance(error, OpweaveError):
            _log.error("request %s failed", request_id, exc_info=error)
        self._deltas.pop(request_id, None)
        self._others.append(RequestFailure(request_id, portable(error)))
        self._news.set()

    def _take_deltas(self) -> list[RequestOutput]:
        deltas, self._deltas = self._deltas, {}
        return [merge_deltas(each) for each in deltas.values()]

    def _logged(self) -> list[LogRecord]:
        records = []
        with suppress(Empty):
            while True:
                records.append(self._records.get_nowait())
        return records


def load_engine(order: LoadOrder, progress: Progress) -> EngineClient:
    """Apply the settings of the sending process, and load the engine.

    Raises:
        RankFailedError, PlatformMismatchError: this process has another platform, other plugins or
            other kernels.
        OpweaveError: as :func:`~opweave_engine.open_engine`.
    """
    agreement = Agreement.from_json(order.agreement)
    agreement.impose()
    agreement.settle()
    config = alone(order.config, order.neighbors)
    make = engine_class(order.model)
    return make(order.model, config=config, model_name=order.model_name, progress=progress)


def alone(config: EngineConfig, neighbors: int) -> EngineConfig:
    """Return the configuration of a replica that shares its machine with *neighbors* in total."""
    parallel = replace(config.parallel, data_parallel_size=1, data_parallel_address=None)
    platform, cache = platforms.current_platform, config.cache
    is_told = cache.memory_bytes is not None or cache.num_blocks is not None
    if platform.capabilities.unified_memory and not is_told:
        free, _ = platform.memory_info()
        cache = replace(cache, memory_bytes=max(1, share_of_host(free) // neighbors))
    return replace(config, parallel=parallel, cache=cache)


def portable(error: BaseException) -> Exception:
    """Return *error* if it can be pickled, else an EngineError with the same text."""
    try:
        found = pickle.loads(pickle.dumps(error))
    except Exception:  # unpickling runs code of the exception's class
        found = None
    if isinstance(found, Exception) and repr(found) == repr(error):
        return found
    return EngineError(described(error))


# The engine's view of one replica.


_STARTING = 300.0  # seconds to import opweave and its plugins on a busy machine


class ReplicaHandle:
    """The state of a replica: its process, whether it has loaded, and its statistics.

    Args:
        number: its number.
        timeout: seconds without a report after which it counts as dead.
        past: the statistics of its predecessors.

    Attributes:
        place: its process; None: not started yet.
        is_ordered: whether its load order was sent.
        max_model_len: the limit of its engine; None: not loaded yet.
        vocab_size: the size of its vocabulary; 0: not loaded yet.
        failure: the error that it died of; None: it is alive.
    """

    def __init__(self, number: int, timeout: float, past: EngineStats = NOTHING) -> None:
        self.number = number
        self.place: ReplicaLocation | None = None
        self.is_ordered = False
        self.max_model_len: int | None = None
        self.vocab_size = 0
        self.failure: ReplicaFailedError | None = None
        self._timeout, self._heard = timeout, time.monotonic()
        self._past, self._stats = past, NOTHING

    @property
    def is_loaded(self) -> bool:
        """Whether it takes requests."""
        return self.max_model_len is not None and self.failure is None

    @property
    def stats(self) -> EngineStats:
        """Its statistics, with those of its predecessors."""
        return merged([self._past, self._stats])

    @property
    def silence(self) -> str | None:
        """How it missed its timeout; None: it did not."""
        if self.failure is not None:
            return None
        silent = time.monotonic() - self._heard
        if self.place is None and silent > _STARTING:
            return f"did not start within {_STARTING:g} s: Ray has no room, or does not answer"
        if self.place is not None and silent > self._timeout:
            return f"has not reported for {self._timeout:g} s"
        return None

    def put(self, place: ReplicaLocation) -> None:
        """Record its process."""
        self.place, self._heard = place, time.monotonic()

    def report(self, report: ReplicaReport) -> None:
        """Record a report."""
        self._heard, self.max_model_len = time.monotonic(), report.max_model_len
        self.vocab_size = report.vocab_size
        if report.stats is not None:
            self._stats = report.stats

    def die(self, failure: ReplicaFailedError) -> None:
        """Record its death."""
        self.failure, self._stats = failure, after_death(self._stats)

    def successor(self) -> ReplicaHandle:
        """Return the handle of its replacement."""
        return ReplicaHandle(self.number, self._timeout, self.stats)


# Supervises the replicas: starts them, reads their reports, and replaces dead ones.


_TURN = 1.0  # seconds to wait for messages


class Replicas:
    """The replicas of one engine. Only one thread at a time may call :meth:`hear`.

    A replica that dies is replaced, unless it dies before it has loaded: its replacement would not
    load either.

    Args:
        group: the processes of the replicas.
        size: the number of replicas.
        order: the model and configuration of each.
        on_report: called with each report.
        on_loss: called with the handle of a replica that has died.
        progress: called while the first replica loads, with the number of tensors loaded so far and
            in total.

    Attributes:
        members: the handles of the current replicas, by number.
        last_failure: the error of the replica that died last; None: no replica has died.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        size: int,
        order: LoadOrder,
        on_report: Callable[[ReplicaReport], None],
        on_loss: Callable[[ReplicaHandle], None],
        progress: Progress | None = None,
    ) -> None:
        timeout = order.config.parallel.timeout
        self.members = [ReplicaHandle(number, timeout) for number in range(size)]
        self.last_failure: ReplicaFailedError | None = None
        self._group, self._order, self._progress = group, order, progress
        self._on_report, self._on_loss = on_report, on_loss

    @property
    def able(self) -> list[int]:
        """The numbers of the replicas that take requests."""
        return [member.number for member in self.members if member.is_loaded]

    def load(self) -> None:
        """Wait until all replicas have loaded.

        Raises:
            ReplicaFailedError: a replica failed.
        """
        while not all(member.is_loaded for member in self.members):
            self.hear()
            for member in self.members:
                if member.failure is not None:
                    raise member.failure
        self._progress = None

    def hear(self) -> None:
        """Process new messages; wait for them for at most a second."""
        for number, news in self._group.receive(_TURN):
            member = self.members[number]
            if isinstance(news, ReplicaFailedError):
                self._bury(member, news)
            elif isinstance(news, ReplicaLocation):
                member.put(news)
                _log.info("replica %d: process %d on %s", number, news.pid, news.node)
            else:
                self._take(member, news)
        self._start_what_is_placed()
        for member in list(self.members):
            if (reason := member.silence) is not None:
                self._bury(member, ReplicaFailedError(f"replica {member.number} {reason}."))

    def ask(self, number: int, ask: Submission) -> None:
        """Send a request to a replica."""
        self._group.tell(number, "ask", ask)

    def abort(self, number: int, request_id: str) -> None:
        """Abort a request of a replica."""
        self._group.tell(number, "abort", request_id)

    def stop(self) -> None:
        """Stop every replica that still responds."""
        for number in self.able:
            self._group.tell(number, "stop")

    def close(self) -> None:
        """Close the group, and free its resources."""
        self._group.close()

    def _take(self, member: ReplicaHandle, report: ReplicaReport) -> None:
        for record in report.records:
            record.msg = f"replica {member.number}: {record.msg}"
            logger = logging.getLogger(record.name)
            if logger.isEnabledFor(record.levelno):
                logger.handle(record)
        if report.progress is not None and self._progress is not None and member.number == 0:
            self._progress(*report.progress)
        was_loaded = member.is_loaded
        member.report(report)
        if member.is_loaded and not was_loaded:
            _log.info("replica %d: loaded", member.number)
        self._on_report(report)
        if (error := report.failure) is not None:
            shown = error if isinstance(error, OpweaveError) else repr(error)
            failure = ReplicaFailedError(f"replica {member.number} failed: {shown}")
            failure.__cause__ = error
            self._bury(member, failure)

    def _start_what_is_placed(self) -> None:
        places = [member.place for member in self.members if member.failure is None]
        nodes = Counter(place.node for place in places if place is not None)
        if None in places:
            return  # the number of replicas per machine is not known yet
        for member in self.members:
            if member.place is not None and member.failure is None and not member.is_ordered:
                member.is_ordered = True
                order = replace(self._order, neighbors=nodes[member.place.node])
                self._group.tell(member.number, "start", order)

    def _bury(self, member: ReplicaHandle, failure: ReplicaFailedError) -> None:
        was_loaded = member.is_loaded
        self._group.kill(member.number)
        member.die(failure)
        self.last_failure = failure
        self._on_loss(member)
        if not was_loaded:
            _log.error("%s", failure)
            return
        try:
            self._group.renew(member.number)
        except ReplicaFailedError as error:
            _log.critical("%s None takes its place: %s Start the server again.", failure, error)
        else:
            _log.error("%s Another one takes its place.", failure)
            self.members[member.number] = member.successor()
