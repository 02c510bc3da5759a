"""Engines and encoders for asyncio."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from opweave.config import EngineConfig
from opweave_engine.client import AsyncClient, StreamingClient, Submission, make_core
from opweave_engine.core import PriorityLists, private_context
from opweave_engine.embedding import Embedder
from opweave_engine.errors import InvalidArgumentError, id_in_use
from opweave_engine.load.checkpoint import Checkpoint, Progress
from opweave_engine.load.loader import is_encoder
from opweave_engine.metrics import EngineStats, StatCounter
from opweave_engine.outputs import EmbeddingOutput, PoolingParams, RequestOutput, RequestTimings
from opweave_engine.prompts import Prompt
from opweave_engine.request import ActiveRequest

# An engine for asyncio, which runs in a thread of its own.


_log = logging.getLogger(__name__)

_STOP_SECONDS = 5.0  # for the current step to finish when the engine shuts down


class AsyncEngine(StreamingClient):
    """Implements :class:`~opweave_engine.EngineClient` with an engine in this process.

    Requests go to its thread, and outputs come back to the caller's event loop. A slow reader skips
    outputs of :meth:`generate`; each holds everything so far. Only one event loop may use the
    engine at a time. Threads without a loop can share an :class:`~opweave_engine.LLM`.

    Args:
        model: the directory of a checkpoint.
        dtype, seed, ir_op_priority, config: as for :class:`~opweave_engine.LLM`.
        model_name: by default the name of the directory.
        progress: called while loading, with the number of tensors loaded so far and in total.

    Raises:
        EngineError, ModelError: the checkpoint is missing, damaged or not supported.
        InvalidArgumentError: (a ValueError) an argument is wrong, or given differently in *config*.
        IrError: an op or provider is unknown.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        seed: int = 0,
        ir_op_priority: PriorityLists | None = None,
        config: EngineConfig | None = None,
        model_name: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(model, model_name)
        core, self._priorities = make_core(model, dtype, seed, ir_op_priority, config, progress)
        self._core = core
        self.tokenizer, self.sampling_defaults = core.tokenizer, core.sampling_defaults
        self.vocab_size, self.max_model_len = core.vocab_size, core.max_model_len
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # A worker in another process may die while the engine is idle.
        core.executor.watch(partial(self._commands.put, core.executor.check))
        self._thread = threading.Thread(target=self._run, name="opweave-engine", daemon=True)
        self._thread.start()

    async def embed(
        self, prompt: Prompt, params: PoolingParams | None = None, *, request_id: str
    ) -> EmbeddingOutput:
        is_pair = params is not None and params.token_type_ids is not None
        lacks = "does not score pairs of texts" if is_pair else "does not make embeddings"
        raise InvalidArgumentError(f"The model {self.model_name!r} generates text; it {lacks}.")

    async def drain(self, timeout: float) -> None:
        await super().drain(timeout)
        await asyncio.to_thread(self._core.grammars.close)

    def stats(self) -> EngineStats:
        return replace(self._core.stats(), replicas=int(self._dead_with is None))

    def shutdown(self) -> None:
        self._is_closed = True
        self._commands.put(None)
        if threading.current_thread() is self._thread:
            return
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            self._core.executor.interrupt()
            self._thread.join()

    async def _prepare(self, submission: Submission) -> Callable[[], None]:
        if (form := getattr(submission.params, "structured_outputs", None)) is not None:
            await asyncio.wrap_future(self._core.grammars.compile(form))
        request = self._core.prepare(**vars(submission), deltas=True)
        return partial(self._commands.put, partial(self._add, request))

    def _abort_request(self, request_id: str) -> None:
        self._commands.put(partial(self._abort, request_id))

    # In the engine's thread

    def _run(self) -> None:
        try:
            with private_context(self._priorities) as context:
                context.run(self._work)
        except BaseException as error:  # all readers must be released, regardless of the error
            self._dead_with = error
            _log.critical("the engine died", exc_info=error)
        finally:
            self._call_in_loop(lambda: self._fail(self._unfinished, self._dead_error()))
            if self._dead_with is not None:
                self._core.fail(self._dead_error())
            self._core.shutdown()

    def _work(self) -> None:
        while True:
            while not (self._commands.empty() and self._core.has_unfinished):
                command = self._commands.get()
                if command is None:
                    self._abort(*self._core.unfinished)
                    return
                command()
            if outputs := self._core.step():
                self._call_in_loop(partial(self._receive, outputs))

    def _add(self, request: ActiveRequest) -> None:
        try:
            self._core.add_request(request)
        except Exception as error:  # it concerns this request alone
            self._call_in_loop(partial(self._fail, [request.request_id], error))

    def _abort(self, *request_ids: str) -> None:
        self._call_in_loop(partial(self._receive, self._core.abort(request_ids)))


# An encoder for asyncio: prompts that arrive together share a forward pass.


