"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from opweave.engine import CompletionOutput, RequestOutput
from opweave.server.disconnect import unless_gone
from opweave.server.generation import Generation, Outputs
from opweave.server.logprobs import chat_logprobs
from opweave.server.pieces import Growth, Piece
from opweave.server.prompts import Prompt, check_context, check_length, render, tokenize
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
    check_length(text, server, param="messages")
    prompts = [Prompt(text, await tokenize(text, server, special=False))]
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
            )
            for answer in output.outputs
        ]
        generation = self.generation
        return ChatResponse(
            id=generation.id,
            created=generation.created,
            model=generation.model,
            choices=choices,
            usage=Usage.of([output]),
        )

    async def events(self, outputs: Outputs) -> AsyncGenerator[str, None]:
        growing: dict[int, Growth] = {}
        newest: list[RequestOutput] = []
        async for _, output in outputs:
            newest = [output]
            for answer in output.outputs:
                if answer.index not in growing:
                    growing[answer.index] = Growth()
                    begin = {"role": "assistant", "content": ""}
                    yield self._event(ChatChunkChoice(index=answer.index, delta=begin))
                for choice in self._choices(answer.index, growing[answer.index].piece(answer)):
                    yield self._event(choice)
        if self.body.includes_usage:
            yield self._chunk([], Usage.of(newest)).event()

    def _logprobs(self, answer: CompletionOutput | Piece) -> ChatLogprobs | None:
        count, tokenizer = self.body.top_logprobs or 0, self.generation.server.engine.tokenizer
        return chat_logprobs(answer.token_ids, answer.logprobs, count, tokenizer)

    def _choices(self, index: int, piece: Piece) -> Iterator[ChatChunkChoice]:
        if piece.text or piece.logprobs:
            logprobs = self._logprobs(piece)
            delta = {"content": piece.text}
            yield ChatChunkChoice(index=index, delta=delta, logprobs=logprobs)
        if piece.finish_reason is not None:
            yield ChatChunkChoice(
                index=index,
                delta={},
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
            )

    def _event(self, choice: ChatChunkChoice) -> str:
        return self._chunk([choice], None).event()

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatChunk:
        generation = self.generation
        return ChatChunk(
            id=generation.id,
            created=generation.created,
            model=generation.model,
            choices=choices,
            usage=usage,
        )
