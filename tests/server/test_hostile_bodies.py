"""Bodies that cost far more than their bytes: long lists of wrong types, and deep nesting."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from opweave.server.errors import ApiError
from opweave.server.protocol import base
from opweave.server.protocol.base import RequestFields
from opweave.server.protocol.chat import ChatRequest
from opweave.server.protocol.completions import CompletionRequest
from opweave.server.protocol.embeddings import EmbeddingRequest
from opweave.server.protocol.responses import ResponsesRequest
from opweave.server.protocol.tokens import DetokenizeRequest
from opweave.server.validation import check_size
from server.command import ROOT
from server.conftest import Running, running
from server.fake_engine import FakeEngine
from server.test_errors import error_of

SIZE = 1_000_000  # bytes of a body
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


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/completions", body("prompt", "2", first='1,"a",')),
        ("/v1/completions", body("prompt", "{}")),
        ("/v1/completions", body("prompt", "[{}]")),
        ("/v1/completions", body("stop", "1", {"prompt": "x"})),
        ("/v1/chat/completions", body("messages", "{}")),
        ("/v1/chat/completions", body("messages", "1")),
        (
            "/v1/chat/completions",
            b'{"messages": [' + body("content", "1", {"role": "user"}) + b"]}",
        ),
        ("/v1/chat/completions", body("tools", "1", {"messages": [USER]})),
        ("/v1/responses", body("input", "1")),
        ("/v1/responses", body("input", "{}")),
        ("/v1/embeddings", body("input", "{}")),
        ("/v1/embeddings", body("input", "1.5")),
        ("/tokenize", body("messages", "[]")),
        ("/tokenize", body("prompt", "1")),
        ("/detokenize", body("tokens", '"a"')),
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
    ],
    ids=lambda value: value[:16].decode() if isinstance(value, bytes) else value,
)
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
    ("content", "is_refused"),
    [
        (b"[" + b"{}," * 200_000 + b"0]", True),
        (b'["' + b'{",[],"' * 140_000 + b'"]', True),
        (json.dumps(["{[" * 200_000, '\\"{' * 200_000, "\\"]).encode(), False),
        (b'"' + b'\\"{' * 200_000, False),
    ],
    ids=["objects", "between texts", "in texts", "unclosed"],
)
def test_arrays_and_objects_of_a_body_are_limited(content: bytes, is_refused: bool) -> None:
    if is_refused:
        with pytest.raises(ApiError, match="arrays and objects"):
            check_size(content, "application/json")
    else:
        check_size(content, "application/json")


def test_many_items_of_one_turn_are_joined_at_once() -> None:
    items = [{"role": "assistant", "content": "a" * 50}] * 40_000
    started = time.process_time()
    chat = ResponsesRequest.model_validate({"input": items}).as_chat()
    assert time.process_time() - started < 1
    assert chat["messages"] == [{"role": "assistant", "content": "a" * 2_000_000}]


def test_a_server_survives_hostile_requests() -> None:
    options = ["--minutes=0.1", "--megabytes=0.5", "--json"]
    run = subprocess.run(
        [sys.executable, "tests/runs/hostile.py", *options],
        check=False, cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert run.stdout, run.stderr
    report = json.loads(run.stdout)
    assert run.returncode == bool(report["broken"])
    # Limits of time are those of an idle machine, so only a generous one is checked here.
    assert report["total"]["health"] < 5, report["kinds"]
    assert not [status for status in report["statuses"] if status[0] == "5"], report["faults"]
    assert not [line for line in report["broken"] if "ended" in line or "health:" in line]
    assert report["statuses"]["400"] > 10
    assert report["total"]["tokens"] > 100
    assert all(report["answers"].get(kind) for kind in report["kinds"])
