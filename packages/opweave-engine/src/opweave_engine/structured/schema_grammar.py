"""JSON schemas and other constraints as grammars, in the notation that llguidance reads."""

import json
import re
from collections.abc import Mapping
from typing import Any

from opweave_engine.errors import require
from opweave_engine.structured.params import MAX_DEPTH, StructuredOutputsParams, too_deep

# JSON schemas in the part of the language that llguidance enforces.


# Values of these keywords are data, not schemas.
_DATA_KEYWORDS = {"const", "enum", "default", "examples", "dependentRequired"}
# Values of these keywords map names to schemas.
_KEYWORDS_OF_NAMED_SCHEMAS = {
    "properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies",
}  # fmt: skip
# Keywords that llguidance may refuse, by the type of the values that they apply to.
_KEYWORDS_OF_TYPE = {
    "array": ("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"),
    "object": (
        "propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas",
        "dependencies", "unevaluatedProperties",
    ),
    "string": ("format",),
}  # fmt: skip
# Keywords that evaluate properties or items by schemas of their own.
_EVALUATING_KEYWORDS = {
    "$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if",
    "dependentSchemas", "dependencies", "contains",
}  # fmt: skip
_ENFORCED_FORMATS = {
    "date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid",
}  # fmt: skip
_LITERAL = r"(?:[\w <>@#%&=:;,~/'\"!-]|\\[^\w|\\])+"  # without escapes for classes, such as \d
_LISTED_NAMES = re.compile(
    rf"\^(?P<group>\((?:\?:)?)?(?P<names>{_LITERAL}(?(group)(?:\|{_LITERAL})*))(?(group)\))\$"
)
_MAX_COPIED_CHARACTERS = 1024  # limit for a schema with several names; nested patterns multiply
_COUNT_KEYWORDS = ("minContains", "maxContains", "minItems", "maxItems")
_ANNOTATION_KEYWORDS = {
    "$comment", "title", "description", "default", "deprecated", "readOnly", "writeOnly",
    "examples",
}  # fmt: skip


def enforceable(schema: Any, *, is_closed: bool = False) -> Any:
    """Return an equivalent schema that llguidance takes, if there is one.

    llguidance refuses some keywords regardless of their value. Such a keyword is removed if its
    value accepts everything, if it applies to no value of the schema's ``type``, or if it is a
    ``format`` that is not enforced, which is an annotation according to the specification.
    Some others become equivalent ones. Keywords with another effect stay, so that llguidance
    refuses them.

    Args:
        schema: the schema; not changed.
        is_closed: forbid additional properties in every object whose schema names some.

    Raises:
        ValueError: the schema has more than MAX_DEPTH levels of nesting.
    """

    def rewrite(part: Any, depth: int) -> Any:
        """Return *part*, which is inside of *depth* objects and lists."""
        if not isinstance(part, list | Mapping):
            return part
        if depth > MAX_DEPTH:
            raise ValueError(too_deep("the schema"))
        if isinstance(part, list):
            return [rewrite(item, depth + 1) for item in part]
        keywords: dict[str, Any] = {}
        for name, value in part.items():
            if name in _DATA_KEYWORDS:
                keywords[name] = value
            elif name in _KEYWORDS_OF_NAMED_SCHEMAS and isinstance(value, Mapping):
                keywords[name] = {key: rewrite(inner, depth + 2) for key, inner in value.items()}
            else:
                keywords[name] = rewrite(value, depth + 1)
        if is_closed and keywords.keys() & {"properties", "patternProperties"}:
            keywords.setdefault("additionalProperties", False)
        simple = _without_unevaluated(_with_effect(keywords))
        return _without_literal_patterns(_with_item_counts(simple))

    return rewrite(schema, 0)


