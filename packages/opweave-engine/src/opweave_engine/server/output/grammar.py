"""The grammar of an answer with required calls, or with reasoning before a constrained form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from opweave_engine import StructuredOutputsParams
from opweave_engine.server.output.call_format import CallLayout
from opweave_engine.server.output.reasoning import BEGIN, END
from opweave_engine.structured.grammar_text import grammar_text
from opweave_engine.structured.json_schema import enforceable

Function = tuple[str, Mapping[str, Any] | bool]  # a name, and the JSON schema of the arguments
_SPACES = " ?"  # in arguments: no run of whitespace without an end


def answer_grammar(
    *,
    layout: CallLayout | None = None,
    functions: Sequence[Function] = (),
    is_parallel: bool = True,
    form: StructuredOutputsParams | None = None,
    reasoning: str | None = None,
    special: Mapping[str, int] = {},
) -> StructuredOutputsParams:
    """Return the constraint for an answer that consists of calls, has a given form, or either.

    Args:
        layout: the texts around calls; None: calls are not possible.
        functions: the functions that may be called.
        is_parallel: whether there may be several calls.
        form: the form of an answer without calls.
        reasoning: ``"may"``: the answer may begin with reasoning; ``"inside"``: the prompt has
            begun it; None: the output has no reasoning.
        special: the special tokens of the formats, by their text.

    Raises:
        MissingDependencyError: llguidance is not installed.
        ValueError: the notation of a grammar in *form* is unknown, or a schema is nested too
            deeply.
    """
    rules, grammars, bodies = [], [], []
    if layout is not None:
        rules += _calls(layout, functions, is_parallel, special)
        bodies.append("calls")
    if form is not None:
        text = grammar_text(form)
        known = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
        grammars.append({**known, "name": "form"})
        bodies.append("@form")
    rules += [f"body: {' | '.join(bodies)}"]
    rules += _start(reasoning, special)
    main = {"name": "main", "lark_grammar": "\n".join(rules)}
    return StructuredOutputsParams(grammar=json.dumps({"grammars": [main, *grammars]}))


def _calls(
    layout: CallLayout,
    functions: Sequence[Function],
    is_parallel: bool,
    special: Mapping[str, int],
) -> list[str]:
    rules = []
    for number, (name, schema) in enumerate(functions):
        options = {"x-guidance": {"whitespace_pattern": _SPACES}}
        spaced = {**options, **(enforceable(schema) if isinstance(schema, dict) else {})}
        head, tail = _literal(layout.head(name), special), _literal(layout.tail, special)
        rules += [
            f"call_{number}: {head} arguments_{number} {tail}",
            f"arguments_{number}: %json {json.dumps(spaced)}",
        ]
    more = f"({_literal(layout.separator, special)} call)*" if is_parallel else ""
    opening, closing = (_literal(text, special) for text in (layout.opening, layout.closing))
    return [
        *rules,
        "call: " + " | ".join(f"call_{number}" for number in range(len(functions))),
        f"calls: {opening} call {more} {closing}",
    ]


def _start(reasoning: str | None, special: Mapping[str, int]) -> list[str]:
    if reasoning is None:
        return ["start: body"]
    if END in special:
        thinking = [f"thinking: TEXT {_literal(END, special)}", "TEXT: /(.|\\n)*/"]
    else:
        end = re.escape(END).replace("/", "\\/")
        thinking = [f"thinking[lazy]: /(.|\\n)*{end}/"]
    before = "thinking SPACES"
    if reasoning == "may":
        before = f"({_literal(BEGIN, special)} {before})?"
    return [*thinking, "SPACES: /\\n{0,2}/", f"start: {before} body"]


def _literal(text: str, special: Mapping[str, int]) -> str:
    """Return *text* in Lark: strings, and special tokens by their ids."""
    if not text:
        return '""'
    names = sorted((name for name in special if name in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    return " ".join(
        f"<[{special[part]}]>" if part in names else json.dumps(part) for part in parts if part
    )
