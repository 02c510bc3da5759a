"""Who is served, how much, and how long: keys, the queue, sizes and times."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from opweave.config import EngineConfig
from opweave_engine import ChatTemplate, SamplingParams
from opweave_engine.daemon_threads import DaemonThreads
from opweave_engine.prompts import IOProcessor
from opweave_engine.server import ServerConfig, ServerConfigError, create_app, streaming
from opweave_engine.server.connection import Connection
from opweave_engine.server.disconnect import merge_streams
from server.conftest import Running, Start
from server.fake_engine import FakeEngine
from server.test_errors import error_of
from support.processes import wait_until

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


def test_api_keys(start: Start) -> None:
    server = start(config=ServerConfig(api_keys=("one", "two")))
    for key in ("one", "two"):
        assert server.openai(key).completions.create(model="tiny-pydoc", **BODY).choices
    for wrong in ("three", "on", "onee", "é"):
        headers = {"Authorization": f"Bearer {wrong}".encode()}
        error_of(server.post(COMPLETIONS, BODY, headers=headers), 401)
    with pytest.raises(openai.AuthenticationError):
        server.openai("three").models.list()
    assert server.client.head("/v1/models").status_code == 401
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
        wait_until(lambda: server.state.admission.active == 3)
        answer = server.post(COMPLETIONS, {"prompt": ["a", "b"]})
        error = error_of(answer, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        assert server.post(COMPLETIONS, BODY).status_code == 200
        with pytest.raises(openai.RateLimitError):
            server.openai().completions.create(model="tiny-pydoc", prompt=["a", "b"], stream=True)
        error_of(server.post("/v1/embeddings", {"input": ["a", "b"]}), 429)
    wait_until(lambda: server.state.admission.active == 0)
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
    wait_until(lambda: server.state.admission.active == 0)


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
        wait_until(lambda: server.engine.finished["length"] == 1)
        assert server.state.admission.active == 64  # the answers are there, and nobody takes them
        wait_until(lambda: server.state.admission.active == 0, 20)
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


# Clients that hang up: their requests end within a step, and nothing of them is left


BOTH = ["/v1/completions", "/v1/chat/completions"]
LONG_BODY = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 200}


def ask(server: Running, path: str, body: dict[str, Any]) -> socket.socket:
    connection = socket.create_connection(address(server))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
def test_hanging_up_aborts(start: Start, path: str, stream: bool, prompts: int) -> None:
    engine = FakeEngine(delay=0.02)
    server = start(engine)
    count = 1 if "chat" in path else prompts
    connection = ask(server, path, {**LONG_BODY, "prompt": ["x"] * prompts, "stream": stream})
    wait_until(lambda: len(engine.running) == count)
    if stream:
        assert connection.recv(10_000).startswith(b"HTTP/1.1 200")
    generated = engine.generated
    connection.close()
    wait_until(lambda: not engine.running, 20)
    assert engine.generated - generated <= 4 * count
    assert sorted(engine.aborted) == sorted(call.request_id for call in engine.calls)
    wait_until(lambda: server.state.admission.active == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_before_the_first_token(start: Start, stream: bool) -> None:
    engine = FakeEngine(delay=60)
    server = start(engine)
    connection = ask(server, BOTH[0], {**LONG_BODY, "stream": stream})
    wait_until(lambda: len(engine.running) == 1)
    connection.close()
    wait_until(lambda: not engine.running, 20)
    assert len(engine.aborted) == 1
    wait_until(lambda: server.state.admission.active == 0)


def test_hanging_up_while_embedding(start: Start) -> None:
    server = start(FakeEngine(delay=60, embeds=True))
    connection = ask(server, "/v1/embeddings", {"input": ["x", "y"]})
    wait_until(lambda: server.state.admission.active == 2)
    connection.close()
    wait_until(lambda: server.state.admission.active == 0, 20)


def test_hanging_up_before_the_body_is_there(start: Start) -> None:
    server = start()
    connection = socket.create_connection(address(server))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
    connection.close()
    assert server.get("/health").status_code == 200
    assert not server.engine.calls


def test_a_reader_that_does_not_read_does_not_stop_the_others(start: Start) -> None:
    engine = FakeEngine()
    server = start(engine)
    idle = [ask(server, BOTH[0], {**LONG_BODY, "n": 4, "stream": True}) for _ in range(8)]
    started = time.monotonic()
    assert server.post(BOTH[0], LONG_BODY).status_code == 200
    assert time.monotonic() - started < 10
    for connection in idle:
        connection.close()
    wait_until(lambda: not engine.running)


def test_a_slow_reader_gets_items_combined() -> None:
    async def texts(letter: str) -> AsyncGenerator[str, None]:
        for _ in range(50):
            await asyncio.sleep(0.001)
            yield letter

    async def read() -> list[tuple[int, str]]:
        items = []
        async for batch in merge_streams([texts("a"), texts("b")], "".join):
            items += batch
            await asyncio.sleep(0.02)
        return items

    items = asyncio.run(read())
    assert len(items) < 50
    for number, letter in enumerate("ab"):
        assert "".join(text for n, text in items if n == number) == letter * 50


def received(connection: socket.socket) -> bytes:
    """Read a chunked response to its end, and return it."""
    content = b""
    while not content.endswith(b"0\r\n\r\n"):
        part = connection.recv(1 << 20)
        assert part, content
        content += part
    return content


def test_a_slow_client_gets_deltas_merged(start: Start) -> None:
    server, size = start(), 200
    body = {"prompt": "x", "max_tokens": size, "n": 64, "temperature": 0}
    with ask(server, BOTH[0], {**body, "stream": True}) as connection:
        wait_until(lambda: server.engine.finished["length"] == 1, 60)
        content = received(connection)
    texts, count = [""] * 64, 0
    for line in content.split(b"\r\n"):
        for event in line.removesuffix(b"\n\n").split(b"\n\n"):
            if event.startswith(b"data: {"):
                (choice,) = json.loads(event[6:])["choices"]
                texts[choice["index"]] += choice["text"]
                count += 1
    assert texts == [choice["text"] for choice in server.post(BOTH[0], body).json()["choices"]]
    assert count < 64 * size  # the rest had to wait for the client


@pytest.mark.parametrize("path", BOTH)
def test_a_step_is_one_write(start: Start, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    write = Connection.write

    async def count(self: Connection, data: bytes) -> None:
        sizes.append(data.count(b"data: "))
        await write(self, data)

    monkeypatch.setattr(Connection, "write", count)
    server = start(FakeEngine(delay=0.01))
    body = {**LONG_BODY, "max_tokens": 5, "n": 3, "stream": True, "temperature": 0}
    assert server.post(path, body).text.endswith("data: [DONE]\n\n")
    assert len(sizes) <= 6  # the last one is [DONE]
    assert max(sizes) >= 3


def test_added_middleware_gets_whole_streams(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    class Marks:
        """Marks each part of a body."""

        def __init__(self, app: ASGIApp) -> None:
            self._app = app

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            async def send_on(message: Message) -> None:
                marked = message.get("body", b"").replace(b"data: ", b"data:  ")
                await send({**message, "body": marked} if "body" in message else message)

            await self._app(scope, receive, send_on)

    def marked(*arguments: Any) -> FastAPI:
        app = create_app(*arguments)
        app.add_middleware(Marks)
        return app

    monkeypatch.setattr("server.conftest.create_app", marked)
    text = start().post(COMPLETIONS, {**BODY, "stream": True}).text
    assert text.endswith("data:  [DONE]\n\n")
    assert text.count("data: ") == text.count("data:  ") > 2


def test_a_stream_for_http_1_0(start: Start) -> None:
    server = start()
    content = json.dumps({**BODY, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.0\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(address(server)) as connection:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        with connection.makefile("rb") as answer:
            fields, _, events = answer.read().partition(b"\r\n\r\n")
    assert b"chunked" not in fields.lower()
    assert events.startswith(b"data: {")
    assert events.endswith(b"}\n\ndata: [DONE]\n\n")


# Templates and I/O processors, which others wrote: they may never end, and must keep nobody


ANY_BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 2,
    "data": 1,
}
PATHS = ["/v1/chat/completions", "/tokenize", "/v1/process"]
CASES = [(path, False) for path in PATHS]


class Stuck:
    """Code that does not return until the test has ended."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.begun = 0

    def wait(self) -> None:
        self.begun += 1
        self.is_over.wait()


