"""Conversion of messages to the form that a chat template expects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opweave_engine.chat.content import TextParts, in_shape, texts_of
from opweave_engine.chat.plain import shown
from opweave_engine.chat.tool_calls import tool_calls
from opweave_engine.chat.traits import Traits
from opweave_engine.errors import ChatTemplateError, PromptError

Message = Mapping[str, Any]  # role and content, as in OpenAI's API

_ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # one field; APIs differ in its name
_UNSUPPORTED = {
    "audio": "the model takes text alone",
    "function_call": "write it as an entry of tool_calls",
}


def for_template(messages: Sequence[Message], traits: Traits) -> list[dict[str, Any]]:
    """Return the messages in the form that a template with these traits expects.

    Fields that are None and empty lists of calls are dropped. Content becomes a string or a list of
    parts, and arguments of calls become objects or JSON text. Reasoning is stored under all names
    that templates use.

    Raises:
        PromptError: a message is malformed, or has a role that the template does not accept.
    """
    return [_message(each, f"messages.{index}", traits) for index, each in enumerate(messages)]


def with_mark(messages: list[dict[str, Any]], mark: str) -> list[dict[str, Any]]:
    """Return the messages with *mark* after the text of the last one.

    Raises:
        ChatTemplateError: it has no text.
    """
    *others, last = messages
    content = last["content"]
    if content is None or not str(content):
        raise ChatTemplateError(
            "continue_final_message=True needs a last message with text to continue.",
            "continue_final_message",
        )
    if isinstance(content, TextParts):
        texts = [part["text"] for part in content]
        return [*others, {**last, "content": TextParts.of([*texts[:-1], texts[-1] + mark])}]
    return [*others, {**last, "content": content + mark}]


def _message(message: Message, path: str, traits: Traits) -> dict[str, Any]:
    given = {name: value for name, value in message.items() if value is not None}
    for name, why in _UNSUPPORTED.items():
        if name in given and not traits.mentions(name):
            raise PromptError(f"{path}.{name} is not supported; {why}.", "messages")
    given["role"] = _role(given.get("role"), path, traits)
    if calls := given.pop("tool_calls", None):
        given["tool_calls"] = tool_calls(
            calls, f"{path}.tool_calls", as_text=traits.takes_arguments_as_text
        )
    texts = texts_of(given.get("content"), f"{path}.content")
    if not texts and calls and traits.needs_null_content:
        given["content"] = None
    else:
        given["content"] = in_shape(
            texts, takes_parts=traits.takes_parts, needs_parts=traits.needs_parts
        )
    reasoning = next((given[name] for name in _REASONING if name in given), None)
    if reasoning is not None:
        given = {**dict.fromkeys(_REASONING, reasoning), **given, _REASONING[0]: reasoning}
    return given


def _role(role: object, path: str, traits: Traits) -> str:
    if not isinstance(role, str) or role not in traits.strings.union(_ROLES) - {""}:
        raise PromptError(
            f"{path}.role is {shown(role)}, which is not a role that the chat template knows; use "
            f"one of {', '.join(_ROLES)}.",
            "messages",
        )
    if role == "developer" and not traits.mentions(role):
        return "system"
    return role
