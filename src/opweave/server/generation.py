"""Answers to the prompts of one request, as they grow."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from opweave.engine import (
    MissingDependencyError,
    PromptError,
    RequestOutput,
    SamplingParams,
    SamplingParamsError,
)
from opweave.server.deadline import Deadline
from opweave.server.errors import ApiError
from opweave.server.merge import merged
from opweave.server.prompts import Prompt
from opweave.server.protocol.structured import form_error
from opweave.server.state import ServerState

_log = logging.getLogger(__name__)

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]  # of which prompt


@dataclass(frozen=True)
class Generation:
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
        id: its id in responses; the engine knows each prompt by it and a number.
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
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", f"{self.kind}-{uuid.uuid4().hex}")

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

    async def answers(self) -> list[RequestOutput]:
        """Return the complete answers, in the order of the prompts; raises as :meth:`outputs`."""
        newest: dict[int, RequestOutput] = {}
        async with aclosing(self.outputs()) as outputs:
            async for index, output in outputs:
                newest[index] = output
        return [newest[index] for index in range(len(self.prompts))]

    def _merged(self) -> Outputs:
        engine = self.server.engine
        return merged(
            [
                engine.generate(
                    prompt.ids,
                    self.params,
                    request_id=f"{self.id}-{index}",
                    priority=self.priority,
                )
                for index, prompt in enumerate(self.prompts)
            ]
        )

    def _check_not_aborted(self, output: RequestOutput) -> None:
        aborted = any(answer.finish_reason == "abort" for answer in output.outputs)
        if aborted and self.server.admission.is_closed:
            raise ApiError(
                "The server shuts down, and the request took too long to wait for.",
                status=503,
                code="shutting_down",
            )
