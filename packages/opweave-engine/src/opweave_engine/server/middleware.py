"""Middleware: request ids, authentication, body limits, compression and error responses."""

import asyncio
import hmac
import logging
import re
import time
import uuid
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from opweave_engine.server.disconnect import CLIENT_CLOSED_REQUEST, ClientGoneError
from opweave_engine.server.errors import ApiError, api_error, is_json, not_arrived, too_large

# Compressed request bodies.


_GZIP_BITS = 16 + zlib.MAX_WBITS  # the zlib module selects gzip's format by adding 16
_WINDOW_BITS = {"gzip": _GZIP_BITS, "x-gzip": _GZIP_BITS, "deflate": zlib.MAX_WBITS}
_MAX_GZIP_MEMBERS = 16  # each further member of a file copies the rest of the body


def decoded(body: bytes, encoding: str, limit: int) -> bytes:
    """Return the decompressed body.

    Args:
        body: the body as sent.
        encoding: the value of Content-Encoding: ``gzip``, ``deflate`` or an empty string.
        limit: the maximum size of the result, so that a small body cannot fill the memory.

    Raises:
        ApiError: the encoding is unknown, the body is damaged, or the result is too large.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return body
    if (window_bits := _WINDOW_BITS.get(name)) is None:
        raise ApiError(
            f"Content-Encoding {encoding!a} is not supported; send gzip, deflate or no encoding.",
            status=415,
            code="unsupported_content_encoding",
            headers={"Accept-Encoding": "gzip, deflate"},
        )
    try:
        return _decompressed(body, window_bits, limit)
    except zlib.error as error:
        raise ApiError(
            f"The body is not valid {name}: {error}.", code="invalid_content_encoding"
        ) from error


def _decompressed(body: bytes, window_bits: int, limit: int) -> bytes:
    text = b""
    for _ in range(_MAX_GZIP_MEMBERS):
        decompressor = zlib.decompressobj(window_bits)
        text += decompressor.decompress(body, limit - len(text) + 1)
        if len(text) > limit:
            raise too_large(limit)
        if not decompressor.eof:
            raise zlib.error("it is incomplete")
        body = decompressor.unused_data
        if not body:
            return text
    raise zlib.error(f"it has more than {_MAX_GZIP_MEMBERS} parts")


# Middleware: request ids, authentication, body limits and error responses.


_access = logging.getLogger("opweave_engine.server.access")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_LINGER_SECONDS = 1.0
_MAX_INLINE_BYTES = 1 << 16  # decompressed or checked within about a millisecond
_ENCODING_HEADERS = (b"content-encoding", b"content-length")  # they describe the body as sent
_OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"})  # probes have no key

Observe = Callable[[Scope, int, float], None]  # request, status and duration of a response


def error_response(error: ApiError) -> Response:
    """Return *error* as a response."""
    return Response(error.json(), error.status, error.headers, "application/json")


class _HttpMiddleware(ABC):
    """Base class: handles HTTP requests, and passes on lifespan events."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        await (self._handle if scope["type"] == "http" else self._app)(scope, receive, send)

    @abstractmethod
    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class Envelope(_HttpMiddleware):
    """Assigns request ids, logs requests, and converts exceptions to responses."""

    def __init__(self, app: ASGIApp, observe: Observe) -> None:
        super().__init__(app)
        self._observe = observe

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        client_id = Headers(scope=scope).get("x-request-id", "")
        request_id = client_id if _REQUEST_ID.fullmatch(client_id) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started, status = time.perf_counter(), 0

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, headers = message["status"], MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                if ignored := scope["state"].get("ignored"):
                    headers["X-Opweave-Ignored"] = ", ".join(ignored)
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except ClientGoneError:
            if not status:
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)
            status = CLIENT_CLOSED_REQUEST
        except asyncio.CancelledError:  # the server stops
            if status:  # the client has not read the whole response
                status = CLIENT_CLOSED_REQUEST
            else:
                late = ApiError("The server shuts down.", status=503, code="shutting_down")
                await error_response(late)(scope, receive, send_on)
        except Exception as error:
            answer = error_response(api_error(error, Request(scope)))
            if not status:
                await answer(scope, receive, send_on)
        finally:
            seconds = time.perf_counter() - started
            self._observe(scope, status, seconds)
            _log_access(scope, status, seconds)


class HeadAsGet(_HttpMiddleware):
    """Answers HEAD as GET, without the body."""

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_on(message: Message) -> None:
            is_body = message["type"] == "http.response.body"
            await send({**message, "body": b""} if is_body else message)

        # A copy, because uvicorn reads the method of its scope to leave out the body.
        as_get = {**scope, "method": "GET"}
        try:
            await self._app(as_get, receive, send_on)
        finally:
            if "route" in as_get:
                scope["route"] = as_get["route"]


