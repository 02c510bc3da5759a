"""JSON responses, and responses streamed as server-sent events."""

from collections.abc import Iterator, Sequence
from itertools import starmap
from typing import Any, Protocol

from fastapi import Response

from opweave_engine import RequestOutput
from opweave_engine.server.disconnect import EventStream, Write
from opweave_engine.server.errors import api_error
from opweave_engine.server.generation import GenerationJob
from opweave_engine.server.protocol.base import ErrorDetail, ResponseBody

# Streams responses as server-sent events.


_GRACE_SECONDS = 5.0  # after the deadline, for a client that reads the last events


class EventWriter(Protocol):
    """Turns the deltas of a request into server-sent events."""

    def events(self, number: int, delta: RequestOutput, /) -> Iterator[str]:
        """Yield the events for a delta of prompt *number*."""

    def last_events(self) -> Iterator[str]:
        """Yield the events after the last delta."""


async def stream(generation: GenerationJob, writer: EventWriter) -> Response:
    """Return a response that streams events, as soon as the first token is generated.

    Until then, errors are responses with their own status; afterwards, they are events.

    Args:
        generation: the request to run.
        writer: turns deltas into events.

    Raises:
        ApiError, EngineError: the request fails before its first token.
        ClientGoneError: the client disconnects before the first token.
    """
    deltas, call = generation.deltas(), generation.call

    async def first() -> Sequence[tuple[int, RequestOutput]]:
        async with call.deadline.limit():
            return await anext(deltas)

    try:
        first_batch = await call.unless_gone(first())
    except BaseException:
        await deltas.aclose()
        raise

    def encoded(batch: Sequence[tuple[int, RequestOutput]]) -> bytes:
        return "".join(map("".join, starmap(writer.events, batch))).encode()

    async def send_events(write: Write) -> None:
        try:
            async with call.deadline.limit():
                await write(encoded(first_batch))
                async for batch in deltas:
                    await write(encoded(batch))
            end = "".join(writer.last_events())
        except Exception as error:  # the status is sent: an event must report the error
            end = f"data: {api_error(error, call.request).json()}\n\n"
        await write(f"{end}data: [DONE]\n\n".encode())

    return EventStream(send_events, deltas, deadline=call.deadline.at + _GRACE_SECONDS)


# Responses: their schema entries, and JSON encoding.


class ErrorBody(ResponseBody):
    """The body of every response that is not a success."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request cannot be answered."},
    "5XX": {"model": ErrorBody, "description": "The server cannot answer."},
}
_DATA = {
    "type": "string",
    "description": "A piece of an answer or an error, as JSON; the last is [DONE].",
}
_EVENT = {"type": "object", "properties": {"data": _DATA}, "required": ["data"]}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {  # OpenAPI 3.2 introduced itemSchema, the schema of each event
        "content": {"text/event-stream": {"itemSchema": _EVENT}},
        "description": "The answers; with stream=true as server-sent events.",
    }
}


def json_response(body: ResponseBody, **options: Any) -> Response:
    """Return *body* as JSON."""
    return Response(body.model_dump_json(**options), media_type="application/json")
