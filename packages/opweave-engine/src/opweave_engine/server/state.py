"""State shared by all requests to a server: its configuration, and admission."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Annotated, Any, TypeVar, cast

from cyclopts import Parameter
from fastapi import Depends, Request

from opweave.config.values import api_key_fault
from opweave_engine import ChatTemplate, EngineClient
from opweave_engine.daemon_threads import DaemonThreads
from opweave_engine.prompts import IOProcessor
from opweave_engine.server.disconnect import ClientGoneError, cancelled, disconnected
from opweave_engine.server.errors import HANG_UP, RETRY, ApiError, ServerConfigError
from opweave_engine.server.output_parser import OutputStyle, ReasoningParser, ToolCallParser
from opweave_engine.server.protocol.base import RequestBody

# Deadline of a request.


class Deadline:
    """A deadline *seconds* from now.

    Attributes:
        at: the deadline in the event loop's time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.at = asyncio.get_running_loop().time() + seconds

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Cancel the block at the deadline.

        Raises:
            ApiError: the deadline passed.
        """
        try:
            async with asyncio.timeout_at(self.at):
                yield
        except TimeoutError as error:
            raise ApiError(
                f"The request was not answered within {self._seconds:g} s.",
                status=504,
                code="timeout",
            ) from error


# Configuration of the server.


MEBIBYTE = 1024 * 1024


@Parameter(name="*", negative=())
@dataclass(frozen=True)
class ServerConfig:
    """The configuration of a server; ``opweave serve`` has an option for each of them.

    Parameters
    ----------
    api_keys
        API key that requests must have; repeatable. Also OPWEAVE_API_KEY.
    served_model_names
        Name of the model for clients; repeatable. Responses have the first one.
    root_path
        The path prefix that a proxy adds, such as /api.
    cors_origins
        Allowed CORS origin, such as https://example.com; * allows all.
    max_requests
        Maximum number of running and waiting answers, counting each prompt n times; others get a
        429.
    max_body_bytes
        Maximum size of a request body in bytes.
    body_timeout
        Timeout in seconds for reading a request's headers, and then its body.
    request_timeout
        Timeout in seconds for a complete answer.
    drain_timeout
        Timeout in seconds for finishing accepted requests at shutdown.
    log_prompts
        Log the text of prompts.
    ssl_keyfile
        The private key of the certificate, if it is not in the file of --ssl-certfile.
    ssl_certfile
        Serve HTTPS with the certificate in this file, in PEM format.
    trust_request_chat_template
        Allow chat templates in requests. Templates are programs, and may use unbounded CPU time.
    tool_call_parser
        Format of the model's tool calls; auto detects it from the chat template.
    reasoning_parser
        Format of the model's reasoning; auto detects it from the chat template.

    A value that is out of range raises ServerConfigError.
    """

    api_keys: Annotated[tuple[str, ...], Parameter(name="--api-key")] = ()
    served_model_names: Annotated[tuple[str, ...], Parameter(name="--served-model-name")] = ()
    root_path: str = ""
    cors_origins: Annotated[tuple[str, ...], Parameter(name="--cors")] = ()
    max_requests: int = 1024
    max_body_bytes: Annotated[int, Parameter(name="--max-body-size")] = 16 * MEBIBYTE
    body_timeout: float = 30.0
    request_timeout: float = 600.0
    drain_timeout: float = 60.0
    log_prompts: bool = False
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    trust_request_chat_template: bool = False
    tool_call_parser: ToolCallParser = "auto"
    reasoning_parser: ReasoningParser = "auto"

    def __post_init__(self) -> None:
        def check(name: str, is_valid: bool, rule: str) -> None:
            if not is_valid:
                raise ServerConfigError(f"{name}={getattr(self, name)!r} {rule}.")

        for name in ("max_requests", "max_body_bytes"):
            check(name, getattr(self, name) >= 1, "must be at least 1")
        rule = "must be a number of seconds, more than 0"
        for name in ("body_timeout", "request_timeout"):
            check(name, 0 < getattr(self, name) < math.inf, rule)
        rule = "must be a number of seconds, at least 0"
        check("drain_timeout", 0 <= self.drain_timeout < math.inf, rule)
        is_prefix = self.root_path.startswith("/") and not self.root_path.endswith("/")
        rule = "must begin with a slash and end without one: /api"
        check("root_path", not self.root_path or is_prefix, rule)
        has_certificate = self.ssl_keyfile is None or self.ssl_certfile is not None
        check("ssl_keyfile", has_certificate, "needs ssl_certfile, the certificate of the key")
        for name in ("api_keys", "served_model_names", "cors_origins"):
            if "" in getattr(self, name):
                raise ServerConfigError(f"One of {name} is empty.")
        for key in self.api_keys:
            if (fault := api_key_fault(key)) is not None:
                raise ServerConfigError(fault)


# Admission control: limits the number of unfinished outputs.


class Admission:
    """Counts running and queued outputs, up to *limit*.

    Attributes:
        active: the number of reserved outputs.
        idle: set while no output is reserved.
        is_closed: whether further requests are rejected.
    """

    def __init__(self, limit: int) -> None:
        self.active = 0
        self.is_closed = False
        self._limit = limit
        self.idle = asyncio.Event()
        self.idle.set()

    @contextmanager
    def places(self, count: int, *, param: str) -> Iterator[None]:
        """Reserve *count* outputs, the number that the request's field *param* asks for.

        Raises:
            ApiError: the limit would be exceeded, or the server is shutting down.
        """
        self.check(count, param=param)
        self.active += count
        self.idle.clear()
        try:
            yield
        finally:
            self.active -= count
            if not self.active:
                self.idle.set()

    def check(self, count: int, *, param: str) -> None:
        """Raise the ApiError that :meth:`places` would raise now."""
        if self.is_closed:
            raise ApiError(
                "The server is shutting down and takes no more requests.",
                status=503,
                code="shutting_down",
                headers={**RETRY, **HANG_UP},
            )
        if count > self._limit:
            raise ApiError(
                f"The request asks for {count} answers, more than the {self._limit} that the "
                "server works on at one time. Send several requests.",
                param=param,
                code="too_many_answers",
            )
        if self.active + count > self._limit:
            raise ApiError(
                f"The server works on {self.active} answers, of at most {self._limit}, and the "
                f"request asks for {count} more. Try again later.",
                status=429,
                code="queue_full",
                headers=RETRY,
            )


# State shared by all requests to a server.


T = TypeVar("T")

_NUM_READERS = max(1, (os.cpu_count() or 1) // 2)  # the engine keeps the other processors
_NUM_GUESTS = 8  # a template that never ends occupies one thread


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
        readers: threads that tokenize texts.
        long_readers: a thread that tokenizes long texts, so that other texts need not wait.
        guests: threads that run templates and I/O processors.
        created: creation time in seconds since 1970.
    """

    engine: EngineClient
    config: ServerConfig
    chat_template: ChatTemplate | None
    admission: Admission
    io_processor: IOProcessor | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    readers: Executor = field(default_factory=partial(DaemonThreads, _NUM_READERS, "reader"))
    long_readers: Executor = field(default_factory=partial(DaemonThreads, 1, "long reader"))
    guests: Executor = field(default_factory=partial(DaemonThreads, _NUM_GUESTS, "guest"))
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def output_style(self) -> OutputStyle:
        """The formats in which the model writes tool calls and reasoning."""
        default = self.chat_template
        templates = [] if default is None else [default, *default.named.values()]
        return OutputStyle.of(
            "\n".join(template.source for template in templates),
            self.config.tool_call_parser,
            self.config.reasoning_parser,
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """The served model names; answers have the first one."""
        return self.config.served_model_names or (self.engine.model_name,)

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

    def accept(self, body: RequestBody, request: Request, param: str) -> ServerCall:
        """Check the model's name and the engine, and record the ignored fields of *body*.

        Args:
            body: the body of *request*.
            request: the HTTP request.
            param: the field of its prompts.

        Raises:
            ApiError: the model does not exist, or the engine is dead.
        """
        request.state.ignored = body.ignored_fields()
        self.check_model(body.model)
        if not self.engine.is_running:
            raise ApiError("The engine does not run.", status=503, code="engine_dead")
        return ServerCall(self, request, param, Deadline(self.config.request_timeout))


@dataclass
class ServerCall:
    """An HTTP request that the server has accepted.

    Attributes:
        server: the server.
        request: the HTTP request.
        param: the field of its prompts.
        deadline: when the response must be complete.
    """

    server: ServerState
    request: Request
    param: str
    deadline: Deadline

    def places(self, count: int) -> AbstractContextManager[None]:
        """Reserve *count* outputs, as :meth:`Admission.places`."""
        return self.server.admission.places(count, param=self.param)

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of *work*; cancel it as soon as the client disconnects.

        Raises:
            ClientGoneError: the client has disconnected.
        """
        working = asyncio.create_task(work)
        hanging_up = asyncio.create_task(disconnected(self.request.receive))
        try:
            await asyncio.wait({working, hanging_up}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise ClientGoneError
        finally:
            await cancelled([working, hanging_up])

    async def as_guest(self, work: Callable[[], T]) -> T:
        """Return the result of *work*, which runs third-party code and may block.

        Raises:
            ApiError: the deadline passes.
        """
        async with self.deadline.limit():
            return await asyncio.get_running_loop().run_in_executor(self.server.guests, work)


async def _server(request: Request) -> ServerState:
    return cast(ServerState, request.app.state.server)


Server = Annotated[ServerState, Depends(_server)]
