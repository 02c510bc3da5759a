"""Answers as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from starlette.requests import Request
from starlette.responses import Response

from opweave.engine import RequestOutput
from opweave.server.disconnect import EventStream, unless_gone
from opweave.server.errors import api_error
from opweave.server.generation import GenerationJob, Outputs

_LAST_WORDS = 5.0  # seconds in which a client is to read what comes at the deadline
Writer = Callable[[Outputs], AsyncGenerator[str, None]]


async def stream(generation: GenerationJob, write: Writer, request: Request) -> Response:
    """Return the answers as events, once there is a first token.

    Until then, errors are responses with a status of their own; after it, they are events.

    Args:
        generation: what to generate.
        write: makes events of what is answered.
        request: whose client the events are for.

    Raises:
        ApiError, EngineError: nothing can be generated.
        ClientGoneError: the client did not wait for the first token.
    """
    outputs = generation.outputs()

    async def first() -> tuple[int, RequestOutput]:
        return await anext(outputs)

    try:
        begun = await unless_gone(request, first())
    except BaseException:
        await outputs.aclose()
        raise
    events = _guarded(write(_resumed(begun, outputs)), request)
    return EventStream(events, outputs, deadline=generation.deadline.at + _LAST_WORDS)


async def _resumed(first: tuple[int, RequestOutput], rest: Outputs) -> Outputs:
    yield first
    async for item in rest:
        yield item


async def _guarded(
    events: AsyncGenerator[str, None], request: Request
) -> AsyncGenerator[str, None]:
    try:
        async for event in events:
            yield event
    except Exception as error:  # whatever it is, the client must learn that this is not the end
        yield f"data: {api_error(error, request).json()}\n\n"
    yield "data: [DONE]\n\n"
