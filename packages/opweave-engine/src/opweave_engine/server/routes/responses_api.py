"""``POST /v1/responses``."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from opweave_engine import EngineError, FinishReason, RequestOutput
from opweave_engine.server.answer_plan import AnswerPlan
from opweave_engine.server.chat_generation import chat_generation
from opweave_engine.server.disconnect import unless_gone
from opweave_engine.server.errors import ApiError, api_error
from opweave_engine.server.generation import Deltas, GenerationJob
from opweave_engine.server.output import CallStart
from opweave_engine.server.parsed_answer import ParsedAnswer
from opweave_engine.server.protocol.chat import ChatRequest
from opweave_engine.server.protocol.responses import ResponsesRequest
from opweave_engine.server.protocol.usage import UsageCounter
from opweave_engine.server.response_items import Item, ResponseItems
from opweave_engine.server.routes.responses import ERRORS, STREAM
from opweave_engine.server.state import Server
from opweave_engine.server.streaming import stream

router = APIRouter(responses=ERRORS, tags=["OpenAI"])

# Fields of the chat completion, and what they are called here.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
}


@router.post("/v1/responses", responses=STREAM)
async def responses(body: ResponsesRequest, request: Request, server: Server) -> Response:
    """Answer a conversation; the response is not stored."""
    server.accept(body, request)
    try:
        chat = _chat(body)
        generation, plan = await chat_generation(chat, request, server, kind="resp")
        writer = _ResponsesWriter(generation, body, plan)
        if body.stream:
            return await stream(generation, writer.events, request)
        (output,) = await unless_gone(request, generation.outputs())
    except (ApiError, EngineError) as error:
        raise _renamed(api_error(error, request)) from error
    return JSONResponse(writer.response(output))


def _chat(body: ResponsesRequest) -> ChatRequest:
    try:
        return ChatRequest.model_validate(body.as_chat())
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        raise ApiError(f"{path}: {first['msg']}.", param="input") from error


def _renamed(error: ApiError) -> ApiError:
    name = _NAMES.get(error.param or "")
    if name is None:
        return error
    return ApiError(
        error.message.replace(error.param or "", name),
        status=error.status,
        param=name,
        code=error.code,
        headers=error.headers,
    )


@dataclass
class _ResponsesWriter:
    """Writes the response to one request."""

    generation: GenerationJob
    body: ResponsesRequest
    plan: AnswerPlan
    items: ResponseItems = field(default_factory=ResponseItems)
    numbers: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self._parsed, self._counter = ParsedAnswer(self.plan), UsageCounter()
        self._reason: FinishReason | None = None

    def response(self, output: RequestOutput) -> Item:
        for _ in self._new(output):
            pass  # the items are kept
        return self._response(has_started=True)

    async def events(self, deltas: Deltas) -> AsyncGenerator[str, None]:
        for kind in ("created", "in_progress"):
            response = self._response(has_started=False)
            yield self._event({"type": f"response.{kind}", "response": response})
        has_started = False
        async for _, delta in deltas:
            has_started = True
            for item in self._new(delta):
                yield self._event(item)
        done = self._response(has_started=has_started)
        yield self._event({"type": f"response.{done['status']}", "response": done})

    def _new(self, delta: RequestOutput) -> Iterator[Item]:
        self._counter.add(delta)
        for output in delta.outputs:
            index = len(self._parsed.calls)
            for event in self._parsed.add(output):
                call_id = self._parsed.calls[index].id if isinstance(event, CallStart) else None
                index += isinstance(event, CallStart)
                yield from self.items.add(event, call_id)
            if output.finish_reason is not None:
                self._reason = output.finish_reason
                is_complete = output.finish_reason == "stop"
                yield from self.items.finish("completed" if is_complete else "incomplete")

    def _response(self, *, has_started: bool) -> Item:
        generation, body = self.generation, self.body
        status = {None: "in_progress", "stop": "completed"}.get(self._reason, "incomplete")
        is_incomplete = status == "incomplete"
        form = None if body.text is None else body.text.format
        return {
            "id": generation.id,
            "object": "response",
            "created_at": generation.created,
            "model": generation.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "output": [dict(item) for item in self.items.items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": generation.params.temperature,
            "top_p": generation.params.top_p,
            "tools": body.tools or [],
            "tool_choice": body.tool_choice or ("auto" if body.tools else "none"),
            "previous_response_id": None,
            "reasoning": None,
            "store": False,
            "truncation": "disabled",
            "metadata": body.metadata or {},
            "usage": self._usage() if has_started else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "text": {"format": form or {"type": "text"}},
        }

    def _usage(self) -> Item:
        usage, encode = self._counter.usage(), self.generation.server.engine.tokenizer.encode
        reasoning = self._parsed.reasoning
        thoughts = len(encode(reasoning, add_special_tokens=False)) if reasoning else 0
        cached = usage.prompt_tokens_details.cached_tokens
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": thoughts},
            "total_tokens": usage.total_tokens,
        }

    def _event(self, fields: dict[str, Any]) -> str:
        numbered = {**fields, "sequence_number": next(self.numbers)}
        return f"event: {fields['type']}\ndata: {json.dumps(numbered)}\n\n"
