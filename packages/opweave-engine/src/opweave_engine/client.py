"""The interface between a server and an engine, and the base of clients for asyncio."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any, Protocol, TypeVar

import torch

from opweave.config import EngineConfig
from opweave.ir import IrOpPriorityConfig
from opweave_engine.core import EngineCore, PriorityLists, engine_priorities, private_context
from opweave_engine.errors import EngineDeadError, InvalidArgumentError, id_in_use
from opweave_engine.load.checkpoint import Progress, checkpoint_name
from opweave_engine.load.loader import check_dtype
from opweave_engine.metrics import EngineStats
from opweave_engine.outputs import EmbeddingOutput, PoolingParams, RequestOutput
from opweave_engine.prompts import Prompt
from opweave_engine.request import OutputAccumulator, merge_deltas
from opweave_engine.sampling.params import SamplingParams
from opweave_engine.tokenizer import Tokenizer

# Merges an engine's direct arguments with its configuration.


T = TypeVar("T")


def make_core(
    model: str | Path,
    dtype: str | torch.dtype,
    seed: int,
    ir_op_priority: PriorityLists | None,
    config: EngineConfig | None,
    progress: Progress | None,
) -> tuple[EngineCore, IrOpPriorityConfig]:
    """Build an engine core, and return it with the priorities that its forwards run under.

    Raises:
        InvalidArgumentError: an argument is wrong or conflicts with *config*, or *config* asks for
            several replicas.
        IrError: an op or provider is unknown.
        EngineError, ModelError: the checkpoint is missing, damaged or not supported.
    """
    config = EngineConfig() if config is None else config
    if not isinstance(config, EngineConfig):
        raise InvalidArgumentError(f"config={config!r} is not an EngineConfig.")
    check_alone(config)
    dtype = check_dtype(_once("dtype", check_dtype(dtype), config.dtype, default="auto"))
    seed = _once("seed", seed, config.seed, default=0)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise InvalidArgumentError(f"seed={seed!r} must be an integer from 0.")
    priorities = engine_priorities(ir_op_priority, config)
    with private_context(priorities) as context:
        config = replace(config, dtype=dtype, seed=seed)
        return context.run(EngineCore, model, config, progress=progress), priorities


def check_alone(config: EngineConfig) -> None:
    """Raise :class:`InvalidArgumentError` if *config* asks for several replicas of an engine."""
    if (size := config.parallel.data_parallel_size) > 1:
        raise InvalidArgumentError(
            f"data_parallel_size={size}: this class runs a single engine without replicas. For "
            "several replicas, use opweave serve, or opweave_engine.open_engine with asyncio."
        )


def _once(name: str, direct: T, configured: T, *, default: T) -> T:
    if default not in (direct, configured) and direct != configured:
        raise InvalidArgumentError(
            f"{name} is given twice: {direct!r}, and {configured!r} in config. Give it once."
        )
    return configured if direct == default else direct


# The interface between a server and an engine.


class EngineClient(Protocol):
    """An engine for asyncio that runs many requests at once, in this process or in others.

    All methods are called from one event loop. The *request_id* identifies a request; no other
    unfinished request may have the same.
    """

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint."""

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Default sampling parameters from the checkpoint, by name."""

    @property
    def vocab_size(self) -> int:
        """The size of the model's vocabulary; the tokenizer's may be smaller."""

    @property
    def max_model_len(self) -> int:
        """The maximum number of tokens of a prompt and its output."""

    @property
    def model_name(self) -> str:
        """The name of the model; by default, the name of its directory."""

    @property
    def is_running(self) -> bool:
        """Whether the engine accepts requests: it has started, and has not shut down or died."""

    @property
    def dead_with(self) -> BaseException | None:
        """The error that the engine died of, or None."""

    def generate(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """Yield the request's output after each step, with everything generated so far.

        Closing the iterator, or cancelling the task that reads it, aborts the request.

        Args:
            prompt: a text, token ids, or a dict with one of them and a ``cache_salt``.
            params: the sampling parameters.
            request_id: a name for the request.
            priority: the scheduling priority; lower numbers go first.

        Raises:
            PromptError: the prompt is empty, too long, or has token ids outside the vocabulary.
            InvalidArgumentError: *request_id* is in use, or another event loop uses the engine.
            NonFiniteLogitsError: the model's logits are not finite; other requests go on.
            EngineDeadError: the engine does not run, or dies before the request finishes.
        """

    def generate_deltas(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        streams: bool = True,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the output of :meth:`generate` as deltas, with only new text and tokens.

        The first delta contains the prompt and all outputs. Later ones contain the outputs that
        changed, with an empty ``prompt_token_ids``. Each finish reason is reported once. A slow
        reader gets several deltas merged into one. With *streams* False, there is a single delta,
        when the request ends.
        """

    async def embed(
        self, prompt: Prompt, params: PoolingParams | None = None, *, request_id: str
    ) -> EmbeddingOutput:
        """Return the embedding of a prompt, or the score of a pair of texts.

        Pairs have ``token_type_ids`` in *params*; the vector's only number is their score.

        Raises:
            SamplingParamsError: *params* ask for dimensions that the model does not support.
            PromptError: as for :meth:`generate`.
            InvalidArgumentError: the model is not an encoder, or for a pair not a cross-encoder; or
                another event loop uses the engine.
            EngineDeadError: the engine does not run.
        """

    async def abort(self, request_id: str) -> None:
        """Abort a request: its last output has the finish reason ``"abort"``.

        No-op if the request is unknown or has finished.
        """

    def stats(self) -> EngineStats:
        """Return the statistics since the engine started."""

    async def drain(self, timeout: float) -> None:
        """Reject new requests, and wait until all unfinished ones have finished.

        After *timeout* seconds, abort the rest.
        """

    def shutdown(self) -> None:
        """Abort all unfinished requests, stop the engine, and free its memory."""


