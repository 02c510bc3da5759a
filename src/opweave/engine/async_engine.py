"""An engine that answers many requests at once, for asyncio: it works in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch

from opweave.config import EngineConfig
from opweave.engine.arguments import make_core
from opweave.engine.async_client import AsyncClient
from opweave.engine.errors import EngineDeadError, InvalidArgumentError
from opweave.engine.loader import Progress
from opweave.engine.outputs import EmbeddingOutput, RequestOutput
from opweave.engine.priorities import PriorityLists, private_context
from opweave.engine.sampling_params import SamplingParams
from opweave.engine.stats import EngineStats
from opweave.engine.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


class _Stream:
    """What a reader has not read yet: the latest output, which holds all before it."""

    def __init__(self) -> None:
        self._output: RequestOutput | None = None
        self._error: EngineDeadError | None = None
        self._changed = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        self._output = output
        self._changed.set()

    def fail(self, error: EngineDeadError) -> None:
        self._error = error
        self._changed.set()

    async def get(self) -> RequestOutput:
        await self._changed.wait()
        self._changed.clear()
        if self._output is None:
            assert self._error is not None  # one of the two has changed
            raise self._error
        output, self._output = self._output, None
        if self._error is not None:
            self._changed.set()  # after what there is
        return output


class AsyncEngine(AsyncClient):
    """Implements :class:`~opweave.engine.client.EngineClient` with an engine in this process.

    Requests go to its thread, outputs come back to the event loop that asked. A reader that is slow
    skips outputs; none is lost, since each holds all before it.

    Args:
        model: the directory of a checkpoint.
        dtype, seed, ir_op_priority, config: as for :class:`~opweave.engine.LLM`.
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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, _Stream] = {}
        self._unfinished: set[str] = set()
        self._idle = asyncio.Event()
        # A worker in another process may die while there is nothing to compute.
        self._core.executor.watch(partial(self._commands.put, self._core.executor.check))
        self._thread = threading.Thread(target=self._run, name="opweave-engine", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._core.tokenizer

    @property
    def max_model_len(self) -> int:
        return self._core.max_model_len

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive() and super().is_running

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        if request_id in self._streams or request_id in self._unfinished:
            raise InvalidArgumentError(
                f"request_id={request_id!r} is in use by a request that is not finished."
            )
        generation = self._core.prepare(request_id, prompt, params, priority=priority)
        stream, is_finished = self._open(request_id), False
        self._commands.put(partial(self._core.add_request, generation))
        try:
            while not is_finished:
                output = await stream.get()
                is_finished = output.finished
                if output.error is not None:
                    raise output.error
                yield output
        finally:
            del self._streams[request_id]
            if not is_finished:
                self._commands.put(partial(self._abort, request_id))

    async def embed(self, prompt: str | Sequence[int], *, request_id: str) -> EmbeddingOutput:
        raise InvalidArgumentError(
            f"The model {self.model_name!r} generates text; it makes no embeddings."
        )

    async def abort(self, request_id: str) -> None:
        self._commands.put(partial(self._abort, request_id))

    def stats(self) -> EngineStats:
        return self._core.stats()

    async def drain(self, timeout: float) -> None:
        self._is_closed = True
        try:
            async with asyncio.timeout(timeout):
                await self._wait_until_idle()
        except TimeoutError:
            for request_id in self._unfinished:
                await self.abort(request_id)
            await self._wait_until_idle()

    def shutdown(self) -> None:
        self._is_closed = True
        self._commands.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # In the event loop

    def _open(self, request_id: str) -> _Stream:
        self._loop = asyncio.get_running_loop()
        stream = self._streams[request_id] = _Stream()
        self._unfinished.add(request_id)
        self._idle.clear()
        # Looked at after the stream is there: who dies later tells all streams.
        if not self.is_running:
            self._close(request_id)
            del self._streams[request_id]
            raise self._why_not()
        return stream

    def _close(self, request_id: str) -> None:
        self._unfinished.discard(request_id)
        if not self._unfinished:
            self._idle.set()

    def _receive(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.put(output)
            if output.finished:
                self._close(output.request_id)

    def _fail(self) -> None:
        for request_id in list(self._unfinished):
            if (stream := self._streams.get(request_id)) is not None:
                stream.fail(self._why_not())
            self._close(request_id)

    async def _wait_until_idle(self) -> None:
        if self._unfinished and self._thread.is_alive():
            await self._idle.wait()

    # In the engine's thread

    def _run(self) -> None:
        try:
            with private_context(self._priorities) as context:
                context.run(self._work)
        except BaseException as error:  # whatever it is, all who wait must hear of it
            self._dead_with = error
            _log.critical("the engine died", exc_info=error)
        finally:
            self._tell(self._fail)
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

    def _abort(self, *request_ids: str) -> None:
        self._tell(partial(self._receive, self._core.abort(request_ids)))

    def _tell(self, call: Callable[[], None]) -> None:
        """Let the event loop call; one that is closed has nobody in it who listens."""
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(call)
