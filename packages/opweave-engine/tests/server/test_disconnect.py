"""Clients that hang up: their requests end within a step, and nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from opweave_engine.server.disconnect import merge_streams
from server.conftest import Running, Start
from server.fake_engine import FakeEngine
from server.test_limits import address, until

PATHS = ["/v1/completions", "/v1/chat/completions"]
BODY = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 200}


def ask(server: Running, path: str, body: dict[str, Any]) -> socket.socket:
    connection = socket.create_connection(address(server))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
def test_hanging_up_aborts(start: Start, path: str, stream: bool, prompts: int) -> None:
    engine = FakeEngine(delay=0.02)
    server = start(engine)
    count = 1 if "chat" in path else prompts
    connection = ask(server, path, {**BODY, "prompt": ["x"] * prompts, "stream": stream})
    until(lambda: len(engine.running) == count)
    if stream:
        assert connection.recv(10_000).startswith(b"HTTP/1.1 200")
    generated = engine.generated
    connection.close()
    until(lambda: not engine.running, 20)
    assert engine.generated - generated <= 4 * count
    assert sorted(engine.aborted) == sorted(call.request_id for call in engine.calls)
    until(lambda: server.state.admission.active == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_before_the_first_token(start: Start, stream: bool) -> None:
    engine = FakeEngine(delay=60)
    server = start(engine)
    connection = ask(server, PATHS[0], {**BODY, "stream": stream})
    until(lambda: len(engine.running) == 1)
    connection.close()
    until(lambda: not engine.running, 20)
    assert len(engine.aborted) == 1
    until(lambda: server.state.admission.active == 0)


def test_hanging_up_while_embedding(start: Start) -> None:
    server = start(FakeEngine(delay=60, embeds=True))
    connection = ask(server, "/v1/embeddings", {"input": ["x", "y"]})
    until(lambda: server.state.admission.active == 2)
    connection.close()
    until(lambda: server.state.admission.active == 0, 20)


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
    idle = [ask(server, PATHS[0], {**BODY, "n": 4, "stream": True}) for _ in range(8)]
    started = time.monotonic()
    assert server.post(PATHS[0], BODY).status_code == 200
    assert time.monotonic() - started < 10
    for connection in idle:
        connection.close()
    until(lambda: not engine.running)


def test_a_slow_reader_gets_items_combined() -> None:
    async def texts(letter: str) -> AsyncGenerator[str, None]:
        for _ in range(50):
            await asyncio.sleep(0.001)
            yield letter

    async def read() -> list[tuple[int, str]]:
        items = []
        async for item in merge_streams([texts("a"), texts("b")], "".join):
            items.append(item)
            await asyncio.sleep(0.02)
        return items

    items = asyncio.run(read())
    assert len(items) < 50
    for number, letter in enumerate("ab"):
        assert "".join(text for n, text in items if n == number) == letter * 50
