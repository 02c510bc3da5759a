"""Structured output through the official client, over the real engine."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from engine.test_structured import CHOICE_OF_30_000, CRASHING, reference_chain, rule_chain
from server.command import Command
from server.conftest import Running, texts_of
from server.fake_engine import CHECKPOINT

MODEL = "tiny-pydoc"
MESSAGES: Any = [{"role": "user", "content": "Who?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Book(BaseModel):
    title: Literal["Emma", "Ulysses"]
    year: int
    is_long: bool


def chat(real: Running, stream: bool, **options: Any) -> list[str]:
    """The texts of the answers, with n of 2."""
    answers: Any = real.openai().chat.completions.create(
        model=MODEL, messages=MESSAGES, n=2, seed=3, max_tokens=150, stream=stream, **options
    )
    return texts_of(answers, stream=stream)


# Without a bound, a model as small as this one may write whitespace for ever.
SPACES = {"guided_whitespace_pattern": " ?"}


@pytest.mark.parametrize("stream", [False, True])
def test_response_formats(real: Running, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    for text in chat(real, stream, response_format=form, extra_body=SPACES):
        jsonschema.validate(json.loads(text), SCHEMA)
    bias = {"93": 8}  # ends objects soon
    objects = chat(
        real, stream, response_format={"type": "json_object"}, extra_body=SPACES, logit_bias=bias
    )
    assert all(text.startswith("{") for text in objects)
    assert chat(real, stream, response_format={"type": "text"}) == chat(real, stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_object", "schema": {k: v for k, v in SCHEMA.items() if k != "type"}},
        {"type": "json_object", "json_schema": {"schema": SCHEMA}},
        {"type": "json_schema", "schema": SCHEMA},
    ],
)
def test_the_schema_of_a_response_format(real: Running, form: Any, stream: bool) -> None:
    for text in chat(real, stream, response_format=form, extra_body=SPACES):
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("style", ["structured_outputs", "guided"])
def test_forms_of_vllm(real: Running, stream: bool, style: str) -> None:
    def ask(**form: Any) -> list[str]:
        if style == "guided":
            body = {f"guided_{name}": value for name, value in form.items()}
        else:
            body = {"structured_outputs": form}
        return chat(real, stream, extra_body=body)

    for text in ask(json=SCHEMA, whitespace_pattern=" ?"):
        jsonschema.validate(json.loads(text), SCHEMA)
    for text in ask(regex=r"[A-Z]\d{3}"):
        assert re.fullmatch(r"[A-Z][0-9]{3}", text)
    assert set(ask(choice=["tea", "coffee"])) <= {"tea", "coffee"}
    for text in ask(grammar='root ::= "a" root? | "."'):
        assert re.fullmatch(r"a*\.?", text)


def test_a_model_of_pydantic_is_parsed(real: Running) -> None:
    answer = real.openai().chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Book, max_tokens=200, extra_body=SPACES
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Book)


def test_completions(real: Running) -> None:
    answer = real.openai().completions.create(
        model=MODEL, prompt=["a", "b"], n=2, max_tokens=20, extra_body={"guided_regex": "[0-9]{4}"}
    )
    assert len(answer.choices) == 4
    assert all(re.fullmatch("[0-9]{4}", choice.text) for choice in answer.choices)


FORMATS = [
    ({"guided_regex": "("}, "guided_regex", "guided_regex: cannot compile the regex: .*unclosed"),
    ({"guided_json": {"type": "x"}}, "guided_json", "cannot compile the JSON schema: Invalid type"),
    ({"guided_json": "{"}, "guided_json", "guided_json: json is not valid JSON"),
    ({"guided_choice": []}, "guided_choice", "one or more strings"),
    ({"guided_grammar": "?"}, "guided_grammar", "cannot compile the grammar"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs", 'keys: \\["not"\\]'),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "not supported"),
    ({"structured_outputs": {"regex": "a"}, "guided_json": {}}, "guided_json", "give one of them"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema.schema"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format", "has a schema"),
    ({"response_format": {"type": "json_object", "schema": {}, "json_schema": {"schema": {}}}},
     "response_format", "give one of them"),
    ({"response_format": {"type": "json_object", "schema": {"type": "x"}}}, "response_format",
     "Invalid type: x"),
    ({"response_format": {"type": "xml"}}, "response_format", "'json_object' or 'json_schema'"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
     "response_format", "response_format: cannot compile the JSON schema: Invalid type: x"),
    ({"guided_regex": 3}, "guided_regex", "string"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "message"), FORMATS)
@pytest.mark.parametrize("stream", [False, True])
def test_what_does_not_compile_is_a_400(
    real: Running, body: Any, param: str, message: str, stream: bool
) -> None:
    before = real.engine.stats().steps
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        real.openai().chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=stream, extra_body=body
        )
    assert caught.value.param == param
    assert real.engine.stats().steps == before


def test_without_llguidance_the_answer_names_the_extra(
    real: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    answer = real.post("/v1/completions", {"prompt": "x", "guided_regex": "a"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "pip install opweave-engine" in error["message"]
    assert error["param"] == "guided_regex"
    assert real.post("/v1/completions", {"prompt": "x"}).status_code == 200


# A server of its own: without the limits and the processes, these requests end it.


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}t{% endif %}"
    command = Command(
        tmp_path_factory.mktemp("server"), str(CHECKPOINT), "--port=0", "--drain-timeout=1",
        f"--chat-template={template}", OMP_NUM_THREADS="1",
    )  # fmt: skip
    yield command
    command.close()


CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SCHEMAS = {
    "references": (reference_chain(4000), "exceeds the limit of 2000 references"),
    "chain": (reference_chain(61), "exceeds the limit of 60 references in a chain"),
    "crash": (CRASHING, "too complex: compiling it ended a process with SIG"),
}
LARK = {
    "rules": (rule_chain(4000), "exceeds the limit of 1000 rules"),
    "schema": (f"start: a\na: %json {json.dumps(reference_chain(4000))}",
               "exceeds the limit of (131072 bytes|2000 references)"),
}  # fmt: skip


def schema_bodies(schema: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Requests with a schema: the path, the parameter that an error names, and the body."""
    chat = {"messages": MESSAGES}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    function = {"name": "f", "parameters": schema}
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    flat = {"input": "x", "tools": [{"type": "function", **function}], "tool_choice": "required"}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    yield CHAT, "response_format", {**chat, "response_format": form}
    yield COMPLETIONS, "response_format", {"prompt": "x", "response_format": form}
    yield CHAT, "structured_outputs", {**chat, "structured_outputs": {"json": schema}}
    yield COMPLETIONS, "guided_json", {"prompt": "x", "guided_json": json.dumps(schema)}
    yield CHAT, "tools", {**chat, **tools}
    yield RESPONSES, "tools", flat
    yield RESPONSES, "text", {"input": "x", "text": text}


