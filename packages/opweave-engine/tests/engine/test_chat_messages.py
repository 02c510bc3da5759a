"""Messages reach a chat template in the shape that it was written for."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from engine import chat_templates as of
from opweave_engine import ChatTemplate, ChatTemplateError, PromptError
from support import ROOT

SOURCE = ROOT / "examples" / "models" / "tiny-pydoc"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
USER: dict[str, Any] = {"role": "user", "content": "Sum?"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
ARGUMENTS = '{"b": [1, "é"],  "a": null}'
NESTED = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}


@cache
def compiled(template: str) -> ChatTemplate:
    return ChatTemplate(template, "a test", TOKENS)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(SOURCE / "tokenizer.json"), **TOKENS)


def ours(template: str, messages: list[Any], **options: Any) -> str:
    return compiled(template).render(messages, **options)


def theirs(template: str, messages: list[Any], **options: Any) -> str:
    """The prompt of transformers."""
    options = {"add_generation_prompt": True, "chat_template": template, **options}
    text = tokenizer().apply_chat_template(messages, tokenize=False, **options)
    assert isinstance(text, str)
    return text


def call(arguments: object, **fields: Any) -> dict[str, Any]:
    """A message of an assistant that calls a function."""
    function = {"name": "add", "arguments": arguments}
    entry = {"id": "abcdefghi", "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [entry], **fields}


# --- Null content ---


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("test", ["is none", "== none"])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_calls_of_a_template_that_prints_them_for_null_content_alone(
    content: dict[str, Any], test: str
) -> None:
    template = of.DEEPSEEK_R1.replace("== none", test)
    # transformers drops a field that is None, so that this template never prints the calls.
    assert ours(template, [USER, call(ARGUMENTS, **content)]) == (
        f"<s><|user|>Sum?<call>add {ARGUMENTS}</s><|assistant|>"
    )
    text = {"role": "assistant", **content}
    assert ours(template, [USER, text]) == "<s><|user|>Sum?<|assistant|></s><|assistant|>"


# --- Tool calls ---


@pytest.mark.parametrize(
    ("template", "as_text"),
    [
        (of.DEEPSEEK_R1, True),
        ("{{ m.arguments }}", True),
        ("{{ m.get('arguments') ~ 'x' }}", True),
        ("{% set a = m['arguments'] %}{{ 'x' + (a or '{}') | trim }}", True),
        ("{% set a = m.arguments | default('{}') %}{{ a }}", True),
        ("{% macro f(a) %}{{ a }}{% endmacro %}{{ f(m.arguments) }}", True),
        ("{% macro f(a) %}{{ a | tojson }}{% endmacro %}{{ f(a=m.arguments) }}", False),
        ("{{ m.arguments if m.arguments is string else m.arguments | tojson }}", False),
        ("{{ m | tojson }}", False),
        ("{% with a = m.arguments %}{% for k in a %}{{ k }}{% endfor %}{% endwith %}", False),
        ("{{ m.arguments['x'] }}", False),
        ("{{ m.arguments[:10] }}", True),
    ],
)
def test_arguments_as_the_template_prints_them(template: str, as_text: bool) -> None:
    assert ChatTemplate(template, "a test", {}).traits.takes_arguments_as_text is as_text


def test_calls_without_a_function_around_name_and_arguments() -> None:
    message = {"role": "assistant", "tool_calls": [{"name": "add", "arguments": ARGUMENTS}]}
    plain = {"name": "add", "arguments": json.loads(ARGUMENTS)}
    expected = theirs(of.QWEN3, [USER, {**message, "content": "", "tool_calls": [plain]}])
    assert ours(of.QWEN3, [USER, message]) == expected


@pytest.mark.parametrize("template", [of.DEEPSEEK, of.ITEMS])
@pytest.mark.parametrize(
    ("message", "named"),
    [
        (call("[1]"), r"tool_calls\.0\.function\.arguments is '\[1\]'; it must be a JSON object"),
        (call('{"a":'), r"arguments is '\{\"a\":', which is not valid JSON"),
        (call("1" * 5000), "it must be a JSON object"),
        (call("[" * 100_000), "arguments is"),
        (call([1]), r"arguments is \[1\]"),
        (call(0), "arguments is 0"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, r"tool_calls is \{'a': 1\}.* a list"),
        ({"role": "assistant", "tool_calls": ["f"]}, r"tool_calls\.0 is 'f'"),
        ({"role": "assistant", "tool_calls": [{"function": 1}]}, r"0\.function is 1"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, r"0\.function needs .*name"),
        ({"role": "assistant", "tool_calls": [{"custom": {}}]}, r"tool_calls\.0 needs .*name"),
        ({"role": "assistant", "function_call": {"name": "f"}}, r"messages\.1\.function_call"),
        ({"role": "assistant", "audio": {"id": "x"}}, r"messages\.1\.audio"),
    ],
)
def test_malformed_calls_name_the_field(template: str, message: Any, named: str) -> None:
    with pytest.raises(PromptError, match=named) as raised:
        ours(template, [USER, message])
    assert raised.value.parameter == "messages"
    assert str(raised.value).startswith("messages.1.")


def test_errors_quote_long_values_in_part() -> None:
    for message in (call("x" * 10**6), {"role": "user", "content": [{"text": [1] * 10**6}]}):
        with pytest.raises(PromptError) as raised:
            ours(of.QWEN3, [message])
        assert len(str(raised.value)) < 400


# --- Content ---


@pytest.mark.parametrize(("template", "takes", "needs"), [
    ("{% for p in m.content[1:] %}{{ p.text }}{% endfor %}", True, True),
    ("{% set c = m['content'] %}{% for p in c %}{{ p['text'] }}{% endfor %}", True, True),
    ("{% for p in (m.content if m.content is not string else []) %}{{ p.text }}{% endfor %}", True,
     True),
    # Only images are looked for; text is printed as a string.
    ("{% for p in m.content %}{{ p.type == 'image' }}{% endfor %}{{ m.content }}", False, False),
    (of.IMAGES_FIRST, True, False),
    ("{{ m.content | map(attribute='text') | join }}", True, True),
    ("{{ (m.content | first).text }}", True, True),
    ("{{ m.content if m.content is string else m.content[-1]['text'] }}", True, False),
    ("{% for line in m.content.split('x') %}{{ line }}{% endfor %}", False, False),
    ("{{ m.content[0] }}{{ m.content[:5] }}", False, False),
    ("{% for p in m.other %}{{ p.text }}{% endfor %}{{ m.content }}", False, False),
])  # fmt: skip
def test_content_as_the_template_reads_it(template: str, takes: bool, needs: bool) -> None:
    traits = ChatTemplate(template, "a test", {}).traits
    assert (traits.takes_parts, traits.needs_parts) == (takes, needs)


def test_strings_stay_where_only_a_search_for_images_reads_parts_of_them() -> None:
    history = [USER, call({"x": 1}, content=""), {"role": "tool", "content": "3"}]
    expected = theirs(of.IMAGES_FIRST, history)
    assert '"3"' in expected
    assert ours(of.IMAGES_FIRST, history) == expected


def test_parts_where_a_template_takes_strings_in_some_roles() -> None:
    history = [USER, {"role": "assistant", "content": parts("on", "e")}, NESTED]
    joined = [USER, {"role": "assistant", "content": "one"}, NESTED]
    assert ours(of.MISTRAL_PARTS, history) == theirs(of.MISTRAL_PARTS, joined)
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}{{ p.text }}"
        "{% endfor %}{% else %}{{ m.content }}{{ m.content | trim }}{{ m.content ~ '!' }}"
        "{{ 'think' if 'n' in m.content }}{{ m.content.split('n')[0] }}{{ m.content + '?' }}"
        "{% endif %}{% endfor %}"
    )
    assert ours(template, history) == "Sum?oneoneone!thinkoone?ab"


def test_parts_that_are_text() -> None:
    content = [
        "bare",
        {"text": "untyped"},
        {"type": "text", "text": "text"},
        {"type": "input_text", "text": "input"},
        {"type": "output_text", "text": "output", "annotations": []},
        {"type": "refusal", "refusal": "refusal"},
        {"type": "thinking", "thinking": "thinking"},
    ]
    words = ["bare", "untyped", "text", "input", "output", "refusal", "thinking"]
    message = {"role": "user", "content": content}
    assert ours(of.GEMMA3, [message]) == theirs(
        of.GEMMA3, [{"role": "user", "content": parts(*words)}]
    )
    assert ours(of.QWEN3, [message]) == theirs(of.QWEN3, [{**USER, "content": "\n".join(words)}])
    for empty in ([], (), None, [""]):
        message["content"] = empty
        assert ours(of.QWEN3, [message]) == theirs(of.QWEN3, [{**USER, "content": ""}])


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (1, "messages.0.content is 1"),
        ({"text": "x"}, "messages.0.content is"),
        ([1], "messages.0.content.0 is 1"),
        (["x", {"type": "image_url"}], "messages.0.content.1: .*'image_url' is not supported"),
        ([{"type": ["text"]}], "not supported"),
        ([{"type": "text"}], "content.0: a part of type 'text' needs 'text'"),
        ([{"type": "refusal", "text": "x"}], "needs 'refusal'"),
        ([{"type": "text", "text": 1}], "content.0.text is 1"),
    ],
)
def test_content_that_is_not_text(content: Any, named: str) -> None:
    with pytest.raises(PromptError, match=named) as raised:
        ours(of.QWEN3, [{"role": "user", "content": content}])
    assert raised.value.parameter == "messages"


# --- Reasoning and roles ---


def test_null_reasoning_is_none() -> None:
    reads = "{% for m in messages %}{{ m.reasoning }}{% endfor %}"
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert ours(reads, [{"role": "assistant", "content": "3", name: "1+2"}]) == "1+2"
    said = {"role": "assistant", "content": "3", "reasoning": None, "reasoning_content": None}
    plain = {"role": "assistant", "content": "3"}
    assert ours(of.QWEN3, [USER, said]) == theirs(of.QWEN3, [USER, plain])
    both = {**said, "thinking": "b", "reasoning_content": "a"}
    assert ours(of.QWEN3, [USER, both]) == theirs(of.QWEN3, [USER, both])
    assert ours(of.THINKING, [USER, both]) == theirs(of.THINKING, [USER, both])


@pytest.mark.parametrize("role", ["robot", "User", "", None, 1])
def test_unknown_roles(role: object) -> None:
    with pytest.raises(PromptError, match=rf"messages\.1\.role is {role!r}.* system, ") as raised:
        ours(of.QWEN3, [USER, {"role": role, "content": "x"}])
    assert raised.value.parameter == "messages"


def test_roles_that_only_a_template_knows() -> None:
    message = {"role": "ipython", "content": "3"}
    assert ours(of.LLAMA3, [USER, message]) == theirs(of.LLAMA3, [USER, message])
    with pytest.raises(PromptError, match="ipython"):
        ours(of.QWEN3, [USER, message])


def test_roles_are_known_after_variables_were_asked_for() -> None:
    template = ChatTemplate(of.LLAMA3, "a test", TOKENS)
    assert "tools" in template.traits.variables
    assert {"ipython", "tool"} <= template.traits.strings


# --- Continuing the last message ---


def test_the_last_of_several_parts_is_continued() -> None:
    history = [USER, {"role": "assistant", "content": parts("one ", "two ")}]
    for template in (of.MISTRAL_PARTS, of.LLAVA, of.QWEN3):
        assert ours(template, history, continue_final_message=True).endswith("two ")


@pytest.mark.parametrize(
    ("template", "message", "named"),
    [
        (of.QWEN3, call("{}"), "text to continue"),
        (of.QWEN3, {"role": "assistant", "content": ""}, "text to continue"),
        (of.DEEPSEEK_R1, call("{}"), "text to continue"),
        ("{{ messages[0].content }}", {"role": "assistant", "content": "x"}, "does not print"),
        ("{{ messages[-1].content[:3] }}", {"role": "assistant", "content": "abc"}, "not print"),
    ],
)
def test_what_cannot_be_continued(template: str, message: dict[str, Any], named: str) -> None:
    with pytest.raises(ChatTemplateError, match=named) as raised:
        ours(template, [USER, message], continue_final_message=True)
    assert raised.value.parameter == "continue_final_message"


# --- Tools and documents ---


def test_an_empty_list_of_tools_is_none() -> None:
    assert ours(of.LLAMA3, [USER], tools=[]) == theirs(of.LLAMA3, [USER])
    assert ours(of.LLAMA3, [USER], tools=TOOLS) == theirs(of.LLAMA3, [USER], tools=TOOLS)


def test_the_messages_that_are_given_stay_as_they_are() -> None:
    history = [NESTED, call(ARGUMENTS, reasoning="r"), {"role": "developer", "content": "x"}]
    copy = json.loads(json.dumps(history))
    ours(of.QWEN3, history)
    ours(of.GEMMA3, [{"role": "assistant", **NESTED}], continue_final_message=True)
    assert history == copy
