"""Chat templates in Jinja, and the messages in the form that they expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from opweave.errors import shown
from opweave.ir.errors import described
from opweave_engine.chat.traits import Traits
from opweave_engine.errors import ChatTemplateError, InvalidArgumentError, PromptError
from opweave_engine.load.checkpoint import Checkpoint
from opweave_engine.tokenizer import SpecialTokens

# The Jinja environment that chat templates are written for.


def compile_template(source: str, origin: str) -> tuple[Any, Any]:
    """Return the compiled template, and its syntax tree.

    Raises:
        ChatTemplateError: *source* is not valid Jinja.
    """
    try:
        return _ENVIRONMENT.from_string(source), _ENVIRONMENT.parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"The chat template ({origin}) is not valid Jinja: line {error.lineno}: {error}.",
            "chat_template",
        ) from error
    # Compiling evaluates constant expressions, and recurses as deeply as the template nests.
    except Exception as error:
        raise ChatTemplateError(
            f"The chat template ({origin}) cannot be compiled ({described(error)}).",
            "chat_template",
        ) from error


class _GenerationTag(Extension):
    """The tag ``generation``, which marks answers in templates for training."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """A namespace without names that could reach Python's internals."""

    def __init__(self, /, *values: Any, **named: Any) -> None:
        for name in dict(*values, **named):
            _check_name(name)
        super().__init__(*values, **named)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace takes no name with an underscore before it: {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
)
_ENVIRONMENT.filters["tojson"] = _tojson  # Jinja's own filter escapes HTML
_ENVIRONMENT.globals |= {
    "raise_exception": _raise_exception,
    "strftime_now": lambda form: datetime.now().strftime(form),
    "namespace": _Namespace,
}


# Values that clients send: as plain objects, and in error messages.


def as_mapping(value: Any) -> Any:
    """Return an object of a pydantic model as a dictionary, and anything else as it is.

    The OpenAI client returns messages and tool calls as such objects, which programs append to
    their conversations.
    """
    dump = getattr(value, "model_dump", None)
    return dump() if callable(dump) else value


def _malformed(path: str, value: object, expected: str) -> PromptError:
    """Return the error for *value*, which is at *path* in the messages."""
    return PromptError(f"{path} is {shown(value)}; it must be {expected}.", "messages")


# The content of a message: a text, or a list of parts.


# The types of parts that are text, and the key that holds it.
_TEXT_KEYS = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    **{kind: kind for kind in ("refusal", "thinking")},
}


class TextParts(list[dict[str, str]]):
    """Content in parts, for templates that read parts; elsewhere it behaves like its text.

    Some templates read the parts of one role, and concatenate the content of another.
    """

    @classmethod
    def of(cls, texts: list[str]) -> TextParts:
        """Return a part for each text."""
        return cls({"type": "text", "text": text} for text in texts)

    def __str__(self) -> str:
        return "".join(part["text"] for part in self)

    def __add__(self, other: Any) -> Any:
        return str(self) + other if isinstance(other, str) else super().__add__(other)

    def __radd__(self, other: str) -> str:
        return other + str(self)

    def __contains__(self, item: object) -> bool:
        return item in str(self) if isinstance(item, str) else super().__contains__(item)

    def __getattr__(self, name: str) -> Any:
        return getattr(str(self), name)


