"""Tool use: the functions that a model may or must call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from opweave_engine.server.errors import ApiError
from opweave_engine.server.output.grammar import Function

# As in OpenAI's API, a function without a description of its parameters has none.
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolUse:
    """The tool use of a request.

    Attributes:
        tools: the functions as the client describes them, for the chat template.
        names: the names of the functions that may be called.
        functions: the functions whose description is sufficient to constrain a call.
        required: the functions of which one must be called; None: the model decides.
        is_parallel: whether there may be several calls.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    names: frozenset[str] = frozenset()
    functions: Sequence[Function] = ()
    required: Sequence[Function] | None = None
    is_parallel: bool = True

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]] | None, choice: Any, parallel: Any) -> ToolUse:
        """Return the tool use that the fields of a request describe.

        Raises:
            ApiError: they contradict each other, or name an unknown function.
        """
        name = _named(choice)
        if choice == "none":
            return cls()
        if not tools:
            if choice in (None, "auto"):
                return cls(tools)
            raise ApiError(f"tool_choice={choice!r} needs tools.", param="tool_choice")
        is_parallel = parallel is not False
        if choice in (None, "auto"):
            known = list(_described(tools))
            return cls(tools, frozenset(name for name, _ in known), known, None, is_parallel)
        required = [_function(index, tool) for index, tool in enumerate(tools)]
        if name is not None:
            required = [each for each in required if each[0] == name]
            is_parallel = False
            if not required:
                raise ApiError(
                    f"tool_choice names the function {name!a}, which is not among the tools.",
                    param="tool_choice",
                )
        names = frozenset(each for each, _ in required)
        return cls(tools, names, required, required, is_parallel)


def _described(tools: Sequence[Mapping[str, Any]]) -> Iterator[Function]:
    for index, tool in enumerate(tools):
        with suppress(ApiError):
            yield _function(index, tool)


def _named(choice: Any) -> str | None:
    """Return the name of the function that must be called, if there is one.

    Raises:
        ApiError: *choice* is not valid.
    """
    if choice is None or choice in ("none", "auto", "required"):
        return None
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(choice, Mapping) or choice.get("type") != "function" or not name:
        raise ApiError(
            f"tool_choice={choice!r} is not supported. It may be 'none', 'auto', 'required' or "
            "{'type': 'function', 'function': {'name': NAME}}.",
            param="tool_choice",
            code="unsupported",
        )
    return str(name)


def _function(index: int, tool: Mapping[str, Any]) -> Function:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    schema = function.get("parameters") if isinstance(function, Mapping) else None
    if tool.get("type") != "function" or not isinstance(name, str) or not name:
        raise ApiError(
            f"tools.{index} must be {{'type': 'function', 'function': {{'name': NAME, ...}}}}.",
            param="tools",
        )
    if schema is not None and not isinstance(schema, dict):
        raise ApiError(f"tools.{index}.function.parameters must be a JSON schema.", param="tools")
    return name, {"type": "object", **schema} if schema else _NO_PARAMETERS
