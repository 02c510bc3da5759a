"""HTTP routes that plugins bring to the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opweave.config.open_registry import OpenRegistry

RouterFactory = Callable[[Any], Any]  # from an EngineClient to a fastapi.APIRouter

routers: OpenRegistry[RouterFactory | str] = OpenRegistry("HTTP router")


def add_router(name: str, factory: RouterFactory | str) -> None:
    """Let the server have the routes of a router; for a general plugin to call.

    Args:
        name: of the router, for messages.
        factory: is given the :class:`opweave.engine.EngineClient` and returns a
            ``fastapi.APIRouter``; or the factory's qualified name, ``"acme.http:router"``, which is
            imported only where a server starts. A path and method that is taken already is an
            error when it does.

    Raises:
        DuplicateNameError: (a ValueError) there is a router of that name.

    Example::

        def router(engine):
            api = fastapi.APIRouter(prefix="/acme")

            @api.get("/queue")
            def queue():
                return {"waiting": engine.stats().waiting}

            return api
    """
    routers.add(name, factory)