def grammar_bodies(grammar: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    body = {"prompt": "x", "structured_outputs": {"grammar": grammar}}
    yield COMPLETIONS, "structured_outputs", body
    yield CHAT, "guided_grammar", {"messages": MESSAGES, "guided_grammar": grammar}


@pytest.mark.parametrize("kind", [*SCHEMAS, *LARK])
def test_no_constraint_ends_the_server(command: Command, kind: str) -> None:
    if kind in SCHEMAS:
        schema, message = SCHEMAS[kind]
        bodies = list(schema_bodies(schema))
    else:
        grammar, message = LARK[kind]
        bodies = list(grammar_bodies(grammar))
    for number, (path, param, body) in enumerate(bodies):
        answer = command.client.post(path, json={**body, "stream": number % 2 == 0})
        assert answer.status_code == 400, (path, param, answer.text[:300])
        error = answer.json()["error"]
        assert re.search(message, error["message"]), (param, error)
        assert error["param"] == param
    assert command.client.get("/health").status_code == 200
    answer = command.client.post(COMPLETIONS, json={"prompt": "x", "guided_regex": "[0-9]{3}"})
    assert answer.json()["choices"][0]["text"].isdecimal()


def test_a_small_constraint_does_not_wait_for_large_ones(command: Command) -> None:
    async def ask(client: httpx.AsyncClient, **form: Any) -> tuple[httpx.Response, float]:
        body = {"prompt": "x", "max_tokens": 5, **form}
        return await client.post(COMPLETIONS, json=body), time.perf_counter()

    async def work() -> None:
        async with httpx.AsyncClient(base_url=command.url, timeout=120, trust_env=False) as client:
            large = [
                asyncio.create_task(ask(client, guided_choice=[*CHOICE_OF_30_000, f"last {i}"]))
                for i in range(6)
            ]
            await asyncio.sleep(0.5)
            began = time.perf_counter()
            answer, ended = await ask(client, guided_regex="[a-c]{2}")
            assert answer.status_code == 200
            assert len(answer.json()["choices"][0]["text"]) == 2
            answers = [await task for task in large]
            assert {answer.status_code: answer.text[:300] for answer, _ in answers}.keys() == {200}
            # Compiling them one after the other takes at least six times as long.
            assert ended - began < (max(end for _, end in answers) - began) / 3

    asyncio.run(work())


@pytest.mark.slow
def test_a_signal_ends_a_server_that_compiles(command: Command) -> None:
    """The last test of this server."""

    async def work() -> None:
        async with httpx.AsyncClient(base_url=command.url, timeout=120, trust_env=False) as client:
            schema = {"enum": [[i, {}] for i in range(50_000)]}  # takes 10 s
            body = {"prompt": "x", "guided_json": schema}
            asking = asyncio.create_task(client.post(COMPLETIONS, json=body))
            await asyncio.sleep(2.0)
            assert not asking.done()
            began = time.perf_counter()
            command.process.terminate()
            answer = await asking
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
            await asyncio.to_thread(command.process.wait, 60)
            assert time.perf_counter() - began < 8.0  # the drain time is one second
            assert command.process.returncode == 0

    asyncio.run(work())
