"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from opweave.engine import CompletionOutput, RequestOutput
from opweave.server.disconnect import unless_gone
from opweave.server.generation import Generation, Outputs
from opweave.server.logprobs import completion_logprobs, joined
from opweave.server.pieces import Growth, Piece
from opweave.server.prompts import check_context, read_prompts
from opweave.server.protocol.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from opweave.server.protocol.usage import Usage
from opweave.server.routes.responses import ERRORS, STREAM, json_response
from opweave.server.state import Server
from opweave.server.streaming import stream

router = APIRouter(responses=ERRORS, tags=["OpenAI"])


@router.post("/v1/completions", response_model=CompletionResponse, responses=STREAM)
async def completions(body: CompletionRequest, request: Request, server: Server) -> Response:
    """Continue one or more prompts."""
    server.accept(body, request)
    params = body.params()
    prompts = await read_prompts(body.prompt, server, param="prompt")
    check_context(prompts, params, server)
    generation = Generation(server, "cmpl", prompts, params, body.priority)
    writer = _Writer(generation, body)
    if body.stream:
        return await stream(generation, writer.events, request)
    outputs = await unless_gone(request, generation.answers())
    return json_response(writer.response(outputs))


@dataclass(frozen=True)
class _Writer:
    """Writes the answers of one request."""

    generation: Generation
    body: CompletionRequest

    def response(self, outputs: list[RequestOutput]) -> CompletionResponse:
        choices = [
            self._choice(number, output, answer, Growth().piece(answer), is_first=True)
            for number, output in enumerate(outputs)
            for answer in output.outputs
        ]
        return self._body(choices, self._usage(outputs))

    async def events(self, outputs: Outputs) -> AsyncGenerator[str, None]:
        growing: dict[int, Growth] = {}
        newest: dict[int, RequestOutput] = {}
        async for number, output in outputs:
            newest[number] = output
            for answer in output.outputs:
                place = self._place(number, answer)
                is_first = place not in growing
                growth = growing.setdefault(place, Growth())
                if (piece := growth.piece(answer)) or (is_first and self.body.echo):
                    choice = self._choice(number, output, answer, piece, is_first=is_first)
                    yield self._body([choice], None).event()
        if self.body.includes_usage:
            yield self._body([], self._usage(newest.values())).event()

    def _choice(
        self,
        number: int,
        output: RequestOutput,
        answer: CompletionOutput,
        piece: Piece,
        *,
        is_first: bool,
    ) -> CompletionChoice:
        prompt = self._prompt_text(number) if self.body.echo else ""
        return CompletionChoice(
            index=self._place(number, answer),
            text=(prompt if is_first else "") + ("" if self.body.writes_nothing else piece.text),
            logprobs=self._logprobs(number, output, piece, len(prompt), is_first=is_first),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )

    def _logprobs(
        self, number: int, output: RequestOutput, piece: Piece, offset: int, *, is_first: bool
    ) -> CompletionLogprobs | None:
        count = self.body.logprobs
        if count is None:
            return None
        known = None if self.body.writes_nothing else piece.logprobs
        answer = completion_logprobs(piece.token_ids, known, count, offset=offset + piece.start)
        if not (self.body.echo and is_first):
            return answer
        ids = self.generation.prompts[number].ids
        first = self.generation.server.engine.tokenizer.decode(ids[:1])
        prompt = completion_logprobs(ids, output.prompt_logprobs, count, offset=0, first=first)
        return joined(prompt, answer)

    def _prompt_text(self, number: int) -> str:
        prompt = self.generation.prompts[number]
        if prompt.text is not None:
            return prompt.text
        return self.generation.server.engine.tokenizer.decode(prompt.ids)

    def _place(self, number: int, answer: CompletionOutput) -> int:
        return number * self.generation.params.n + answer.index

    def _usage(self, outputs: Iterable[RequestOutput]) -> Usage:
        return Usage.of(outputs, counts_answers=not self.body.writes_nothing)

    def _body(self, choices: list[CompletionChoice], usage: Usage | None) -> CompletionResponse:
        generation = self.generation
        return CompletionResponse(
            id=generation.id,
            created=generation.created,
            model=generation.model,
            choices=choices,
            usage=usage,
        )
