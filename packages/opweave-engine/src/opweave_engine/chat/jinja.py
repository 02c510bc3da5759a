"""The Jinja environment that chat templates are written for."""

from __future__ import annotations

import json
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

from opweave.ir.errors import described
from opweave_engine.dependencies import require
from opweave_engine.errors import ChatTemplateError


def compile_template(source: str, origin: str) -> tuple[Any, Any]:
    """Return the compiled template, and its syntax tree.

    Raises:
        ChatTemplateError: *source* is not valid Jinja.
    """
    jinja2, environment = require("jinja2"), _environment()
    try:
        return environment.from_string(source), environment.parse(source)
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


@cache
def _environment() -> Any:
    sandbox = require("jinja2.sandbox")
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_generation_extension(), "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson  # Jinja's own escapes HTML
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _namespace_class()
    return environment


def _generation_extension() -> type:
    """Return the tag ``generation``, by which templates for training mark answers."""
    extension: Any = require("jinja2.ext").Extension
    scope = require("jinja2.nodes").Scope

    class GenerationTag(extension):  # type: ignore[misc]
        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return scope(body, lineno=line)

    return GenerationTag


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
