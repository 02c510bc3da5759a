"""Bodies that cost much time or memory: lists of wrong types, deep nesting and long texts."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from opweave_engine import Checkpoint, Tokenizer
from opweave_engine.server import ServerConfig, create_app, listen
from opweave_engine.server.errors import ApiError
from opweave_engine.server.middleware import check_parts
from opweave_engine.server.protocol import base
from opweave_engine.server.protocol.base import RequestFields
from opweave_engine.server.protocol.chat import ChatRequest
from opweave_engine.server.protocol.completions import CompletionRequest
from opweave_engine.server.protocol.encoders import EmbeddingRequest
from opweave_engine.server.protocol.responses import ResponsesRequest
from opweave_engine.server.protocol.tokens import DetokenizeRequest
from opweave_engine.server.run import run
from server.command import ROOT
from server.conftest import Running, Start, running
from server.fake_engine import CHECKPOINT, FakeEngine
from server.test_errors import error_of
from server.test_limits import ask
from support.processes import wait_until

SIZE = 1_000_000  # bytes of a body
LONG = "long text " * 7_000  # takes the queue for long texts
LIMIT = 1 << 20  # characters of one text, for a short context
USER = {"role": "user", "content": "x"}
WRONG: tuple[Any, ...] = (None, True, 1, 1.5, "a", [], {}, [[]], ["a"], [{}], {"a": 1})
FIELDS = [
    ("/v1/completions", CompletionRequest, "prompt", {}),
    ("/v1/completions", CompletionRequest, "stop", {"prompt": "x"}),
    ("/v1/completions", CompletionRequest, "bad_words", {"prompt": "x"}),
    ("/v1/completions", CompletionRequest, "stop_token_ids", {"prompt": "x"}),
    ("/v1/completions", CompletionRequest, "guided_choice", {"prompt": "x"}),
    ("/v1/chat/completions", ChatRequest, "messages", {}),
    ("/v1/chat/completions", ChatRequest, "tools", {"messages": [USER]}),
    ("/v1/responses", ResponsesRequest, "input", {}),
    ("/v1/embeddings", EmbeddingRequest, "input", {}),
    ("/detokenize", DetokenizeRequest, "tokens", {}),
]


def body(field: str, item: str, others: dict[str, Any] | None = None, first: str = "") -> bytes:
    """Return a body of about SIZE bytes with one list of equal items."""
    start = json.dumps(others or {})[:-1] + (", " if others else "")
    items = ",".join([item] * (SIZE // (len(item) + 1)))
    return f'{start}"{field}": [{first}{items}]}}'.encode()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(FakeEngine(delay=0.002, embeds=True)) as shared:
        yield shared


def subclasses(kind: type[RequestFields]) -> Iterator[type[RequestFields]]:
    for one in kind.__subclasses__():
        yield one
        yield from subclasses(one)


def unbounded(schema: object, path: str = "", *, is_guarded: bool = False) -> Iterator[str]:
    """Yield the places in a schema of pydantic-core that collect an error for every item."""
    if isinstance(schema, dict):
        kind, function = schema.get("type"), schema.get("function")
        is_list = kind in ("list", "tuple", "set", "frozenset", "generator")
        if is_list and not schema.get("fail_fast"):
            yield path
        values = schema.get("values_schema", {"type": "any"})
        if kind == "dict" and values["type"] != "any" and not is_guarded:
            yield path
        guards = isinstance(function, dict) and function.get("function") is base.until_fault
        for key, part in schema.items():
            yield from unbounded(part, f"{path}.{key}", is_guarded=guards)
    elif isinstance(schema, list | tuple):
        for index, part in enumerate(schema):
            yield from unbounded(part, f"{path}.{index}")


@pytest.mark.parametrize("kind", [*subclasses(RequestFields)], ids=lambda kind: kind.__name__)
def test_lists_of_requests_stop_at_the_first_fault(kind: type[RequestFields]) -> None:
    assert not list(unbounded(kind.__pydantic_core_schema__))


@pytest.mark.parametrize(
    ("path", "kind", "field", "others"), FIELDS, ids=lambda value: str(value).rpartition(".")[2]
)
def test_wrong_items_cost_little(
    server: Running, path: str, kind: type[RequestFields], field: str, others: dict[str, Any]
) -> None:
    for wrong in WRONG:
        values = {**others, field: [1, *[wrong] * 20_000]}
        started, errors = time.process_time(), 0
        tracemalloc.start()
        try:
            TypeAdapter(kind).validate_python(values)
        except ValidationError as error:
            errors = error.error_count()
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert errors < 10, wrong
        assert peak < 4_000_000, wrong
        assert time.process_time() - started < 1, wrong


@pytest.mark.parametrize(("path", "content"), [
    ("/v1/completions", body("prompt", "2", first='1,"a",')),
    ("/v1/chat/completions", body("messages", "{}")),
    ("/v1/chat/completions", b'{"messages": [' + body("content", "1", {"role": "user"}) + b"]}"),
    ("/v1/responses", body("input", "{}")),
    ("/detokenize", body("tokens", "-1")),
    ("/v1/completions", b'{"prompt": ' + b"[" * SIZE + b"]" * SIZE + b"}"),
    (
        "/v1/completions",
        json.dumps(
            {"prompt": "x", "logit_bias": {f"a{i}": 1 for i in range(SIZE // 12)}}
        ).encode(),
    ),
    (
        "/v1/completions",
        json.dumps({"logit_bias": {str(i): "a" for i in range(SIZE // 12)}}).encode(),
    ),
], ids=lambda value: value[:16].decode() if isinstance(value, bytes) else value)  # fmt: skip
def test_a_megabyte_of_wrong_items_delays_nobody(
    server: Running, path: str, content: bytes
) -> None:
    gaps: list[float] = []
    is_running, is_done = threading.Event(), threading.Event()

    def listen() -> None:
        request = {"prompt": "x", "max_tokens": 200, "stream": True}
        while not is_done.is_set():
            with server.client.stream("POST", "/v1/completions", json=request) as stream:
                before = None
                for _ in stream.iter_lines():
                    now = time.perf_counter()
                    if before is not None:
                        gaps.append(now - before)
                    before = now
                    is_running.set()
                    if is_done.is_set():
                        break

    normal = threading.Thread(target=listen)
    normal.start()
    assert is_running.wait(60)
    started = time.perf_counter()
    answer = server.post(path, content=content, headers={"Content-Type": "application/json"})
    seconds = time.perf_counter() - started
    is_done.set()
    normal.join(60)
    assert len(error_of(answer, 400)["message"]) < 1000
    assert seconds < 1.0
    assert max(gaps) < 0.5


@pytest.mark.parametrize(
    ("content", "excess"),
    [
        (b"[" + b"{}," * 200_000 + b"0]", "200001 arrays and objects"),
        (b'["' + b'{",[],"' * 140_000 + b'"]', "140001 arrays and objects"),
        (b"{" + b'"a":1,' * 300_000 + b'"a":1}', "300001 names"),
        (b"[" + b"1," * 3_000_000 + b"1]", "3000000 values"),
        (json.dumps(["{[" * 200_000, '\\"{' * 200_000, "\\"]).encode(), None),
        (json.dumps([":" * 300_000, "," * 3_000_000, '\\",:' * 3_000_000]).encode(), None),
        (b'"' + b'\\"{' * 200_000, None),
        (b"[" + b"1," * (1 << 21) + b"1]", None),
    ],
    ids=["objects", "between texts", "names", "values", "in texts", "marks", "unclosed", "limit"],
)
def test_the_parts_of_a_body_are_limited(content: bytes, excess: str | None) -> None:
    if excess:
        with pytest.raises(ApiError, match=f"has {excess}, but the server takes at most"):
            check_parts(content, "application/json")
    else:
        check_parts(content, "application/json")


@pytest.mark.parametrize("part", [b'"{', b'"{"', b'{"', b'{"":""},', b"[{},", b'\\\\"{'])
def test_bodies_of_short_strings_are_counted_quickly(part: bytes) -> None:
    content = part * (14_000_000 // len(part))
    started = time.process_time()
    with suppress(ApiError):
        check_parts(content, "application/json")
    assert time.process_time() - started < 0.3


@pytest.mark.parametrize(
    ("path", "field", "count", "parts"),
    [
        *(("/v1/chat/completions", "messages", count, 0) for count in (16_384, 16_385)),
        *(("/v1/chat/completions", "messages", count, 1) for count in (8192, 8193)),
        ("/v1/chat/completions", "messages", 1, 16_384),
        *(("/v1/responses", "input", count, 0) for count in (16_384, 16_385)),
    ],
)
def test_the_messages_of_a_conversation_are_limited(
    server: Running, path: str, field: str, count: int, parts: int
) -> None:
    content = [{"type": "text", "text": "x"}] * parts or "x"
    answer = server.post(path, json={field: [{"role": "user", "content": content}] * count})
    error = error_of(answer, 400)
    assert error["param"] == field
    is_refused = f"{count} messages with {count * parts} content parts" in error["message"]
    assert is_refused == (count + count * parts > 16_384)  # others are too long for the context


def test_garbage_collections_of_a_server_are_short() -> None:
    frozen: list[int] = []

    def stop() -> None:
        frozen.append(gc.get_freeze_count())
        os.kill(os.getpid(), signal.SIGTERM)

    run(create_app(FakeEngine()), listen("127.0.0.1", 0), stop)
    assert frozen[0] > 10_000
    assert gc.get_freeze_count() == 0


class HeldTokenizer(Tokenizer):
    """A tokenizer that holds texts from a length on until the test releases them."""

    def __init__(self, size: int = 65_536) -> None:
        super().__init__(Checkpoint(CHECKPOINT))
        self.size, self.lengths = size, list[int]()
        self.is_released = threading.Event()

    def encode(self, text: str, **options: Any) -> list[int]:
        self.lengths.append(len(text))
        if len(text) >= self.size:
            self.is_released.wait(60)
        return super().encode(text[:100], **options)

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        self.lengths.append(len(ids))
        if len(ids) >= self.size:
            self.is_released.wait(60)
        return super().decode(ids[:100], **options)


@pytest.fixture
def held() -> Iterator[HeldTokenizer]:
    tokenizer = HeldTokenizer()
    yield tokenizer
    tokenizer.is_released.set()


def held_server(start: Start, held: HeldTokenizer, **limits: Any) -> Running:
    engine = FakeEngine(embeds=True)
    engine.tokenizer = held
    return start(engine, ServerConfig(**limits))


CONVERSATION = {"messages": [{"role": "user", "content": LONG}], "truncate_prompt_tokens": 9}
LONG_BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": LONG}),
    ("/tokenize", CONVERSATION),
    ("/detokenize", {"tokens": [5] * 70_000}),
    ("/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": 9}),
    ("/v1/chat/completions", CONVERSATION),
    ("/v1/embeddings", {"input": ["a", LONG], "truncate_prompt_tokens": 9}),
    ("/v1/embeddings", CONVERSATION),
]


@pytest.mark.parametrize(("path", "content"), LONG_BODIES, ids=lambda value: str(value)[:16])
def test_a_long_text_does_not_delay_short_ones(
    start: Start, held: HeldTokenizer, path: str, content: dict[str, Any]
) -> None:
    server = held_server(start, held)
    with ExitStack() as stack:
        for count in range(os.cpu_count() or 1):
            stack.enter_context(ask(server, path, content))
            wait_until(lambda: server.state.admission.active == count + 1)  # noqa: B023
        wait_until(lambda: any(length >= held.size for length in held.lengths))
        started = time.perf_counter()
        for body in ({"prompt": "a" * 5_000}, {"prompt": "a"}):
            assert server.post("/tokenize", body, timeout=5).json()["count"] > 0
        assert time.perf_counter() - started < 0.5
    wait_until(lambda: server.state.admission.active == 0)


@pytest.mark.parametrize(("path", "content"), LONG_BODIES[::3], ids=lambda value: str(value)[:16])
def test_tokenization_has_a_deadline(
    start: Start, held: HeldTokenizer, path: str, content: dict[str, Any]
) -> None:
    server = held_server(start, held, request_timeout=0.5, max_requests=2)
    assert error_of(server.post(path, content, timeout=5), 504)["code"] == "timeout"
    assert server.state.admission.active == 0


def test_long_texts_are_admitted_and_dropped_when_the_client_leaves(
    start: Start, held: HeldTokenizer
) -> None:
    server = held_server(start, held, max_requests=2)
    with ask(server, "/tokenize", {"prompt": LONG}):
        wait_until(lambda: len(held.lengths) == 1)
        with ask(server, "/tokenize", {"prompt": LONG + "1"}):
            wait_until(lambda: server.state.admission.active == 2)
            error = error_of(server.post("/tokenize", {"prompt": LONG}, timeout=5), 429)
            assert error["code"] == "queue_full"
            assert server.post("/tokenize", {"prompt": "a"}).status_code == 200
        wait_until(lambda: server.state.admission.active == 1)
    held.is_released.set()
    last = {"prompt": LONG + "22", "return_token_strs": True}
    answer = server.post("/tokenize", last).json()
    assert answer["token_strs"] == [held.token(token) for token in answer["tokens"]]
    assert held.lengths == [len(LONG), 1, len(LONG) + 2]


def test_many_texts_let_others_have_their_turn(start: Start, held: HeldTokenizer) -> None:
    held.size = 6_000
    server = held_server(start, held)
    inputs = ["a" * (6_000 + index) for index in range(200)]
    answers = []

    def embed() -> None:
        content = {"input": inputs, "truncate_prompt_tokens": 200}
        answers.append(server.post("/v1/embeddings", content).json())

    thread = threading.Thread(target=embed)
    thread.start()
    wait_until(lambda: len(held.lengths) == 1)
    with ask(server, "/tokenize", {"prompt": "a" * 5_000}):
        wait_until(lambda: server.state.admission.active == 2)
        held.is_released.set()
        thread.join(60)
    assert held.lengths.index(5_000) < 30
    assert [n for n in held.lengths if n != 5_000] == [len(text) for text in inputs]
    assert len(answers[0]["data"]) == 200


@pytest.mark.parametrize(("path", "content", "param"), [
    ("/tokenize", {"prompt": "a" * (LIMIT + 1)}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": "a" * LIMIT}]}, "messages"),
    ("/detokenize", {"tokens": [5] * (LIMIT + 1)}, "tokens"),
    ("/v1/completions", {"prompt": "a" * (LIMIT + 1), "truncate_prompt_tokens": 9}, "prompt"),
], ids=["text", "conversation", "tokens", "prompt"])  # fmt: skip
def test_the_length_of_a_text_is_limited(
    server: Running, path: str, content: dict[str, Any], param: str
) -> None:
    error = error_of(server.post(path, content), 400)
    assert (error["code"], error["param"]) == ("text_too_long", param)
    assert f"at most {LIMIT}" in error["message"]


def test_the_limit_of_a_text_grows_with_the_context(start: Start, held: HeldTokenizer) -> None:
    server = held_server(start, held)
    held.is_released.set()
    server.engine.max_model_len = 40_000
    assert server.post("/tokenize", {"prompt": "a" * 1_280_000}).json()["tokens"]
    error = error_of(server.post("/tokenize", {"prompt": "a" * 1_280_001}), 400)
    assert "at most 1280000" in error["message"]


def test_many_items_of_one_turn_are_joined_at_once() -> None:
    items = [{"role": "assistant", "content": "a" * 50}] * 40_000
    started = time.process_time()
    chat = ResponsesRequest.model_validate({"input": items}).as_chat()
    assert time.process_time() - started < 1
    assert chat["messages"] == [{"role": "assistant", "content": "a" * 2_000_000}]


@pytest.mark.slow
def test_a_server_survives_hostile_requests() -> None:
    options = ["--minutes=0.1", "--megabytes=0.5", "--json"]
    process = subprocess.run(
        [sys.executable, "tests/runs/hostile.py", *options],
        check=False, cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert process.stdout, process.stderr
    report = json.loads(process.stdout)
    assert process.returncode == bool(report["broken"])
    # Limits of time are those of an idle machine, so only a generous one is checked here.
    assert report["total"]["health"] < 5, report["kinds"]
    assert not report["faults"]
    assert not report["exceptions"]
    assert not [line for line in report["broken"] if "ended" in line or "health:" in line]
    assert report["statuses"]["400"] > 10
    assert report["total"]["tokens"] > 100
    assert all(report["answers"].get(kind) for kind in report["kinds"])
