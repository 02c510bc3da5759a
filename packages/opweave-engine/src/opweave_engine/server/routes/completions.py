"""``POST /v1/completions``."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from fastapi import APIRouter, Request, Response

from opweave_engine import CompletionOutput, RequestOutput
from opweave_engine.detokenizer import IncrementalDecoder
from opweave_engine.server.errors import engine_error
from opweave_engine.server.generation import GenerationJob
from opweave_engine.server.logprobs import (
    Offsets,
    completion_logprobs,
    joined,
    prompt_logprobs,
    prompt_offsets,
)
from opweave_engine.server.prompts import Reading, check_context, read_prompts
from opweave_engine.server.protocol.base import ErrorDetail, TextEvents, Usage, UsageCounter
from opweave_engine.server.protocol.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from opweave_engine.server.state import Server
from opweave_engine.server.streaming import ERRORS, STREAM, json_response, stream

router = APIRouter(responses=ERRORS, tags=["OpenAI"])


@router.post("/v1/completions", response_model=CompletionResponse, responses=STREAM)
async def completions(body: CompletionRequest, request: Request, server: Server) -> Response:
    """Continue one or more prompts."""
    call, defaults = server.accept(body, request, "prompt"), server.engine.sampling_defaults
    params = body.params(defaults)
    max_prompt_length = params.prompt_limit(server.engine.max_model_len)
    reading = Reading(body.add_special_tokens is not False, max_prompt_length)
    prompts = await call.unless_gone(
        read_prompts(body.prompt, call, n=params.n, reading=reading, cache_salt=body.cache_salt)
    )
    asks = body.max_tokens is not None or "max_tokens" not in defaults
    check_context(prompts, params, call, limit="max_tokens", asks=asks)
    generation = GenerationJob(
        call, "cmpl", prompts, params, body.priority or 0, body.form_field, body.request_id
    )
    writer = _CompletionsWriter(generation, body)
    if body.stream:
        return await stream(generation, writer)
    outputs = await call.unless_gone(generation.outputs(partial=True))
    return json_response(writer.response(outputs))


@dataclass
class _Choice:
    """The state of one output while it is written.

    Attributes:
        first: the first delta of its prompt.
        echo: the prompt's text, if the response repeats it.
        is_new: whether nothing of it has been written.
        offsets: finds the text offsets of its tokens, for log-probabilities.
    """

    first: RequestOutput
    echo: str
    is_new: bool = True
    offsets: Offsets | None = None


@dataclass
class _CompletionsWriter:
    """Writes the response to one request."""

    generation: GenerationJob
    body: CompletionRequest
    choices: dict[int, _Choice] = field(default_factory=dict)  # by the index of the choice

    def __post_init__(self) -> None:
        body = self.body
        self.counter = UsageCounter(counts_completion=not body.writes_nothing)
        self.text_events = TextEvents(self._text_body)
        has_counts = body.logprobs is not None or body.prompt_logprobs is not None
        has_ids = body.return_token_ids or body.writes_nothing
        self.has_only_text = not (has_counts or has_ids or body.echo or body.repeats_usage)

    def response(self, outputs: list[RequestOutput]) -> CompletionResponse:
        choices = list[CompletionChoice]()
        for number, output in enumerate(outputs):
            self.counter.add(output, number)
            choices += filter(None, (self._choice(number, output, out) for out in output.outputs))
        return self._body(choices, self.counter.usage())

    def events(self, number: int, delta: RequestOutput) -> Iterator[str]:
        self.counter.add(delta, number)
        usage = self.counter.usage() if self.body.repeats_usage else None
        for output in delta.outputs:
            if self.has_only_text and output.finish_reason is None:
                if output.text:
                    yield self.text_events.event(self._index(number, output), output.text)
            elif (choice := self._choice(number, delta, output)) is not None:
                yield self._body([choice], usage).event()

    def last_events(self) -> Iterator[str]:
        if self.body.includes_usage:
            yield self._body([], self.counter.usage()).event()

    def _index(self, number: int, output: CompletionOutput) -> int:
        return number * self.generation.params.n + output.index

    def _choice(
        self, number: int, delta: RequestOutput, output: CompletionOutput
    ) -> CompletionChoice | None:
        """Return the choice for a delta of an output, or None if there is nothing to send."""
        index = self._index(number, output)
        if index not in self.choices:
            echo = self._prompt_text(number) if self.body.echo else ""
            self.choices[index] = _Choice(delta, echo)
        state = self.choices[index]
        ids = output.token_ids if self.body.return_token_ids else None
        has_news = output.text or output.finish_reason or output.logprobs or ids
        if not (has_news or (state.is_new and self.body.echo)):
            return None
        reason, stop_reason, text = output.finish_reason, output.stop_reason, output.text
        if self.body.writes_nothing:  # the engine had to generate a token, which is dropped
            reason, stop_reason, text = "length" if reason == "stop" else reason, None, ""
        logprobs = self._logprobs(output, state)
        choice = CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            token_ids=[] if ids and self.body.writes_nothing else ids,
            error=_error(delta) if reason == "error" else None,
        )
        if state.is_new:
            self._begin(choice, state)
        return choice

    def _begin(self, choice: CompletionChoice, state: _Choice) -> None:
        """Add the fields that only the first chunk of an output has."""
        state.is_new, choice.text = False, state.echo + choice.text
        prompt = state.first.prompt_token_ids
        if self.body.return_token_ids:
            choice.prompt_token_ids = prompt
        if (count := self.body.prompt_logprobs) is not None:
            choice.prompt_logprobs = prompt_logprobs(state.first.prompt_logprobs, prompt, count)

    def _logprobs(self, output: CompletionOutput, state: _Choice) -> CompletionLogprobs | None:
        if (count := self.body.logprobs) is None:
            return None
        logprobs = None if self.body.writes_nothing else output.logprobs
        tokenizer, ids = self.generation.server.engine.tokenizer, state.first.prompt_token_ids
        if state.offsets is None:
            decoder = IncrementalDecoder.of(tokenizer, ids, self.generation.params)
            state.offsets = Offsets(decoder, len(state.echo))
        offsets = state.offsets.add(output.token_ids)
        as_ids = bool(self.body.return_tokens_as_token_ids)
        generated = completion_logprobs(
            output.token_ids, logprobs, count, offsets, tokenizer, as_ids=as_ids
        )
        if not (self.body.echo and state.is_new):
            return generated
        offsets = prompt_offsets(tokenizer, ids, state.echo)
        first = tokenizer.decode(ids[:1])
        prompt = completion_logprobs(
            ids, state.first.prompt_logprobs, count, offsets, tokenizer, first=first, as_ids=as_ids
        )
        return joined(prompt, generated)

    def _prompt_text(self, number: int) -> str:
        prompt = self.generation.prompts[number]
        if prompt.text is not None:
            return prompt.text
        return self.generation.server.engine.tokenizer.decode(prompt.ids)

    def _text_body(self, index: int, text: str) -> CompletionResponse:
        return self._body([CompletionChoice(index=index, text=text, finish_reason=None)], None)

    def _body(self, choices: list[CompletionChoice], usage: Usage | None) -> CompletionResponse:
        return CompletionResponse(**self.generation.header, choices=choices, usage=usage)


def _error(output: RequestOutput) -> ErrorDetail | None:
    """Return the error of a prompt that failed while others did not."""
    error = None if output.error is None else engine_error(output.error)
    return None if error is None else ErrorDetail.model_validate(error.body["error"])