# A fair (FIFO) lock.


class FairLock:
    """A lock that a waiting thread gets before the thread that has just released it.

    A plain lock usually goes to the running thread, which is the one that released it.
    """

    def __init__(self) -> None:
        self._next, self._now = Lock(), Lock()
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()

    @contextmanager
    def take(self) -> Iterator[None]:
        """Hold the lock in the block."""
        with self._next:
            self._now.acquire()
        try:
            yield
        finally:
            self._now.release()
            self._do_calls()

    def soon(self, call: Callable[[], object]) -> None:
        """Run *call* under the lock: now, or when the current holder releases it.

        Never blocks: garbage collection may close an iterator while this thread holds the lock.
        """
        self._calls.put(call)
        self._do_calls()

    def _do_calls(self) -> None:
        # A thread that cannot get the lock leaves the calls to the holder, which comes here next.
        while not self._calls.empty() and self._now.acquire(blocking=False):
            try:
                with suppress(Empty):
                    self._calls.get_nowait()()
            finally:
                self._now.release()


# Base class for asyncio clients: their name, event loop and end.


class AsyncClient:
    """Base class of :class:`~opweave_engine.EngineClient` implementations.

    Args:
        model: the directory of a checkpoint.
        model_name: by default the name of the directory.
    """

    def __init__(self, model: str | Path, model_name: str | None) -> None:
        self._model_name = model_name or checkpoint_name(model)
        self._dead_with: BaseException | None = None
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_lock = Lock()

    @property
    def model_name(self) -> str:
        return self._model_name

    @property
    def is_running(self) -> bool:
        return not self._is_closed and self.dead_with is None

    @property
    def dead_with(self) -> BaseException | None:
        return self._dead_with

    def _enter_loop(self) -> asyncio.AbstractEventLoop | None:
        """Use the running event loop from now on, and return the previous one.

        Raises:
            InvalidArgumentError: the previous loop still runs, in another thread.
        """
        running = asyncio.get_running_loop()
        with self._loop_lock:
            before = self._loop
            if before is not None and before is not running and before.is_running():
                raise InvalidArgumentError(
                    "The engine is in use by an event loop that runs in another thread. Use it "
                    "from that loop (asyncio.run_coroutine_threadsafe), or share an LLM between "
                    "threads."
                )
            self._loop = running
        return before

    def _dead_error(self) -> EngineDeadError:
        """Return the error for a request while the engine does not run."""
        if (reason := self.dead_with) is None:
            return EngineDeadError("The engine is shut down, and takes no requests.")
        error = EngineDeadError(f"The engine died: {reason!r}.")
        error.__cause__ = reason
        return error


# Base class for asyncio clients backed by a worker thread.


