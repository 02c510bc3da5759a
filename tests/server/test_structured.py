"""Structured output through the official client, over the real engine."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from opweave.engine import AsyncEngine
from server.conftest import TEMPLATE, Running, running
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


@pytest.fixture(scope="module")
def real() -> Iterator[Running]:
    engine: Any = AsyncEngine(CHECKPOINT, dtype="float32")
    with running(engine, None, TEMPLATE) as server:
        yield server
    engine.shutdown()


def chat(real: Running, stream: bool, **options: Any) -> list[str]:
    """The texts of the answers, with n of 2."""
    answers: Any = real.openai().chat.completions.create(
        model=MODEL, messages=MESSAGES, n=2, seed=3, max_tokens=150, stream=stream, **options
    )
    texts = ["", ""]
    for answer in answers if stream else [answers]:
        for choice in answer.choices:
            part = choice.delta if stream else choice.message
            texts[choice.index] += part.content or ""
    return texts


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
    (
        {"response_format": {"type": "json_object", "schema": {}, "json_schema": {"schema": {}}}},
        "response_format",
        "give one of them",
    ),
    (
        {"response_format": {"type": "json_object", "schema": {"type": "x"}}},
        "response_format",
        "Invalid type: x",
    ),
    ({"response_format": {"type": "xml"}}, "response_format", "'json_object' or 'json_schema'"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        "response_format",
        "response_format: cannot compile the JSON schema: Invalid type: x",
    ),
    ({"guided_regex": 3}, "guided_regex", "string"),
]


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
    assert "pip install 'opweave[serve]'" in error["message"]
    assert error["param"] == "guided_regex"
    assert real.post("/v1/completions", {"prompt": "x"}).status_code == 200
