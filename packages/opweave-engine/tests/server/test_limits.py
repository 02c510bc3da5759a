"""Who is served, how much, and how long: keys, the queue, sizes and times."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from opweave_engine.server import ServerConfig, ServerConfigError, streaming
from server.conftest import Running, Start
from server.fake_engine import FakeEngine
from server.test_errors import error_of

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 3}


@contextmanager
def stalled(where: tuple[str, int]) -> Iterator[None]:
    """Ask for more than fits into the buffers of a connection, and read none of it."""
    body = {"prompt": "x", "max_tokens": 200, "n": 64, "stream": True}
    content = json.dumps(body).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(where)
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.002)


def test_api_keys(start: Start) -> None:
    server = start(config=ServerConfig(api_keys=("one", "two")))
    for key in ("one", "two"):
        assert server.openai(key).completions.create(model="tiny-pydoc", **BODY).choices
    for wrong in ("three", "on", "onee", "é"):
        headers = {"Authorization": f"Bearer {wrong}".encode()}
        error_of(server.post(COMPLETIONS, BODY, headers=headers), 401)
    with pytest.raises(openai.AuthenticationError):
        server.openai("three").models.list()
    answer = server.get("/v1/models", headers={"Authorization": "Basic one"})
    assert error_of(answer, 401)["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/nothing", "/version", "/openapi.json", "/docs", "/v1/plugins", "/health/"):
        error_of(server.get(path), 401)
    for path in ("/health", "/ping", "/metrics"):
        assert server.get(path).status_code == 200
    assert [server.client.head(path).status_code for path in ("/health", "/ping")] == [200, 200]
    assert error_of(server.post("/tokenize", {"prompt": "x"}), 401)


def test_request_ids(start: Start) -> None:
    server = start()
    assert server.get("/ping", headers={"X-Request-Id": "a-b/7"}).headers["x-request-id"] == "a-b/7"
    for odd in ("", "with space", "x" * 129, "é"):
        made = server.get("/ping", headers={"X-Request-Id": odd.encode()}).headers["x-request-id"]
        assert made != odd
        assert len(made) == 32
    ids = [server.post(COMPLETIONS, BODY, headers={"X-Request-Id": "same"}) for _ in range(2)]
    assert ids[0].json()["id"] != ids[1].json()["id"]
    stream = server.post(COMPLETIONS, {**BODY, "stream": True}, headers={"X-Request-Id": "s"})
    assert stream.headers["x-request-id"] == "s"


def test_the_queue_is_bounded(start: Start) -> None:
    server = start(FakeEngine(delay=0.02), ServerConfig(max_requests=4))
    three = {"prompt": ["a", "b", "c"], "max_tokens": 200, "stream": True}
    with server.client.stream("POST", COMPLETIONS, json=three):
        until(lambda: server.state.admission.active == 3)
        answer = server.post(COMPLETIONS, {"prompt": ["a", "b"]})
        error = error_of(answer, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        assert server.post(COMPLETIONS, BODY).status_code == 200
        with pytest.raises(openai.RateLimitError):
            server.openai().completions.create(model="tiny-pydoc", prompt=["a", "b"], stream=True)
        error_of(server.post("/v1/embeddings", {"input": ["a", "b"]}), 429)
    until(lambda: server.state.admission.active == 0)
    assert server.post(COMPLETIONS, {**BODY, "prompt": ["a", "b"]}).status_code == 200
    error = error_of(server.post(COMPLETIONS, {"prompt": ["a"] * 5}), 400)
    assert (error["code"], error["param"]) == ("too_many_answers", "prompt")
    error = error_of(server.post(COMPLETIONS, {"prompt": "a", "n": 5}), 400)
    assert (error["code"], error["param"]) == ("too_many_answers", "n")
    error = error_of(server.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 3}), 400)
    assert "6 answers" in error["message"]
    assert not server.engine.running


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_that_are_too_large(start: Start, chunked: bool) -> None:
    server = start(config=ServerConfig(max_body_bytes=10_000))
    fits = b'{"prompt": "x", "max_tokens": 1, "pad": "' + b"a" * 9_000 + b'"}'
    large = fits.replace(b"aa", b"aab")

    def content(body: bytes) -> bytes | Iterator[bytes]:
        return (body[i : i + 1000] for i in range(0, len(body), 1000)) if chunked else body

    headers = {"content-type": "application/json"}
    assert server.post(COMPLETIONS, content=content(fits), headers=headers).status_code == 200
    error = error_of(server.post(COMPLETIONS, content=content(large), headers=headers), 413)
    assert "10000 bytes" in error["message"]
    assert server.engine.calls[-1].params.max_tokens == 1


def test_who_writes_on_gets_the_answer(start: Start) -> None:
    server = start(config=ServerConfig(max_body_bytes=1000))
    size = 20_000_000
    with socket.create_connection(address(server)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
        connection.sendall(head.encode() + b"a" * size)
        with connection.makefile("rb") as answer:
            assert answer.readline().startswith(b"HTTP/1.1 413 ")
            assert b"1000 bytes" in answer.read()


def address(server: Running) -> tuple[str, int]:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return host, int(port)


def test_a_body_that_comes_too_slowly(start: Start) -> None:
    server = start(config=ServerConfig(body_timeout=0.1))
    with socket.create_connection(address(server)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
        )
        connection.settimeout(5)
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/v1/embeddings"])
def test_requests_that_take_too_long(start: Start, path: str) -> None:
    engine = FakeEngine(delay=0.5, embeds=True)
    server = start(engine, ServerConfig(request_timeout=0.05))
    body: dict[str, object] = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    if path == "/v1/embeddings":
        body = {"input": ["x", "y"]}
    for stream in (False, True):
        error = error_of(server.post(path, {**body, "stream": stream}), 504)
        assert (error["type"], error["code"]) == ("timeout_error", "timeout")
    assert not engine.running
    until(lambda: server.state.admission.active == 0)


def test_a_stream_that_takes_too_long(start: Start) -> None:
    engine = FakeEngine(delay=0.03)
    server = start(engine, ServerConfig(request_timeout=0.2))
    text = server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 99, "stream": True}).text
    assert '"code": "timeout"' in text
    assert text.endswith("data: [DONE]\n\n")
    assert engine.aborted


def test_a_client_that_reads_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(streaming, "_GRACE_SECONDS", 0.2)
    server = start(config=ServerConfig(request_timeout=6.0))
    with stalled(address(server)):
        until(lambda: server.engine.finished["length"] == 1)
        assert server.state.admission.active == 64  # the answers are there, and nobody takes them
        until(lambda: server.state.admission.active == 0, 20)
        assert not server.http.server_state.connections
        assert server.post(COMPLETIONS, {"prompt": "x", "n": 64}).status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_what_is_refused_is_not_read(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(config=ServerConfig(max_requests=4))
    monkeypatch.setattr(server.engine.tokenizer, "encode", None)
    for body in ({"prompt": ["x"] * 5}, {"prompt": ["x", "y"], "n": 3}):
        assert error_of(server.post(COMPLETIONS, body), 400)["code"] == "too_many_answers"


def test_a_connection_that_is_kept_is_fast(start: Start) -> None:
    server = start()
    times = []
    for _ in range(20):
        started = time.monotonic()
        server.get("/ping")
        times.append(time.monotonic() - started)
    assert min(times[1:]) < 0.03  # acknowledgments are delayed by 40 ms


def test_cors(start: Start) -> None:
    server = start(config=ServerConfig(cors_origins=("https://a.example",), api_keys=("k",)))
    asking = {
        "Origin": "https://a.example",
        "Access-Control-Request-Method": "DELETE",
        "Access-Control-Request-Headers": "X-Odd",
    }
    answer = server.client.options(COMPLETIONS, headers=asking)  # without a key
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    assert "DELETE" in answer.headers["access-control-allow-methods"]
    assert "X-Odd" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers
    refused = server.post(COMPLETIONS, BODY, headers={"Origin": "https://a.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"
    other = server.get("/ping", headers={"Origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers
    plain = start()
    answer = plain.get("/ping", headers={"Origin": "https://a.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_root_path(start: Start) -> None:
    server = start(config=ServerConfig(root_path="/api", api_keys=("k",)))
    for prefix in ("", "/api"):  # a proxy may or may not take it away
        assert server.get(f"{prefix}/health").status_code == 200
        error_of(server.get(f"{prefix}/v1/models"), 401)
        found = server.get(f"{prefix}/v1/models", headers={"Authorization": "Bearer k"})
        assert found.status_code == 200
    error_of(server.get("/api/api/health"), 401)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_requests": 0}, {"max_body_bytes": 0}, {"request_timeout": -1.0},
        {"request_timeout": 0.0}, {"body_timeout": 0.0},
        {"drain_timeout": float("nan")}, {"body_timeout": float("inf")}, {"root_path": "api"},
        {"root_path": "/api/"}, {"api_keys": ("",)}, {"api_keys": ("é",)}, {"api_keys": ("a b",)},
        {"served_model_names": ("",)},
    ],
)  # fmt: skip
def test_wrong_configurations(wrong: dict[str, Any]) -> None:
    with pytest.raises(ServerConfigError):
        ServerConfig(**wrong)


def test_many_inputs_of_one_embeddings_request(start: Start) -> None:
    server = start(FakeEngine(embeds=True))
    texts = [str(number) for number in range(2048)]
    answer = server.post("/v1/embeddings", {"input": texts})
    assert answer.status_code == 200, answer.text
    assert [one["index"] for one in answer.json()["data"]] == list(range(2048))
    encode = server.engine.tokenizer.encode
    assert [list(call.prompt) for call in server.engine.calls] == [encode(text) for text in texts]
    error = error_of(server.post("/v1/embeddings", {"input": [*texts, "x"]}), 400)
    assert (error["code"], error["param"]) == ("too_many_inputs", "input")
