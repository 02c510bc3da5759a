"""Validates conversations, and renders them as prompts."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any

from opweave.ir.errors import did_you_mean
from opweave_engine import errors
from opweave_engine.chat import ChatTemplate, Message
from opweave_engine.chat.template import as_mapping
from opweave_engine.load.checkpoint import Checkpoint

_log = logging.getLogger(__name__)

_NOT_VARIABLES = signature(ChatTemplate.render).parameters.keys() - {"self", "variables"}


def template_for(checkpoint: Checkpoint, choice: str | None) -> ChatTemplate:
    """Return the checkpoint's chat template, or the chosen one: a name, a file or a template.

    Raises:
        ChatTemplateError: the template is missing, or is not valid Jinja.
    """
    if choice is not None:
        return ChatTemplate.given(choice, checkpoint)
    if (template := ChatTemplate.of(checkpoint)) is None:
        raise errors.ChatTemplateError(
            f"{checkpoint.path} has no chat template: its model may not be made for conversations. "
            "Give a template (chat_template=..., or --chat-template FILE), or use generate."
        )
    return template


def check_keywords(
    keywords: Mapping[str, Any], template: ChatTemplate, function: Callable[..., Any] | None = None
) -> None:
    """Check that the template reads a variable for each of the keyword arguments.

    Raises:
        UnexpectedKeywordError: it does not; the message lists the parameters of *function*, too.
    """
    names, fault = template.traits.variables, "is not"
    if function is not None:
        names |= signature(function).parameters.keys() - {"self", "variables"}
        fault = f"is neither a parameter of {function.__name__} nor"
    for name in keywords:
        if name not in template.traits.variables:
            raise errors.UnexpectedKeywordError(
                f"{name!r} {fault} a variable of the chat template. {did_you_mean(name, names)}",
                name,
            )


def checked_variables(chat_template_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the variables in *chat_template_kwargs*.

    Raises:
        InvalidArgumentError: it is not a mapping, or one of them is a parameter.
    """
    variables = {} if chat_template_kwargs is None else chat_template_kwargs
    if not isinstance(variables, Mapping):
        raise errors.InvalidArgumentError(
            f"{chat_template_kwargs=} must be a dict of variables.", "chat_template_kwargs"
        )
    if clash := sorted(_NOT_VARIABLES & variables.keys()):
        raise errors.InvalidArgumentError(
            f"chat_template_kwargs cannot hold {', '.join(clash)}; give it as a parameter.",
            "chat_template_kwargs",
        )
    return dict(variables)


def render_all(
    conversations: Sequence[Sequence[Message]],
    template: ChatTemplate,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    documents: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
    **flags: bool | None,
) -> list[str]:
    """Return the prompt of each conversation; *flags* are those of :meth:`ChatTemplate.render`.

    Raises:
        ChatTemplateError, PromptError, InvalidArgumentError: as :meth:`ChatTemplate.render`; or
            the template does not use the tools or documents.
    """
    template.check_use(tools=tools, documents=documents)
    for name in sorted(variables.keys() - template.chosen(tools).traits.variables):
        _log.warning("the chat template does not read the variable %r", name)
    render = partial(template.render, tools=tools, documents=documents, **flags, **variables)
    texts = []
    for index, messages in enumerate(conversations):
        try:
            texts.append(render(messages))
        except (errors.PromptError, errors.ChatTemplateError) as error:
            if len(conversations) == 1:
                raise
            raise type(error)(f"conversation {index}: {error}", error.parameter) from error
    return texts


def as_conversations(messages: object) -> list[list[Message]]:
    """Return one conversation or several as a list of them.

    Messages are dicts, or objects of the OpenAI client's types.

    Raises:
        PromptError: an item is not a message, or a conversation is empty.
    """
    if isinstance(messages, list | tuple) and messages:
        messages = [messages] if isinstance(as_mapping(messages[0]), Mapping) else messages
    if not isinstance(messages, list | tuple):
        raise errors.PromptError(
            f"messages must be a list of messages, or of such lists, not {messages!r}."
        )
    return [_conversation(one) for one in messages]


def _conversation(messages: object) -> list[Message]:
    if not isinstance(messages, list | tuple) or not messages:
        raise errors.PromptError(f"A conversation is {messages!r}; it must be a list of messages.")
    conversation = [as_mapping(message) for message in messages]
    for message in conversation:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise errors.PromptError(
                f"A message is {message!r}; it must be a dict like "
                "{'role': 'user', 'content': 'Hello'}."
            )
    return conversation
