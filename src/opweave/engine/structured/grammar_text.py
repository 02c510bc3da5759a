"""Constraints in the notation that llguidance reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from opweave.engine.dependencies import require
from opweave.engine.structured.params import StructuredOutputsParams

# Values of these keywords are data, not schemas.
_DATA = {"const", "enum", "default", "examples"}
# Values of these keywords map names to schemas.
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}


def grammar_text(params: StructuredOutputsParams) -> str:
    """Return the grammar that *params* describe.

    Raises:
        MissingDependencyError: llguidance is not installed.
        ValueError: the grammar's notation is not understood.
    """
    llguidance = require("llguidance")
    matcher = llguidance.LLMatcher
    if params.kind in ("json", "json_object"):
        schema = {"type": "object"} if params.kind == "json_object" else params.schema
        if schema is False:
            raise ValueError("nothing satisfies the schema false")
        schema = {} if schema is True else schema
        text: str = matcher.grammar_from_json_schema(
            json.dumps(_closed(schema) if params.disable_additional_properties else schema),
            overrides=_json_options(params),
        )
    elif params.kind == "regex":
        text = f"start: /{llguidance.regex_to_lark(params.regex, 'dws')}/"
    elif params.kind == "choice":
        text = llguidance.grammar_from("choice", json.dumps(params.choice))
    elif params.grammar is not None and params.grammar.startswith("{"):
        text = params.grammar  # llguidance's own notation
    else:
        text = llguidance.grammar_from("grammar", params.grammar)
    return text


def _json_options(params: StructuredOutputsParams) -> dict[str, Any]:
    options: dict[str, Any] = {"whitespace_flexible": not params.disable_any_whitespace}
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    return options


def _closed(schema: Any) -> Any:
    """Forbid additional properties in every object whose schema names some."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _DATA:
            closed[name] = value
        elif name in _NAMED and isinstance(value, Mapping):
            closed[name] = {key: _closed(each) for key, each in value.items()}
        else:
            closed[name] = _closed(value)
    if "properties" in schema or "patternProperties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed
