"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field

from fastapi import APIRouter, Request, Response

from opweave.engine import CompletionOutput, RequestOutput
from opweave.server.disconnect import unless_gone
from opweave.server.generation import Generation, Outputs
from opweave.server.logprobs import completion_logprobs, joined
from opweave.server.offsets import Offsets, prompt_offsets
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
    defaults, deadline = server.engine.sampling_defaults, server.deadline()
    params = body.params(defaults)
    prompts = await read_prompts(body.prompt, server, param="prompt", n=params.n)
    asks = body.max_tokens is not None or "max_tokens" not in defaults
    check_context(prompts, params, server, param="prompt", limit="max_tokens", asks=asks)
    generation = Generation(
        server,
        "cmpl",
        prompts,
        params,
        deadline,
        body.priority or 0,
        form_field=body.form_field,
    )
    writer = _Writer(generation, body)
    if body.stream:
        return await stream(generation, writer.events, request)
    outputs = await unless_gone(request, generation.answers())
    return json_response(writer.response(outputs))


class _Growing:
    """One answer while it is written: what is new in it, and where its tokens begin.

    Args:
        prompt: the text that it echoes.
        offsets: finds the places of its tokens.
    """

    def __init__(self, prompt: str, offsets: Offsets) -> None:
        self.prompt, self.offsets = prompt, offsets
        self.growth, self.is_new = Growth(), True


@dataclass(frozen=True)
class _Writer:
    """Writes the answers of one request."""

    generation: Generation
    body: CompletionRequest
    growing: dict[int, _Growing] = field(default_factory=dict)  # by its place

    def response(self, outputs: list[RequestOutput]) -> CompletionResponse:
        choices = [
            choice
            for number, output in enumerate(outputs)
            for answer in output.outputs
            if (choice := self._choice(number, output, answer)) is not None
        ]
        return self._body(choices, self._usage(outputs))

    async def events(self, outputs: Outputs) -> AsyncGenerator[str, None]:
        newest: dict[int, RequestOutput] = {}
        async for number, output in outputs:
            newest[number] = output
            for answer in output.outputs:
                if (choice := self._choice(number, output, answer)) is not None:
                    yield self._body([choice], None).event()
        if self.body.includes_usage:
            yield self._body([], self._usage(newest.values())).event()

    def _choice(
        self, number: int, output: RequestOutput, answer: CompletionOutput
    ) -> CompletionChoice | None:
        """Return what is new in an answer, or None if nothing is."""
        place = self._place(number, answer)
        if place not in self.growing:
            prompt = self._prompt_text(number) if self.body.echo else ""
            self.growing[place] = _Growing(prompt, self._offsets(output, len(prompt)))
        growing = self.growing[place]
        piece = growing.growth.piece(answer)
        if not piece and not (growing.is_new and self.body.echo):
            return None
        reason, stop_reason, text = piece.finish_reason, piece.stop_reason, piece.text
        if self.body.writes_nothing:  # whatever the token is that the engine had to write
            reason, stop_reason, text = "length" if reason == "stop" else reason, None, ""
        logprobs = self._logprobs(output, piece, growing)
        if growing.is_new:
            text, growing.is_new = growing.prompt + text, False
        return CompletionChoice(
            index=place,
            text=text,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
        )

    def _logprobs(
        self, output: RequestOutput, piece: Piece, growing: _Growing
    ) -> CompletionLogprobs | None:
        if (count := self.body.logprobs) is None:
            return None
        known = None if self.body.writes_nothing else piece.logprobs
        places = growing.offsets.add(piece.token_ids)
        tokenizer, ids = self.generation.server.engine.tokenizer, output.prompt_token_ids
        answer = completion_logprobs(piece.token_ids, known, count, places, tokenizer)
        if not (self.body.echo and growing.is_new):
            return answer
        places = prompt_offsets(tokenizer, ids, growing.prompt)
        first = tokenizer.decode(ids[:1])
        prompt = completion_logprobs(
            ids, output.prompt_logprobs, count, places, tokenizer, first=first
        )
        return joined(prompt, answer)

    def _offsets(self, output: RequestOutput, start: int) -> Offsets:
        return Offsets(
            self.generation.server.engine.tokenizer,
            output.prompt_token_ids,
            start=start,
            skip_special_tokens=self.generation.params.skip_special_tokens,
        )

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