class StuckTemplate(ChatTemplate):
    def __init__(self, stuck: Stuck) -> None:
        super().__init__("", "a test", {})
        self._stuck = stuck

    def render(self, *_: Any, **__: Any) -> str:
        self._stuck.wait()
        return "x"


class StuckProcessor(IOProcessor):
    """One whose prompts, or whose results, do not come."""

    def __init__(self, stuck: Stuck, *, at_the_end: bool) -> None:
        super().__init__(EngineConfig())
        self._stuck, self._at_the_end = stuck, at_the_end

    def prompts(self, request: Any) -> list[str]:
        if not self._at_the_end:
            self._stuck.wait()
        return ["x"]

    def sampling_params(self, request: Any) -> SamplingParams:
        return SamplingParams(max_tokens=2)

    def result(self, request: Any, outputs: Any) -> Any:
        self._stuck.wait()
        return 1


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    made = Stuck()
    yield made
    made.is_over.set()


def server_with(stuck: Stuck, start: Start, *, at_the_end: bool = False, **limits: Any) -> Running:
    processor = StuckProcessor(stuck, at_the_end=at_the_end)
    return start(None, ServerConfig(**limits), StuckTemplate(stuck), processor)


@pytest.mark.parametrize(("path", "at_the_end"), [*CASES, ("/v1/process", True)])
def test_they_have_a_deadline(start: Start, stuck: Stuck, path: str, at_the_end: bool) -> None:
    server = server_with(stuck, start, at_the_end=at_the_end, request_timeout=0.5)
    assert error_of(server.post(path, ANY_BODY), 504)["code"] == "timeout"
    assert stuck.begun == 1
    wait_until(lambda: server.state.admission.active == 0)
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_they_take_a_place_until_the_client_hangs_up(start: Start, stuck: Stuck, path: str) -> None:
    server = server_with(stuck, start, max_requests=1)
    connection = ask(server, path, ANY_BODY)
    wait_until(lambda: stuck.begun == 1)
    assert server.state.admission.active == 1
    error_of(server.post(path, ANY_BODY), 429)
    connection.close()
    wait_until(lambda: server.state.admission.active == 0)


def test_work_in_threads() -> None:
    threads = DaemonThreads(2, "a test")
    release, running = threading.Event(), []

    def work(number: int) -> int:
        running.append(threading.current_thread())
        release.wait()
        return 6 // number

    futures = [threads.submit(work, number) for number in (1, 2, 3, 0)]
    wait_until(lambda: len(running) == 2)
    assert all(thread.daemon and thread.name == "a test" for thread in running)
    assert futures[2].cancel()
    release.set()
    assert [future.result(60) for future in futures[:2]] == [6, 3]
    with pytest.raises(ZeroDivisionError):
        futures[3].result(60)
    assert len(set(running)) <= 2
    wait_until(lambda: not any(thread.is_alive() for thread in running))
    assert threads.submit(work, 6).result(60) == 1


def test_work_of_a_loop_that_has_ended() -> None:
    threads, release = DaemonThreads(1, "a test"), threading.Event()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.get_running_loop().run_in_executor(threads, release.wait)

    asyncio.run(give_up())
    release.set()
    assert threads.submit(int, "5").result(60) == 5