def _with_effect(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove the keywords that have no effect."""
    idle = {name for name, value in schema.items() if _is_idle(name, value)}
    types = schema.get("type")
    if isinstance(types, str | list):
        for type_, keywords in _KEYWORDS_OF_TYPE.items():
            if type_ not in ([types] if isinstance(types, str) else types):
                idle.update(keywords)
    if "if" not in schema or all(_accepts_all(schema.get(n, True)) for n in ("then", "else")):
        idle.update(("if", "then", "else"))
    names = schema.get("required")
    required = {n for n in names if isinstance(n, str)} if isinstance(names, list) else set()
    if schema.get("minProperties") in range(len(required) + 1):
        idle.add("minProperties")
    if schema.get("maxItems") in (0, 1):
        idle.add("uniqueItems")
    dependent = schema.get("dependentRequired")
    if isinstance(dependent, Mapping) and all(
        isinstance(names, list) and all(isinstance(n, str) and n in required for n in names)
        for names in dependent.values()
    ):
        idle.add("dependentRequired")
    return {name: value for name, value in schema.items() if name not in idle}


def _is_idle(name: str, value: Any) -> bool:
    """Whether a keyword with this value has no effect, regardless of the other keywords."""
    if name in ("uniqueItems", "not"):
        return value is False
    if name == "propertyNames" and isinstance(value, Mapping) and value.get("type") == "string":
        return _accepts_all({key: inner for key, inner in value.items() if key != "type"})
    if name in ("propertyNames", "unevaluatedItems", "unevaluatedProperties"):
        return _accepts_all(value)
    if name in ("dependentSchemas", "dependencies"):
        return isinstance(value, Mapping) and all(
            inner == [] or _accepts_all(inner) for inner in value.values()
        )
    if name == "format":
        return isinstance(value, str) and value not in _ENFORCED_FORMATS
    return name in ("$dynamicAnchor", "$recursiveAnchor")  # only $dynamicRef reads them


def _accepts_all(schema: Any) -> bool:
    return schema is True or (isinstance(schema, Mapping) and schema.keys() <= _ANNOTATION_KEYWORDS)


def _without_unevaluated(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace ``unevaluatedProperties`` and ``unevaluatedItems`` where no other schema evaluates.

    They then apply to the values that ``additionalProperties`` and ``items`` apply to.
    """
    if schema.keys() & _EVALUATING_KEYWORDS or isinstance(schema.get("items"), list):
        return schema
    rest = dict(schema)
    for name, equal in (
        ("unevaluatedProperties", "additionalProperties"),
        ("unevaluatedItems", "items"),
    ):
        if name in rest:
            rest.setdefault(equal, rest.pop(name))
    return rest


def _with_item_counts(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace ``contains`` by bounds on the number of items if it accepts every item."""
    counts = {name: schema[name] for name in _COUNT_KEYWORDS if name in schema}
    if not all(isinstance(count, int) for count in counts.values()):
        return schema
    names = ("contains", "minContains", "maxContains")
    rest = {name: value for name, value in schema.items() if name not in names}
    least, most = counts.get("minContains", 1), counts.get("maxContains")
    if "contains" not in schema or (least == 0 and most is None):
        return rest
    if not _accepts_all(schema["contains"]):
        return schema
    rest["minItems"] = max(least, counts.get("minItems", 0))
    if most is not None:
        rest["maxItems"] = min(most, counts.get("maxItems", most))
    return rest


def _without_literal_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    """Declare the properties whose names a pattern lists.

    If all of them are declared elsewhere, llguidance still expects another one after a comma, and
    cannot go on. With bounds on the number of properties, it takes no optional ones.
    """
    patterns, properties = schema.get("patternProperties"), schema.get("properties", {})
    if not isinstance(patterns, Mapping) or not isinstance(properties, Mapping):
        return schema
    if schema.keys() & {"minProperties", "maxProperties"}:
        return schema
    declared, others = dict(properties), dict(patterns)
    for pattern, inner in patterns.items():
        names = _listed_names(pattern)
        if len(names) > 1 and len(names) * len(json.dumps(inner)) > _MAX_COPIED_CHARACTERS:
            continue
        for name in names:
            declared[name] = {"allOf": [declared[name], inner]} if name in declared else inner
        if names:
            del others[pattern]
    return {**schema, "properties": declared, "patternProperties": others}


def _listed_names(pattern: str) -> list[str]:
    """Return the names that *pattern* matches if it is a list of them, as ``^(one|two)$``."""
    listed = _LISTED_NAMES.fullmatch(pattern)
    if listed is None:
        return []
    return list(dict.fromkeys(name.replace("\\", "") for name in listed["names"].split("|")))


# The grammar of each kind of constraint.


def grammar_text(params: StructuredOutputsParams) -> str:
    """Return the grammar that *params* describe.

    Raises:
        MissingDependencyError: llguidance is not installed.
        ValueError: the grammar's notation is not understood, or a schema is nested too deeply.
    """
    llguidance = require("llguidance")
    if params.kind in ("json", "json_object"):
        schema = {"type": "object"} if params.kind == "json_object" else params.schema
        if schema is False:
            raise ValueError("nothing satisfies the schema false")
        schema = {} if schema is True else schema
        schema = enforceable(schema, is_closed=params.disable_additional_properties)
        options: dict[str, Any] = {"whitespace_flexible": not params.disable_any_whitespace}
        if params.whitespace_pattern is not None:
            options["whitespace_pattern"] = params.whitespace_pattern
        text: str = llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps(schema), overrides=options
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
