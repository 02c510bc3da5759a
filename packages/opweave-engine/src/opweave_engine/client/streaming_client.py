"""Base class for asyncio clients backed by a worker thread."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from contextlib import aclosing, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from opweave_engine.client.async_client import AsyncClient
from opweave_engine.errors import InvalidArgumentError
from opweave_engine.request.accumulator import OutputAccumulator, merge_deltas
from opweave_engine.request.outputs import RequestOutput
from opweave_engine.request.prompts import Prompt
from opweave_engine.sampling.sampling_params import SamplingParams

_ABORTED_WITHIN = 2.0  # seconds; the current step finishes first


class _Stream:
    """The deltas of a request that its reader has not read yet."""

    def __init__(self) -> None:
        self._deltas: list[RequestOutput] = []
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def put(self, delta: RequestOutput) -> None:
        self._deltas.append(delta)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._changed.set()

    async def get(self) -> RequestOutput:
        """Return all unread deltas as one; after them, raise the error."""
        await self._changed.wait()
        self._changed.clear()
        if not self._deltas:
            assert self._error is not None, "put() or fail() was called"
            raise self._error
        deltas, self._deltas = self._deltas, []
        if self._error is not None:
            self._changed.set()
        return merge_deltas(deltas)


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
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        total = OutputAccumulator()
        deltas = self.generate_deltas(prompt, params, request_id=request_id, priority=priority)
        async with aclosing(deltas):
            async for delta in deltas:
                total.add(delta)
                yield total.output()

    @abstractmethod
    def generate_deltas(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the request's outputs; see :meth:`EngineClient.generate_deltas`."""

    async def abort(self, request_id: str) -> None:
        self._give_up(request_id)

    async def drain(self, timeout: float) -> None:
        self._is_closed = True
        self._enter_loop()
        try:
            async with asyncio.timeout(timeout):
                await self._wait_until_idle()
        except TimeoutError:
            for request_id in list(self._unfinished):
                self._give_up(request_id)
            with suppress(TimeoutError):
                async with asyncio.timeout(_ABORTED_WITHIN):
                    await self._wait_until_idle()
            self._fail(self._unfinished, self._why_not())  # the thread hangs; release the readers

    @abstractmethod
    def _give_up(self, request_id: str) -> None:
        """Abort the request, if it is known."""

    # In the event loop

    async def _outputs(
        self,
        request_id: str,
        prepare: Callable[[], Callable[[], None]],
        before: Callable[[], Future[Any]] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the deltas of a request.

        Args:
            request_id: its name.
            prepare: checks the request, and returns a function that submits it.
            before: starts work in another thread that must finish first.
        """
        if before is not None:
            await asyncio.wrap_future(before())
        self._enter_loop()
        self._check_unused(request_id)
        submit = prepare()
        self._open(request_id)
        stream, is_finished = _Stream(), False
        self._streams[request_id] = stream
        try:
            submit()
            while not is_finished:
                output = await stream.get()
                is_finished = output.finished
                if output.error is not None:
                    raise output.error
                yield output
        finally:
            if self._streams.get(request_id) is stream:  # else it belongs to a loop that was closed
                del self._streams[request_id]
                if not is_finished:
                    self._give_up(request_id)

    def _enter_loop(self) -> asyncio.AbstractEventLoop | None:
        """Use the running event loop from now on.

        Requests of a loop that was closed have no reader any more, and are aborted.
        """
        before = super()._enter_loop()
        if before is None or not before.is_closed():
            return before
        self._forget_readers()
        self._idle = asyncio.Event()  # an event belongs to the loop in which it is awaited
        self._hear()
        for request_id in list(self._unfinished):
            self._give_up(request_id)
        return before

    def _forget_readers(self) -> None:
        """Drop all readers, because their loop is closed."""
        self._streams.clear()

    def _check_unused(self, request_id: str) -> None:
        if request_id in self._streams or request_id in self._unfinished:
            raise InvalidArgumentError(
                f"request_id={request_id!r} is in use by a request that is not finished."
            )

    def _open(self, request_id: str) -> None:
        self._unfinished.add(request_id)
        self._idle.clear()
        # Checked after the request is registered: a thread that dies later fails all of those.
        if not self.is_running:
            self._close(request_id)
            raise self._why_not()

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

    def _hear(self) -> None:
        """Run the calls that the thread has queued."""
        with suppress(Empty):
            while True:
                self._calls.get_nowait()()

    # In the thread

    def _tell(self, call: Callable[[], None]) -> None:
        """Run *call* in the event loop, or in the next one if this one is closed."""
        if self._loop is not None:  # set by the first request
            self._calls.put(call)
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._hear)
