"""Configuration of the server."""

from __future__ import annotations

from dataclasses import dataclass

from opweave.config.checks import api_key_fault
from opweave_engine.server.errors import ServerConfigError
from opweave_engine.server.output_formats import ReasoningParser, ToolCallParser

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True)
class ServerConfig:
    """The configuration of a server.

    Attributes:
        api_keys: accepted API keys; if empty, none is required.
        served_model_names: the names of the model in requests; responses use the first one. If
            empty, the engine's name.
        root_path: the path under which a reverse proxy serves the server.
        cors_origins: origins of web pages that may call the server; ``*`` allows all.
        max_requests: the maximum number of running and waiting answers, counting each prompt ``n``
            times; further requests get a 429.
        max_body_bytes: the maximum size of a request body in bytes.
        body_timeout: timeout in seconds for the headers of a request, and then for its body.
        request_timeout: timeout in seconds for a complete response.
        drain_timeout: timeout in seconds for accepted requests at shutdown.
        log_prompts: whether prompts are logged.
        ssl_keyfile: the certificate's private key; None: it is in *ssl_certfile*.
        ssl_certfile: serve HTTPS with the certificate in this file; None: serve HTTP.
        trust_request_chat_template: whether requests may contain a chat template. A template is a
            program, which can use a CPU for any length of time.
        tool_call_parser: the model's format of tool calls.
        reasoning_parser: the model's format of reasoning.

    Raises:
        ServerConfigError: a value is out of range.
    """

    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    root_path: str = ""
    cors_origins: tuple[str, ...] = ()
    max_requests: int = 1024
    max_body_bytes: int = 16 * MEBIBYTE
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
        for name in ("max_requests", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ServerConfigError(f"{name}={getattr(self, name)} must be at least 1.")
        for name in ("body_timeout", "request_timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ServerConfigError(
                    f"{name}={getattr(self, name)} must be a number of seconds, more than 0."
                )
        if not 0 <= self.drain_timeout < float("inf"):
            raise ServerConfigError(
                f"drain_timeout={self.drain_timeout} must be a number of seconds, at least 0."
            )
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ServerConfigError(
                f"root_path={self.root_path!r} must begin with a slash and end without one: /api."
            )
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ServerConfigError(
                f"ssl_keyfile={self.ssl_keyfile!r} needs ssl_certfile, the certificate of the key."
            )
        for kind in ("api_keys", "served_model_names", "cors_origins"):
            if "" in getattr(self, kind):
                raise ServerConfigError(f"One of {kind} is empty.")
        for key in self.api_keys:
            if (fault := api_key_fault(key)) is not None:
                raise ServerConfigError(fault)
