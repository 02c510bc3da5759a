"""An encoder for asyncio: prompts that arrive together share a forward pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from opweave.config import EngineConfig
from opweave_engine.client.async_client import AsyncClient
from opweave_engine.embedding.embedder import Embedder
from opweave_engine.embedding.pooling_params import PoolingParams
from opweave_engine.errors import InvalidArgumentError
from opweave_engine.loading.checkpoint import Progress
from opweave_engine.metrics.stats import EngineStats, StatCounter
from opweave_engine.priorities import PriorityLists
from opweave_engine.request.outputs import EmbeddingOutput, RequestOutput, RequestTimings
from opweave_engine.request.prompts import Prompt
from opweave_engine.sampling.sampling_params import SamplingParams
from opweave_engine.tokenization.tokenizer import Tokenizer


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
        self._waiting: dict[str, _Waiting] = {}
        self._running: dict[str, _Waiting] = {}
        self._work: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="opweave-embedder")
        self._counter = StatCounter()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._embedder.tokenizer

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        return {}

    @property
    def vocab_size(self) -> int:
        return self._embedder.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._embedder.max_model_len

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        makes = "scores pairs of texts" if self._embedder.is_cross_encoder else "makes embeddings"
        raise InvalidArgumentError(f"The model {self.model_name!r} {makes}; it generates no text.")
        yield  # makes this an asynchronous generator

    generate_deltas = generate

    async def embed(
        self,
        prompt: Prompt,
        params: PoolingParams | None = None,
        *,
        request_id: str,
    ) -> EmbeddingOutput:
        self._enter_loop()
        if request_id in self._waiting or request_id in self._running:
            raise InvalidArgumentError(
                f"request_id={request_id!r} is in use by a request that is not finished."
            )
        if not self.is_running:
            raise self._why_not()
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
        if (found := self._waiting.get(request_id)) is not None:
            found.vector.cancel()

    def stats(self) -> EngineStats:
        counter = self._counter
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_usage=0.0,
            prefix_queries=0,
            prefix_hits=0,
            preemptions=0,
            prompt_tokens=counter.prompt_tokens,
            generation_tokens=0,
            steps=counter.steps,
            finished=dict(counter.finished),
            histograms=counter.histograms(),
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
                vectors = await loop.run_in_executor(
                    self._thread, self._embedder.vectors, texts, params
                )
                self._finish(vectors, began)
        except BaseException as error:  # all waiting requests must be released
            self._dead_with = error
            for waiting in (*self._running.values(), *self._waiting.values()):
                if not waiting.vector.done():
                    waiting.vector.set_exception(self._why_not())
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
