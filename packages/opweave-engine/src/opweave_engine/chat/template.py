"""A chat template, in Jinja."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opweave.ir.errors import described
from opweave_engine.chat.files import DEFAULT, read_template, sources_of
from opweave_engine.chat.jinja import compile_template
from opweave_engine.chat.messages import Message, for_template, with_mark
from opweave_engine.chat.plain import shown
from opweave_engine.chat.traits import Traits
from opweave_engine.dependencies import require
from opweave_engine.errors import ChatTemplateError, InvalidArgumentError
from opweave_engine.loading.checkpoint import Checkpoint
from opweave_engine.tokenization.special_tokens import SpecialTokens

_WITH_TOOLS = "tool_use"  # the name of the template for requests with tools
# Where the last message ends in a prompt. Of private-use characters, which templates do not change.
_MARK = "\ue0f0opweave:end-of-message\ue0f1"


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template of a Hugging Face checkpoint.

    Templates run in a sandbox: they cannot call into Python or modify their arguments.

    Attributes:
        source: the template.
        origin: where it comes from.
        special_tokens: the special tokens by the names that templates know, such as ``bos_token``.
        named: the checkpoint's other templates; requests with tools use ``tool_use``.

    Raises:
        ChatTemplateError: the template is not valid Jinja.
    """

    source: str
    origin: str
    special_tokens: Mapping[str, str]
    named: Mapping[str, ChatTemplate] = field(default_factory=dict)
    traits: Traits = field(init=False, compare=False, repr=False)
    _template: Any = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        template, tree = compile_template(self.source, self.origin)
        object.__setattr__(self, "_template", template)
        object.__setattr__(self, "traits", Traits(self.source, tree))

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ChatTemplate | None:
        """Return the template of a checkpoint, or None if it has none.

        Raises:
            ChatTemplateError: it has one that is not valid Jinja.
            CheckpointError: its ``tokenizer_config.json`` is damaged.
        """
        tokens = SpecialTokens.of(checkpoint).named
        sources = sources_of(checkpoint)
        if not sources:
            return None
        first = sources.pop(DEFAULT if DEFAULT in sources else next(iter(sources)))
        named = {name: cls(*source, tokens) for name, source in sources.items()}
        return cls(*first, tokens, named)

    @classmethod
    def given(cls, template: str, checkpoint: Checkpoint) -> ChatTemplate:
        """Return the template that a user gives for a checkpoint.

        Args:
            template: the name of one of the checkpoint's templates, the name of a file, or the
                template itself.
            checkpoint: the checkpoint with the special tokens.

        Raises:
            ChatTemplateError: the file does not exist, or the template is not valid Jinja.
        """
        if not isinstance(template, str) or not template:
            raise ChatTemplateError(
                f"chat_template={template!r} must be the name of a file, or the template itself.",
                "chat_template",
            )
        tokens = SpecialTokens.of(checkpoint).named
        if (named := sources_of(checkpoint).get(template)) is not None:
            return cls(*named, tokens)
        if "{" in template or "\n" in template:
            return cls(template, "the template given", tokens)
        return cls(read_template(Path(template)), template, tokens)

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt, with the special tokens that it begins with.

        The messages are converted to the form that the template expects: see :func:`for_template`.

        Args:
            messages: the conversation.
            tools: the functions that the model may call; an empty list means None.
            documents: the documents that the model may cite.
            add_generation_prompt: end the prompt with the header of an assistant message; None:
                unless *continue_final_message* is set.
            continue_final_message: end the prompt with the text of the last message, which the
                model continues.
            variables: other variables of the template.

        Raises:
            PromptError: a message is malformed.
            ChatTemplateError: the template refuses the messages, or fails.
            InvalidArgumentError: an argument has the wrong type, or both *add_generation_prompt*
                and *continue_final_message* are set.
        """
        _check_lists(tools=tools, documents=documents)
        _check_flags(add_generation_prompt, continue_final_message)
        chosen = self.chosen(tools)
        ready = for_template(messages, chosen.traits)
        if continue_final_message:
            ready = with_mark(ready, _MARK)
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        text = chosen._rendered(
            {
                **self.special_tokens,
                **variables,
                "messages": ready,
                "tools": tools or None,
                "documents": documents or None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _before_mark(text) if continue_final_message else text

    def by_name(self, name: str) -> ChatTemplate | None:
        """Return the checkpoint's template of that name, or None."""
        return self if name == DEFAULT else self.named.get(name)

    def chosen(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        """Return the template for a request: with tools, the one named ``tool_use``, if any."""
        return self.named.get(_WITH_TOOLS, self) if tools else self

    def check_use(
        self,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Check that the template uses the tools and documents.

        Raises:
            ChatTemplateError: it does not.
        """
        known = self.chosen(tools).traits.variables
        for name, given in (("tools", tools), ("documents", documents)):
            if given and name not in known:
                raise ChatTemplateError(
                    f"The chat template does not use {name}, so that the model would not see "
                    "them; leave them out, or give a template that does (chat_template).",
                    name,
                )

    def _rendered(self, variables: Mapping[str, Any]) -> str:
        jinja2 = require("jinja2")
        try:
            # In one object: a variable may have any name, such as self.
            text: str = self._template.render(variables)
        except jinja2.TemplateError as error:
            why = " ".join(str(error).split())  # in one line
            raise ChatTemplateError(
                f"The chat template refuses the messages: {why}", "messages"
            ) from error
        # A template can fail in any way on messages that it does not expect.
        except Exception as error:
            raise ChatTemplateError(
                f"The chat template cannot handle the messages ({described(error)}).", "messages"
            ) from error
        return text


def _check_lists(**given: object) -> None:
    for name, value in given.items():
        entries = () if value is None else value
        if not isinstance(entries, list | tuple) or not all(
            isinstance(each, Mapping) for each in entries
        ):
            raise InvalidArgumentError(f"{name}={shown(value)} must be a list of dicts.", name)


def _check_flags(begins: bool | None, continues: bool | None) -> None:
    flags = {"add_generation_prompt": begins, "continue_final_message": continues}
    for name, flag in flags.items():
        if flag not in (None, True, False):
            raise InvalidArgumentError(f"{name}={shown(flag)} must be True or False.", name)
    if begins and continues:
        raise InvalidArgumentError(
            "continue_final_message=True continues the last message, and "
            "add_generation_prompt=True begins another one; give one of them.",
            "continue_final_message",
        )


def _before_mark(text: str) -> str:
    end = text.rfind(_MARK)
    if end < 0:
        raise ChatTemplateError(
            "continue_final_message=True is not possible: the chat template does not print the "
            "text of the last message as it is.",
            "continue_final_message",
        )
    return text[:end]
