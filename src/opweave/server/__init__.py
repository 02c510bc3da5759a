"""The server: OpenAI's API over HTTP."""

from opweave.server.app import create_app
from opweave.server.config import ServerConfig
from opweave.server.errors import ApiError, ServerConfigError, ServerError
from opweave.server.plugin_routes import PluginRouteError
from opweave.server.run import AddressError, listen, listen_unix, run

__all__ = [
    "AddressError",
    "ApiError",
    "PluginRouteError",
    "ServerConfig",
    "ServerConfigError",
    "ServerError",
    "create_app",
    "listen",
    "listen_unix",
    "run",
]
