"""Generates the outputs of one HTTP request, until it ends or the client disconnects."""

import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from opweave_engine import (
    CompletionOutput,
    MissingDependencyError,
    NonFiniteLogitsError,
    PromptError,
    RequestOutput,
    RequestTimings,
    SamplingParams,
    SamplingParamsError,
    Tokenizer,
)
from opweave_engine.prompts import DictPrompt
from opweave_engine.request import OutputAccumulator, merge_deltas
from opweave_engine.server import output_parser
from opweave_engine.server.disconnect import close, merge_streams
from opweave_engine.server.errors import ApiError, shutting_down
from opweave_engine.server.prompts import Prompt, Reading, check_context, read_prompts, render
from opweave_engine.server.protocol.chat import ChatRequest
from opweave_engine.server.protocol.sampling import ToolUse, form_error
from opweave_engine.server.state import ServerCall, ServerState

# Generates the outputs of one HTTP request.


_log = logging.getLogger(__name__)

# The deltas that arrived together, each with the number of its prompt.
Deltas = AsyncGenerator[list[tuple[int, RequestOutput]], None]


@dataclass(frozen=True)
class GenerationJob:
    """The prompts and parameters of one HTTP request.

    Attributes:
        call: the HTTP request.
        kind: the prefix of its id.
        prompts: at least one.
        params: the sampling parameters.
        priority: the scheduling priority; lower numbers go first.
        form_field: the request field that constrains the form of the output.
        request_id: the suffix of its id; None: a random one.
        created: seconds since 1970.
    """

    call: ServerCall
    kind: str
    prompts: list[Prompt]
    params: SamplingParams
    priority: int = 0
    form_field: str = "structured_outputs"
    request_id: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    _name: str = field(default_factory=lambda: uuid.uuid4().hex)  # unique in the engine

    @property
    def id(self) -> str:
        """The id in responses."""
        return f"{self.kind}-{self.request_id or self._name}"

    @property
    def server(self) -> ServerState:
        """The server that runs the request."""
        return self.call.server

    @property
    def header(self) -> dict[str, Any]:
        """The fields that all responses begin with."""
        return {"id": self.id, "created": self.created, "model": self.server.model_names[0]}

    async def deltas(self, *, streams: bool = True) -> Deltas:
        """Yield the deltas of all prompts. Closing it aborts.

        With *streams* False, each prompt has a single delta, when it ends.

        Raises:
            ApiError: too many requests are running, or the server stops.
            EngineError: the engine fails.
        """
        if self.server.config.log_prompts:
            _log.info("%s prompts %r", self.id, [p.text or p.ids for p in self.prompts])
        param = self.call.param if self.params.n == 1 else "n"
        generate = self._generate if len(self.prompts) == 1 else self._isolated
        sources = [generate(index, streams) for index in range(len(self.prompts))]
        if len(sources) == 1:  # the engine merges its deltas
            batches = ([(0, delta)] async for delta in sources[0])
        else:
            batches = merge_streams(sources, merge_deltas)
        with self.server.admission.places(len(self.prompts) * self.params.n, param=param):
            try:
                async with aclosing(batches):
                    async for batch in batches:
                        if self.server.admission.is_closed and _is_aborted(batch):
                            raise shutting_down()
                        yield batch
            except PromptError as error:
                raise ApiError(str(error), param=self.call.param) from error
            except (SamplingParamsError, MissingDependencyError) as error:
                if self.params.structured_outputs is None:
                    raise
                raise form_error(error, self.form_field) from error
            finally:
                for source in sources:
                    await close(source)

    async def outputs(self, *, partial: bool = False) -> list[RequestOutput]:
        """Return the complete outputs, in the order of the prompts; raises as :meth:`deltas`.

        With *partial*, a prompt that failed has an output with its error, unless all failed. Raises
        an ApiError at the deadline, too.
        """
        totals = [OutputAccumulator() for _ in self.prompts]
        async with self.call.deadline.limit(), aclosing(self.deltas(streams=False)) as deltas:
            async for batch in deltas:
                for index, delta in batch:
                    totals[index].add(delta)
        complete = [total.output() for total in totals]
        errors = [output.error for output in complete if output.error is not None]
        if errors and (not partial or len(errors) == len(complete)):
            raise errors[0]
        return complete

    async def _isolated(self, index: int, streams: bool) -> AsyncGenerator[RequestOutput, None]:
        """Yield the deltas of one prompt. If its logits are NaN, the other prompts continue."""
        stream, is_first = self._generate(index, streams), True
        unfinished = set(range(self.params.n))
        try:
            async for delta in stream:
                is_first = False
                unfinished -= {output.index for output in delta.outputs if output.finish_reason}
                yield delta
        except NonFiniteLogitsError as error:
            outputs = [CompletionOutput(i, "", [], "error") for i in sorted(unfinished)]
            prompt = self.prompts[index].ids if is_first else []
            timings = RequestTimings(0.0, 0.0, 0.0)
            yield RequestOutput(self.id, None, prompt, outputs, True, timings, error=error)
        finally:
            await close(stream)

    def _generate(self, index: int, streams: bool) -> AsyncIterator[RequestOutput]:
        prompt = self.prompts[index]
        return self.server.engine.generate_deltas(
            prompt.ids
            if prompt.cache_salt is None
            else DictPrompt(prompt_token_ids=prompt.ids, cache_salt=prompt.cache_salt),
            self.params,
            request_id=f"{self.kind}-{self._name}-{index}",
            priority=self.priority,
            streams=streams,
        )


