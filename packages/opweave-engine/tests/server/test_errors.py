"""Requests that cannot be answered: OpenAI's error object, with what is wrong and where."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from opweave_engine import Checkpoint, EngineDeadError, GrammarQueueFullError
from opweave_engine.tokenizer import AbsentTokenizer
from server.conftest import Running, Start, running
from server.fake_engine import CHECKPOINT, CONTEXT, FakeEngine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]


def _content(part: dict[str, str]) -> dict[str, Any]:
    return {"role": "user", "content": [part]}


@pytest.fixture(scope="module")
def plain() -> Iterator[Running]:
    """A server of a model without a chat template."""
    with running(template=None) as shared:
        yield shared


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    found: dict[str, Any] = body["error"]
    return found


# A field of a completion or a chat completion, its value, and words of the message.
FIELDS: list[tuple[str, str, Any, str]] = [
    (COMPLETIONS, "prompt", 3, "valid string"),
    (COMPLETIONS, "prompt", [], "empty"),
    (COMPLETIONS, "prompt", [[]], "prompt is empty"),
    (COMPLETIONS, "prompt", ["a", 3], "valid string"),
    (COMPLETIONS, "prompt", [1, 2.5], "valid integer"),
    (COMPLETIONS, "prompt", [5, 99999], "model has not"),
    (COMPLETIONS, "prompt", [-1], "model has not"),
    (COMPLETIONS, "prompt", "\ud800", "surrogate"),
    (COMPLETIONS, "max_tokens", "many", "integer"),
    (COMPLETIONS, "max_tokens", -1, "at least 0"),
    (COMPLETIONS, "max_tokens", True, "valid integer"),
    (COMPLETIONS, "max_tokens", 5.5, "valid integer"),
    (COMPLETIONS, "temperature", -1, "at least 0"),
    (COMPLETIONS, "temperature", 9, "=9 must be at most 2"),
    (COMPLETIONS, "temperature", math.inf, "finite"),
    (COMPLETIONS, "temperature", math.nan, "finite"),
    (COMPLETIONS, "temperature", "1", "valid number"),
    (COMPLETIONS, "temperature", False, "valid number"),
    (COMPLETIONS, "prompt_logprobs", -1, "at least 0"),
    (COMPLETIONS, "stop", "y" * 4097, "at most 4096 characters"),
    (COMPLETIONS, "stop", ["a", "y" * 4097], "at most 4096"),
    (COMPLETIONS, "stop", ["a"] * 99, "64"),
    (COMPLETIONS, "stop", "", "empty string"),
    (COMPLETIONS, "bad_words", "y", "valid list"),
    (COMPLETIONS, "bad_words", ["y"] * 257, "256"),
    (COMPLETIONS, "bad_words", ["y" * 257], "256"),
    (COMPLETIONS, "allowed_token_ids", [], "empty"),
    (COMPLETIONS, "truncate_prompt_tokens", 0, "at least 1"),
    (COMPLETIONS, "top_p", 0, "above 0"),
    (COMPLETIONS, "response_format", {"type": "xml"},
     "response_format.type='xml' is not supported"),
    (COMPLETIONS, "n", 0, "at least 1"),
    (COMPLETIONS, "n", 4096, "at most"),
    (COMPLETIONS, "logprobs", 900, "at most 20"),
    (COMPLETIONS, "stream", "true", "valid boolean"),
    (COMPLETIONS, "stop_token_ids", [-1], "at least 0"),
    (COMPLETIONS, "stop_token_ids", [True], "integer"),
    (COMPLETIONS, "logit_bias", {"5": 101}, "at most 100"),
    (COMPLETIONS, "logit_bias", {"-1": 1}, "at least 0"),
    (COMPLETIONS, "logit_bias", {"5": "1"}, "valid number"),
    (COMPLETIONS, "logit_bias", {"a": 1}, "integer"),
    (COMPLETIONS, "logit_bias", {" 5 ": 1}, "' 5 ' is no"),
    (COMPLETIONS, "logit_bias", {"1_0": 1}, "'1_0' is no"),
    (COMPLETIONS, "logit_bias", {"9" * 5000: 1}, "integer"),
    (COMPLETIONS, "min_tokens", 17, "at most max_tokens"),
    (COMPLETIONS, "seed", 1 << 63, "seed=9223372036854775808 must"),
    (COMPLETIONS, "seed", 1 << 70, "seed"),
    (COMPLETIONS, "best_of", 3, "use n"),
    (COMPLETIONS, "stream_options", {}, "need stream=true"),
    (COMPLETIONS, "priority", 1 << 40, "less than"),
    (CHAT, "messages", [], "at least 1"),
    (CHAT, "messages", [{}], "required"),
    (CHAT, "messages", "hello", "list"),
    (CHAT, "messages", [{"role": "", "content": ""}], "at least 1"),
    (CHAT, "messages", [{"role": "forbidden"}], "No such role"),
    (CHAT, "messages", [{"role": "a\ud800"}], "surrogate"),
    (CHAT, "messages", [{"role": "user", "content": "a " * 400}], "256 tokens"),
    (CHAT, "messages", [_content({"type": "image_url"})], "'image_url' is not supported"),
    (CHAT, "messages", [_content({"type": "text"})], "messages.0.content.0: a part of type 'text'"),
    (CHAT, "temperature", 2.01, "at most 2"),
    (CHAT, "top_logprobs", 2, "logprobs=true"),
    (CHAT, "max_completion_tokens", 0, "max_completion_tokens=0 must"),
    (CHAT, "max_completion_tokens", 256, "256 tokens"),
    (CHAT, "max_tokens", 0, "max_tokens=0 must"),
    (CHAT, "tool_choice", "required", "needs tools"),
    (CHAT, "response_format", {"type": "xml"}, "response_format.type='xml' is not supported"),
    (CHAT, "chat_template_kwargs", {"messages": []}, "cannot hold messages"),
]  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "x"}, CHAT: {"messages": USER}}
OTHERS: list[tuple[str, Any, str | None, str]] = [
    (COMPLETIONS, {}, "prompt", "required"),
    (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs",
     "sent in"),
    (COMPLETIONS, {"prompt": [5] * 256, "max_tokens": 0}, "prompt", "always needs one"),
    (CHAT, {}, "messages", "required"),
    (CHAT, {"messages": USER, "tools": [{"a": "\ud800"}]}, None, "surrogate"),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs",
     "logprobs=21 must"),
    (CHAT, {"messages": USER, "max_completion_tokens": 2, "min_tokens": 3}, "min_tokens",
     "min_tokens=3 must be at most max_completion_tokens=2"),
    ("/v1/embeddings", {"input": []}, "input", "empty"),
    ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, "encoding_format", "base64"),
    ("/tokenize", {}, "prompt", "required"),
    ("/detokenize", {"tokens": [2048]}, "tokens", "no token 2048"),
    ("/detokenize", {"tokens": [-1]}, "tokens", "greater than or equal to 0"),
    ("/detokenize", {"tokens": [1 << 80]}, "tokens", "less than"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "param", "named"),
    [*((path, {**BODIES[path], name: v}, name, named) for path, name, v, named in FIELDS), *OTHERS],
)
def test_bad_requests(
    server: Running, path: str, body: dict[str, Any], param: str | None, named: str
) -> None:
    answer = server.post(
        path, content=json.dumps(body), headers={"content-type": "application/json"}
    )
    error = error_of(answer, 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert named in error["message"], error


@pytest.mark.parametrize("stream", [False, True])
def test_what_does_not_fit_into_the_context(server: Running, stream: bool) -> None:
    body = {"prompt": [5] * 200, "max_tokens": 57, "stream": stream}
    error = error_of(server.post(COMPLETIONS, body), 400)
    assert error["code"] == "context_length_exceeded"
    assert "256 tokens" in error["message"]
    assert "257: 200 in the prompt and 57 for the answer" in error["message"]
    assert server.post(COMPLETIONS, {**body, "max_tokens": 56}).status_code == 200
    error = error_of(server.post(COMPLETIONS, {"prompt": [5] * 256, "stream": stream}), 400)
    assert error["param"] == "prompt"
    chat = {"messages": [{"role": "user", "content": "word " * 400}], "stream": stream}
    assert error_of(server.post(CHAT, chat), 400)["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "param"), [(COMPLETIONS, "prompt"), (CHAT, "messages"), ("/v1/embeddings", "input")]
)
def test_what_is_too_long_to_be_read(
    server: Running, path: str, param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = server.engine.tokenizer.longest_token
    assert longest is not None
    encoded: list[str] = []
    monkeypatch.setattr(server.engine.tokenizer, "encode", lambda text, **_: encoded.append(text))
    text = "x" * (longest * CONTEXT + 1)
    value: Any = [{"role": "user", "content": text}] if path == CHAT else text
    error = error_of(server.post(path, {param: value}), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == param
    assert "characters" in error["message"]
    assert not encoded


def test_no_chat_template(plain: Running) -> None:
    for path in (CHAT, "/tokenize"):
        error = error_of(plain.post(path, {"messages": USER}), 400)
        assert error["code"] == "no_chat_template"
        assert "--chat-template" in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/embeddings", "/tokenize"])
def test_no_tokenizer(start: Start, path: str) -> None:
    engine = FakeEngine()
    engine.tokenizer = AbsentTokenizer(Checkpoint(CHECKPOINT))
    server = start(engine)
    body = {"input" if "embeddings" in path else "prompt": "x " * 400}
    error = error_of(server.post(path, {"messages": USER} if path == CHAT else body), 400)
    assert error["code"] == "no_tokenizer"
    assert "token ids" in error["message"]


DEEP = b"[" * 100_000
HOSTILE = {
    "empty": (b"", "The body is empty; a JSON object is required."),
    "no JSON": (b"{", "not valid JSON: Expecting property name"),
    "not UTF-8": (b'{"prompt": "caf\xe9"}', "not UTF-8, at byte 15 (0xe9)"),
    "a byte order mark": (b'\xff\xfe{"prompt": "x"}', "not valid JSON"),
    "deeply nested": (b'{"prompt": ' + DEEP, "nested too deeply"),
    "nested and closed": (b'{"a": ' + DEEP + b"]" * 100_000 + b"}", "nested too deeply"),
    "a list": (b"[]", "valid dictionary"),
    "null": (b"null", "valid dictionary"),
    "a string": (b'"prompt"', "valid dictionary"),
    "an integer of many digits": (b'{"seed": ' + b"9" * 10_000 + b"}", "10000 digits"),
    "zeros": (b"\x00" * 1000, "not valid JSON"),
}


@pytest.mark.parametrize(("body", "named"), HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/embeddings", "/tokenize", "/detokenize"])
def test_hostile_bodies(server: Running, path: str, body: bytes, named: str) -> None:
    headers = {"content-type": "application/json"}
    assert named in error_of(server.post(path, content=body, headers=headers), 400)["message"]


def test_whole_numbers_are_integers_and_integers_are_numbers(server: Running) -> None:
    whole = {"max_tokens": 2.0, "n": 1.0, "seed": 3.0, "top_k": -1.0, "logprobs": 1.0}
    numbers = {"temperature": 1, "top_p": 1, "logit_bias": {"5": 1}}
    assert server.post(COMPLETIONS, {"prompt": "x", **whole, **numbers}).status_code == 200
    params = server.engine.calls[-1].params
    assert (params.max_tokens, params.seed, params.logprobs) == (2, 3, 1)
    assert isinstance(params.max_tokens, int)
    assert (params.temperature, params.logit_bias) == (1.0, {5: 1.0})


def test_the_newer_limit_of_two_counts(server: Running) -> None:
    body = {"messages": USER, "max_tokens": 9, "max_completion_tokens": 2, "model": ""}
    answer = server.post(CHAT, body)
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert answer.json()["model"] == "tiny-pydoc"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "x", "priority": None, "seed": -1, "max_tokens": 1}),
        (CHAT, {"messages": USER, "add_generation_prompt": None, "max_tokens": 1}),
        (CHAT, {"messages": USER, "logprobs": False, "top_logprobs": 0, "max_tokens": 1}),
        ("/tokenize", {"prompt": "x", "add_special_tokens": None, "return_token_strs": None}),
        ("/tokenize", {"messages": USER, "add_special_tokens": None}),
        ("/v1/embeddings", {"input": "x", "encoding_format": None}),
    ],
)
def test_null_is_the_default(start: Start, path: str, body: dict[str, Any]) -> None:
    server = start(FakeEngine(embeds=True))
    short = {name: value for name, value in body.items() if value not in (None, -1, False, 0)}
    found, expected = (server.post(path, each).json() for each in (body, short))
    for answer in (found, expected):
        assert "error" not in answer
        for name in ("id", "created"):
            answer.pop(name, None)
    assert found == expected


def test_nesting_that_json_allows_is_no_harm(server: Running) -> None:
    nested: Any = {}
    for _ in range(200):
        nested = {"a": [nested]}
    body = {"prompt": "x", "max_tokens": 1, "nested": nested}
    answer = server.post(COMPLETIONS, body)
    assert answer.status_code == 200
    messages = [{"role": "user", "content": "x", "nested": nested}]
    body = {"messages": messages, "tools": [nested], "max_tokens": 1}
    error = error_of(server.post(CHAT, body), 400)  # it reaches the template, and is too long
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/embeddings", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "kind", ["application/x-www-form-urlencoded", "text/json", "text/plain; charset=utf-8", ""]
)
def test_another_content_type(server: Running, path: str, kind: str) -> None:
    answer = server.post(path, content=b'{"prompt": "x"}', headers={"content-type": kind})
    error = error_of(answer, 415)
    assert (error["code"], error["param"]) == ("unsupported_content_type", None)
    assert repr(kind) in error["message"]
    assert "Content-Type: application/json" in error["message"]


def test_paths_and_methods(server: Running) -> None:
    assert error_of(server.get("/v1/nothing"), 404)["type"] == "not_found_error"
    assert error_of(server.get("/v1/models/nothing"), 404)["code"] == "model_not_found"
    answer = server.get(COMPLETIONS)
    error_of(answer, 405)
    assert answer.headers["allow"] == "POST"
    answer = server.post(f"{COMPLETIONS}/", {"prompt": "x"}, follow_redirects=False)
    assert error_of(answer, 404)["code"] == "not_found"
    error = error_of(server.post(COMPLETIONS, {"prompt": "x", "model": "gpt"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("input ", r"input\x20"),
        (" ", r"\x20"),
        ("a, b", r"a\x2c\x20b"),
        ("\x00\x7f\t", r"\x00\x7f\t"),
        ("é🙂", r"\xe9\U0001f642"),
        ("", '""'),
    ],
)
def test_any_name_of_an_unknown_field_fits_the_header(
    server: Running, name: str, header: str
) -> None:
    headers = {"Content-Type": "application/json"}
    content = json.dumps({"prompt": "x", "max_tokens": 1, name: 1})
    answer = server.post(COMPLETIONS, content=content, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["x-opweave-ignored"] == header
    variables = {"messages": USER, "chat_template_kwargs": {name: 1}}
    answer = server.post("/tokenize", content=json.dumps(variables), headers=headers)
    assert answer.headers["x-opweave-ignored"].removeprefix("chat_template_kwargs.") == (
        header if name else ""
    )


def test_an_error_of_the_engine_before_the_first_token(start: Start) -> None:
    engine = FakeEngine()
    engine.fails_after, engine.raises = 0, RuntimeError("a secret of the machine")
    server = start(engine)
    for stream in (False, True):
        answer = server.post(
            COMPLETIONS, {"prompt": "x", "stream": stream}, headers={"X-Request-Id": "mine"}
        )
        error = error_of(answer, 500)
        assert error["type"] == "server_error"
        assert "mine" in error["message"]
        assert "secret" not in answer.text


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_error_in_mid_stream(start: Start, path: str) -> None:
    engine = FakeEngine()
    engine.fails_after, engine.raises = 3, RuntimeError("a secret of the machine")
    server = start(engine)
    body = {"prompt": "x", "messages": USER, "stream": True, "n": 2, "logprobs": None}
    answer = server.post(path, body)
    events = [line[6:] for line in answer.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    error = json.loads(events[-2])["error"]
    assert error["type"] == "server_error"
    assert "secret" not in answer.text
    assert all("choices" in json.loads(event) for event in events[:-2])
    assert len(events) > 3
    assert not engine.running
    with pytest.raises(openai.APIError, match="went wrong"):
        list(server.openai().completions.create(model="tiny-pydoc", prompt="x", stream=True))


def test_an_engine_that_dies(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    engine.fails_after = 2
    server = start(engine)
    events = server.post(COMPLETIONS, {"prompt": "x", "stream": True}).text.split("\n\n")
    assert json.loads(events[-3][6:])["error"]["code"] == "engine_dead"
    health = server.get("/health")
    assert health.status_code == 503
    assert (health.json()["status"], health.json()["error"]) == ("dead", "RuntimeError")
    for path in (COMPLETIONS, CHAT):
        for stream in (False, True):
            body = {"prompt": "x", "messages": USER, "stream": stream}
            error = error_of(server.post(path, body), 503)
            assert error["code"] == "engine_dead"
    assert error_of(server.post("/v1/embeddings", {"input": "x"}), 503)


def test_a_replica_that_dies(start: Start) -> None:
    engine = FakeEngine()
    engine.fails_after, engine.raises = 0, EngineDeadError("The engine died: of this replica.")
    server = start(engine)
    for stream in (False, True):
        answer = server.post(COMPLETIONS, {"prompt": "x", "stream": stream})
        error = error_of(answer, 503)
        assert error["code"] == "replica_died"
        assert "again" not in error["message"]
        assert "retry-after" not in answer.headers
    engine.fails_after = 2
    events = server.post(COMPLETIONS, {"prompt": "x", "stream": True}).text.split("\n\n")
    assert json.loads(events[-3][6:])["error"]["code"] == "replica_died"
    assert server.get("/health").status_code == 200
    # The request may have killed the replica, so clients must not send it to the next one.
    engine.fails_after, before = 0, len(engine.calls)
    with pytest.raises(openai.InternalServerError, match=r"replica .* has died"):
        server.openai().with_options(max_retries=3).completions.create(
            model="tiny-pydoc", prompt="x"
        )
    assert len(engine.calls) == before + 1


def test_a_grammar_that_waits_too_long(start: Start) -> None:
    engine = FakeEngine()
    engine.fails_after, engine.raises = 0, GrammarQueueFullError("The grammar waited for 30 s.")
    answer = start(engine).post(COMPLETIONS, {"prompt": "x", "guided_regex": "a"})
    error = error_of(answer, 429)
    assert (error["code"], error["message"]) == ("queue_full", "The grammar waited for 30 s.")
    assert answer.headers["retry-after"] == "1"


def test_what_breaks_in_the_server_is_logged_and_not_told(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = start()
    monkeypatch.setattr(type(server.engine), "model_name", property(lambda _: 1 / 0), raising=False)
    del server.engine.__dict__["model_name"]
    with caplog.at_level(logging.ERROR, "opweave_engine.server"):
        answer = server.get("/v1/models", headers={"X-Request-Id": "id-17"})
    assert "id-17" in error_of(answer, 500)["message"]
    assert "division" not in answer.text
    assert any("id-17" in r.getMessage() and r.exc_info for r in caplog.records)
