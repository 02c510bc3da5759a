"""A replica: runs an engine in its process, and reports its news."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from logging import LogRecord
from logging.handlers import QueueHandler
from queue import Empty, SimpleQueue

from opweave import platforms
from opweave.base.packages import PROJECT
from opweave.config import EngineConfig
from opweave.ir.errors import OpweaveError, described
from opweave_engine.client.engine_class import engine_class
from opweave_engine.client.engine_client import EngineClient
from opweave_engine.embedding.pooling_params import PoolingParams
from opweave_engine.errors import EngineDeadError, EngineError
from opweave_engine.loading.checkpoint import Progress
from opweave_engine.parallel.data_parallel.messages import (
    LoadOrder,
    ReplicaReport,
    RequestFailure,
    Submission,
)
from opweave_engine.parallel.executor.agreement import Agreement
from opweave_engine.request.accumulator import merge_deltas
from opweave_engine.request.outputs import EmbeddingOutput, RequestOutput
from opweave_engine.runner.worker import share_of_host
from opweave_engine.sampling.sampling_params import SamplingParams

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
