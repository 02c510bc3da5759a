"""Constraints in the notation that llguidance reads."""

from __future__ import annotations

import json
from typing import Any

from opweave_engine.dependencies import require
from opweave_engine.structured.json_schema import enforceable
from opweave_engine.structured.params import StructuredOutputsParams


def grammar_text(params: StructuredOutputsParams) -> str:
    """Return the grammar that *params* describe.

    Raises:
        MissingDependencyError: llguidance is not installed.
        ValueError: the grammar's notation is not understood, or a schema is nested too deeply.
    """
    llguidance = require("llguidance")
    matcher = llguidance.LLMatcher
    if params.kind in ("json", "json_object"):
        schema = {"type": "object"} if params.kind == "json_object" else params.schema
        if schema is False:
            raise ValueError("nothing satisfies the schema false")
        schema = {} if schema is True else schema
        schema = enforceable(schema, is_closed=params.disable_additional_properties)
        text: str = matcher.grammar_from_json_schema(
            json.dumps(schema), overrides=_json_options(params)
        )
    elif params.kind == "regex":
        text = f"start: /{llguidance.regex_to_lark(params.regex, 'dws')}/"
    elif params.kind == "choice":
        # One terminal: as rules, texts that begin alike would fill the parser's rows.
        text = "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, params.choice or ()))
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
