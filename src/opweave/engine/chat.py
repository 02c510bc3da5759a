"""Chat templates: the messages of a conversation as one prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from opweave.engine.checkpoint import Checkpoint
from opweave.engine.dependencies import require
from opweave.engine.errors import ChatTemplateError
from opweave.engine.special_tokens import SpecialTokens
from opweave.ir.errors import described

_FILE = "chat_template.jinja"

Message = Mapping[str, Any]  # role and content, as in OpenAI's API


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, in Jinja as checkpoints of Hugging Face bring it.

    Templates run in a sandbox: they can neither call into Python nor change what they are given.

    Attributes:
        source: the template.
        origin: where it comes from.
        special_tokens: what templates know by names such as ``bos_token``.

    Raises:
        ChatTemplateError: the template is no valid Jinja.
    """

    source: str
    origin: str
    special_tokens: Mapping[str, str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_template", _compile(self.source, self.origin))

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ChatTemplate | None:
        """Return the template of a checkpoint, or None if it has none.

        Raises:
            ChatTemplateError: it has one that is no valid Jinja.
            CheckpointError: its ``tokenizer_config.json`` is damaged.
        """
        config = checkpoint.json("tokenizer_config.json") or {}
        tokens = SpecialTokens.of(checkpoint).named
        file = checkpoint.path / _FILE
        if file.is_file():
            return cls(_read(file), str(file), tokens)
        source = _default(config.get("chat_template"))
        if source is None:
            return None
        return cls(source, f"{checkpoint.path / 'tokenizer_config.json'}: chat_template", tokens)

    @classmethod
    def given(cls, template: str, checkpoint: Checkpoint) -> ChatTemplate:
        """Return the template that a user gives for a checkpoint: a file's name, or the template.

        Raises:
            ChatTemplateError: there is no such file, or the template is no valid Jinja.
        """
        if not isinstance(template, str) or not template:
            raise ChatTemplateError(
                f"chat_template={template!r} must be the name of a file, or the template itself."
            )
        tokens = SpecialTokens.of(checkpoint).named
        if "{" in template or "\n" in template:
            return cls(template, "the template given", tokens)
        return cls(_read(Path(template)), template, tokens)

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the prompt, with the special tokens that it begins with.

        Args:
            messages: the conversation. A role ``developer`` that the template does not know is
                ``system``; what is None counts as not given, as templates expect.
            tools: the functions that the model may call.
            add_generation_prompt: end with what begins an answer.
            variables: what the template may ask for beside these.

        Raises:
            ChatTemplateError: the template refuses the messages, or fails.
        """
        jinja2 = require("jinja2")
        known = {
            **self.special_tokens,
            **variables,
            "messages": [self._as_known(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            # In one object: a variable may have any name, such as self.
            text: str = self._template.render(known)  # type: ignore[attr-defined]
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"The chat template refuses the messages: {error}") from error
        # What a template does with messages of any kind can fail in any way.
        except Exception as error:
            raise ChatTemplateError(
                f"The chat template cannot handle the messages ({described(error)})."
            ) from error
        return text

    def _as_known(self, message: Message) -> Message:
        given = {name: value for name, value in message.items() if value is not None}
        if given.get("role") == "developer" and "developer" not in self.source:
            return {**given, "role": "system"}
        return given


def _compile(source: str, origin: str) -> Any:
    jinja2, sandbox = require("jinja2"), require("jinja2.sandbox")
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_generation_extension(), "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson  # Jinja's own escapes HTML
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _namespace_class()
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"The chat template ({origin}) is no valid Jinja: line {error.lineno}: {error}."
        ) from error
    # Compiling computes what is constant, and nests as deeply as the template does.
    except Exception as error:
        raise ChatTemplateError(
            f"The chat template ({origin}) cannot be compiled ({described(error)})."
        ) from error


def _generation_extension() -> type:
    """Return the tag ``generation``, by which templates for training mark answers."""
    extension: Any = require("jinja2.ext").Extension
    scope = require("jinja2.nodes").Scope

    class Generation(extension):  # type: ignore[misc]
        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return scope(body, lineno=line)

    return Generation


def _namespace_class() -> type:
    """Return namespaces that take no names by which Python's internals could be reached."""
    namespace: Any = require("jinja2.utils").Namespace
    error = require("jinja2.exceptions").SecurityError

    class Namespace(namespace):  # type: ignore[misc]
        def __init__(self, /, *values: Any, **named: Any) -> None:
            for name in dict(*values, **named):
                _check(name)
            super().__init__(*values, **named)

        def __setitem__(self, name: str, value: Any) -> None:
            _check(name)
            super().__setitem__(name, value)

    def _check(name: object) -> None:
        if str(name).startswith("_"):
            raise error(f"a namespace takes no name with an underscore before it: {name!r}")

    return Namespace


def _raise_exception(message: str) -> NoReturn:
    raise require("jinja2").TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _read(file: Path) -> str:
    try:
        return file.expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ChatTemplateError(f"The chat template {str(file)!r} is not UTF-8.") from error
    except (OSError, ValueError, RuntimeError) as error:  # or no name that a file can have
        why = error.strerror if isinstance(error, OSError) else error
        raise ChatTemplateError(
            f"The chat template {str(file)!r} cannot be read: {why}. Give a file, or the template "
            "itself."
        ) from error


def _default(given: object) -> str | None:
    """Return the template to use: checkpoints may have several, by name."""
    if isinstance(given, str):
        return given
    named = {
        entry["name"]: entry["template"]
        for entry in (given if isinstance(given, list) else ())
        if isinstance(entry, dict) and {"name", "template"} <= entry.keys()
    }
    return named.get("default", next(iter(named.values()), None))
