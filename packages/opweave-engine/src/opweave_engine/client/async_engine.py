"""An engine for asyncio, which runs in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from opweave.config import EngineConfig
from opweave_engine.client.arguments import make_core
from opweave_engine.client.streaming_client import StreamingClient
from opweave_engine.embedding.pooling_params import PoolingParams
from opweave_engine.errors import InvalidArgumentError
from opweave_engine.loading.checkpoint import Progress
from opweave_engine.metrics.stats import EngineStats
from opweave_engine.priorities import PriorityLists, private_context
from opweave_engine.request.active_request import ActiveRequest
from opweave_engine.request.outputs import EmbeddingOutput, RequestOutput
from opweave_engine.request.prompts import Prompt
from opweave_engine.sampling.sampling_params import SamplingParams
from opweave_engine.tokenization.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_ENDING = 5.0  # seconds to wait for the current step when the engine shuts down


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
        self._core, self._priorities = make_core(
            model,
            dtype=dtype,
            seed=seed,
            ir_op_priority=ir_op_priority,
            config=config,
            progress=progress,
        )
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # A worker in another process may die while the engine is idle.
        self._core.executor.watch(partial(self._commands.put, self._core.executor.check))
        self._thread = threading.Thread(target=self._run, name="opweave-engine", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._core.tokenizer

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        return self._core.sampling_defaults

    @property
    def vocab_size(self) -> int:
        return self._core.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._core.max_model_len

    def generate_deltas(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        def prepare() -> Callable[[], None]:
            request = self._core.prepare(request_id, prompt, params, priority=priority, deltas=True)
            return partial(self._commands.put, partial(self._add, request))

        form = params.structured_outputs if isinstance(params, SamplingParams) else None
        compiled = None if form is None else partial(self._core.grammars.compile, form)
        return self._outputs(request_id, prepare, compiled)

    async def embed(
        self,
        prompt: Prompt,
        params: PoolingParams | None = None,
        *,
        request_id: str,
    ) -> EmbeddingOutput:
        is_pair = params is not None and params.token_type_ids is not None
        lacks = "scores no pairs of texts" if is_pair else "makes no embeddings"
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
        self._thread.join(_ENDING)
        if self._thread.is_alive():
            self._core.executor.interrupt()
            self._thread.join()

    def _give_up(self, request_id: str) -> None:
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
            self._tell(lambda: self._fail(self._unfinished, self._why_not()))
            if self._dead_with is not None:
                self._core.fail(self._why_not())
            self._core.shutdown()

    def _work(self) -> None:
        while True:
            while not (self._commands.empty() and self._core.has_unfinished):
                command = self._commands.get()
                if command is None:
                    self._abort(*self._core.unfinished)
                    return
                command()
            self._tell(partial(self._receive, self._core.step()))

    def _add(self, request: ActiveRequest) -> None:
        try:
            self._core.add_request(request)
        except Exception as error:  # it concerns this request alone
            self._tell(partial(self._fail, [request.request_id], error))

    def _abort(self, *request_ids: str) -> None:
        self._tell(partial(self._receive, self._core.abort(request_ids)))
