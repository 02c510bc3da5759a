"""Answers to the prompts of one request, as they grow."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from opweave.engine import (
    CompletionOutput,
    EngineError,
    MissingDependencyError,
    NonFiniteLogitsError,
    PromptError,
    RequestOutput,
    RequestTimings,
    SamplingParams,
    SamplingParamsError,
)
from opweave.server.deadline import Deadline
from opweave.server.errors import ApiError
from opweave.server.merge_streams import close, merge_streams
from opweave.server.prompts import Prompt
from opweave.server.protocol.structured import form_error
from opweave.server.state import ServerState

_log = logging.getLogger(__name__)

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]  # of which prompt


@dataclass(frozen=True)
class GenerationJob:
    """What one request wants to have generated.

    Attributes:
        server: where.
        kind: what its id begins with.
        prompts: at least one.
        params: how to choose tokens.
        deadline: when it must have been answered.
        priority: a lower number goes first.
        param: the field of the request that the prompts come from.
        form_field: the field that says what form the answers must have.
        request_id: what its id in responses ends with; None: a new one.
        id: its id in responses.
        created: in seconds since 1970.
    """

    server: ServerState
    kind: str
    prompts: list[Prompt]
    params: SamplingParams
    deadline: Deadline
    priority: int = 0
    param: str = "prompt"
    form_field: str = "structured_outputs"
    request_id: str | None = None
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    _name: str = field(default_factory=lambda: uuid.uuid4().hex)  # in the engine, a unique one

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", f"{self.kind}-{self.request_id or self._name}")

    @property
    def model(self) -> str:
        """The name of the model in responses."""
        return self.server.model_names[0]

    async def outputs(self) -> Outputs:
        """Yield what is answered so far, with the number of the prompt; closing it aborts.

        Raises:
            ApiError: too many requests are running, it takes too long, or the server stops.
            EngineError: what the engine raises.
        """
        if self.server.config.log_prompts:
            _log.info("%s prompts %r", self.id, [p.text or p.ids for p in self.prompts])
        several = self.param if self.params.n == 1 else "n"
        with self.server.admission.places(len(self.prompts) * self.params.n, param=several):
            async with aclosing(self._merged()) as outputs:
                while True:
                    try:
                        async with self.deadline.limit():
                            index, output = await anext(outputs)
                    except StopAsyncIteration:
                        return
                    except PromptError as error:
                        raise ApiError(str(error), param=self.param) from error
                    except (SamplingParamsError, MissingDependencyError) as error:
                        if self.params.structured_outputs is None:
                            raise
                        raise form_error(error, self.form_field) from error
                    self._check_not_aborted(output)
                    yield index, output

    async def answers(self, *, partial: bool = False) -> list[RequestOutput]:
        """Return the complete answers, in the order of the prompts; raises as :meth:`outputs`.

        With *partial*, a prompt that failed alone has an output with its error, unless all did.
        """
        newest: dict[int, RequestOutput] = {}
        async with aclosing(self.outputs()) as outputs:
            async for index, output in outputs:
                newest[index] = output
        complete = [newest[index] for index in range(len(self.prompts))]
        errors = [output.error for output in complete if output.error is not None]
        if errors and (not partial or len(errors) == len(complete)):
            raise errors[0]
        return complete

    def _merged(self) -> Outputs:
        return merge_streams([self._answer(index) for index in range(len(self.prompts))])

    async def _answer(self, index: int) -> AsyncGenerator[RequestOutput, None]:
        """Yield the answers to one prompt; logits that are NaN end it, and not the others."""
        prompt, output = self.prompts[index].ids, None
        stream = self.server.engine.generate(
            prompt,
            self.params,
            request_id=f"{self.kind}-{self._name}-{index}",
            priority=self.priority,
        )
        try:
            async for output in stream:
                yield output
        except NonFiniteLogitsError as error:
            if len(self.prompts) == 1:
                raise
            yield _failed(output or self._empty(prompt), error)
        finally:
            await close(stream)

    def _empty(self, prompt: list[int]) -> RequestOutput:
        answers = [CompletionOutput(index, "", [], None) for index in range(self.params.n)]
        return RequestOutput(self.id, None, prompt, answers, False, RequestTimings(0.0, 0.0, 0.0))

    def _check_not_aborted(self, output: RequestOutput) -> None:
        aborted = any(answer.finish_reason == "abort" for answer in output.outputs)
        if aborted and self.server.admission.is_closed:
            raise ApiError(
                "The server shuts down, and the request took too long to wait for.",
                status=503,
                code="shutting_down",
            )


def _failed(output: RequestOutput, error: EngineError) -> RequestOutput:
    """Return *output* with all unfinished answers ended by *error*."""
    answers = [
        replace(answer, finish_reason=answer.finish_reason or "error") for answer in output.outputs
    ]
    return replace(output, outputs=answers, finished=True, error=error)
