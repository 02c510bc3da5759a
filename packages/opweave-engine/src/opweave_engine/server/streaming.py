"""JSON responses, and responses streamed as server-sent events."""

from collections.abc import AsyncGenerator, Callable
from typing import Any

from fastapi import Response
from starlette.requests import Request

from opweave_engine import RequestOutput
from opweave_engine.server.disconnect import EventStream
from opweave_engine.server.errors import api_error
from opweave_engine.server.generation import Deltas, GenerationJob
from opweave_engine.server.protocol.base import ErrorDetail, ResponseBody

# Streams responses as server-sent events.


_GRACE_SECONDS = 5.0  # after the deadline, for a client that reads the last events
Writer = Callable[[Deltas], AsyncGenerator[str, None]]


async def stream(generation: GenerationJob, write: Writer) -> Response:
    """Return a response that streams events, as soon as the first token is generated.

    Until then, errors are responses with their own status; afterwards, they are events.

    Args:
        generation: the request to run.
        write: turns deltas into events.

    Raises:
        ApiError, EngineError: the request fails before its first token.
        ClientGoneError: the client disconnects before the first token.
    """
    deltas, call = generation.deltas(), generation.call

    async def first() -> tuple[int, RequestOutput]:
        return await anext(deltas)

    try:
        first_delta = await call.unless_gone(first())
    except BaseException:
        await deltas.aclose()
        raise

    async def all_deltas() -> Deltas:
        yield first_delta
        async for delta in deltas:
            yield delta

    events = _guarded(write(all_deltas()), call.request)
    return EventStream(events, deltas, deadline=call.deadline.at + _GRACE_SECONDS)


async def _guarded(
    events: AsyncGenerator[str, None], request: Request
) -> AsyncGenerator[str, None]:
    """Yield *events*, an event for an error, and the final ``[DONE]``."""
    try:
        async for event in events:
            yield event
    except Exception as error:  # the status is sent: an event must report the error
        yield f"data: {api_error(error, request).json()}\n\n"
    yield "data: [DONE]\n\n"


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
