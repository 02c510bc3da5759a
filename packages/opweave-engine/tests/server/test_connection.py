"""Connections: those that bring no request, those that bring none of HTTP, and how many."""

from __future__ import annotations

import gzip
import http.client
import importlib
import json
import logging
import socket
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest

from opweave_engine.server import ServerConfig
from opweave_engine.server.connection import most_connections
from server.conftest import Running, Start
from server.fake_engine import FakeEngine
from server.test_errors import error_of
from server.test_limits import BODY, COMPLETIONS, address, ask
from support.processes import wait_until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
WHOLE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def connect(server: Running) -> socket.socket:
    return socket.create_connection(address(server), 60)


def answer_on(connection: socket.socket) -> httpx.Response:
    with closing(http.client.HTTPResponse(connection)) as answer:
        answer.begin()
        return httpx.Response(answer.status, headers=answer.getheaders(), content=answer.read())


def test_requests_that_do_not_arrive(start: Start) -> None:
    server = start(config=ServerConfig(body_timeout=1.0, api_keys=("key",)))
    with connect(server) as idle, connect(server) as begun, connect(server) as kept:
        begun.sendall(HEAD)
        kept.sendall(WHOLE)
        assert answer_on(kept).status_code == 200
        kept.sendall(HEAD)
        with connect(server) as refused:
            refused.sendall(HEAD + b"Content-Length: 9\r\n\r\n{")
            error_of(answer_on(refused), 401)
            refused.sendall(b"{")
            assert refused.recv(1) == b""
        for connection in (begun, kept):
            assert error_of(answer_on(connection), 408)["code"] == "timeout"
            assert connection.recv(1) == b""
        assert idle.recv(1) == b""


def test_the_client_closes_idle_connections(start: Start) -> None:
    # The other way round, a request that is sent at that moment is lost.
    server = start()
    with connect(server) as connection:
        connection.sendall(WHOLE)
        assert answer_on(connection).status_code == 200
        (held,) = server.http.server_state.connections
        wait_until(lambda: held.timeout_keep_alive_task is not None)
        assert held.timeout_keep_alive_task.when() - held.loop.time() > 120


