"""The server: OpenAI's API over HTTP."""

from opweave_engine.server.app import PluginRouteError, create_app
from opweave_engine.server.errors import ApiError, ServerConfigError, ServerError
from opweave_engine.server.run import AddressError, listen, listen_unix, run
from opweave_engine.server.state import ServerConfig

__all__ = [
    "AddressError", "ApiError", "PluginRouteError", "ServerConfig", "ServerConfigError",
    "ServerError", "create_app", "listen", "listen_unix", "run",
]  # fmt: skip
