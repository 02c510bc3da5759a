"""Servers on real sockets, over an engine that tests control."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn
from openai import OpenAI

from opweave_engine import LLM, AsyncEngine, ChatTemplate
from opweave_engine.prompts import IOProcessor
from opweave_engine.server import ServerConfig, create_app, listen
from opweave_engine.server.run import http_server, url
from opweave_engine.server.state import ServerState
from server.fake_engine import CHECKPOINT, FakeEngine

TEMPLATE = ChatTemplate(
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'forbidden' %}{{ raise_exception('No such role.') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if tools %}[tools]{{ tools | tojson }}{% endif %}"
    "{{ mood or '' }}{% if add_generation_prompt %}[assistant]{% endif %}",
    "a test",
    {"bos_token": "<s>"},
)


@dataclass
class Running:
    """A server that runs in a thread of its own."""

    url: str
    engine: FakeEngine
    state: ServerState
    http: uvicorn.Server
    client: httpx.Client

    def openai(self, key: str = "none") -> OpenAI:
        return OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=self.client
        )

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)

    def post(self, path: str, json: object = None, **options: Any) -> httpx.Response:
        return self.client.post(path, json=json, **options)


Start = Callable[..., Running]


def texts_of(answers: Any, *, stream: bool) -> list[str]:
    """The texts of the choices of completions or chats, of a whole answer or of a stream."""
    texts: dict[int, str] = {}
    for choice in (
        choice for answer in (answers if stream else [answers]) for choice in answer.choices
    ):
        part = choice if hasattr(choice, "text") else choice.delta if stream else choice.message
        text = part.text if hasattr(part, "text") else part.content
        texts[choice.index] = texts.get(choice.index, "") + (text or "")
    return [texts[index] for index in sorted(texts)]


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, without the last one."""
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@contextmanager
def running(
    engine: FakeEngine | None = None,
    config: ServerConfig | None = None,
    template: ChatTemplate | None = TEMPLATE,
    io_processor: IOProcessor | None = None,
) -> Iterator[Running]:
    engine = engine or FakeEngine()
    app = create_app(engine, config, template, io_processor)
    bound = listen("127.0.0.1", 0)
    address = url(bound, config)
    http = http_server(app)
    thread = threading.Thread(target=lambda: asyncio.run(http.serve(sockets=[bound])))
    thread.start()
    client = httpx.Client(base_url=address, timeout=60, verify=False, trust_env=False)
    try:
        with client:
            yield Running(address, engine, app.state.server, http, client)
    finally:
        http.should_exit = True
        thread.join(60)
        bound.close()
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server that all tests of a module share."""
    with running() as shared:
        yield shared


@pytest.fixture(scope="module")
def real() -> Iterator[Running]:
    """A server over the real engine."""
    engine: Any = AsyncEngine(CHECKPOINT, dtype="float32")
    with running(engine) as shared:
        yield shared
    engine.shutdown()


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM(CHECKPOINT, dtype="float32")


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a server for one test: ``start(engine, config, template)``."""
    with ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(running(*arguments, **options))
