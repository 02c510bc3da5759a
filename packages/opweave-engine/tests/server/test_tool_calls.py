"""Tool calls and reasoning through the official client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import openai
import pytest

from engine.test_structured import PYDOC, VOCABULARY, GrammarCompiler, allowed
from opweave_engine import LLM, AsyncEngine, ChatTemplate, SamplingParams
from opweave_engine.server import ServerConfig
from opweave_engine.server.output_parser import (
    CallFormat,
    DeepSeek,
    Hermes,
    LlamaJson,
    Mistral,
    answer_grammar,
)
from server.conftest import Running, Start, running
from server.fake_engine import CHECKPOINT
from server.scripted_engine import ScriptedEngine

MODEL = "tiny-pydoc"
MESSAGES: Any = [{"role": "user", "content": "Weather?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "when": {"$ref": "#/$defs/when"}},
    "required": ["city", "when"],
    "additionalProperties": False,
    "$defs": {"when": {"type": "integer", "minimum": 0, "maximum": 9}},
}  # fmt: skip
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "wait": NOTHING}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "x", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
MARKS = {
    "hermes": "<tool_call>",
    "llama3_json": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "deepseek_v3": "```json" + DeepSeek.opener,
    "deepseek_v31": DeepSeek.opener,
}
FORMATS: dict[str, type[CallFormat]] = {
    "hermes": Hermes,
    "llama3_json": LlamaJson,
    "mistral": Mistral,
    "deepseek_v3": DeepSeek,
    "deepseek_v31": DeepSeek,
}


def template(marks: str, end: str = "") -> ChatTemplate:
    """A template that shows the marks of a format without printing them."""
    return ChatTemplate(
        f"{{% if false %}}{marks}{{% endif %}}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        f"{{% if tools %}}[tools]{{% endif %}}[assistant]{end}",
        "a test",
        {},
    )


def ask(server: Running, stream: bool, **options: Any) -> list[Any]:
    """The messages of the answers, each with its finish reason, however they come."""
    create: Any = server.openai().chat.completions.create
    options = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, **options}
    if not stream:
        answer = create(**options)
        return [
            {**c.message.model_dump(exclude_none=True), "finish": c.finish_reason}
            for c in answer.choices
        ]
    messages: dict[int, Any] = {}
    for chunk in create(stream=True, **options):
        for choice in chunk.choices:
            message = messages.setdefault(choice.index, {"content": "", "tool_calls": []})
            add(message, choice.delta.model_dump(exclude_none=True))
            message["finish"] = choice.finish_reason or message.get("finish")
    for message in messages.values():
        if not message["tool_calls"]:
            del message["tool_calls"]
        if not message["content"] and ("tool_calls" in message or "reasoning" in message):
            del message["content"]
    return [messages[index] for index in sorted(messages)]


def add(message: Any, delta: Any) -> None:
    for name in ("content", "reasoning", "reasoning_content"):
        if name in delta:
            message[name] = message.get(name, "") + delta[name]
    message["role"] = delta.get("role", message.get("role"))
    for part in delta.get("tool_calls", []):
        if part["index"] == len(message["tool_calls"]):
            assert part["id"]
            assert part["type"] == "function"
            message["tool_calls"].append({k: v for k, v in part.items() if k != "index"})
        else:
            assert part["index"] == len(message["tool_calls"]) - 1
            assert set(part) == {"index", "function"}
            function = message["tool_calls"][-1]["function"]
            function["arguments"] += part["function"]["arguments"]


def calls_of(message: Any) -> list[tuple[str, Any]]:
    calls = message.get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


ROME = {"city": "Rome", "when": 1}


def written(name: str, *calls: tuple[str, Any]) -> str:
    layout = FORMATS[name].layout(MARKS[name])
    parts = [layout.head(name) + json.dumps(given) + layout.tail for name, given in calls]
    return layout.opening + layout.separator.join(parts) + layout.closing


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_that_the_model_decides_on(start: Start, name: str, stream: bool) -> None:
    text = written(name, ("get_weather", ROME), ("wait", {}))
    server = start(ScriptedEngine(text, "No call."), None, template(MARKS[name]))
    called, plain = ask(server, stream, n=2)
    assert called["role"] == "assistant"
    assert calls_of(called) == [("get_weather", ROME), ("wait", {})]
    assert (called["finish"], called.get("content")) == ("tool_calls", None)
    if name == "mistral":
        assert all(re.fullmatch("[a-zA-Z0-9]{9}", call["id"]) for call in called["tool_calls"])
    assert (plain["content"], plain["finish"]) == ("No call.", "stop")
    assert "tool_calls" not in plain
    (first, _) = ask(server, stream, n=2, parallel_tool_calls=False)
    assert calls_of(first) == [("get_weather", ROME)]
    (params, *_) = [call.params for call in server.engine.calls]
    assert params.structured_outputs is None


@pytest.mark.parametrize("stream", [False, True])
def test_text_before_a_call_and_an_answer_that_is_cut_off(start: Start, stream: bool) -> None:
    text = "One moment.\n\n" + written("hermes", ("get_weather", ROME))
    server = start(ScriptedEngine(text), None, template("<tool_call>"))
    (message,) = ask(server, stream)
    assert message["content"] == "One moment."
    assert calls_of(message) == [("get_weather", ROME)]
    cut = text[: text.index("Rome") + 2]
    server = start(ScriptedEngine(cut, reason="length"), None, template("<tool_call>"))
    (message,) = ask(server, stream)
    assert message["finish"] == "length"
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Ro'


@pytest.mark.parametrize("stream", [False, True])
def test_without_tools_nothing_is_parsed(start: Start, stream: bool) -> None:
    text = written("hermes", ("wait", {}))
    server = start(ScriptedEngine(text), None, template("<tool_call>"))
    for options in ({"tools": openai.omit}, {"tool_choice": "none"}):
        (message,) = ask(server, stream, **options)
        assert (message["content"], message["finish"]) == (text, "stop")
        asked = PYDOC.decode(server.engine.calls[-1].prompt)
        assert "[tools]" not in asked  # the model does not hear of them
    config = ServerConfig(tool_call_parser="none")
    server = start(ScriptedEngine(text), config, template("<tool_call>"))
    assert ask(server, stream)[0]["content"] == text
    assert "[tools]" in PYDOC.decode(server.engine.calls[-1].prompt)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", ["", "<think>\n"])
def test_reasoning(start: Start, stream: bool, end: str) -> None:
    text = "Let me see: 2 < 3.\n</think>\n\nYes. " + written("hermes", ("wait", {}))
    text = text if end else "<think>\n" + text
    marks = "<tool_call></think>"
    server = start(ScriptedEngine(text), None, template(marks, end))
    (message,) = ask(server, stream)
    assert message["reasoning_content"] == message["reasoning"] == "Let me see: 2 < 3."
    assert message["content"] == "Yes."
    assert calls_of(message) == [("wait", {})]
    (message,) = ask(server, stream, extra_body={"include_reasoning": False})
    assert "reasoning" not in message
    assert message["content"] == "Yes."
    server = start(
        ScriptedEngine(text), ServerConfig(reasoning_parser="none"), template(marks, end)
    )
    (message,) = ask(server, stream)
    assert message["content"] == text.partition(" <tool_call>")[0]
    # The prompt has ended the reasoning, as where thinking is switched off.
    closed = template(marks, "<think>\n\n</think>\n\n")
    server = start(ScriptedEngine("Yes. </think>"), None, closed)
    assert ask(server, stream)[0]["content"] == "Yes. </think>"


@pytest.fixture(scope="module", params=FORMATS)
def real(request: pytest.FixtureRequest) -> Iterator[Running]:
    """A server over a model that knows nothing of tools."""
    engine: Any = AsyncEngine(CHECKPOINT, dtype="float32")
    with running(engine, None, template(MARKS[request.param])) as server:
        yield server
    engine.shutdown()


with_hermes = pytest.mark.parametrize("real", ["hermes"], indirect=True)


def checked(message: Any) -> list[str]:
    calls = calls_of(message)
    for name, given in calls:
        jsonschema.validate(given, SCHEMAS[name])
    return [name for name, _ in calls]


@pytest.mark.parametrize(
    ("real", "stream"), [*((name, False) for name in FORMATS), ("hermes", True)], indirect=["real"]
)
def test_calls_that_the_model_must_make(real: Running, stream: bool) -> None:
    options = {"n": 2, "seed": 4, "max_tokens": 200, "temperature": 1.0}
    for message in ask(real, stream, tool_choice="required", parallel_tool_calls=False, **options):
        assert len(checked(message)) == 1
        assert message["finish"] == "tool_calls"
        assert "content" not in message
    for message in ask(real, stream, tool_choice="required", **{**options, "max_tokens": 80}):
        names = checked(message) if message["finish"] == "tool_calls" else ["cut off"]
        assert len(names) >= 1
    named: Any = {"type": "function", "function": {"name": "wait"}}
    for message in ask(real, stream, tool_choice=named, **options):
        assert checked(message) == ["wait"]
        assert message["finish"] == "tool_calls"


@with_hermes
@pytest.mark.parametrize("parameters", [{}, {"parameters": None}, {"parameters": {}}])
def test_a_function_without_parameters(real: Running, parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "now", **parameters}}]
    named = {"type": "function", "function": {"name": "now"}}
    for choice in ("required", named):
        options = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
        for message in ask(real, False, n=2, seed=4, max_tokens=120, **options):
            assert calls_of(message) == [("now", {})]
            assert message["finish"] == "tool_calls"


def test_the_model_may_leave_out_the_arguments(start: Start) -> None:
    server = start(ScriptedEngine('<tool_call>{"name": "now"}</tool_call>'), None, template("x"))
    tools: Any = [{"type": "function", "function": {"name": "now"}}]
    assert calls_of(ask(server, False, tools=tools)[0]) == [("now", {})]


@with_hermes
def test_schemas_of_parameters_may_have_keywords_without_an_effect(real: Running) -> None:
    schema = {**WEATHER, "propertyNames": True, "patternProperties": {"^city$": True}}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": schema}}]
    options = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    (message,) = ask(real, False, seed=4, max_tokens=100, **options)
    assert checked(message) == ["get_weather"]


@with_hermes
@pytest.mark.parametrize(("options", "param", "message"), [
    ({"tool_choice": "required", "tools": []}, "tool_choice", "needs tools"),
    ({"tool_choice": "sometimes"}, "tool_choice", "not supported"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "not supported"),
    ({"tool_choice": {"type": "function", "function": {"name": "gone"}}}, "tool_choice",
     "'gone', which is not among the tools"),
    ({"tool_choice": "required", "tools": [{"type": "function"}]}, "tools", "tools.0 must be"),
    (
        {
            "tool_choice": "required",
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}
            ],
        },
        "tools",
        "^tools: cannot compile the grammar",
    ),
])  # fmt: skip
def test_choices_that_are_wrong(real: Running, options: Any, param: str, message: str) -> None:
    answer = real.post("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS, **options})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert re.search(message, error["message"])


def test_a_required_call_without_a_format_is_refused(start: Start) -> None:
    config = ServerConfig(tool_call_parser="none")
    server = start(ScriptedEngine("x"), config, template("<tool_call>"))
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser none"):
        ask(server, False, tool_choice="required")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", ["", "<think>\n"])
def test_forms_hold_after_reasoning_and_beside_calls(stream: bool, end: str) -> None:
    engine: Any = AsyncEngine(CHECKPOINT, dtype="float32")
    bias = {"29": -100.0}
    with running(engine, None, template("<tool_call></think>", end)) as server:
        options = {
            "n": 3,
            "seed": 2,
            "max_tokens": 120,
            "extra_body": {"guided_choice": ["A", "B"]},
        }
        for message in ask(server, stream, tools=openai.omit, **options):
            if message["finish"] == "stop":
                assert message["content"] in ("A", "B")
                assert (message.get("reasoning") is not None) or not end
        found = ask(server, stream, logit_bias=bias, **options)
        for message in found:
            if message["finish"] == "tool_calls":
                assert checked(message)
            elif message["finish"] == "stop":
                assert message["content"] in ("A", "B")
    engine.shutdown()


def test_special_tokens_of_a_format_are_forced_by_their_ids() -> None:
    grammars = GrammarCompiler(PYDOC, VOCABULARY, [2])
    form = answer_grammar(
        layout=Mistral.layout(""), functions=[("f", NOTHING)], special={"[TOOL_CALLS]": 1}
    )
    state = grammars.start(SamplingParams(structured_outputs=form))
    assert state is not None
    assert allowed(state) == [1]
    form = answer_grammar(
        layout=Mistral.layout(""),
        functions=[("f", NOTHING)],
        reasoning="inside",
        special={"[TOOL_CALLS]": 1, "</think>": 0},
    )
    state = grammars.start(SamplingParams(structured_outputs=form))
    assert state is not None
    for token in (50, 60, 0, 1):
        assert token in allowed(state)
        assert 2 not in allowed(state)
        grammars.advance([(state, token)])
    assert state.error is None


def test_kept_special_tokens_stay_in_the_text() -> None:
    llm = LLM(CHECKPOINT, dtype="float32")
    begin = llm.tokenizer.bos_token_id
    assert begin in llm.tokenizer.special_ids
    params = SamplingParams(max_tokens=4, logit_bias={begin: 100.0}, temperature=0)
    assert llm.generate("x", params)[0].outputs[0].text == ""
    kept = replace(params, kept_special_tokens=[begin])
    name = llm.tokenizer.token(begin)
    assert name is not None
    assert llm.generate("x", kept)[0].outputs[0].text == name * 4
