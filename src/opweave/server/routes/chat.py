"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from opweave.engine import CompletionOutput, RequestOutput
from opweave.server.disconnect import unless_gone
from opweave.server.generation import Generation, Outputs
from opweave.server.logprobs import chat_logprobs, prompt_logprobs
from opweave.server.pieces import Growth, Piece
from opweave.server.prompts import Prompt, Reading, check_context, check_length, render, tokenize
from opweave.server.protocol.chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
)
from opweave.server.protocol.usage import Usage
from opweave.server.routes.responses import ERRORS, STREAM, json_response
from opweave.server.state import Server
from opweave.server.streaming import stream

router = APIRouter(responses=ERRORS, tags=["OpenAI"])


@router.post("/v1/chat/completions", response_model=ChatResponse, responses=STREAM)
async def chat_completions(body: ChatRequest, request: Request, server: Server) -> Response:
    """Answer a conversation."""
    server.accept(body, request)
    params, deadline = body.params(server.engine.sampling_defaults), server.deadline()
    text = await unless_gone(request, render(body, request, server, deadline))
    reading = Reading.of(params, server, add_special_tokens=bool(body.add_special_tokens))
    check_length(text, server, param="messages", reading=reading)
    prompts = [Prompt(text, await tokenize(text, server, reading))]
    check_context(
        prompts,
        params,
        server,
        param="messages",
        limit=body.limit_field,
        asks=getattr(body, body.limit_field) is not None,
    )
    generation = Generation(
        server,
        "chatcmpl",
        prompts,
        params,
        deadline,
        body.priority or 0,
        param="messages",
        form_field=body.form_field,
        request_id=body.request_id,
    )
    writer = _Writer(generation, body)
    if body.stream:
        return await stream(generation, writer.events, request)
    (output,) = await unless_gone(request, generation.answers())
    return json_response(writer.response(output))


@dataclass(frozen=True)
class _Writer:
    """Writes the answers of one request."""

    generation: Generation
    body: ChatRequest

    def response(self, output: RequestOutput) -> ChatResponse:
        choices = [
            ChatChoice(
                index=answer.index,
                message=AnswerMessage(content=answer.text),
                logprobs=self._logprobs(answer),
                finish_reason=answer.finish_reason,
                stop_reason=answer.stop_reason,
                token_ids=answer.token_ids if self.body.return_token_ids else None,
            )
            for answer in output.outputs
        ]
        generation, ids = self.generation, output.prompt_token_ids
        return ChatResponse(
            id=generation.id,
            created=generation.created,
            model=generation.model,
            choices=choices,
            usage=Usage.of([output]),
            prompt_token_ids=ids if self.body.return_token_ids else None,
            prompt_logprobs=prompt_logprobs(
                output.prompt_logprobs, ids, self.body.prompt_logprobs or 0
            ),
        )

    async def events(self, outputs: Outputs) -> AsyncGenerator[str, None]:
        growing: dict[int, Growth] = {}
        newest: list[RequestOutput] = []
        async for _, output in outputs:
            newest = [output]
            usage = Usage.of(newest) if self.body.repeats_usage else None
            for answer in output.outputs:
                if answer.index not in growing:
                    is_first, growing[answer.index] = not growing, Growth()
                    begin = {"role": "assistant", "content": ""}
                    chunk = self._chunk([ChatChunkChoice(index=answer.index, delta=begin)], usage)
                    if is_first and self.body.return_token_ids:
                        chunk.prompt_token_ids = output.prompt_token_ids
                    yield chunk.event()
                for choice in self._choices(answer.index, growing[answer.index].piece(answer)):
                    yield self._chunk([choice], usage).event()
        if self.body.includes_usage:
            yield self._chunk([], Usage.of(newest)).event()

    def _logprobs(self, answer: CompletionOutput | Piece) -> ChatLogprobs | None:
        count, tokenizer = self.body.top_logprobs or 0, self.generation.server.engine.tokenizer
        return chat_logprobs(
            answer.token_ids,
            answer.logprobs,
            count,
            tokenizer,
            as_ids=bool(self.body.return_tokens_as_token_ids),
        )

    def _choices(self, index: int, piece: Piece) -> Iterator[ChatChunkChoice]:
        ids = piece.token_ids if self.body.return_token_ids else None
        if piece.text or piece.logprobs or ids:
            logprobs = self._logprobs(piece)
            delta = {"content": piece.text}
            yield ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, token_ids=ids)
        if piece.finish_reason is not None:
            yield ChatChunkChoice(
                index=index,
                delta={},
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
            )

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatChunk:
        generation = self.generation
        return ChatChunk(
            id=generation.id,
            created=generation.created,
            model=generation.model,
            choices=choices,
            usage=usage,
        )