def _is_aborted(batch: Sequence[tuple[int, RequestOutput]]) -> bool:
    return any(out.finish_reason == "abort" for _, delta in batch for out in delta.outputs)


# Turns a conversation into a generation job, and a plan for its answer.


@dataclass(frozen=True)
class AnswerPlan:
    """How to constrain an output, and how to parse it.

    Attributes:
        style: the formats that the model writes.
        use: the tool use of the request.
        prompt: the text that the model continues.
        form_field: the request field that constrains the form of the output.
    """

    style: output_parser.OutputStyle
    use: ToolUse
    prompt: str
    form_field: str

    def __post_init__(self) -> None:
        if self.use.required is not None and self.style.calls is None:
            raise ApiError(
                "tool_choice needs a format of tool calls: the server runs with "
                "--tool-call-parser none.",
                param="tool_choice",
                code="unsupported",
            )

    @property
    def calls(self) -> type[output_parser.CallFormat] | None:
        """The format of tool calls, if the model may call a function."""
        return self.style.calls if self.use.tools else None

    @property
    def has_reasoning(self) -> bool:
        """Whether the output may begin with reasoning, which the prompt has not ended."""
        return self.style.has_reasoning and not self.prompt.rstrip().endswith(output_parser.END)

    @property
    def source_field(self) -> str:
        """The field of the request that the constraint comes from."""
        return self.form_field if self.use.required is None else "tools"

    def parser(self) -> output_parser.AnswerParser:
        """Return a parser for one output."""
        return output_parser.AnswerParser(
            self.calls,
            names=self.use.names,
            has_reasoning=self.has_reasoning,
            is_thinking=self.has_reasoning and output_parser.is_thinking(self.prompt),
            is_parallel=self.use.is_parallel,
        )

    def constrained(self, params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
        """Return *params* with the constraint, and with the special tokens that formats need.

        Raises:
            ApiError: the constraint is invalid or cannot be compiled.
        """
        special = self._special_tokens(tokenizer)
        params = replace(params, kept_special_tokens=sorted(special.values()))
        form = None if self.use.required is not None else params.structured_outputs
        functions = self.use.required if form is None else self.use.functions
        if not functions and (form is None or not self.has_reasoning):
            return params
        reasoning = None
        if self.has_reasoning:
            reasoning = "inside" if output_parser.is_thinking(self.prompt) else "may"
        try:
            grammar = output_parser.answer_grammar(
                layout=self.calls.layout(self.style.template) if self.calls and functions else None,
                functions=functions or (),
                is_parallel=self.use.is_parallel,
                form=form,
                reasoning=reasoning,
                special=special,
            )
        except (ValueError, MissingDependencyError) as error:
            raise form_error(error, self.source_field) from error
        return replace(params, structured_outputs=grammar)

    def _special_tokens(self, tokenizer: Tokenizer) -> Mapping[str, int]:
        markers = {*(self.calls.markers if self.calls else ())}
        markers |= {output_parser.BEGIN, output_parser.END} if self.has_reasoning else set()
        named = {tokenizer.token(token): token for token in tokenizer.special_ids if markers}
        return {name: token for name, token in named.items() if name in markers}


async def chat_generation(
    body: ChatRequest, call: ServerCall, *, kind: str
) -> tuple[GenerationJob, AnswerPlan]:
    """Return the job for a conversation, and how to parse its outputs.

    Args:
        body: the conversation.
        call: the HTTP request.
        kind: the prefix of the response's id.

    Raises:
        ApiError, EngineError: the request is invalid.
        ClientGoneError: the client disconnected.
    """
    server = call.server
    params = body.params(server.engine.sampling_defaults)
    use = ToolUse.of(body.tools, body.tool_choice, body.parallel_tool_calls)
    max_prompt_length = params.prompt_limit(server.engine.max_model_len)
    reading = Reading(bool(body.add_special_tokens), max_prompt_length)

    async def read() -> tuple[str, list[Prompt]]:
        text = await render(body, call)
        return text, await read_prompts(text, call, reading=reading, cache_salt=body.cache_salt)

    text, prompts = await call.unless_gone(read())
    plan = AnswerPlan(server.output_style, use, text, body.form_field)
    constrain = partial(plan.constrained, params, server.engine.tokenizer)
    # The schemas of many functions take too long for the event loop.
    params = await call.as_guest(constrain) if use.functions else constrain()
    asks = getattr(body, body.limit_field) is not None
    check_context(prompts, params, call, limit=body.limit_field, asks=asks)
    job = GenerationJob(
        call, kind, prompts, params, body.priority or 0, plan.source_field, body.request_id
    )
    return job, plan
