"""Cancels work when the client disconnects, and merges streams that may end early.

``Call.unless_gone`` in ``state`` does the same before the first byte of a response. Closing the
generator of a request's outputs aborts the request in the engine; see ``client``.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

# Merges several streams into one.


T = TypeVar("T")


async def merge_streams(
    streams: Sequence[AsyncIterator[T]], combine: Callable[[Sequence[T]], T]
) -> AsyncGenerator[list[tuple[int, T]], None]:
    """Yield the items of all streams, those that arrive together in one list.

    Each has the number of its stream. Streams are read even if the reader is slow, which then gets
    several items of a stream combined into one. Ends when all streams have ended. Closes all of
    them at the end, on an error, and when it is closed.
    """
    ready: dict[int, list[T]] = {}
    changed = asyncio.Event()

    async def read(index: int) -> None:
        try:
            async for item in streams[index]:
                ready.setdefault(index, []).append(item)
                changed.set()
        finally:
            await close(streams[index])
            changed.set()

    tasks = [asyncio.create_task(read(index)) for index in range(len(streams))]
    try:
        while not all(task.done() for task in tasks) or ready:
            await changed.wait()
            changed.clear()
            if batch := [(index, combine(items)) for index, items in ready.items()]:
                ready.clear()
                yield batch
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        await cancelled(tasks)


async def cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def close(stream: object) -> None:
    """Close *stream* if it has an ``aclose`` method."""
    aclose = getattr(stream, "aclose", None)
    if aclose is not None:
        await aclose()


# Cancels work when the client disconnects.


CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that did not wait
# Keys in the state of a request, of functions of its connection.
HANG_UP_KEY = "hang_up"  # closes it
WRITE_KEY = "write"  # writes a part of the body
Write = Callable[[bytes], Awaitable[None]]
Events = Callable[[Write], Awaitable[None]]


class ClientGoneError(Exception):
    """The client has disconnected."""


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of server-sent events. Closes their source as soon as the client disconnects.

    Args:
        events: writes the encoded events with the function that it gets, and never raises.
        source: the source of the events; closed even if *events* never started.
        deadline: the event loop's time at which the response is cut off, even if the client does
            not read.
    """

    media_type = "text/event-stream"

    def __init__(self, events: Events, source: AsyncIterator[object], *, deadline: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]
        self._events, self._source, self._deadline = events, source, deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events.

        Raises:
            ClientGoneError: the client did not read them in time.
        """
        sending = asyncio.create_task(self._send(scope, send))
        hanging_up = asyncio.create_task(disconnected(receive))
        timeout = self._deadline - asyncio.get_running_loop().time()
        try:
            done, _ = await asyncio.wait(
                {sending, hanging_up}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if sending in done:
                sending.result()
            elif not done:
                if hang_up := scope["state"].get(HANG_UP_KEY):
                    hang_up()  # a plain close would wait until the client reads the sent data
                    await hanging_up
                raise ClientGoneError
        finally:
            await cancelled([sending, hanging_up])
            await close(self._source)

    async def _send(self, scope: Scope, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        # Each of the middlewares and the state machine of HTTP would take longer than the write.
        await self._events(scope["state"].get(WRITE_KEY) or partial(_write, send))
        await send({"type": "http.response.body"})


async def _write(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
