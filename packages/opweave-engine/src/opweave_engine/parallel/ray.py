"""Replicas of an engine: processes of their own, as Ray actors."""

import asyncio
import logging
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from logging import LogRecord
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Protocol

import torch

from opweave import platforms
from opweave.config import EngineConfig, ParallelConfig, environment
from opweave.ir.errors import OpweaveError, described
from opweave.packages import PROJECT
from opweave_engine import errors
from opweave_engine.async_engine import engine_class
from opweave_engine.client import EngineClient, Submission
from opweave_engine.load.checkpoint import Progress
from opweave_engine.metrics import EngineStats
from opweave_engine.outputs import EmbeddingOutput, RequestOutput
from opweave_engine.parallel.rank import Agreement, Launch
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
        replicas_on_node: the number of replicas on its machine, including itself.
        log_level: the lowest level of log records that it reports.
    """

    agreement: str
    model: Path
    config: EngineConfig
    model_name: str
    replicas_on_node: int
    log_level: int


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
        answers: results of requests: outputs as deltas, vectors, and refusals.
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


Method = Literal["start", "submit", "abort", "stop"]
News = ReplicaLocation | ReplicaReport | errors.ReplicaFailedError


class ReplicaGroup(Protocol):
    """Replicas, identified by number.

    Each first sends its :class:`ReplicaLocation`, then its reports, and last the error that it died
    of.
    """

    def send(self, replica: int, method: Method, *arguments: object) -> None:
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


# A replica: runs an engine in its process, and reports its news.


_log = logging.getLogger(__name__)

REPORT_SECONDS = 1.0  # between reports at most; longer silence means that the replica hangs

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

    async def submit(self, submission: Submission) -> None:
        """Run a request."""
        if self._engine is None:  # it was sent to the previous replica of this number
            gone = errors.EngineDeadError(
                "The replica died before it received the request. Retry it."
            )
            self._refuse(submission.request_id, gone)
            return
        task = asyncio.create_task(self._answer(self._engine, submission))
        self._tasks[submission.request_id] = task

    async def abort(self, request_id: str) -> None:
        """Abort a request; a no-op if it is unknown or has finished."""
        if self._engine is not None:
            await asyncio.sleep(0)  # lets a request that has just arrived start
            await self._engine.abort(request_id)

    async def report(self) -> ReplicaReport:
        """Return the news as soon as there are any, or after a second."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REPORT_SECONDS):
                await self._news.wait()
        self._news.clear()
        answers = [*map(merge_deltas, self._deltas.values()), *self._others]
        records = [self._records.get_nowait() for _ in range(self._records.qsize())]
        news = ReplicaReport(answers, progress=self._progress, records=records)
        self._deltas, self._others, self._progress = {}, [], None
        if (engine := self._engine) is not None:
            length, vocabulary = engine.max_model_len, engine.vocab_size
            stats = engine.stats()
            news = replace(news, stats=stats, max_model_len=length, vocab_size=vocabulary)
            self._failure = engine.dead_with or self._failure
        return news if self._failure is None else replace(news, failure=portable(self._failure))

    async def stop(self) -> None:
        """Stop the engine."""
        self._news.set()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.shutdown)

    # In the thread that loads

    def _start(self, order: LoadOrder) -> None:
        try:
            self._engine = self._load(order, self._loading)
        except Exception as error:  # the engine must receive any error
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

    async def _answer(self, engine: EngineClient, submission: Submission) -> None:
        params, name = submission.params, submission.request_id
        try:
            if isinstance(params, SamplingParams):
                async for output in engine.generate_deltas(**vars(submission)):
                    self._deltas.setdefault(name, []).append(output)
                    self._news.set()
            else:
                self._others.append(await engine.embed(submission.prompt, params, request_id=name))
                self._news.set()
        except asyncio.CancelledError:  # an encoder cancels an aborted request
            self._refuse(name, errors.EngineError("The request was aborted."))
        except Exception as error:  # the engine must receive any error
            self._refuse(name, error)
        finally:
            del self._tasks[name]

    def _refuse(self, request_id: str, error: Exception) -> None:
        if not isinstance(error, OpweaveError):
            _log.error("request %s failed", request_id, exc_info=error)
        self._others.append(RequestFailure(request_id, portable(error)))
        self._news.set()


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
    config = replica_config(order.config, order.replicas_on_node)
    return engine_class(order.model)(
        order.model, config=config, model_name=order.model_name, progress=progress
    )


