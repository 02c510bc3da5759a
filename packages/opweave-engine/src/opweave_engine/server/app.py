"""The application: OpenAI's API and opweave's own endpoints, over an engine."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from opweave import __version__
from opweave.config.values import OpenRegistry
from opweave.ir.errors import OpweaveError, described
from opweave.plugins import resolve_obj_by_qualname
from opweave_engine import ChatTemplate, EngineClient
from opweave_engine.prompts import IOProcessor
from opweave_engine.server import errors
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
from opweave_engine.server.routes import chat, completions, encoders, info, process, responses_api
from opweave_engine.server.state import Admission, ServerConfig, ServerState

# HTTP routes that plugins add to the server.


RouterFactory = Callable[[Any], Any]  # takes an EngineClient, returns a fastapi.APIRouter

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


class PluginRouteError(errors.ServerError):
    """A plugin's HTTP routes cannot be attached."""


def _attach_plugins(app: FastAPI, engine: EngineClient) -> None:
    """Attach the routers of all plugins to *app*.

    Raises:
        PluginRouteError: a router cannot be created, or one of its routes is taken.
    """
    owners = {endpoint: "opweave" for router in _ROUTERS for endpoint in _endpoints(router)}
    for name, entry in routers.entries.items():
        owner = f"HTTP router {name!r} of " + (
            f"plugin {entry.owner}" if entry.owner else "this program"
        )
        router = _create_router(entry.value, engine, owner)
        for method, path in _endpoints(router):
            first_owner = owners.setdefault((method, path), owner)
            if first_owner != owner:
                raise PluginRouteError(
                    f"{owner} has {method} {path}, which is a route of {first_owner} already. "
                    "Remove one of the plugins, or leave it out with OPWEAVE_PLUGINS=-name."
                )
        app.include_router(router)


def _create_router(factory: RouterFactory | str, engine: EngineClient, owner: str) -> APIRouter:
    try:
        create = resolve_obj_by_qualname(factory) if isinstance(factory, str) else factory
        router = create(engine)
    except Exception as error:  # a plugin's code can raise anything
        raise PluginRouteError(
            f"{owner} cannot be made: {described(error)}. Leave the plugin out with "
            "OPWEAVE_PLUGINS=-name."
        ) from error
    if not isinstance(router, APIRouter):
        raise PluginRouteError(f"{owner} is {router!r}; it must be a fastapi.APIRouter.")
    return router


def _endpoints(router: APIRouter) -> Iterator[tuple[str, str]]:
    for route in router.routes:
        if isinstance(route, APIRoute):
            yield from ((method, route.path) for method in sorted(route.methods or ()))


# The application.


_ROUTERS = (
    completions.router, chat.router, responses_api.router, encoders.router,
    encoders.scoring_router, process.router, info.models_router, info.tokens_router, info.router,
)  # fmt: skip


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
    if special_tokens is None:
        special_tokens = chat_template.special_tokens if chat_template is not None else {}
    admission = Admission(config.max_requests)
    server = ServerState(
        engine, config, chat_template, admission, io_processor, special_tokens=special_tokens
    )
    metrics = Metrics(engine, server.model_names[0])
    app = FastAPI(
        title="opweave",
        version=__version__,
        redirect_slashes=False,  # a client that follows the redirect of a POST may lose the body
        middleware=_middleware(config, metrics),
    )
    app.state.server, app.state.metrics = server, metrics
    app.state.middleware = list(app.user_middleware)  # others may change the bodies
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(OpweaveError, _failed)
    for router in _ROUTERS:
        app.include_router(router)
    _attach_plugins(app, engine)
    return app


def _middleware(config: ServerConfig, metrics: Metrics) -> list[Middleware]:
    """Return the middleware, outermost first."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=config.cors_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "X-Opweave-Ignored"],
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
    return error_response(errors.validation_error(error, request.headers.get("content-type", "")))


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 400 and (malformed := errors.body_error(error.__cause__)) is not None:
        return error_response(malformed)
    return error_response(errors.http_error(error.status_code, str(error.detail), error.headers))


async def _failed(request: Request, error: Exception) -> Response:
    return error_response(errors.api_error(error, request))