def texts_of(content: object, path: str) -> str | list[str]:
    """Return the content of a message as a text, or as the texts of its parts.

    Raises:
        PromptError: it is of another type, or a part is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return str(content)
    if not isinstance(content, list | tuple):
        raise _malformed(path, content, "a string, a list of text parts, or null")
    return [_text(part, f"{path}.{index}") for index, part in enumerate(content)] or ""


def in_shape(texts: str | list[str], traits: Traits) -> str | TextParts:
    """Return the content in the form that a template with these traits expects.

    Args:
        texts: a text, or the texts of several parts; without parts, they are joined by newlines.
        traits: the traits of the template.
    """
    if isinstance(texts, str):
        return TextParts.of([texts]) if traits.needs_parts else texts
    return TextParts.of(texts) if traits.takes_parts else "\n".join(texts)


def _text(part: object, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise _malformed(path, part, "an object or a string")
    kind = part.get("type", "text")
    if (key := _TEXT_KEYS.get(kind) if isinstance(kind, str) else None) is None:
        raise PromptError(
            f"{path}: a part of type {shown(kind)} is not supported; the model takes parts of type "
            "'text'.",
            "messages",
        )
    if (text := part.get(key)) is None:
        raise PromptError(f"{path}: a part of type {shown(kind)} needs {key!r}.", "messages")
    if not isinstance(text, str):
        raise _malformed(f"{path}.{key}", text, "a string")
    return text


# Tool calls in earlier messages of an assistant.


_ARGUMENTS_EXAMPLE = """a JSON object such as '{"x": 1}'"""


def tool_calls(calls: object, path: str, *, as_text: bool) -> list[dict[str, Any]]:
    """Return the calls of a message in the form that a template expects.

    Args:
        calls: as in OpenAI's API; the name and arguments of a function may be outside of
            ``function``.
        path: where they are in the request.
        as_text: whether the template prints arguments unchanged, so that they must be JSON text;
            other templates expect objects.

    Raises:
        PromptError: a call has no function, or its arguments are not an object.
    """
    if not isinstance(calls, list | tuple):
        raise _malformed(path, calls, "a list")
    return [_call(call, f"{path}.{index}", as_text) for index, call in enumerate(calls)]


def _call(call: object, path: str, as_text: bool) -> dict[str, Any]:
    call = as_mapping(call)
    if not isinstance(call, Mapping):
        raise _malformed(path, call, "an object")
    fields = {name: value for name, value in call.items() if value is not None}
    if "function" not in fields:
        return _function(fields, path, as_text)
    if not isinstance(function := as_mapping(fields["function"]), Mapping):
        raise _malformed(f"{path}.function", function, "an object")
    return {**fields, "function": _function(function, f"{path}.function", as_text)}


def _function(function: Mapping[str, Any], path: str, as_text: bool) -> dict[str, Any]:
    if not isinstance(function.get("name"), str):
        raise PromptError(f"{path} needs the 'name' of a function and its 'arguments'.", "messages")
    original = function.get("arguments")
    arguments = _object(original, f"{path}.arguments")
    if not as_text:
        return {**function, "arguments": arguments}
    is_json = isinstance(original, str) and arguments
    return {**function, "arguments": original if is_json else _json(arguments, path)}


def _object(arguments: object, path: str) -> Mapping[str, Any]:
    """Return the arguments of a call; none at all is an empty object."""
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments) if arguments.strip() else None
        except (ValueError, RecursionError) as error:
            raise PromptError(
                f"{path} is {shown(arguments)}, which is not valid JSON ({error}); it must be "
                f"{_ARGUMENTS_EXAMPLE}.",
                "messages",
            ) from error
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _malformed(path, arguments, _ARGUMENTS_EXAMPLE)
    return value


def _json(value: Mapping[str, Any], path: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(
            f"{path}.arguments cannot be written as JSON: {error}.", "messages"
        ) from error


# Conversion of messages to the form that a chat template expects.


Message = Mapping[str, Any]  # role and content, as in OpenAI's API

_ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # one field in several APIs
_UNSUPPORTED_FIELDS = {
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
    return [_message(message, f"messages.{i}", traits) for i, message in enumerate(messages)]


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
    fields = {name: value for name, value in message.items() if value is not None}
    for name, why in _UNSUPPORTED_FIELDS.items():
        if name in fields and not traits.mentions(name):
            raise PromptError(f"{path}.{name} is not supported; {why}.", "messages")
    fields["role"] = _role(fields.get("role"), path, traits)
    if calls := fields.pop("tool_calls", None):
        fields["tool_calls"] = tool_calls(
            calls, f"{path}.tool_calls", as_text=traits.takes_arguments_as_text
        )
    texts = texts_of(fields.get("content"), f"{path}.content")
    is_null = not texts and calls and traits.needs_null_content
    fields["content"] = None if is_null else in_shape(texts, traits)
    reasoning = next((fields[name] for name in _REASONING_FIELDS if name in fields), None)
    if reasoning is not None:
        fields = {**dict.fromkeys(_REASONING_FIELDS, reasoning), **fields}
        fields[_REASONING_FIELDS[0]] = reasoning
    return fields


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


# The chat templates of a checkpoint by name.


_FILE, _FOLDER = "chat_template.jinja", "additional_chat_templates"
DEFAULT = "default"

Source = tuple[str, str]  # a template, and where it is from


def sources_of(checkpoint: Checkpoint) -> dict[str, Source]:
    """Return the templates of a checkpoint; files take precedence over ``tokenizer_config.json``.

    Raises:
        ChatTemplateError: a file cannot be read.
        CheckpointError: ``tokenizer_config.json`` is damaged.
    """
    value = (checkpoint.json("tokenizer_config.json") or {}).get("chat_template")
    origin = f"{checkpoint.path / 'tokenizer_config.json'}: chat_template"
    sources = {name: (source, origin) for name, source in _named(value).items()}
    for file in sorted((checkpoint.path / _FOLDER).glob("*.jinja")):
        sources[file.stem] = (read_template(file), str(file))
    if (file := checkpoint.path / _FILE).is_file():
        sources[DEFAULT] = (read_template(file), str(file))
    return sources


def read_template(file: Path) -> str:
    """Return the text of *file*.

    Raises:
        ChatTemplateError: it cannot be read.
    """
    try:
        return file.expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ChatTemplateError(
            f"The chat template {str(file)!r} is not UTF-8.", "chat_template"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:  # or a name that no file can have
        why = error.strerror if isinstance(error, OSError) else error
        raise ChatTemplateError(
            f"The chat template {str(file)!r} cannot be read: {why}. Give a file, or the template "
            "itself.",
            "chat_template",
        ) from error


def _named(value: object) -> dict[str, str]:
    """Return the templates in ``chat_template`` by name."""
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, list):  # entries like {"name": ..., "template": ...}
        entries = [(e.get("name"), e.get("template")) for e in value if isinstance(e, dict)]
    else:
        entries = list(value.items()) if isinstance(value, dict) else []
    return {n: t for n, t in entries if isinstance(n, str) and isinstance(t, str)}


# A chat template, in Jinja.


_TOOL_TEMPLATE_NAME = "tool_use"  # the name of the template for requests with tools
# Marks the end of the last message in a prompt. Templates do not change private-use characters.
_END_MARK = "\ue0f0opweave:end-of-message\ue0f1"


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
            ready = with_mark(ready, _END_MARK)
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
        return self.named.get(_TOOL_TEMPLATE_NAME, self) if tools else self

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
        variables = self.chosen(tools).traits.variables
        for name, value in (("tools", tools), ("documents", documents)):
            if value and name not in variables:
                raise ChatTemplateError(
                    f"The chat template does not use {name}, so that the model would not see "
                    "them; leave them out, or give a template that does (chat_template).",
                    name,
                )

    def _rendered(self, variables: Mapping[str, Any]) -> str:
        try:
            # One mapping instead of keywords, because a variable may have any name, such as self.
            text: str = self._template.render(variables)
        except jinja2.TemplateError as error:
            why = " ".join(str(error).split())
            raise ChatTemplateError(
                f"The chat template refuses the messages: {why}", "messages"
            ) from error
        # A template can fail in any way on messages that it does not expect.
        except Exception as error:
            raise ChatTemplateError(
                f"The chat template cannot handle the messages ({described(error)}).", "messages"
            ) from error
        return text


def _check_lists(**arguments: object) -> None:
    for name, value in arguments.items():
        is_list = isinstance(value, list | tuple) and all(isinstance(v, Mapping) for v in value)
        if value is not None and not is_list:
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
    end = text.rfind(_END_MARK)
    if end < 0:
        raise ChatTemplateError(
            "continue_final_message=True is not possible: the chat template does not print the "
            "text of the last message as it is.",
            "continue_final_message",
        )
    return text[:end]