def replica_config(config: EngineConfig, replicas_on_node: int) -> EngineConfig:
    """Return the configuration of one of *replicas_on_node* replicas on a machine."""
    parallel = replace(config.parallel, data_parallel_size=1, data_parallel_address=None)
    platform, cache = platforms.current_platform, config.cache
    is_sized = cache.memory_bytes is not None or cache.num_blocks is not None
    if platform.capabilities.unified_memory and not is_sized:
        free, _ = platform.memory_info()
        cache = replace(cache, memory_bytes=max(1, share_of_host(free) // replicas_on_node))
    return replace(config, parallel=parallel, cache=cache)


def portable(error: BaseException) -> Exception:
    """Return *error* if it can be pickled, else an EngineError with the same text."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # unpickling runs code of the exception's class
        copy = None
    if isinstance(copy, Exception) and repr(copy) == repr(error):
        return copy
    return errors.EngineError(described(error))


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
    others = {name: count for name, count in devices.items() if name != CPU}
    needs = {**others, CPU: max(1, devices.get(CPU, 1))}
    most = max((int(node.get(CPU, 0)) for node in nodes), default=0)
    for processors in range(most, needs[CPU] - 1, -1):
        share = {**others, CPU: processors}
        rooms = (min(int(node.get(name, 0) // n) for name, n in share.items()) for node in nodes)
        if sum(rooms) >= replicas:
            return share
    needed = ", ".join(f"{count} {name}" for name, count in needs.items())
    present = "; ".join(", ".join(f"{node.get(n, 0):g} {n}" for n in needs) for node in nodes)
    raise errors.InvalidArgumentError(
        f"data_parallel_size={replicas}: each replica needs {needed} on one machine, but Ray's "
        f"machines have: {present or 'nothing'}. Lower data_parallel_size or "
        "tensor_parallel_size, or add machines to the cluster."
    )


# The replicas as actors of Ray.


_STOP_SECONDS = 5.0  # for replicas to end
_STORE_BYTES = 128 * 2**20  # for objects larger than a message; reports are not
_CONNECT_SECONDS = 10.0  # to reach a cluster
_LOCAL = "local"
# No usage statistics, no warnings about variables of missing devices, and workers of normal
# priority, which other programs cannot starve.
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
}
_THREADS = "OMP_NUM_THREADS"


class RayReplica(Replica):
    """A replica in a process of its own, whose log records it reports."""

    async def start(self, order: LoadOrder) -> None:
        for name in PROJECT:
            logger = logging.getLogger(name)
            logger.setLevel(order.log_level)
            logger.addHandler(QueueHandler(self._records))
        await super().start(order)

    async def place(self) -> ReplicaLocation:
        """Return the replica's process."""
        return ReplicaLocation(errors.require("ray", "ray").util.get_node_ip_address(), os.getpid())


class RayGroup:
    """Implements :class:`ReplicaGroup` with Ray.

    If the program has initialized Ray, that connection is used and stays open. Otherwise, this
    class connects to a cluster or starts Ray on this machine, and shuts it down in :meth:`close`.

    Args:
        config: the number of replicas, their number of ranks, and the cluster.

    Raises:
        MissingDependencyError: Ray is not installed.
        InvalidArgumentError: the cluster is unreachable or too small, or this process is one of
            several launched by ``torchrun``.
    """

    def __init__(self, config: ParallelConfig) -> None:
        if Launch.from_environment() is not None:
            raise errors.InvalidArgumentError(
                f"data_parallel_size={config.data_parallel_size}, but several processes were "
                "launched (WORLD_SIZE), as torchrun does. Ray starts the replicas and their ranks: "
                "run one process, or leave data_parallel_size out."
            )
        self._ray = errors.require("ray", "ray")
        self._is_own = not self._ray.is_initialized()
        if self._is_own:
            _initialize(self._ray, config)
        self._is_closed = False
        self._actors: list[Any] = []
        self._waiting: dict[Any, int] = {}
        try:
            self._options = _options(self._ray, config)
            self._actors = [self._new(replica) for replica in range(config.data_parallel_size)]
        except BaseException:
            self.close()
            raise

    def send(self, replica: int, method: Method, *arguments: object) -> None:
        if self._is_closed:
            return  # a remote call would start Ray again
        getattr(self._actors[replica], method).remote(*arguments)

    def receive(self, timeout: float) -> Sequence[tuple[int, News]]:
        if not self._waiting:  # all replicas have died and were not replaced
            time.sleep(timeout)
            return []
        self._ray.wait(list(self._waiting), timeout=timeout)  # returns at the first message
        count = len(self._waiting)
        ready, _ = self._ray.wait(list(self._waiting), num_returns=count, timeout=0)
        return [self._news(reference) for reference in ready]

    def renew(self, replica: int) -> None:
        here = self._ray.get_runtime_context().get_node_id()
        if not any(node["Alive"] for node in self._ray.nodes() if node["NodeID"] == here):
            raise errors.ReplicaFailedError("Ray does not run on the server's machine any more.")
        self._actors[replica] = self._new(replica)

    def kill(self, replica: int) -> None:
        self._waiting = {ref: number for ref, number in self._waiting.items() if number != replica}
        self._ray.kill(self._actors[replica])

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if stops := [actor.stop.remote() for actor in self._actors]:
            self._ray.wait(stops, num_returns=len(stops), timeout=_STOP_SECONDS)
        for actor in self._actors:
            self._ray.kill(actor)
        if self._is_own:
            self._ray.shutdown()

    def _new(self, replica: int) -> Any:
        actor = self._ray.remote(RayReplica).options(**self._options).remote()
        self._waiting[actor.place.remote()] = replica
        return actor

    def _news(self, reference: Any) -> tuple[int, News]:
        replica = self._waiting.pop(reference)
        try:
            news: News = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            failure = errors.ReplicaFailedError(f"replica {replica} died: {_reason(error)}.")
            failure.__cause__ = error
            return replica, failure
        self._waiting[self._actors[replica].report.remote()] = replica
        return replica, news


def _initialize(ray: Any, config: ParallelConfig) -> None:
    """Connect to the configured cluster, or start Ray here. Never join another cluster."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    # Ray would print several lines to stderr for each event that this engine logs in one.
    ray._private.worker._worker_logs_enabled = False
    address = config.data_parallel_address or os.environ.get("RAY_ADDRESS") or _LOCAL
    local: dict[str, Any] = {}
    if address == _LOCAL:
        ranks = config.data_parallel_size * config.tensor_parallel_size
        processors = max(ranks, torch.get_num_threads())
        present = os.cpu_count() or ranks
        if platforms.current_platform.device_type == "cpu" and ranks > present:
            _log.warning(
                "%d ranks share %d processors; lower data_parallel_size or tensor_parallel_size.",
                ranks, present,
            )  # fmt: skip
        local = {
            "num_cpus": processors, "include_dashboard": False, "object_store_memory": _STORE_BYTES,
        }  # fmt: skip
    else:
        replace(config, data_parallel_address=address)  # validates the address from the environment
    try:
        if address not in (_LOCAL, "auto"):
            host, _, port = address.rpartition(":")
            # Ray itself would retry for minutes.
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0].rstrip(".")
        raise errors.InvalidArgumentError(
            f"Ray cannot be used at {address!r}: {first}. A cluster is started with ray start "
            "--head, and its address given with data_parallel_address or RAY_ADDRESS."
        ) from error


def _options(ray: Any, config: ParallelConfig) -> dict[str, Any]:
    """Return the Ray options of each replica: its resources, and its environment."""
    ranks = config.tensor_parallel_size
    resource = resource_name(platforms.current_platform.device_type)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    share = replica_resources(nodes, config.data_parallel_size, {resource: ranks})
    processors, devices = share.pop(CPU), share.pop("GPU", 0)
    variables = {name: os.environ[name] for name in environment.in_use()}
    variables.pop(environment.API_KEY, None)
    variables[_THREADS] = os.environ.get(_THREADS) or str(max(1, processors // ranks))
    return {
        "num_cpus": processors, "num_gpus": devices, "resources": share, "max_restarts": 0,
        "runtime_env": {"env_vars": variables},
    }  # fmt: skip


def _reason(error: Exception) -> str:
    """Return Ray's reason for a death, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = next((line for line in lines if "because" in line or "Error" in line), lines[0])
    return reason.partition(". ")[0].rstrip(".")
