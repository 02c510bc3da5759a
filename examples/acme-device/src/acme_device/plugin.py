"""The two functions that opweave finds by their entry points in ``pyproject.toml``."""

from __future__ import annotations

from importlib import import_module

from opweave.plugins import PLATFORM_API, Claim
from opweave_engine.server.app import add_router


def platform() -> Claim | None:
    """Claim the machine if a device is there.

    It is called before anything is known, so it is quick, and loads no driver: a vendor looks for
    a device file. This device is always there, since its memory is the host's.
    """
    return Claim("acme_device.platform.AcmePlatform", api=PLATFORM_API, why="acme-device is here")


def register() -> None:
    """Register the parts for every platform: ops, layers, a variable, a route of the server."""
    for module in ("ops", "layers", "settings"):
        import_module(f"acme_device.{module}")
    # By name: FastAPI is imported only where a server starts.
    add_router("acme", "acme_device.engine.http:router")
