"""``/v1/responses`` through the official client."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.responses import Response

from engine.test_structured import PYDOC
from opweave_engine import AsyncEngine
from server.conftest import Running, Start
from server.fake_engine import CHECKPOINT, FakeEngine
from server.scripted_engine import ScriptedEngine
from server.test_tool_calls import ROME, SCHEMAS, WEATHER, template, written

MODEL = "tiny-pydoc"
TEMPLATE = template("<tool_call></think>")
TOOLS: Any = [
    {"type": "function", "name": name, "parameters": schema, "strict": True}
    for name, schema in SCHEMAS.items()
]


def ask(server: Running, stream: bool, **options: Any) -> Response:
    """The response; of a stream, checked against the events before it."""
    create: Any = server.openai().responses.create
    options = {"model": MODEL, **options}
    if not stream:
        return create(**options)  # type: ignore[no-any-return]
    events = list(create(stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last: Response = events[-1].response
    assert events[-1].type == f"response.{last.status}"
    assert {event.response.id for event in (*events[:2], events[-1])} == {last.id}
    check_items(events, last)
    return last


def check_items(events: list[Any], last: Response) -> None:
    """The events of each item add up to it."""
    for index, item in enumerate(last.output):
        own = [each for each in events if getattr(each, "output_index", None) == index]
        first, *middle, end = own
        assert (first.type, end.type) == ("response.output_item.added", "response.output_item.done")
        assert end.item == item
        assert first.item.id == item.id
        assert first.item.status == "in_progress"
        text = "".join(each.delta for each in middle if each.type.endswith(".delta"))
        done = [each for each in middle if each.type.endswith((".arguments.done", "_text.done"))]
        found: Any = item
        if item.type == "function_call":
            assert text == item.arguments
        else:
            assert text == found.content[0].text == done[0].text
            kinds = [each.type for each in middle]
            assert kinds[0] == "response.content_part.added"
            assert kinds[-1] == "response.content_part.done"
            assert middle[-1].part.text == found.content[0].text
        assert all(each.item_id == item.id for each in middle)
    assert max(getattr(each, "output_index", 0) for each in events) == len(last.output) - 1


@pytest.mark.parametrize("stream", [False, True])
def test_text(start: Start, stream: bool) -> None:
    server = start(ScriptedEngine("Hello, world."), None, TEMPLATE)
    response = ask(server, stream, input="Say hello.", metadata={"a": "b"}, temperature=0.5)
    assert response.output_text == "Hello, world."
    assert (response.status, response.model, response.object) == ("completed", MODEL, "response")
    assert response.id.startswith("resp-")
    assert response.metadata == {"a": "b"}
    assert (response.temperature, response.error, response.incomplete_details) == (0.5, None, None)
    (call,) = server.engine.calls
    assert PYDOC.decode(call.prompt) == "[user]Say hello.[assistant]"
    assert call.params.temperature == 0.5
    assert response.usage.input_tokens == len(call.prompt)
    assert response.usage.output_tokens == 7
    assert response.usage.total_tokens == len(call.prompt) + response.usage.output_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_off(start: Start, stream: bool) -> None:
    server = start(ScriptedEngine("Hello", reason="length"), None, TEMPLATE)
    response = ask(server, stream, input="x", max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.max_output_tokens == 3
    assert response.output_text == "Hello"
    assert server.engine.calls[0].params.max_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_and_calls(start: Start, stream: bool) -> None:
    calls = [written("hermes", ("get_weather", ROME)), written("hermes", ("wait", {}))]
    text = "<think>\nHm.\n</think>\n\nOne moment." + "".join(calls)
    server = start(ScriptedEngine(text), None, TEMPLATE)
    response = ask(server, stream, input="Weather?", tools=TOOLS)
    kinds = [item.type for item in response.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    reasoning, _, first, second = [item.model_dump() for item in response.output]
    assert reasoning["content"][0]["text"] == "Hm."
    assert response.output_text == "One moment."
    assert (first["name"], json.loads(first["arguments"])) == ("get_weather", ROME)
    assert (second["name"], json.loads(second["arguments"])) == ("wait", {})
    assert first["call_id"] != second["call_id"]
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    # The items go back as the input of the next turn.
    turn: Any = [
        {"role": "user", "content": "Weather?"},
        *(item.model_dump(exclude_none=True) for item in response.output),
        {"type": "function_call_output", "call_id": first["call_id"], "output": "sunny"},
    ]
    ask(server, stream, input=turn, instructions="Be brief.", tools=TOOLS)
    prompt = PYDOC.decode(server.engine.calls[-1].prompt)
    expected = "[system]Be brief.[user]Weather?[assistant]One moment.[tool]sunny[tools][assistant]"
    assert prompt == expected


def test_messages_in_every_form(start: Start) -> None:
    server = start(ScriptedEngine("x"), None, TEMPLATE)
    items: Any = [
        {"role": "developer", "content": "A"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "B"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "C"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
        {"type": "message", "role": "assistant", "content": "D"},
        {"role": "user", "content": "E"},
    ]
    ask(server, False, input=items)
    prompt = PYDOC.decode(server.engine.calls[0].prompt)
    assert prompt == "[system]A[user]B[assistant]CD[user]E[assistant]"


@pytest.mark.parametrize("stream", [False, True])
def test_forms_and_required_calls(start: Start, stream: bool) -> None:
    engine: Any = AsyncEngine(CHECKPOINT, dtype="float32")
    try:
        server = start(engine, None, template("<tool_call>"))
        schema = {"enum": ["A", "B"]}
        form: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        response = ask(server, stream, input="x", text=form, max_output_tokens=200)
        jsonschema.validate(json.loads(response.output_text), schema)
        choice: Any = {"type": "function", "name": "get_weather"}
        response = ask(
            server, stream, input="x", tools=TOOLS, tool_choice=choice, max_output_tokens=200
        )
        (call,) = response.output
        assert call.type == "function_call"
        jsonschema.validate(json.loads(call.arguments), WEATHER)
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input", "not a role"),
        ({"input": [{"role": "user", "content": 3}]}, "input", "text, or a list of parts"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "text only"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "not supported"),
        ({"input": "x", "previous_response_id": "r"}, "previous_response_id", "stored"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools", "functions"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text", "not supported"),
        ({"input": "x", "max_output_tokens": 10_000}, "max_output_tokens", "context has"),
        ({"input": "x", "temperature": 9}, "temperature", "temperature=9"),
        ({"input": 3}, "input", "string"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors(start: Start, options: Any, param: str, message: str, stream: bool) -> None:
    server = start(FakeEngine(), None, TEMPLATE)
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        server.openai().responses.create(model=MODEL, extra_body=options, stream=stream)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "field",
    [
        '"text": {"format": {"type": "text", "": NUMBER}}',
        '"metadata": {"x": [NUMBER]}',
        '"tools": [{"type": "function", "name": "f", "parameters": {"default": NUMBER}}]',
        '"tool_choice": {"type": "auto", "x": NUMBER}',
    ],
)
@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN", "1e999"])
def test_numbers_that_a_response_cannot_repeat(start: Start, field: str, number: str) -> None:
    body = '{"input": "x", ' + field.replace("NUMBER", number) + "}"
    server = start(FakeEngine(), None, TEMPLATE)
    headers = {"Content-Type": "application/json"}
    response = server.post("/v1/responses", content=body, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field.split('"')[1])
    assert "not finite" in error["message"]
