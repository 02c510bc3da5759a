"""The application: OpenAI's API and opweave's own endpoints, over an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import BaseRoute

from opweave import __version__
from opweave.config.values import OpenRegistry
from opweave.ir.errors import OpweaveError, described
from opweave.plugins import resolve_obj_by_qualname
from opweave_engine import ChatTemplate, EngineClient
from opweave_engine.prompts import IOProcessor
from opweave_engine.server.errors import (
    ServerError,
    api_error,
    body_error,
    http_error,
    validation_error,
)
from opweave_engine.server.metrics import Metrics
from opweave_engine.server.middleware import (
    ApiKey,
    Envelope,
    HeadAsGet,
    RootPath,
    WholeBody,
    error_response,
)
from opweave_engine.server.protocol.base import FieldRow, all_rows, models_of
from opweave_engine.server.routes import (
    chat,
    completions,
    embeddings,
    info,
    process,
    responses_api,
    scoring,
)
from opweave_engine.server.state import Admission, ServerConfig, ServerState

# HTTP routes that plugins add to the server.


RouterFactory = Callable[[Any], Any]  # from an EngineClient to a fastapi.APIRouter

routers: OpenRegistry[RouterFactory | str] = OpenRegistry("HTTP router")


def add_router(name: str, factory: RouterFactory | str) -> None:
    """Add routes to the server; call this in a general plugin.

    Args:
        name: name of the router, for messages.
        factory: takes the :class:`opweave_engine.EngineClient` and returns a
            ``fastapi.APIRouter``; or its qualified name, ``"acme.http:router"``, imported when a
            server starts. A path and method that is already taken makes the start fail.

    Raises:
        DuplicateNameError: (a ValueError) the name is taken.

    Example::

        def router(engine):
            api = fastapi.APIRouter(prefix="/acme")

            @api.get("/queue")
            def queue():
                return {"waiting": engine.stats().waiting}

            return api
    """
    routers.add(name, factory)


# Attaches the routes of plugins.


class PluginRouteError(ServerError):
    """A plugin's HTTP routes cannot be attached."""


def attach(app: FastAPI, engine: EngineClient, taken: Iterable[APIRouter]) -> None:
    """Attach the routers of all plugins to *app*, which already has the routes *taken*.

    Raises:
        PluginRouteError: a router cannot be created, or one of its routes is taken.
    """
    holders = {place: "opweave" for router in taken for place in _places(router.routes)}
    for name, entry in routers.entries.items():
        who = f"HTTP router {name!r} of " + (
            f"plugin {entry.owner}" if entry.owner else "this program"
        )
        router = _made(entry.value, engine, who)
        for method, path in _places(router.routes):
            holder = holders.setdefault((method, path), who)
            if holder != who:
                raise PluginRouteError(
                    f"{who} has {method} {path}, which is a route of {holder} already. Remove one "
                    "of the plugins, or leave it out with OPWEAVE_PLUGINS=-name."
                )
        app.include_router(router)


def _made(factory: RouterFactory | str, engine: EngineClient, who: str) -> APIRouter:
    try:
        make = resolve_obj_by_qualname(factory) if isinstance(factory, str) else factory
        router = make(engine)
    except Exception as error:  # it is a plugin's code
        raise PluginRouteError(
            f"{who} cannot be made: {described(error)}. Leave the plugin out with "
            "OPWEAVE_PLUGINS=-name."
        ) from error
    if not isinstance(router, APIRouter):
        raise PluginRouteError(f"{who} is {router!r}; it must be a fastapi.APIRouter.")
    return router


def _places(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, str]]:
    for route in routes:
        if isinstance(route, APIRoute):
            yield from ((method, route.path) for method in sorted(route.methods or ()))


# The application.


_ROUTERS = (
    completions.router,
    chat.router,
    responses_api.router,
    embeddings.router,
    scoring.router,
    process.router,
    info.models_router,
    info.tokens_router,
    info.router,
)
_EXPOSED = ["X-Request-Id", "X-Opweave-Ignored"]


def request_fields() -> dict[str, dict[str, FieldRow]]:
    """Return how the server handles the fields of requests, by endpoint and path of the field."""
    endpoints: dict[str, dict[str, FieldRow]] = {}
    for route in (route for router in _ROUTERS for route in router.routes):
        if isinstance(route, APIRoute) and route.body_field is not None:
            rows = endpoints.setdefault(route.path, {})
            for model in models_of(route.body_field.field_info.annotation):
                rows |= all_rows(model)
    return endpoints


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
