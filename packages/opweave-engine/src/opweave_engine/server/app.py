"""The application: OpenAI's API and opweave's own endpoints, over an engine."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from opweave import __version__
from opweave.ir.errors import OpweaveError
from opweave_engine import ChatTemplate, EngineClient
from opweave_engine.request.io_processor import IOProcessor
from opweave_engine.server.admission import Admission
from opweave_engine.server.config import ServerConfig
from opweave_engine.server.errors import api_error, http_error
from opweave_engine.server.metrics import Metrics
from opweave_engine.server.middleware import (
    ApiKey,
    Envelope,
    HeadAsGet,
    RootPath,
    WholeBody,
    error_response,
)
from opweave_engine.server.plugin_routes import attach
from opweave_engine.server.routes import (
    chat,
    completions,
    embeddings,
    info,
    models,
    process,
    responses_api,
    scoring,
    tokens,
)
from opweave_engine.server.state import ServerState
from opweave_engine.server.validation import body_error, validation_error

_ROUTERS = (
    completions.router,
    chat.router,
    responses_api.router,
    embeddings.router,
    scoring.router,
    process.router,
    models.router,
    tokens.router,
    info.router,
)
_EXPOSED = ["X-Request-Id", "X-Opweave-Ignored"]


def create_app(
    engine: EngineClient,
    config: ServerConfig | None = None,
    chat_template: ChatTemplate | None = None,
    io_processor: IOProcessor | None = None,
    special_tokens: Mapping[str, str] | None = None,
) -> FastAPI:
    """Return the ASGI application; the caller must stop the engine.

    Args:
        engine: the engine that runs the requests.
        config: the server's configuration.
        chat_template: renders conversations as prompts; None: conversations are refused.
        io_processor: the I/O processor for ``/v1/process``; None: its requests are refused.
        special_tokens: the special tokens for chat templates in requests; None: those of
            *chat_template*.

    Raises:
        PluginRouteError: a plugin's HTTP routes cannot be attached.
    """
    config = config or ServerConfig()
    admission = Admission(config.max_requests)
    if special_tokens is None:
        special_tokens = chat_template.special_tokens if chat_template is not None else {}
    server = ServerState(
        engine, config, chat_template, admission, io_processor, special_tokens=special_tokens
    )
    metrics = Metrics(engine, server.model_names[0])
    app = FastAPI(
        title="opweave",
        version=__version__,
        redirect_slashes=False,  # of a POST, clients would lose the body, or not follow at all
        middleware=_middleware(config, metrics),
    )
    app.state.server, app.state.metrics = server, metrics
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(OpweaveError, _failed)
    for router in _ROUTERS:
        app.include_router(router)
    attach(app, engine, _ROUTERS)
    return app


def _middleware(config: ServerConfig, metrics: Metrics) -> list[Middleware]:
    """Return the middleware, outermost first."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=config.cors_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=_EXPOSED,
    )
    return [
        *([Middleware(RootPath, root=config.root_path)] if config.root_path else []),
        Middleware(Envelope, observe=metrics.observe),
        Middleware(HeadAsGet),
        *([cors] if config.cors_origins else []),
        Middleware(ApiKey, keys=config.api_keys),
        Middleware(WholeBody, limit=config.max_body_bytes, timeout=config.body_timeout),
    ]


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(validation_error(error, request.headers.get("content-type", "")))


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 400 and (found := body_error(error.__cause__)) is not None:
        return error_response(found)
    headers: Mapping[str, str] | None = error.headers
    return error_response(http_error(error.status_code, str(error.detail), headers))


async def _failed(request: Request, error: Exception) -> Response:
    return error_response(api_error(error, request))