class RootPath(_HttpMiddleware):
    """Accepts paths with and without the prefix *root*, which a proxy may remove."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        super().__init__(app)
        self._root = root

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        full_path = path if path.startswith(f"{self._root}/") else self._root + path
        scope.update(root_path=self._root, path=full_path)
        await self._app(scope, receive, send)


class ApiKey(_HttpMiddleware):
    """Refuses requests without one of the keys, if there are any."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        super().__init__(app)
        self._keys = [key.encode("ascii") for key in keys]

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if not self._keys or path in _OPEN_PATHS or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        refusal = ApiError(
            "The API key is missing or wrong. Send it in the header Authorization: Bearer KEY.",
            status=401,
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error_response(refusal)(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, credentials = Headers(scope=scope).get("authorization", "").partition(" ")
        sent_key = credentials.strip().encode("utf-8", "replace")
        # All keys are compared, so that the time does not reveal which one was nearly right.
        matches = [hmac.compare_digest(sent_key, key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)


# Limits of one body, and the characters that are counted. Each array, object, name or value takes
# few bytes in the body, but up to 200 bytes of memory. Parsing blocks all other requests, for less
# than 0.2 s within these limits.
_MAX_PARTS = {
    "arrays and objects": (b"[{", 1 << 17),
    "names": (b":", 1 << 18),
    "values": (b",", 1 << 21),
}
_OTHER_BYTES = bytes(set(range(256)) - set(b'"[{:,'))


def check_parts(body: bytes, content_type: str) -> None:
    """Raise ApiError if a body of JSON has too many arrays and objects, names, or values."""
    if not is_json(content_type):
        return
    if all(sum(map(body.count, marks)) <= limit for marks, limit in _MAX_PARTS.values()):
        return
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    # A regular expression would take a second for a body of many short strings.
    characters = np.frombuffer(unescaped.translate(None, _OTHER_BYTES), np.uint8)
    is_quote = characters == ord('"')
    characters = characters[~(np.logical_xor.accumulate(is_quote) | is_quote)]
    for name, (marks, limit) in _MAX_PARTS.items():
        count = int(np.isin(characters, list(marks)).sum())
        if count > limit:
            raise ApiError(
                f"The body has {count} {name}, but the server takes at most {limit}. Send several "
                "requests.",
                code="invalid_request",
            )


class WholeBody(_HttpMiddleware):
    """Receives and decompresses the whole body, within limits, before passing on a request."""

    def __init__(self, app: ASGIApp, limit: int, timeout: float) -> None:
        super().__init__(app)
        self._limit, self._timeout = limit, timeout

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                body = await self._decoded(scope, await self._read(scope, receive))
                check = partial(check_parts, body, Headers(scope=scope).get("content-type", ""))
                await asyncio.to_thread(check) if len(body) > _MAX_INLINE_BYTES else check()
        except TimeoutError:
            await _refuse(not_arrived(self._timeout), receive, send)
        except ApiError as error:
            await _refuse(error, receive, send)
        else:
            await self._app(scope, _replaying(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        content_length = Headers(scope=scope).get("content-length", "")
        if content_length.isdecimal() and int(content_length) > self._limit:
            raise too_large(self._limit)
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self._limit:
                raise too_large(self._limit)
            if not message.get("more_body", False):
                return b"".join(chunks)

    async def _decoded(self, scope: Scope, body: bytes) -> bytes:
        """Return the body without its Content-Encoding, which is removed from the headers."""
        encoding = Headers(scope=scope).get("content-encoding", "")
        if not encoding or not body:
            return body
        work = partial(decoded, body, encoding, self._limit)
        plain = await asyncio.to_thread(work) if len(body) > _MAX_INLINE_BYTES else work()
        scope["headers"] = [(n, v) for n, v in scope["headers"] if n not in _ENCODING_HEADERS]
        return plain


async def _refuse(error: ApiError, receive: Receive, send: Send) -> None:
    """Send *error*, and continue reading for a while.

    Closing a connection with unread data resets it, and a client that is still writing would lose
    the answer (RFC 9112, section 9.6).
    """
    answer = error_response(error)
    start = {"type": "http.response.start", "status": answer.status_code}
    await send({**start, "headers": answer.raw_headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": True})
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            while (await receive()).get("more_body", False):
                pass
    await send({"type": "http.response.body"})


def _replaying(body: bytes, receive: Receive) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _log_access(scope: Scope, status: int, seconds: float) -> None:
    client = scope.get("client")
    fields = {
        "request_id": scope["state"]["request_id"],
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "seconds": round(seconds, 6),
        "client": client[0] if client else None,
    }
    if ignored := scope["state"].get("ignored"):
        fields["ignored_fields"] = ignored
    shown = " ".join(f"{name}={value!a}" for name, value in fields.items())
    _access.info("%s", shown, extra={"fields": fields})