@dataclass(frozen=True)
class Submission:
    """A request: a prompt to continue, or to embed.

    Attributes:
        request_id: the name of the request.
        prompt: a text, token ids, or a dict with one of them.
        params: sampling or pooling parameters.
        priority: the scheduling priority; lower numbers go first.
        streams: whether a delta is returned after each step, or only at the end.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams | PoolingParams
    priority: int = 0
    streams: bool = True


_ABORT_TIMEOUT_SECONDS = 2.0  # the current step finishes first


class _Stream:
    """The deltas of a request that its reader has not read yet."""

    def __init__(self) -> None:
        self._deltas: list[RequestOutput] = []
        self._error: Exception | None = None
        self._waiting: asyncio.Future[None] | None = None

    def put(self, delta: RequestOutput) -> None:
        self._deltas.append(delta)
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    async def get(self) -> RequestOutput:
        """Return all unread deltas as one; after them, raise the error."""
        if not self._deltas and self._error is None:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if not self._deltas:
            assert self._error is not None, "put() or fail() was called"
            raise self._error
        deltas, self._deltas = self._deltas, []
        return merge_deltas(deltas)

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class StreamingClient(AsyncClient, ABC):
    """Base class of :class:`~opweave_engine.EngineClient` implementations with a worker thread.

    The thread sends deltas to the event loop of the caller. A slow reader gets several merged into
    one. Subclasses create and start the thread.

    Args:
        model: the directory of a checkpoint.
        model_name: by default the name of the directory.
    """

    _thread: threading.Thread

    def __init__(self, model: str | Path, model_name: str | None) -> None:
        super().__init__(model, model_name)
        self._streams: dict[str, _Stream] = {}
        self._unfinished: set[str] = set()
        self._idle = asyncio.Event()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive() and super().is_running

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        total = OutputAccumulator()
        deltas = self.generate_deltas(prompt, params, request_id=request_id, priority=priority)
        async with aclosing(deltas):
            async for delta in deltas:
                total.add(delta)
                yield total.output()

    async def abort(self, request_id: str) -> None:
        self._abort_request(request_id)

    async def drain(self, timeout: float) -> None:
        self._is_closed = True
        self._enter_loop()
        try:
            async with asyncio.timeout(timeout):
                await self._wait_until_idle()
        except TimeoutError:
            for request_id in list(self._unfinished):
                self._abort_request(request_id)
            with suppress(TimeoutError):
                async with asyncio.timeout(_ABORT_TIMEOUT_SECONDS):
                    await self._wait_until_idle()
            # If the thread hangs, the readers must still be released.
            self._fail(self._unfinished, self._dead_error())

    @abstractmethod
    async def _prepare(self, submission: Submission) -> Callable[[], None]:
        """Check the request, and return a function that submits it."""

    @abstractmethod
    def _abort_request(self, request_id: str) -> None:
        """Abort the request, if it is known."""

    # In the event loop

    async def generate_deltas(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        streams: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        submit = await self._prepare(Submission(request_id, prompt, params, priority, streams))
        self._enter_loop()
        self._check_unused(request_id)
        self._open(request_id)
        stream, is_finished = _Stream(), False
        self._streams[request_id] = stream
        try:
            submit()
            while not is_finished:
                output = await stream.get()
                is_finished = output.finished
                if output.error is None:
                    yield output
                    continue
                if any(out.token_ids for out in output.outputs):  # generated before the error
                    yield replace(output, finished=False, error=None)
                raise output.error
        finally:
            # Otherwise, the request belongs to a loop that was closed.
            if self._streams.get(request_id) is stream:
                del self._streams[request_id]
                if not is_finished:
                    self._abort_request(request_id)

    def _enter_loop(self) -> asyncio.AbstractEventLoop | None:
        """Use the running event loop from now on.

        Requests of a loop that was closed have no reader any more, and are aborted.
        """
        before = super()._enter_loop()
        if before is None or not before.is_closed():
            return before
        self._forget_readers()
        self._idle = asyncio.Event()  # an event belongs to the loop in which it is awaited
        self._run_queued_calls()
        for request_id in list(self._unfinished):
            self._abort_request(request_id)
        return before

    def _forget_readers(self) -> None:
        """Drop all readers, because their loop is closed."""
        self._streams.clear()

    def _check_unused(self, request_id: str) -> None:
        if request_id in self._streams or request_id in self._unfinished:
            raise id_in_use(request_id)

    def _open(self, request_id: str) -> None:
        self._unfinished.add(request_id)
        self._idle.clear()
        # Checked after the request is registered: a thread that dies later fails all of those.
        if not self.is_running:
            self._close(request_id)
            raise self._dead_error()

    def _close(self, request_id: str) -> None:
        self._unfinished.discard(request_id)
        if not self._unfinished:
            self._idle.set()

    def _receive(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.put(output)
            if output.finished:
                self._close(output.request_id)

    def _fail(self, request_ids: Iterable[str], error: Exception) -> None:
        for request_id in list(request_ids):
            if (stream := self._streams.get(request_id)) is not None:
                stream.fail(error)
            self._close(request_id)

    async def _wait_until_idle(self) -> None:
        if self._unfinished and self._thread.is_alive():
            await self._idle.wait()

    def _run_queued_calls(self) -> None:
        """Run the calls that the thread has queued."""
        with suppress(Empty):
            while True:
                self._calls.get_nowait()()

    # In the thread

    def _call_in_loop(self, call: Callable[[], None]) -> None:
        """Run *call* in the event loop, or in the next one if this one is closed."""
        if self._loop is not None:  # set by the first request
            self._calls.put(call)
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._run_queued_calls)
