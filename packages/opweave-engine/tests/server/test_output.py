"""Answers are parsed alike however their text arrives, and no text is lost."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import chat_templates
from opweave_engine import ChatTemplate, CompletionOutput
from opweave_engine.server.output_parser import (
    AnswerParser,
    ArgumentsDelta,
    CallFormat,
    CallStart,
    ContentDelta,
    DeepSeek,
    Event,
    Hermes,
    LlamaJson,
    Mistral,
    OutputStyle,
    ReasoningDelta,
)

FORMATS: list[type[CallFormat]] = [Hermes, LlamaJson, Mistral, DeepSeek]
NAMES = ("get_weather", "add")
# A format, and a part of a chat template that changes its layout.
LAYOUTS = [*((format_, "") for format_ in FORMATS), (Mistral, "[ARGS]"), (DeepSeek, "```json")]
Found = tuple[str, str, list[list[str]]]  # content, reasoning, and calls with their arguments


def collected(events: Sequence[Event]) -> Found:
    content = reasoning = ""
    calls: list[list[str]] = []
    for event in events:
        match event:
            case ContentDelta(text):
                content += text
            case ReasoningDelta(text):
                reasoning += text
            case CallStart(name, _):
                calls.append([name, ""])
            case ArgumentsDelta(text):
                calls[-1][1] += text
    return content, reasoning, calls


def delta(text: str, reason: Any = None) -> CompletionOutput:
    return CompletionOutput(0, text, [], reason)


def parsed(text: str, format_: type[CallFormat] | None, size: int = 0, **options: Any) -> Found:
    parser = AnswerParser(format_, names=NAMES, **options)
    events: list[Event] = []
    for start in range(0, len(text), size or max(1, len(text))):
        events += parser.push(delta(text[start : start + (size or len(text))]))
    parts = collected([*events, *parser.push(delta("", "stop"))])
    calls = [[call.name, call.arguments] for call in parser.calls]
    assert parts == (parser.content, parser.reasoning, calls)
    return parts


def pieces(format_: type[CallFormat]) -> st.SearchStrategy[str]:
    """Parts of texts of a format, whole and broken."""
    fragments = [
        *format_.markers, "<think>", "</think>", '{"name": "add", ', '"arguments": ', "}",
        '"parameters": ', '{"a": "}\\"]", "b": [1, {}]}', '"{\\"a\\": 1}"', "null", "[", "]", ",",
        "; ", "\n", "  ", "Hello", "function", "add", "get_weather\n", "```json\n", "```", "é",
        '{"name": "get_weather", "parameters": {"x": 1}}', '{"name": "Bob", "age": 3}', '"',
        '{"arguments": {}, "name": "add"}', "<", "<tool", "[TOOL", "\\",
    ]  # fmt: skip
    return st.sampled_from(fragments)


@pytest.mark.parametrize("format_", FORMATS)
@given(data=st.data())
def test_pieces_of_any_size_give_the_same(format_: type[CallFormat], data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(pieces(format_), max_size=14)))
    options = {
        "has_reasoning": data.draw(st.booleans()),
        "is_parallel": data.draw(st.booleans()),
        "is_thinking": data.draw(st.booleans()),
    }
    whole = parsed(text, format_, **options)
    for size in (1, 2, 3, 5, 11):
        assert parsed(text, format_, size, **options) == whole
    parser, events, rest = AnswerParser(format_, names=NAMES, **options), list[Event](), text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        events += parser.push(delta(rest[:size]))
        rest = rest[size:]
    assert collected([*events, *parser.push(delta("", "stop"))]) == whole


@pytest.mark.parametrize("format_", FORMATS)
@given(st.lists(st.sampled_from(["a", " ", "\n", "{", "}", "[", '"', ":", "<", "|", "1"])))
def test_text_without_markers_is_content(format_: type[CallFormat], parts: list[str]) -> None:
    text = "".join(parts)
    assert parsed(text, format_) == (text, "", [])
    assert parsed(text, None, has_reasoning=True) == (text, "", [])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
ARGUMENTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=3)


@pytest.mark.parametrize(("format_", "template"), LAYOUTS)
@given(
    st.sampled_from(["", "Let me see.", "é {"]),
    st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3),
    st.integers(1, 9),
)
def test_calls_come_back_as_they_were_written(
    format_: type[CallFormat],
    template: str,
    content: str,
    calls: list[tuple[str, dict[str, Any]]],
    size: int,
) -> None:
    layout = format_.layout(template)
    content = "" if format_ is LlamaJson else content  # whose calls have no marker
    written = [layout.head(name) + json.dumps(given) + layout.tail for name, given in calls]
    text = content + "\n" + layout.opening + layout.separator.join(written) + layout.closing
    found, reasoning, parsed_calls = parsed(text + "\n", format_, size)
    assert (found, reasoning) == (content, "")
    assert [(name, json.loads(given)) for name, given in parsed_calls] == calls
    thoughtful = parsed(f"<think>\nHm.\n</think>\n\n{text}", format_, size, has_reasoning=True)
    assert thoughtful == (content, "Hm.", parsed_calls)
    first = parsed(text, format_, size, is_parallel=False)
    assert first == (content, "", parsed_calls[:1])
    # An answer that is cut off keeps what was written of its last call.
    end = random.randrange(len(text))
    _, _, some = parsed(text[:end], format_)
    for (name, begun), (other, whole) in zip(some, parsed_calls, strict=False):
        assert name == other
        assert whole.startswith(begun)


def _deepseek(name: str, arguments: str) -> str:
    call = f"{DeepSeek.begin}{name}{DeepSeek.separator}{arguments}{DeepSeek.closers[0]}"
    return f"{DeepSeek.opener}{call}{DeepSeek.closers[1]}"


@pytest.mark.parametrize(("format_", "text", "content", "calls"), [
    (Hermes, '<tool_call>{"name": "f"}</tool_call>', "", [["f", "{}"]]),
    (Hermes, '<tool_call>{"name": "f", "arguments": null}', "", [["f", "{}"]]),
    (Hermes, '<tool_call>{"arguments": "{}", "name": "f"}', "", [["f", "{}"]]),
    (Hermes, '<tool_call>{"id": [1], "name": "f", "arguments": {}}', "", [["f", "{}"]]),
    (Hermes, '<tool_call>{"name": "f", "arguments": {"a": 1', "", [["f", '{"a": 1']]),
    (Hermes, '<tool_call>{"nam', '<tool_call>{"nam', []),
    (Hermes, "<tool_call>call me</tool_call>", "<tool_call>call me</tool_call>", []),
    (Hermes, 'A <tool_call>, and <tool_call>{"name": "f"}', "A <tool_call>, and", [["f", "{}"]]),
    (Hermes, '<tool_call>{"name": "f"}</tool_call> Done. ', " Done.", [["f", "{}"]]),
    (LlamaJson, '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    (LlamaJson, '{"name": "add"}', '{"name": "add"}', []),
    (LlamaJson, '<|python_tag|>{"name": "add", "parameters": {}}', "", [["add", "{}"]]),
    (
        LlamaJson,
        '{"name": "add", "parameters": {}}; {"name": "Bob"}',
        '; {"name": "Bob"}',
        [["add", "{}"]],
    ),
    (LlamaJson, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (Mistral, '[TOOL_CALLS] [{"name": "f", "arguments": {}}]', "", [["f", "{}"]]),
    (Mistral, '[TOOL_CALLS] {"name": "f", "arguments": {}}', "", [["f", "{}"]]),
    (Mistral, "[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{}", "", [["f", "{}"]]),
    (Mistral, "[TOOL_CALLS]f{}[TOOL_CALLS]g[ARGS]{}", "", [["f", "{}"], ["g", "{}"]]),
    (Mistral, "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
    (DeepSeek, _deepseek("f", '{"a": 1}'), "", [["f", '{"a": 1}']]),
    (DeepSeek, _deepseek("function", "f\n```json\n{}\n```"), "", [["f", "{}"]]),
    (DeepSeek, DeepSeek.opener + "?", DeepSeek.opener + "?", []),
])  # fmt: skip
def test_formats(
    format_: type[CallFormat], text: str, content: str, calls: list[list[str]]
) -> None:
    assert parsed(text, format_) == (content, "", calls)


@pytest.mark.parametrize(
    ("text", "is_thinking", "found"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, ("Yes.", "Hm.")),
        ("\n<think>Hm.</think>Yes.", False, ("Yes.", "Hm.")),
        ("Hm.\n</think>\n\nYes.\n", True, ("Yes.\n", "Hm.")),
        ("<think>Hm.</think>Yes.", True, ("Yes.", "Hm.")),
        ("<think>\n\n</think>\n\nYes.", False, ("Yes.", "")),
        ("<think>It goes on", False, ("", "It goes on")),
        ("Yes. <think> is a tag.", False, ("Yes. <think> is a tag.", "")),
        ("<thin", False, ("<thin", "")),
    ],
)
def test_reasoning(text: str, is_thinking: bool, found: tuple[str, str]) -> None:
    for size in (0, 1, 4):
        options = {"has_reasoning": True, "is_thinking": is_thinking}
        content, reasoning, calls = parsed(text, None, size, **options)
        assert (content, reasoning, calls) == (*found, [])


def test_a_marker_is_held_back_only_until_it_is_decided() -> None:
    parser = AnswerParser(Hermes)
    assert collected(parser.push(delta("Hello <tool")))[0] == "Hello"
    assert collected(parser.push(delta("box> ")))[0] == " <toolbox>"
    parser = AnswerParser(Hermes)
    events = parser.push(delta('<tool_call>{"name": "f", "arguments": {"text": "one'))
    assert collected(events) == ("", "", [["f", '{"text": "one']])


@pytest.mark.parametrize(
    ("template", "calls", "has_reasoning"),
    [
        ("{{ '<tool_call>' }}{{ '</think>' }}", Hermes, True),
        ("{{ '[TOOL_CALLS]' }}", Mistral, False),
        ("{{ '<｜tool▁calls▁begin｜>' }}{% if '</think>' in x %}{% endif %}", DeepSeek, True),
        ("{{ '<|python_tag|>' }}", LlamaJson, False),
        ("""{{ '{"name": ' }}{{ '"parameters": ' }}""", LlamaJson, False),
        ("{{ messages }}", Hermes, False),
    ],
)
def test_styles_of_templates(template: str, calls: type[CallFormat], has_reasoning: bool) -> None:
    found = OutputStyle.of(template, "auto", "auto")
    assert (found.calls, found.has_reasoning) == (calls, has_reasoning)
    told = OutputStyle.of(template, "none", "none")
    assert (told.calls, told.has_reasoning) == (None, False)
    told = OutputStyle.of(template, "mistral", "deepseek_r1")
    assert (told.calls, told.has_reasoning) == (Mistral, True)


def test_an_unknown_format_of_calls_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    OutputStyle.of("{{ tools }}", "auto", "auto")
    assert "--tool-call-parser" in caplog.text
    caplog.clear()
    OutputStyle.of("{{ messages }}", "auto", "auto")
    OutputStyle.of("{{ tools }}<tool_call>", "auto", "auto")
    assert not caplog.text
    OutputStyle.of("{{ tools }}<tool_call><function=", "auto", "auto")
    assert "--tool-call-parser" in caplog.text


@pytest.mark.parametrize("source", ["LLAMA3", "QWEN3", "HERMES"])
def test_calls_are_read_as_the_template_writes_them(source: str) -> None:
    template = ChatTemplate(getattr(chat_templates, source), "a test", {})
    style = OutputStyle.of(template.source, "auto", "auto")
    calls = [["get_weather", {"city": "Rome", "days": [1, 2]}], ["add", {}]]
    calls = calls[:1] if source == "LLAMA3" else calls  # whose template takes one
    user = {"role": "user", "content": "Weather?"}
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": name, "arguments": given}}
            for name, given in calls
        ],
    }
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    prompt = template.render([user], tools=tools)
    text = template.render([user, turn], tools=tools, add_generation_prompt=False)
    assert text.startswith(prompt)
    answer = text[len(prompt) :].rpartition("<|")[0]  # without the end-of-text token
    content, reasoning, found = parsed(answer, style.calls, has_reasoning=style.has_reasoning)
    assert (content, reasoning) == ("", "")
    assert [[name, json.loads(given)] for name, given in found] == calls
    # And a call that the grammar enforces begins as the template begins it.
    layout = style.calls.layout(template.source)
    assert answer.startswith(layout.opening + layout.head("get_weather"))
