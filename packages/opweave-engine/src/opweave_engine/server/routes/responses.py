"""Responses: their schema entries, and JSON encoding."""

from __future__ import annotations

from typing import Any

from fastapi import Response

from opweave_engine.server.protocol.answers import ErrorDetail
from opweave_engine.server.protocol.base import ResponseBody


class ErrorBody(ResponseBody):
    """The body of every response that is not a success."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request cannot be answered."},
    "5XX": {"model": ErrorBody, "description": "The server cannot answer."},
}
_EVENT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "data": {
            "type": "string",
            "description": "A piece of an answer or an error, as JSON; the last is [DONE].",
        }
    },
    "required": ["data"],
}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {  # itemSchema: of each event, as OpenAPI has it from 3.2 on
        "content": {"text/event-stream": {"itemSchema": _EVENT}},
        "description": "The answers; with stream=true as server-sent events.",
    }
}


def json_response(body: ResponseBody, **options: Any) -> Response:
    """Return *body* as JSON."""
    return Response(body.model_dump_json(**options), media_type="application/json")
