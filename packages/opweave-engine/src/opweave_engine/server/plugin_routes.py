"""Attaches the routes of plugins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from opweave.ir.errors import described
from opweave.plugins import resolve_obj_by_qualname
from opweave_engine import EngineClient
from opweave_engine.server.errors import ServerError
from opweave_engine.server.http_routers import RouterFactory, routers


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