class _Waiting(NamedTuple):
    tokens: list[int]
    params: PoolingParams
    vector: asyncio.Future[list[float]]
    since: float


class AsyncEmbedder(AsyncClient):
    """Implements :class:`~opweave_engine.EngineClient` with an encoder in this process.

    Args:
        model: the directory of a checkpoint.
        dtype, ir_op_priority, config: as for :class:`~opweave_engine.Embedder`.
        model_name: by default the name of the directory.
        progress: called while loading, with the number of tensors loaded so far and in total.

    Raises:
        EngineError, ModelError: the checkpoint is missing, damaged or not supported.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        ir_op_priority: PriorityLists | None = None,
        config: EngineConfig | None = None,
        model_name: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(model, model_name)
        self._embedder = Embedder(
            model, dtype=dtype, ir_op_priority=ir_op_priority, config=config, progress=progress
        )
        self.tokenizer = self._embedder.tokenizer
        self.sampling_defaults: Mapping[str, Any] = {}
        self.vocab_size = self._embedder.vocab_size
        self.max_model_len = self._embedder.max_model_len
        self._waiting: dict[str, _Waiting] = {}
        self._running: dict[str, _Waiting] = {}
        self._work: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="opweave-embedder")
        self._counter = StatCounter()

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[RequestOutput]:
        makes = "scores pairs of texts" if self._embedder.is_cross_encoder else "makes embeddings"
        raise InvalidArgumentError(
            f"The model {self.model_name!r} {makes}; it does not generate text."
        )
        yield  # makes this an asynchronous generator

    generate_deltas = generate

    async def embed(
        self, prompt: Prompt, params: PoolingParams | None = None, *, request_id: str
    ) -> EmbeddingOutput:
        self._enter_loop()
        if request_id in self._waiting or request_id in self._running:
            raise id_in_use(request_id)
        if not self.is_running:
            raise self._dead_error()
        tokens = self._embedder.tokens(prompt)
        params = self._embedder.check_params(params, len(tokens))
        vector = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = _Waiting(tokens, params, vector, time.perf_counter())
        if self._work is None:
            self._work = asyncio.create_task(self._compute())
        try:
            return EmbeddingOutput(request_id, tokens, await vector)
        finally:
            self._waiting.pop(request_id, None)

    async def abort(self, request_id: str) -> None:
        if (waiting := self._waiting.get(request_id)) is not None:
            waiting.vector.cancel()

    def stats(self) -> EngineStats:
        return replace(
            self._counter.stats(),
            running=len(self._running),
            waiting=len(self._waiting),
            replicas=int(self._dead_with is None),
            kernels=self._embedder.selection_report.kernels,
        )

    async def drain(self, timeout: float) -> None:
        self._is_closed = True
        self._enter_loop()
        if self._work is not None:
            await asyncio.wait([self._work], timeout=timeout)
        for request_id in list(self._waiting):
            await self.abort(request_id)

    def shutdown(self) -> None:
        self._is_closed = True
        self._thread.shutdown(cancel_futures=True)

    async def _compute(self) -> None:
        """Compute all waiting prompts together, until none is left."""
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                self._running, self._waiting = self._waiting, {}
                running, began = self._running.values(), time.perf_counter()
                texts, params = [w.tokens for w in running], [w.params for w in running]
                compute = partial(self._embedder.vectors, texts, params)
                self._finish(await loop.run_in_executor(self._thread, compute), began)
        except BaseException as error:  # all waiting requests must be released
            self._dead_with = error
            for waiting in (*self._running.values(), *self._waiting.values()):
                if not waiting.vector.done():
                    waiting.vector.set_exception(self._dead_error())
        finally:
            self._running, self._work = {}, None

    def _finish(self, vectors: Sequence[list[float]], began: float) -> None:
        now, running = time.perf_counter(), list(self._running.values())
        self._counter.step(now - began, sum(len(waiting.tokens) for waiting in running))
        self._running = {}
        for waiting, vector in zip(running, vectors, strict=True):
            if waiting.vector.done():
                self._counter.finish("abort", RequestTimings(0.0, 0.0, 0.0))
                continue
            self._counter.prompt_tokens += len(waiting.tokens)
            whole = now - waiting.since
            self._counter.finish("stop", RequestTimings(began - waiting.since, whole, whole))
            waiting.vector.set_result(vector)


# Chooses the class of engine that runs a checkpoint.


def engine_class(model: str | Path) -> type[AsyncEngine] | type[AsyncEmbedder]:
    """Return :class:`AsyncEmbedder` for an encoder, else :class:`AsyncEngine`.

    Args:
        model: the directory of a checkpoint.

    Raises:
        EngineError, ModelError: the checkpoint is missing, damaged or not supported.
    """
    return AsyncEmbedder if is_encoder(Checkpoint(model)) else AsyncEngine
