"""``POST /v1/chat/completions``."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from opweave_engine import CompletionOutput, FinishReason, RequestOutput
from opweave_engine.server import output_parser
from opweave_engine.server.generation import AnswerPlan, GenerationJob, chat_generation
from opweave_engine.server.logprobs import chat_logprobs, prompt_logprobs
from opweave_engine.server.protocol import chat
from opweave_engine.server.protocol.base import TextEvents, Usage, UsageCounter
from opweave_engine.server.state import Server
from opweave_engine.server.streaming import ERRORS, STREAM, json_response, stream

router = APIRouter(responses=ERRORS, tags=["OpenAI"])


@router.post("/v1/chat/completions", response_model=chat.ChatResponse, responses=STREAM)
async def chat_completions(body: chat.ChatRequest, request: Request, server: Server) -> Response:
    """Answer a conversation."""
    call = server.accept(body, request, "messages")
    generation, plan = await chat_generation(body, call, kind="chatcmpl")
    writer = _ChatWriter(generation, body, plan)
    if body.stream:
        return await stream(generation, writer)
    (output,) = await call.unless_gone(generation.outputs())
    return json_response(writer.response(output))


@dataclass
class _ChatWriter:
    """Writes the response to one request."""

    generation: GenerationJob
    body: chat.ChatRequest
    plan: AnswerPlan

    def __post_init__(self) -> None:
        self.counter, self.text_events = UsageCounter(), TextEvents(self._text_chunk)
        self.parsed: dict[int, output_parser.AnswerParser] = {}

    def response(self, output: RequestOutput) -> chat.ChatResponse:
        ids = output.prompt_token_ids
        self.counter.add(output)
        return chat.ChatResponse(
            **self.generation.header,
            choices=[self._choice(answer) for answer in output.outputs],
            usage=self.counter.usage(),
            prompt_token_ids=ids if self.body.return_token_ids else None,
            prompt_logprobs=prompt_logprobs(
                output.prompt_logprobs, ids, self.body.prompt_logprobs or 0
            ),
        )

    def events(self, _: int, delta: RequestOutput) -> Iterator[str]:
        self.counter.add(delta)
        usage = self.counter.usage() if self.body.repeats_usage else None
        for output in delta.outputs:
            if output.index not in self.parsed:
                is_first, self.parsed[output.index] = not self.parsed, self.plan.parser()
                begin = {"role": "assistant", "content": ""}
                chunk = self._chunk(usage, index=output.index, delta=begin)
                if is_first and self.body.return_token_ids:
                    chunk.prompt_token_ids = delta.prompt_token_ids
                yield chunk.event()
            yield from self._output_events(output, usage)

    def last_events(self) -> Iterator[str]:
        if self.body.includes_usage:
            yield self._chunk(self.counter.usage()).event()

    def _choice(self, answer: CompletionOutput) -> chat.ChatChoice:
        parsed = self.plan.parser()
        parsed.push(answer)
        reasoning = parsed.reasoning if self._shows_reasoning and parsed.reasoning else None
        is_text = not (parsed.calls or parsed.reasoning)
        calls = [
            chat.ToolCall(
                id=call.id, function=chat.CalledFunction(name=call.name, arguments=call.arguments)
            )
            for call in parsed.calls
        ]
        message = chat.AnswerMessage(
            content=parsed.content if parsed.content or is_text else None,
            tool_calls=calls or None,
            reasoning_content=reasoning,
            reasoning=reasoning,
        )
        return chat.ChatChoice(
            index=answer.index,
            message=message,
            logprobs=self._logprobs(answer),
            finish_reason=_finish_reason(answer.finish_reason, parsed),
            stop_reason=answer.stop_reason,
            token_ids=answer.token_ids if self.body.return_token_ids else None,
        )

    def _output_events(self, output: CompletionOutput, usage: Usage | None) -> Iterator[str]:
        parsed = self.parsed[output.index]
        calls = len(parsed.calls)
        deltas = []
        for event in parsed.push(output):
            calls += isinstance(event, output_parser.CallStart)
            deltas += self._delta(event, calls - 1)
        ids = output.token_ids if self.body.return_token_ids else None
        if (output.logprobs or ids) and not deltas:
            deltas = [{"content": ""}]  # tokens whose text is held back, or is part of a format
        logprobs = self._logprobs(output)
        for delta in deltas:
            if "content" in delta and usage is None and logprobs is None and ids is None:
                yield self.text_events.event(output.index, delta["content"])
                continue
            scores = {"logprobs": logprobs, "token_ids": ids}
            yield self._chunk(usage, index=output.index, delta=delta, **scores).event()
            logprobs = ids = None
        if (reason := output.finish_reason) is not None:
            end = {
                "finish_reason": _finish_reason(reason, parsed),
                "stop_reason": output.stop_reason,
            }
            yield self._chunk(usage, index=output.index, delta={}, **end).event()

    def _text_chunk(self, index: int, text: str) -> chat.ChatChunk:
        return self._chunk(None, index=index, delta={"content": text})

    def _delta(self, event: output_parser.Event, index: int) -> list[dict[str, Any]]:
        match event:
            case output_parser.ContentDelta(text):
                return [{"content": text}]
            case output_parser.ReasoningDelta(text):
                shown = {"reasoning_content": text, "reasoning": text}
                return [shown] if self._shows_reasoning else []
            case output_parser.CallStart(name, call_id):
                call = {"index": index, "id": call_id, "type": "function"}
                return [{"tool_calls": [{**call, "function": {"name": name, "arguments": ""}}]}]
            case output_parser.ArgumentsDelta(text):
                return [{"tool_calls": [{"index": index, "function": {"arguments": text}}]}]

    @property
    def _shows_reasoning(self) -> bool:
        return self.body.include_reasoning is not False

    def _logprobs(self, output: CompletionOutput) -> chat.ChatLogprobs | None:
        count, as_ids = self.body.top_logprobs or 0, bool(self.body.return_tokens_as_token_ids)
        return chat_logprobs(output, count, self.generation.server.engine.tokenizer, as_ids=as_ids)

    def _chunk(self, usage: Usage | None, **choice: Any) -> chat.ChatChunk:
        choices = [chat.ChatChunkChoice(**choice)] if choice else []
        return chat.ChatChunk(**self.generation.header, choices=choices, usage=usage)


def _finish_reason(
    reason: FinishReason | None, parsed: output_parser.AnswerParser
) -> chat.ChatFinishReason | None:
    return "tool_calls" if reason == "stop" and parsed.calls else reason
