"""Header-read timeout, and malformed requests."""

from __future__ import annotations

import asyncio
import logging
import uuid
from http import HTTPStatus
from typing import Any

import h11
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from opweave_engine.server.disconnect import HANG_UP_KEY
from opweave_engine.server.errors import HANG_UP, ApiError, not_arrived
from opweave_engine.server.idle_connections import IdleConnections
from opweave_engine.server.middleware import error_response

_log = logging.getLogger(__name__)


class Connection(H11Protocol):
    """A connection with a timeout for the head of each request.

    uvicorn itself has only a keep-alive timeout.
    :class:`~opweave_engine.server.middleware.WholeBody` has the timeout for bodies.

    Args:
        timeout: seconds from the first byte of a request, or from the start of the connection, to
            the end of the head.
        room: the connections without a request.
    """

    def __init__(
        self, *arguments: Any, timeout: float, room: IdleConnections, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._timeout, self._room = timeout, room
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
            answer = error_response(error)
            answer.headers["X-Request-Id"] = request_id
            self.transport.write(_as_http(answer))
        self.transport.close()


def _as_http(answer: Response) -> bytes:
    """Return a response as bytes; h11 cannot write one without a valid request."""
    status = HTTPStatus(answer.status_code)
    first = f"HTTP/1.1 {status} {status.phrase}".encode("ascii")
    headers = [b"%s: %s" % header for header in answer.raw_headers]
    return b"\r\n".join([first, *headers, b"", answer.body])
