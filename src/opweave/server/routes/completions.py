"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field

from fastapi import APIRouter, Request, Response

from opweave.engine import CompletionOutput, RequestOutput
from opweave.server.disconnect import unless_gone
from opweave.server.errors import engine_error
from opweave.server.generation import GenerationJob, Outputs
from opweave.server.logprobs import completion_logprobs, joined, prompt_logprobs
from opweave.server.offsets import Offsets, prompt_offsets
from opweave.server.pieces import Growth, Piece
from opweave.server.prompts import Reading, check_context, read_prompts
from opweave.server.protocol.answers import ErrorDetail
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
    reading = Reading.of(params, server, add_special_tokens=body.add_special_tokens is not False)
    prompts = await read_prompts(body.prompt, server, param="prompt", n=params.n, reading=reading)
    asks = body.max_tokens is not None or "max_tokens" not in defaults
    check_context(prompts, params, server, param="prompt", limit="max_tokens", asks=asks)
    generation = GenerationJob(
        server,
        "cmpl",
        prompts,
        params,
        deadline,
        body.priority or 0,
        form_field=body.form_field,
        request_id=body.request_id,
    )
    writer = _CompletionsWriter(generation, body)
    if body.stream:
        return await stream(generation, writer.events, request)
    outputs = await unless_gone(request, generation.answers(partial=True))
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
class _CompletionsWriter:
    """Writes the answers of one request."""

    generation: GenerationJob
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
            usage = self._usage(newest.values()) if self.body.repeats_usage else None
            for answer in output.outputs:
                if (choice := self._choice(number, output, answer)) is not None:
                    yield self._body([choice], usage).event()
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
        ids = piece.token_ids if self.body.return_token_ids else None
        if not (piece or ids or (growing.is_new and self.body.echo)):
            return None
        reason, stop_reason, text = piece.finish_reason, piece.stop_reason, piece.text
        if self.body.writes_nothing:  # whatever the token is that the engine had to write
            reason, stop_reason, text = "length" if reason == "stop" else reason, None, ""
        logprobs = self._logprobs(output, piece, growing)
        choice = CompletionChoice(
            index=place,
            text=text,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            token_ids=[] if ids and self.body.writes_nothing else ids,
            error=_error(output) if reason == "error" else None,
        )
        if growing.is_new:
            self._begin(choice, output, growing)
        return choice

    def _begin(self, choice: CompletionChoice, output: RequestOutput, growing: _Growing) -> None:
        """Add what only the first piece of an answer has."""
        growing.is_new, choice.text = False, growing.prompt + choice.text
        prompt = output.prompt_token_ids
        if self.body.return_token_ids:
            choice.prompt_token_ids = prompt
        if (count := self.body.prompt_logprobs) is not None:
            choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs, prompt, count)

    def _logprobs(
        self, output: RequestOutput, piece: Piece, growing: _Growing
    ) -> CompletionLogprobs | None:
        if (count := self.body.logprobs) is None:
            return None
        known = None if self.body.writes_nothing else piece.logprobs
        places = growing.offsets.add(piece.token_ids)
        tokenizer, ids = self.generation.server.engine.tokenizer, output.prompt_token_ids
        as_ids = bool(self.body.return_tokens_as_token_ids)
        answer = completion_logprobs(
            piece.token_ids, known, count, places, tokenizer, as_ids=as_ids
        )
        if not (self.body.echo and growing.is_new):
            return answer
        places = prompt_offsets(tokenizer, ids, growing.prompt)
        first = tokenizer.decode(ids[:1])
        prompt = completion_logprobs(
            ids, output.prompt_logprobs, count, places, tokenizer, first=first, as_ids=as_ids
        )
        return joined(prompt, answer)

    def _offsets(self, output: RequestOutput, start: int) -> Offsets:
        return Offsets(
            self.generation.server.engine.tokenizer,
            output.prompt_token_ids,
            start=start,
            skip_special_tokens=self.generation.params.skip_special_tokens,
            spaces_between_special_tokens=self.generation.params.spaces_between_special_tokens,
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


def _error(output: RequestOutput) -> ErrorDetail | None:
    """Return why a prompt has no answer while others have one."""
    found = None if output.error is None else engine_error(output.error)
    return None if found is None else ErrorDetail.model_validate(found.body["error"])
