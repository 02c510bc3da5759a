"""State shared by all requests to a server."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Annotated, TypeVar, cast

from fastapi import Depends, Request

from opweave.config.daemon_threads import DaemonThreads
from opweave_engine import ChatTemplate, EngineClient
from opweave_engine.request.io_processor import IOProcessor
from opweave_engine.server.admission import Admission
from opweave_engine.server.config import ServerConfig
from opweave_engine.server.deadline import Deadline
from opweave_engine.server.errors import ApiError
from opweave_engine.server.output.style import OutputStyle
from opweave_engine.server.protocol.base import RequestBody

T = TypeVar("T")

_HALF = max(1, (os.cpu_count() or 1) // 2)
_GUESTS = 8  # threads, of which one that never ends takes a processor from the others


@dataclass
class ServerState:
    """The state of one server.

    Attributes:
        engine: the engine that runs the requests.
        config: the server's configuration.
        chat_template: renders conversations as prompts; may be None.
        special_tokens: the special tokens for chat templates in requests.
        admission: counts and limits the requests.
        io_processor: the I/O processor for ``/v1/process``; may be None.
        readers: threads that tokenize texts; the engine keeps half of the processors.
        long_readers: a thread that tokenizes long texts, for which other texts do not wait.
        guests: threads that run templates and I/O processors.
        created: creation time in seconds since 1970.
    """

    engine: EngineClient
    config: ServerConfig
    chat_template: ChatTemplate | None
    admission: Admission
    io_processor: IOProcessor | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    readers: Executor = field(default_factory=partial(DaemonThreads, _HALF, "reader"))
    long_readers: Executor = field(default_factory=partial(DaemonThreads, 1, "long reader"))
    guests: Executor = field(default_factory=partial(DaemonThreads, _GUESTS, "guest"))
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def output_style(self) -> OutputStyle:
        """The formats in which the model writes tool calls and reasoning."""
        template = self.chat_template
        known = [] if template is None else [template, *template.named.values()]
        return OutputStyle.of(
            "\n".join(each.source for each in known),
            self.config.tool_call_parser,
            self.config.reasoning_parser,
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """The served model names; answers have the first one."""
        return self.config.served_model_names or (self.engine.model_name,)

    def deadline(self) -> Deadline:
        """Return the deadline of a request that arrives now."""
        return Deadline(self.config.request_timeout)

    async def as_guest(self, work: Callable[[], T], deadline: Deadline) -> T:
        """Return the result of *work*, which runs third-party code and may block.

        Raises:
            ApiError: the deadline passes.
        """
        async with deadline.limit():
            return await asyncio.get_running_loop().run_in_executor(self.guests, work)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if the model is not served under that name; None and "" match any."""
        if name and name not in self.model_names:
            raise ApiError(
                f"The model {name!a} does not exist. This server has: "
                f"{', '.join(self.model_names)}.",
                status=404,
                param="model",
                code="model_not_found",
            )

    def accept(self, body: RequestBody, request: Request) -> None:
        """Check the model's name and the engine, and record the ignored fields of *body*.

        Raises:
            ApiError: the model does not exist, or the engine is dead.
        """
        request.state.ignored = body.ignored_fields()
        self.check_model(body.model)
        if not self.engine.is_running:
            raise ApiError("The engine does not run.", status=503, code="engine_dead")


async def _server(request: Request) -> ServerState:
    return cast(ServerState, request.app.state.server)


Server = Annotated[ServerState, Depends(_server)]
