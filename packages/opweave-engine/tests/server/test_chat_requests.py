"""Conversations over HTTP reach the chat template as it reads them, or get a 400."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine import chat_templates as of
from engine.test_chat_messages import ARGUMENTS, TOOLS, USER, call, theirs
from opweave_engine import ChatTemplate
from opweave_engine.server import ServerConfig
from server.conftest import Running, running
from server.test_errors import error_of

CHAT = "/v1/chat/completions"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
OK = {"role": "assistant", "content": "OK! "}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server that takes chat templates in requests."""
    config = ServerConfig(trust_request_chat_template=True)
    with running(None, config, ChatTemplate(of.QWEN3, "a test", TOKENS)) as shared:
        yield shared


def prompts(server: Running, messages: list[Any], **fields: Any) -> str:
    """The text of a conversation, which both endpoints agree on."""
    engine = server.engine
    engine.calls.clear()
    body = {"messages": messages, **fields}
    answer = server.post(CHAT, {**body, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    ids = list(engine.calls[-1].prompt)
    assert server.post("/tokenize", body).json()["tokens"] == ids
    return engine.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("template", [of.DEEPSEEK, of.QWEN3, of.HERMES])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": "Let me"}])
def test_calls(server: Running, template: str, content: dict[str, Any]) -> None:
    arguments = ARGUMENTS if template == of.DEEPSEEK else {"b": [1, "é"], "a": None}
    expected = theirs(template, [USER, call(arguments, content=content.get("content") or "")])
    sent = [USER, call(ARGUMENTS, refusal=None, audio=None, function_call=None, **content)]
    assert prompts(server, sent, chat_template=template) == expected


def test_continuing_the_last_message(server: Running) -> None:
    expected = "<|im_start|>user\nSum?<|im_end|>\n<|im_start|>assistant\nOK! "
    for fields in (
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"chat_template_kwargs": {"continue_final_message": True}},
    ):
        assert prompts(server, [USER, OK], **fields) == expected
    ended = f"{expected}<|im_end|>\n"
    for fields in (
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"add_generation_prompt": False}},
        {"add_generation_prompt": False, "chat_template_kwargs": {"add_generation_prompt": None}},
    ):
        assert prompts(server, [USER, OK], **fields) == ended


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize(("fields", "param", "named"), [
    ({"messages": [USER, call("[1]")]}, "messages", "messages.1.tool_calls.0.function.argum"),
    ({"messages": [USER, call('{"a":')]}, "messages", "not valid JSON"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages", "messages.0.role is 'rob"),
    ({"messages": [{"role": "user", "content": [7]}]}, "messages", "content.0"),
    ({"chat_template": of.GEMMA3, "messages": [USER, USER]}, "messages", "must alternate"),
    ({"chat_template": "{% if %}"}, "chat_template", "not valid Jinja"),
    ({"chat_template": "/etc/hostname", "documents": [{}]}, "documents", "not use documents"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message",
     "give one of them"),
    ({"add_generation_prompt": True, "chat_template_kwargs": {"add_generation_prompt": False}},
     "add_generation_prompt", "give one of them"),
    ({"chat_template_kwargs": {"add_generation_prompt": "yes"}}, "add_generation_prompt",
     "boolean"),
    ({"messages": [USER, {**OK, "content": ""}], "continue_final_message": True},
     "continue_final_message", "text to continue"),
    ({"documents": [{"text": "x"}]}, "documents", "does not use documents"),
    ({"chat_template": of.ITEMS, "tools": TOOLS}, "tools", "does not use tools"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "cannot hold"),
])  # fmt: skip
def test_errors_name_the_field(
    server: Running, path: str, fields: dict[str, Any], param: str, named: str
) -> None:
    error = error_of(server.post(path, {"messages": [USER], **fields}), 400)
    assert error["param"] == param
    assert named in error["message"]


def test_tools_that_must_not_be_called_may_be_left_out_of_the_prompt(server: Running) -> None:
    fields = {"tools": TOOLS, "tool_choice": "none", "chat_template": of.ITEMS}
    assert server.post(CHAT, {"messages": [USER], "max_tokens": 1, **fields}).status_code == 200


def test_variables_that_the_template_does_not_read_are_named(server: Running) -> None:
    variables = {"enable_thinking": False, "enable_thinkin": False, "é": 1}
    answer = server.post("/tokenize", {"messages": [USER], "chat_template_kwargs": variables})
    assert answer.headers["x-opweave-ignored"] == (
        "chat_template_kwargs.enable_thinkin, chat_template_kwargs.\\xe9"
    )


def test_a_template_of_the_request_never_names_a_file(server: Running) -> None:
    assert prompts(server, [USER], chat_template="/etc/hostname") == "/etc/hostname"


def test_templates_in_requests_are_refused_unless_they_are_trusted() -> None:
    named = {"tool_use": ChatTemplate("tools: {{ tools | tojson }}", "a test", TOKENS)}
    template = ChatTemplate("default{{ bos_token }}", "a test", TOKENS, named)
    with running(template=template) as server:
        for path in (CHAT, "/tokenize"):
            answer = server.post(path, {"messages": [USER], "chat_template": "x"})
            error = error_of(answer, 400)
            assert (error["param"], error["code"]) == ("chat_template", "unsupported")
            assert "--trust-request-chat-template" in error["message"]
            assert "tool_use" in error["message"]
        assert prompts(server, [USER]) == "default<s>"
        assert prompts(server, [USER], chat_template="default") == "default<s>"
        assert prompts(server, [USER], tools=TOOLS).startswith('tools: [{"type": "function"')
        assert prompts(server, [USER], chat_template="tool_use") == "tools: null"


def test_a_template_of_the_request_without_one_of_the_checkpoint() -> None:
    config = ServerConfig(trust_request_chat_template=True)
    with running(None, config, None) as server:
        assert prompts(server, [USER], chat_template="x{{ messages[0].content }}") == "xSum?"
        assert error_of(server.post(CHAT, {"messages": [USER]}), 400)["code"] == "no_chat_template"
