"""Runs a server until it is told to stop."""

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import uvicorn
from fastapi import FastAPI

from opweave_engine.server.connection import Connection, IdleConnections, most_connections
from opweave_engine.server.errors import ServerError
from opweave_engine.server.state import ServerConfig, ServerState

_log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_BACKLOG = 2048  # connections that wait to be accepted
# Connections accepted at one time. If no more files can be opened, asyncio tries all of them, and
# logs each failure.
_ACCEPT_BATCH = 16
_DRAIN_SECONDS = 5.0  # for responses that are already written
# Longer than clients and proxies keep an idle connection (httpx 5 s, nginx 60 s, Caddy 120 s): if
# the server closes it first, a request that is on its way is lost.
_KEEP_ALIVE_SECONDS = 180
_POLL_SECONDS = 0.2  # between checks whether the engine has died


class AddressError(ServerError):
    """The server cannot listen on the given address."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address; port 0 chooses a free port.

    Clients that connect before the server runs wait for it.

    Raises:
        AddressError: the address is in use, does not belong to this machine, or is not allowed.
    """
    if not 0 <= port < 2**16:
        raise AddressError(f"Port {port} does not exist; ports are from 0 to {2**16 - 1}.")
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # asyncio disables Nagle's algorithm only for sockets with an explicit protocol. With it, a
        # client that keeps its connection would wait 40 ms for a second small write.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:
        raise AddressError(_no_host(host, getattr(error, "strerror", error))) from error
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        bound.listen(_BACKLOG)  # several sockets may bind on Linux, but only one may listen
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise AddressError(_no_host(host, "this machine has no such address")) from error
        raise AddressError(
            f"Cannot listen on {host!r}, port {port}: {error.strerror}. "
            "Choose another with --port; --port 0 takes one that is free."
        ) from error
    bound.set_inheritable(False)
    return bound


def listen_unix(path: str) -> socket.socket:
    """Return a Unix domain socket that listens at *path*; the socket of a dead server is replaced.

    Raises:
        AddressError: another server listens there, or the file cannot be created.
    """
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if (file := Path(path)).is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(path)
                except ConnectionRefusedError:  # its server is dead
                    file.unlink()
        bound.bind(path)
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        raise AddressError(
            f"Cannot listen on {path!r}: {error.strerror or error}. Choose another path with --uds."
        ) from error
    bound.set_inheritable(False)
    return bound


def _no_host(host: str, why: object) -> str:
    return (
        f"Cannot listen on {host!r}: {why}. Choose another with --host; 0.0.0.0 is every network, "
        "127.0.0.1 this machine alone."
    )


def url(bound: socket.socket, config: ServerConfig | None = None) -> str:
    """Return the address of a socket as a URL, or the path of a Unix domain socket."""
    if bound.family == socket.AF_UNIX:
        return f"unix:{bound.getsockname()}"
    scheme = "http" if config is None or config.ssl_certfile is None else "https"
    host, port = bound.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def run(
    app: FastAPI, bound: socket.socket, ready: Callable[[], None], *, ends_with_engine: bool = False
) -> None:
    """Serve until SIGTERM or SIGINT; then finish accepted requests and stop the engine.

    A second signal stops at once. When the engine dies, requests get 503 until then.

    Args:
        app: the application from :func:`opweave_engine.server.create_app`.
        bound: the socket from :func:`listen` or :func:`listen_unix`; it is closed at the end.
        ready: called when the server is ready for requests.
        ends_with_engine: also stop when the engine has died, after notifying waiting clients.
    """
    server: ServerState = app.state.server
    # Read before the event loop closes the socket, which then has no name.
    file = Path(bound.getsockname()) if bound.family == socket.AF_UNIX else None
    try:
        asyncio.run(_serve(app, bound, ready, ends_with_engine))
    finally:
        gc.unfreeze()
        server.engine.shutdown()
        bound.close()
        if file is not None:
            file.unlink(missing_ok=True)


async def _serve(
    app: FastAPI, bound: socket.socket, ready: Callable[[], None], ends_with_engine: bool
) -> None:
    http = http_server(app)
    handlers = _SignalHandlers(app.state.server, http)
    serving = asyncio.create_task(http.serve(sockets=[bound]))
    watching = asyncio.create_task(handlers.watch()) if ends_with_engine else None
    try:
        while not http.started and not serving.done():
            await asyncio.sleep(0.005)
        if http.started:
            # A full garbage collection takes a quarter of a second for the objects of the libraries
            # and of the engine, and a large body would trigger several.
            gc.collect()
            gc.freeze()
            ready()
        await serving
        if tasks := set(http.server_state.tasks):  # cancelled, but still releasing their resources
            await asyncio.wait(tasks, timeout=_DRAIN_SECONDS)
    finally:
        handlers.restore()
        if watching is not None:
            watching.cancel()


def http_server(app: FastAPI) -> uvicorn.Server:
    """Return a uvicorn server for *app*; the caller passes it a listening socket."""
    server: ServerState = app.state.server
    connection = partial(
        Connection,
        timeout=server.config.body_timeout,
        room=IdleConnections(most_connections()),
        is_direct=app.user_middleware == app.state.middleware,
    )
    return _Server(
        uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], connection),
            log_config=None,
            log_level="error",  # refused upgrades and malformed requests are not warnings
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            backlog=_ACCEPT_BATCH,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(_DRAIN_SECONDS),
            ssl_keyfile=server.config.ssl_keyfile,
            ssl_certfile=server.config.ssl_certfile,
        )
    )


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # _SignalHandlers handles the signals instead

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or []:
            listening.listen(_BACKLOG)  # asyncio has set the size of its batch of accepts


class _SignalHandlers:
    """Signal handlers: the first signal drains the server, the second one stops it at once."""

    def __init__(self, server: ServerState, http: uvicorn.Server) -> None:
        self._server, self._http = server, http
        self._draining: asyncio.Task[None] | None = None
        self._is_signalled = False
        self._loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, self._signal, number)

    def restore(self) -> None:
        for number in _SIGNALS:
            self._loop.remove_signal_handler(number)

    async def watch(self) -> None:
        """Stop when the engine has died."""
        while self._server.engine.dead_with is None:
            await asyncio.sleep(_POLL_SECONDS)
        self._stop("the engine has died")

    def _signal(self, number: int) -> None:
        if not self._is_signalled:
            self._is_signalled = True
            self._stop(signal.Signals(number).name)
        else:
            # An engine step cannot be interrupted, and the user does not want to wait for it.
            _log.warning("stopping at once")
            os._exit(128 + number)

    def _stop(self, reason: str) -> None:
        if self._draining is not None:
            return
        count = self._server.admission.active
        _log.warning("%s: finishing %d answers, taking no more requests", reason, count)
        self._server.admission.is_closed = True
        self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        timeout = self._server.config.drain_timeout
        try:
            async with asyncio.timeout(timeout):
                await self._server.admission.idle.wait()
        except TimeoutError:
            count = self._server.admission.active
            _log.warning("%d answers have not finished within %g s", count, timeout)
        await self._server.engine.drain(0.0)
        self._http.should_exit = True
