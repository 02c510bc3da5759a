"""Conversations as users give them."""

from __future__ import annotations

from collections.abc import Mapping

from opweave.engine.chat import ChatTemplate, Message
from opweave.engine.checkpoint import Checkpoint
from opweave.engine.errors import ChatTemplateError, PromptError


def template_for(checkpoint: Checkpoint, given: str | None) -> ChatTemplate:
    """Return the chat template to use: the one given, a file or the template itself, or its own.

    Raises:
        ChatTemplateError: there is none, or it is no valid Jinja.
    """
    if given is not None:
        return ChatTemplate.given(given, checkpoint)
    if (own := ChatTemplate.of(checkpoint)) is None:
        raise ChatTemplateError(
            f"{checkpoint.path} has no chat template: its model may not be made for conversations. "
            "Give a template (chat_template=..., or --chat-template FILE), or use generate."
        )
    return own


def as_conversations(messages: object) -> list[list[Message]]:
    """Return one conversation or several as a list of them.

    Raises:
        PromptError: something is no message; or a conversation is empty.
    """
    if isinstance(messages, list | tuple) and messages and isinstance(messages[0], Mapping):
        messages = [messages]
    if not isinstance(messages, list | tuple):
        raise PromptError(
            f"messages must be a list of messages, or of such lists, not {messages!r}."
        )
    return [_conversation(one) for one in messages]


def _conversation(messages: object) -> list[Message]:
    if not isinstance(messages, list | tuple) or not messages:
        raise PromptError(f"A conversation is {messages!r}; it must be a list of messages.")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PromptError(
                f"A message is {message!r}; it must be a dict like "
                "{'role': 'user', 'content': 'Hello'}."
            )
    return list(messages)
