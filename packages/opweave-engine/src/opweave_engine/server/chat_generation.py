"""Turns a conversation into a generation job."""

from __future__ import annotations

from fastapi import Request

from opweave_engine.server.answer_plan import AnswerPlan
from opweave_engine.server.disconnect import unless_gone
from opweave_engine.server.generation import GenerationJob
from opweave_engine.server.prompts import Prompt, Reading, check_context, read_prompts, render
from opweave_engine.server.protocol.chat import ChatRequest
from opweave_engine.server.protocol.tools import ToolUse
from opweave_engine.server.state import ServerState


async def chat_generation(
    body: ChatRequest, request: Request, server: ServerState, *, kind: str
) -> tuple[GenerationJob, AnswerPlan]:
    """Return the job for a conversation, and how to parse its outputs.

    Args:
        body: the conversation.
        request: the HTTP request.
        server: runs the job.
        kind: the prefix of the response's id.

    Raises:
        ApiError, EngineError: the request is invalid.
        ClientGoneError: the client disconnected.
    """
    params, deadline = body.params(server.engine.sampling_defaults), server.deadline()
    use = ToolUse.of(body.tools, body.tool_choice, body.parallel_tool_calls)
    reading = Reading.of(params, server, add_special_tokens=bool(body.add_special_tokens))

    async def read() -> tuple[str, list[Prompt]]:
        text = await render(body, request, server, deadline)
        prompts = await read_prompts(
            text, server, deadline, param="messages", reading=reading, cache_salt=body.cache_salt
        )
        return text, prompts

    text, prompts = await unless_gone(request, read())
    plan = AnswerPlan(server.output_style, use, text, body.form_field)
    params = plan.constrained(params, server.engine.tokenizer)
    check_context(
        prompts,
        params,
        server,
        param="messages",
        limit=body.limit_field,
        asks=getattr(body, body.limit_field) is not None,
    )
    generation = GenerationJob(
        server,
        kind,
        prompts,
        params,
        deadline,
        body.priority or 0,
        param="messages",
        form_field=plan.source_field,
        request_id=body.request_id,
    )
    return generation, plan
