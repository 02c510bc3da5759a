"""Generates the outputs of one HTTP request, until it ends or the client disconnects."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
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
)
from opweave_engine.prompts import DictPrompt
from opweave_engine.request import OutputAccumulator, merge_deltas
from opweave_engine.server.answer_plan import AnswerPlan
from opweave_engine.server.disconnect import close, merge_streams
from opweave_engine.server.errors import ApiError, shutting_down
from opweave_engine.server.prompts import Prompt, Reading, check_context, read_prompts, render
from opweave_engine.server.protocol.chat import ChatRequest
from opweave_engine.server.protocol.sampling import ToolUse, form_error
from opweave_engine.server.state import ServerCall, ServerState

# Generates the outputs of one HTTP request.


_log = logging.getLogger(__name__)

Deltas = AsyncGenerator[tuple[int, RequestOutput], None]  # each with the number of its prompt


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
        id: the id in responses.
        created: seconds since 1970.
    """

    call: ServerCall
    kind: str
    prompts: list[Prompt]
    params: SamplingParams
    priority: int = 0
    form_field: str = "structured_outputs"
    request_id: str | None = None
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    _name: str = field(default_factory=lambda: uuid.uuid4().hex)  # unique in the engine

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", f"{self.kind}-{self.request_id or self._name}")

    @property
    def server(self) -> ServerState:
        """The server that runs the request."""
        return self.call.server

    @property
    def header(self) -> dict[str, Any]:
        """The fields that all responses begin with."""
        return {"id": self.id, "created": self.created, "model": self.server.model_names[0]}

    async def deltas(self) -> Deltas:
        """Yield the deltas of all prompts, each with the index of its prompt. Closing it aborts.

        Raises:
            ApiError: too many requests are running, the deadline passes, or the server stops.
            EngineError: the engine fails.
        """
        if self.server.config.log_prompts:
            _log.info("%s prompts %r", self.id, [p.text or p.ids for p in self.prompts])
        several = self.call.param if self.params.n == 1 else "n"
        with self.server.admission.places(len(self.prompts) * self.params.n, param=several):
            async with aclosing(self._merged()) as deltas:
                while True:
                    try:
                        async with self.call.deadline.limit():
                            index, delta = await anext(deltas)
                    except StopAsyncIteration:
                        return
                    except PromptError as error:
                        raise ApiError(str(error), param=self.call.param) from error
                    except (SamplingParamsError, MissingDependencyError) as error:
                        if self.params.structured_outputs is None:
                            raise
                        raise form_error(error, self.form_field) from error
                    self._check_not_aborted(delta)
                    yield index, delta

    async def outputs(self, *, partial: bool = False) -> list[RequestOutput]:
        """Return the complete outputs, in the order of the prompts; raises as :meth:`deltas`.

        With *partial*, a prompt that failed has an output with its error, unless all failed.
        """
        totals = [OutputAccumulator() for _ in self.prompts]
        async with aclosing(self.deltas()) as deltas:
            async for index, delta in deltas:
                totals[index].add(delta)
        complete = [total.output() for total in totals]
        errors = [output.error for output in complete if output.error is not None]
        if errors and (not partial or len(errors) == len(complete)):
            raise errors[0]
        return complete

    def _merged(self) -> Deltas:
        streams = [self._isolated(index) for index in range(len(self.prompts))]
        return merge_streams(streams, merge_deltas)

    async def _isolated(self, index: int) -> AsyncGenerator[RequestOutput, None]:
        """Yield the deltas of one prompt. If its logits are NaN, the other prompts continue."""
        stream, is_first = self._generate(index), True
        unfinished = set(range(self.params.n))
        try:
            async for delta in stream:
                is_first = False
                unfinished -= {each.index for each in delta.outputs if each.finish_reason}
                yield delta
        except NonFiniteLogitsError as error:
            if len(self.prompts) == 1:
                raise
            ends: list[CompletionOutput] = [
                CompletionOutput(each, "", [], "error") for each in sorted(unfinished)
            ]
            prompt = self.prompts[index].ids if is_first else []
            timings = RequestTimings(0.0, 0.0, 0.0)
            yield RequestOutput(self.id, None, prompt, ends, True, timings, error=error)
        finally:
            await close(stream)

    def _generate(self, index: int) -> AsyncIterator[RequestOutput]:
        prompt = self.prompts[index]
        return self.server.engine.generate_deltas(
            prompt.ids
            if prompt.cache_salt is None
            else DictPrompt(prompt_token_ids=prompt.ids, cache_salt=prompt.cache_salt),
            self.params,
            request_id=f"{self.kind}-{self._name}-{index}",
            priority=self.priority,
        )

    def _check_not_aborted(self, delta: RequestOutput) -> None:
        aborted = any(output.finish_reason == "abort" for output in delta.outputs)
        if aborted and self.server.admission.is_closed:
            raise shutting_down()


# Turns a conversation into a generation job.


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
    reading = Reading.of(params, server, add_special_tokens=bool(body.add_special_tokens))

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