def test_a_head_that_comes_byte_by_byte(start: Start) -> None:
    server = start(config=ServerConfig(body_timeout=1.0))
    with connect(server) as connection:
        for byte in WHOLE:
            connection.sendall(bytes([byte]))
        assert answer_on(connection).status_code == 200


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        HEAD + b"Content-Length: -5\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"X: y\r\n" * 20_000,
    ],
    ids=["words", "length", "chunk", "headers"],
)
def test_what_is_no_http(
    server: Running, request_: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(server) as connection:
        connection.sendall(request_)
        error = error_of(answer_on(connection), 400)
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")
    assert server.get("/health").status_code == 200
    assert not errors(caplog)


def errors(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_body_that_is_no_http_after_the_answer(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(config=ServerConfig(api_keys=("key",)))
    with connect(server) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        error_of(answer_on(connection), 401)
        connection.sendall(b"zz\r\n")
        assert connection.recv(1) == b""
    assert not errors(caplog)


def test_another_protocol_is_no_news(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket"}
    assert server.get("/health", headers=headers).status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    # The package has a function of this name.
    module = importlib.import_module("opweave_engine.server.run")
    monkeypatch.setattr(module, "most_connections", lambda: 3)


def test_idle_connections_make_room(
    three: None, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(FakeEngine(delay=60))
    busy = ask(server, COMPLETIONS, BODY)
    wait_until(lambda: len(server.engine.running) == 1)
    idle = [connect(server) for _ in range(20)]
    try:
        assert server.get("/health").status_code == 200
        for connection in idle[:-2]:
            assert connection.recv(1) == b""
        assert len(server.engine.running) == 1
        assert len(server.http.server_state.connections) == 3
    finally:
        for connection in [busy, *idle]:
            connection.close()
    assert caplog.text.count("3 connections") == 1


def test_when_all_connections_are_used(three: None, start: Start) -> None:
    server = start(FakeEngine(delay=60))
    busy = [ask(server, COMPLETIONS, BODY) for _ in range(3)]
    wait_until(lambda: len(server.engine.running) == 3)
    with connect(server) as late:
        assert late.recv(1) == b""
    busy.pop().close()
    wait_until(lambda: len(server.engine.running) == 2)
    assert server.get("/health").status_code == 200
    for connection in busy:
        connection.close()


def test_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(soft: int) -> Iterator[int]:
        monkeypatch.setattr("resource.getrlimit", lambda _: (soft, soft))
        yield most_connections()

    assert 0 < next(limit(4096)) < 4096 - 64
    assert next(limit(8)) == 1
    assert next(limit(-1)) > 1 << 32


# HTTP features: compressed bodies, and HEAD


PATH = "/v1/completions"
CONTENT = json.dumps({"prompt": "Return the", "max_tokens": 3}).encode()
ENCODED = {
    "gzip": gzip.compress(CONTENT),
    "x-gzip": gzip.compress(CONTENT),
    "GZIP": gzip.compress(CONTENT),
    "deflate": zlib.compress(CONTENT),
    "identity": CONTENT,
}
LIMIT = 1 << 20


def post(server: Running, content: bytes, encoding: str) -> object:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    return server.post(PATH, content=content, headers=headers)


@pytest.mark.parametrize(("encoding", "content"), ENCODED.items(), ids=ENCODED)
def test_compressed_bodies(server: Running, encoding: str, content: bytes) -> None:
    plain = server.post(PATH, content=CONTENT, headers={"content-type": "application/json"}).json()
    found = post(server, content, encoding).json()
    assert found["choices"] == plain["choices"]


def test_a_gzip_body_of_several_parts(server: Running) -> None:
    parts = gzip.compress(CONTENT[:9]) + gzip.compress(b"") + gzip.compress(CONTENT[9:])
    assert post(server, parts, "gzip").status_code == 200
    answer = post(server, parts + gzip.compress(b"") * 99, "gzip")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_content_encoding")


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(CONTENT)[:-9], CONTENT],
    # Compressed data holds the time, and every worker must give a test the same name.
    ids=["not compressed", "cut short", "plain"],
)
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_damaged_bodies(server: Running, content: bytes, encoding: str) -> None:
    answer = post(server, content, encoding)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_content_encoding")
    assert encoding in answer.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "nonsense"])
def test_unknown_encodings(server: Running, encoding: str) -> None:
    answer = post(server, CONTENT, encoding)
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "gzip, deflate")
    assert repr(encoding) in answer.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_small_body_that_becomes_large_is_refused_early(start: Start, encoding: str) -> None:
    server = start(config=ServerConfig(max_body_bytes=LIMIT))
    content = b"0" * (50 * LIMIT)
    bomb = gzip.compress(content) if encoding == "gzip" else zlib.compress(content)
    assert len(bomb) < LIMIT
    del content
    tracemalloc.start()
    answer = post(server, bomb, encoding)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert answer.status_code == 413
    assert most < 8 * LIMIT


GETS = ["/v1/models", "/v1/models/tiny-pydoc", "/metrics", "/health", "/ping", "/version",
        "/v1/ops", "/v1/plugins", "/openapi.json"]  # fmt: skip


@pytest.mark.parametrize("path", GETS)
def test_head_is_get_without_a_body(server: Running, path: str) -> None:
    whole, head = server.get(path), server.client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert int(head.headers["content-length"]) > 0
    assert server.get(path).status_code == 200  # on the same connection


def test_head_of_what_get_does_not_find(server: Running) -> None:
    for path, status in [("/v1/nothing", 404), (PATH, 405), ("/v1/models/nothing", 404)]:
        answer = server.client.head(path)
        assert (answer.status_code, answer.content) == (status, b"")
    assert server.client.head(PATH).headers["allow"] == "POST"


def test_head_is_counted_under_its_path(server: Running) -> None:
    server.client.head("/version")
    lines = server.get("/metrics").text.splitlines()
    counted = [line for line in lines if line.startswith("opweave_http_requests_total")]
    assert any('"HEAD"' in line and '"/version"' in line for line in counted), counted


@pytest.mark.parametrize(("trusted", "client"), [(None, "203.0.113.7"), ("192.0.2.1", "127.0.0.1")])
def test_the_client_of_a_proxy_is_logged(
    trusted: str | None,
    client: str,
    start: Start,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if trusted is None:
        monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
    else:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    with caplog.at_level("INFO", "opweave_engine.server.access"):
        start().get("/health", headers={"X-Forwarded-For": "203.0.113.7"})
        wait_until(lambda: "path='/health'" in caplog.text)
    assert f"client='{client}'" in caplog.text
