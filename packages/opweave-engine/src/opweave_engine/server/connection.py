"""Connections: timeouts, limits, malformed requests, the certificate."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import ssl
import sys
import uuid
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from opweave_engine.server.disconnect import HANG_UP_KEY, WRITE_KEY
from opweave_engine.server.errors import HANG_UP, ApiError, ServerConfigError, not_arrived
from opweave_engine.server.middleware import error_response
from opweave_engine.server.state import ServerConfig

# The certificate of the server.


def check_certificate(config: ServerConfig) -> None:
    """Check that the certificate can be used, before the model is loaded.

    Raises:
        ServerConfigError: a file is missing or damaged, or the key does not fit.
    """
    if config.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password, an encrypted key would be asked for on the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "")
    except OSError as error:  # including ssl.SSLError
        files = " and ".join(filter(None, (config.ssl_certfile, config.ssl_keyfile)))
        raise ServerConfigError(
            f"Cannot use the certificate in {files}: {error.strerror or error}. Give PEM files: a "
            "certificate, and its key without a password."
        ) from error


# Idle connections, and the limit of connections.


_log = logging.getLogger(__name__)

_RESERVED_FILES = 64  # for the engine, and for connections that are being accepted


class IdleConnections:
    """The connections without a request. If there are too many, the oldest is closed.

    Args:
        limit: the maximum number of connections, with or without a request.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._was_full = limit, False
        self._waiting: dict[Connection, None] = {}  # oldest first

    def enter(self, connection: Connection) -> None:
        """Add a connection that waits for a request."""
        self._waiting[connection] = None

    def leave(self, connection: Connection) -> None:
        """Remove a connection, because it got a request or was closed."""
        self._waiting.pop(connection, None)

    def make_room(self, count: int) -> None:
        """Close the oldest idle connection if *count* exceeds the limit."""
        if count <= self._limit or not self._waiting:
            return
        if not self._was_full:
            self._was_full = True
            _log.warning(
                "There are %d connections, as many as the limit of open files allows (ulimit -n). "
                "From now on, each new one ends the one that has waited longest for a request.",
                self._limit,
            )
        oldest = next(iter(self._waiting))
        self.leave(oldest)
        oldest.hang_up()


def most_connections() -> int:
    """Return the number of connections that the limit of open files allows."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(1, limit - len(os.listdir("/dev/fd")) - _RESERVED_FILES)


# Header-read timeout, and malformed requests.


class Connection(H11Protocol):
    """A connection with a timeout for the head of each request.

    uvicorn itself has only a keep-alive timeout.
    :class:`~opweave_engine.server.middleware.WholeBody` has the timeout for bodies.

    Args:
        timeout: seconds from the first byte of a request, or from the start of the connection, to
            the end of the head.
        room: the connections without a request.
        is_direct: whether parts of streams may bypass the middlewares.
    """

    def __init__(
        self, *args: Any, timeout: float, room: IdleConnections, is_direct: bool, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._timeout, self._room, self._is_direct = timeout, room, is_direct
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout of the first request."""
        super().connection_made(transport)
        self._start_timer()
        self._room.enter(self)
        self._room.make_room(len(self.connections))

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timeout."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Receive data."""
        super().data_received(data)
        if not self._has_request and self._timer is None:
            self._start_timer()

    def handle_events(self) -> None:
        """Handle received events; stop the timeout when a request has begun."""
        super().handle_events()
        if self._has_request:
            self._stop_waiting()
            self.scope["state"][HANG_UP_KEY] = self.hang_up
            self.scope["state"][WRITE_KEY] = self.write if self._is_direct else None

    def on_response_complete(self) -> None:
        """Wait for the next request, which may have arrived already."""
        self._room.enter(self)  # even if it is being closed: the client may never read the response
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Reject malformed HTTP with a 400."""
        self._refuse(
            ApiError("The request is not valid HTTP.", code="invalid_http", headers=HANG_UP)
        )

    def hang_up(self) -> None:
        """Close the connection at once; drop unsent data."""
        self.connections.discard(self)  # so that it does not count until the loop has closed it
        self.transport.abort()

    async def write(self, data: bytes) -> None:
        """Write a part of a body without a Content-Length, once the client has read enough."""
        if self.flow.write_paused and not self.cycle.disconnected:
            await self.flow.drain()
        if data and not self.cycle.disconnected:  # an empty chunk would end the body
            is_chunked = self.scope["http_version"] == "1.1"
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)

    @property
    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self._timeout, self._give_up)

    def _stop_waiting(self) -> None:
        self._room.leave(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if self.conn.trailing_data[0]:
            self._refuse(not_arrived(self._timeout))
        else:  # no request was sent, so no response is due
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Send an error response, unless a response has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            request_id = uuid.uuid4().hex
            _log.info("request %s from %s: %s", request_id, self.client, error.message)
            response = error_response(error)
            response.headers["X-Request-Id"] = request_id
            # h11 cannot write a response without a valid request.
            status_line = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()
            headers = [b"%s: %s" % header for header in response.raw_headers]
            self.transport.write(b"\r\n".join([status_line, *headers, b"", response.body]))
        self.transport.close()
