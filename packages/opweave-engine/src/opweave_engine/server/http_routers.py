"""HTTP routes that plugins add to the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opweave.config.open_registry import OpenRegistry

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
