"""Tool calls in earlier messages of an assistant."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from opweave_engine.chat.plain import as_mapping, shown
from opweave_engine.errors import PromptError

_EXAMPLE = """it must be a JSON object such as '{"x": 1}'."""


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
        raise PromptError(f"{path} is {shown(calls)}; it must be a list.", "messages")
    return [_call(call, f"{path}.{index}", as_text) for index, call in enumerate(calls)]


def _call(call: object, path: str, as_text: bool) -> dict[str, Any]:
    call = as_mapping(call)
    if not isinstance(call, Mapping):
        raise PromptError(f"{path} is {shown(call)}; it must be an object.", "messages")
    given = {name: value for name, value in call.items() if value is not None}
    if "function" not in given:
        return _function(given, path, as_text)
    if not isinstance(function := as_mapping(given["function"]), Mapping):
        raise PromptError(
            f"{path}.function is {shown(function)}; it must be an object.", "messages"
        )
    return {**given, "function": _function(function, f"{path}.function", as_text)}


def _function(function: Mapping[str, Any], path: str, as_text: bool) -> dict[str, Any]:
    if not isinstance(function.get("name"), str):
        raise PromptError(f"{path} needs the 'name' of a function and its 'arguments'.", "messages")
    given = function.get("arguments")
    arguments = _object(given, f"{path}.arguments")
    if not as_text:
        return {**function, "arguments": arguments}
    is_written = isinstance(given, str) and arguments
    return {**function, "arguments": given if is_written else _json(arguments, path)}


def _object(arguments: object, path: str) -> Mapping[str, Any]:
    """Return the arguments of a call; none at all is an empty object."""
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments) if arguments.strip() else None
        except (ValueError, RecursionError) as error:
            raise PromptError(
                f"{path} is {shown(arguments)}, which is not valid JSON ({error}); {_EXAMPLE}",
                "messages",
            ) from error
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise PromptError(f"{path} is {shown(arguments)}; {_EXAMPLE}", "messages")
    return value


def _json(value: Mapping[str, Any], path: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(
            f"{path}.arguments cannot be written as JSON: {error}.", "messages"
        ) from error
