"""What the clients for asyncio have in common whose answers come from a thread."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from opweave.engine.client.async_client import AsyncClient
from opweave.engine.errors import InvalidArgumentError
from opweave.engine.request.outputs import RequestOutput

_ABORTED_WITHIN = 2.0  # seconds; the step that is computed comes to its end first


class _Stream:
    """What a reader has not read yet: the latest output, which holds all before it."""

    def __init__(self) -> None:
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        self._output = output
        self._changed.set()

    def fail(self, error: Exception) -> None:
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


class StreamingClient(AsyncClient, ABC):
    """Part of an :class:`~opweave.engine.EngineClient` that hears from a thread.

    Outputs come back to the event loop that asked. A reader that is slow skips outputs; none is
    lost, since each holds all before it. The thread is the subclass's to make and to start.

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
            self._fail(self._unfinished, self._why_not())  # it hangs, and readers wait all the same

    @abstractmethod
    def _give_up(self, request_id: str) -> None:
        """Let the request end, if there is such a one."""

    # In the event loop

    async def _outputs(
        self,
        request_id: str,
        prepare: Callable[[], Callable[[], None]],
        before: Callable[[], None] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of a request; what *prepare* returns hands it over.

        *before* is called first, in a thread of its own, since it may take long.
        """
        if before is not None:
            await asyncio.to_thread(before)
        self._enter_loop()
        self._check_unused(request_id)
        hand_over = prepare()
        self._open(request_id)
        stream, is_finished = _Stream(), False
        self._streams[request_id] = stream
        try:
            hand_over()
            while not is_finished:
                output = await stream.get()
                is_finished = output.finished
                if output.error is not None:
                    raise output.error
                yield output
        finally:
            if self._streams.get(request_id) is stream:  # it is not of a loop that was closed
                del self._streams[request_id]
                if not is_finished:
                    self._give_up(request_id)

    def _enter_loop(self) -> asyncio.AbstractEventLoop | None:
        """Hear in the running loop from now on.

        What was asked in one that is closed now has no reader any more, and is given up.
        """
        before = super()._enter_loop()
        if before is None or not before.is_closed():
            return before
        self._forget_readers()
        self._idle = asyncio.Event()  # which belongs to the loop where somebody waits for it
        self._hear()
        for request_id in list(self._unfinished):
            self._give_up(request_id)
        return before

    def _forget_readers(self) -> None:
        """Tell those who wait nothing more: their loop is closed."""
        self._streams.clear()

    def _check_unused(self, request_id: str) -> None:
        if request_id in self._streams or request_id in self._unfinished:
            raise InvalidArgumentError(
                f"request_id={request_id!r} is in use by a request that is not finished."
            )

    def _open(self, request_id: str) -> None:
        self._unfinished.add(request_id)
        self._idle.clear()
        # Looked at after the request is known: who dies later tells all of them.
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
        """Do what the thread has said since the last time."""
        with suppress(Empty):
            while True:
                self._calls.get_nowait()()

    # In the thread

    def _tell(self, call: Callable[[], None]) -> None:
        """Let the event loop call; where it is closed, or closes meanwhile, the next one does."""
        if self._loop is not None:  # somebody has asked
            self._calls.put(call)
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._hear)
