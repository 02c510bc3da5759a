"""``POST /v1/responses``."""

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from opweave_engine import EngineError, FinishReason, RequestOutput
from opweave_engine.server import output_parser
from opweave_engine.server.errors import ApiError, api_error
from opweave_engine.server.generation import AnswerPlan, GenerationJob, chat_generation
from opweave_engine.server.protocol.base import UsageCounter
from opweave_engine.server.protocol.chat import ChatRequest
from opweave_engine.server.protocol.responses import ResponsesRequest
from opweave_engine.server.state import Server
from opweave_engine.server.streaming import ERRORS, STREAM, stream

# The items of a response, built from the events of an answer.


Item = dict[str, Any]


class ResponseItems:
    """Collects the items of one response: reasoning, messages and calls.

    Attributes:
        items: the items so far.
    """

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._is_open = False

    def add(self, event: output_parser.Event) -> Iterator[Item]:
        """Process an event, and yield OpenAI's events for it, without sequence numbers."""
        match event:
            case output_parser.ReasoningDelta(text):
                yield from self._need("reasoning", "reasoning_text")
                yield from self._text("response.reasoning_text.delta", text)
            case output_parser.ContentDelta(text):
                yield from self._need("message", "output_text")
                yield from self._text("response.output_text.delta", text)
            case output_parser.CallStart(name, call_id):
                yield from self.close()
                yield from self._open(
                    "function_call", "fc", call_id=call_id, name=name, arguments=""
                )
            case output_parser.ArgumentsDelta(text):
                self.items[-1]["arguments"] += text
                yield self._event("response.function_call_arguments.delta", delta=text)

    def close(self, status: str = "completed") -> Iterator[Item]:
        """Complete the last item."""
        if not self._is_open:
            return
        self._is_open, item = False, self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            arguments, name = item["arguments"], item["name"]
            kind = "response.function_call_arguments.done"
            yield self._event(kind, arguments=arguments, name=name)
        else:
            (part,) = item["content"]
            more: Item = {"logprobs": []} if part["type"] == "output_text" else {}
            kind = f"response.{part['type']}.done"
            yield self._event(kind, content_index=0, text=part["text"], **more)
            yield self._event("response.content_part.done", content_index=0, part=dict(part))
        index = len(self.items) - 1
        yield {"type": "response.output_item.done", "output_index": index, "item": _copy(item)}

    def finish(self, status: str) -> Iterator[Item]:
        """Complete the response; if it has no items, add an empty message."""
        if not self.items:
            yield from self._need("message", "output_text")
        yield from self.close(status)

    def _need(self, kind: str, part_type: str) -> Iterator[Item]:
        if self._is_open and self.items[-1]["type"] == kind:
            return
        yield from self.close()
        more: Item = {"role": "assistant"} if kind == "message" else {"summary": []}
        yield from self._open(kind, "msg" if kind == "message" else "rs", content=[], **more)
        part: Item = {"type": part_type, "text": ""}
        if part_type == "output_text":
            part |= {"annotations": [], "logprobs": []}
        self.items[-1]["content"].append(part)
        yield self._event("response.content_part.added", content_index=0, part=dict(part))

    def _open(self, kind: str, prefix: str, **fields: Any) -> Iterator[Item]:
        name, self._is_open = f"{prefix}_{uuid.uuid4().hex}", True
        self.items.append({"type": kind, "id": name, "status": "in_progress", **fields})
        index = len(self.items) - 1
        item = _copy(self.items[-1])
        yield {"type": "response.output_item.added", "output_index": index, "item": item}

    def _text(self, kind: str, text: str) -> Iterator[Item]:
        self.items[-1]["content"][0]["text"] += text
        more: Item = {"logprobs": []} if kind == "response.output_text.delta" else {}
        yield self._event(kind, content_index=0, delta=text, **more)

    def _event(self, kind: str, **fields: Any) -> Item:
        index = len(self.items) - 1
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": index, **fields}


def _copy(item: Item) -> Item:
    """Return a copy of the item."""
    content = item.get("content")
    return item if content is None else {**item, "content": [dict(part) for part in content]}


# The route.


router = APIRouter(responses=ERRORS, tags=["OpenAI"])

# Fields of the chat completion, and their names in this endpoint.
_FIELD_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
}


@router.post("/v1/responses", responses=STREAM)
async def responses(body: ResponsesRequest, request: Request, server: Server) -> Response:
    """Answer a conversation; the response is not stored."""
    call = server.accept(body, request, "messages")
    try:
        generation, plan = await chat_generation(_chat(body), call, kind="resp")
        writer = _ResponsesWriter(generation, body, plan)
        if body.stream:
            return await stream(generation, writer)
        (output,) = await call.unless_gone(generation.outputs())
    except (ApiError, EngineError) as error:
        raise _renamed(api_error(error, request)) from error
    return JSONResponse(writer.response(output))


def _chat(body: ResponsesRequest) -> ChatRequest:
    try:
        return ChatRequest.model_validate(body.as_chat())
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        message = str(first["msg"]).removeprefix("Value error, ")
        raise ApiError(f"{path}: {message}.", param="input") from error


def _renamed(error: ApiError) -> ApiError:
    """Return *error* with this endpoint's name of the field."""
    if (name := _FIELD_NAMES.get(param := error.param or "")) is not None:
        error.message, error.param = error.message.replace(param, name), name
    return error


@dataclass
class _ResponsesWriter:
    """Writes the response to one request."""

    generation: GenerationJob
    body: ResponsesRequest
    plan: AnswerPlan
    items: ResponseItems = field(default_factory=ResponseItems)
    numbers: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self._parsed, self._counter = self.plan.parser(), UsageCounter()
        self._reason: FinishReason | None = None
        self._has_started = False

    def response(self, output: RequestOutput) -> Item:
        for _ in self._new(output):
            pass  # self.items collects the items
        return self._response(has_started=True)

    def events(self, _: int, delta: RequestOutput) -> Iterator[str]:
        for kind in () if self._has_started else ("created", "in_progress"):
            response = self._response(has_started=False)
            yield self._event({"type": f"response.{kind}", "response": response})
        self._has_started = True
        for item in self._new(delta):
            yield self._event(item)

    def last_events(self) -> Iterator[str]:
        done = self._response(has_started=True)
        yield self._event({"type": f"response.{done['status']}", "response": done})

    def _new(self, delta: RequestOutput) -> Iterator[Item]:
        self._counter.add(delta)
        for output in delta.outputs:
            for event in self._parsed.push(output):
                yield from self.items.add(event)
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
            "model": generation.header["model"],
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
