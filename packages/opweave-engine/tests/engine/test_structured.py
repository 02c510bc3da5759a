"""Constraints and their token masks, against brute force over the vocabulary."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from opweave_engine import (
    Checkpoint,
    EngineDeadError,
    GrammarQueueFullError,
    SamplingParams,
    SamplingParamsError,
    StructuredOutputsParams,
    Tokenizer,
)
from opweave_engine.sampling.sampler import SamplingRequest, adjusted
from opweave_engine.server.output_parser import Hermes, answer_grammar
from opweave_engine.structured import grammar_compiler, grammar_worker
from opweave_engine.structured.grammar_compiler import (
    GrammarCompiler,
    GrammarState,
    vocabulary_arguments,
)
from opweave_engine.structured.grammar_worker import Vocabulary, native_vocabulary
from opweave_engine.structured.params import MAX_DEPTH
from opweave_engine.structured.schema_grammar import enforceable
from server.fake_engine import CHECKPOINT, VOCABULARY
from support import ROOT

EOS = 2
PYDOC = Tokenizer(Checkpoint(CHECKPOINT))
GRAMMARS = GrammarCompiler(PYDOC, VOCABULARY, [EOS])


def constrained(ignore_eos: bool = False, **form: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**form), ignore_eos=ignore_eos)


def compiled(params: SamplingParams, grammars: GrammarCompiler = GRAMMARS) -> None:
    assert params.structured_outputs is not None
    grammars.compile(params.structured_outputs).result(60)


def started(grammars: GrammarCompiler = GRAMMARS, **form: Any) -> GrammarState:
    state = grammars.start(constrained(**form))
    assert state is not None
    return state


def allowed(state: GrammarState) -> list[int]:
    bits = np.unpackbits(np.frombuffer(state.mask.allowed, np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def text_of(state: GrammarState, draw: random.Random, most: int = 400) -> str | None:
    """Return a random text that the masks admit; None if it does not end."""
    tokens: list[int] = []
    for _ in range(most):
        choices = allowed(state)
        assert choices
        if EOS in choices and (len(choices) == 1 or draw.random() < 0.3):
            return PYDOC.decode(tokens)
        token = draw.choice([each for each in choices if each != EOS])
        tokens.append(token)
        GRAMMARS.advance([(state, token)])
        assert state.error is None
    return None


CHOICES = ["red", "reddish", "green and blue", "grün", "漢字", 'a "quoted" \\ text\n', "😀"]


def test_masks_of_a_choice_are_those_of_brute_force() -> None:
    pieces = {
        token: PYDOC.bytes_of(token)
        for token in range(VOCABULARY)
        if token not in PYDOC.special_ids
    }
    texts = [text.encode() for text in CHOICES]
    for chosen in texts:
        state, done = started(choice=CHOICES), b""
        while not state.is_complete:
            rest = [text[len(done) :] for text in texts if text.startswith(done)]
            wanted = {
                token
                for token, piece in pieces.items()
                if piece and any(text.startswith(piece) for text in rest)
            }
            found = set(allowed(state)) - {EOS}
            # Where all texts go on alike, only the tokenizer's own token is allowed.
            is_forced = len({text[:1] for text in rest}) == 1
            assert found == wanted or (is_forced and found and found < wanted)
            assert (EOS in allowed(state)) == (done in texts)
            if done == chosen:
                break
            token = random.choice(
                [t for t in found if chosen.startswith(done + (pieces[t] or b""))]
            )
            done += pieces[token] or b""
            GRAMMARS.advance([(state, token)])
        assert done == chosen
        assert allowed(state)[:1] == [EOS]


def test_masks_of_any_length_mix_in_a_batch() -> None:
    logits = torch.randn(3, 21)
    requests = [
        SamplingRequest(SamplingParams(), 0, allowed=bytes([0b1, 0, 0b10000, 0xFF])),
        SamplingRequest(SamplingParams(), 0, allowed=bytes([0b110])),
        SamplingRequest(SamplingParams(), 0, allowed=bytes([0, 0xFF, 0])),
    ]
    found = [row.isfinite().nonzero().flatten().tolist() for row in adjusted(logits, requests)]
    assert found == [[0, 20], [1, 2], list(range(8, 16))]


LETTERS = st.text("ab/é1 ", min_size=1, max_size=3).map(re.escape)
REGEXES = st.recursive(
    LETTERS
    | st.sampled_from([r"\d", r"[a-c]", r"[^x\n]", r"\w", r"\S", r".", r"[\w-]", "/", "\n"]),
    lambda inner: (
        st.tuples(inner, inner).map("".join)
        | st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})")
        | st.tuples(inner, st.sampled_from(["?", "{2}", "{0,3}", "{1,2}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        )
    ),
    max_leaves=6,
)


@given(REGEXES, st.randoms())
def test_texts_match_their_regular_expression(regex: str, draw: random.Random) -> None:
    text = text_of(started(regex=regex), draw)
    assert text is not None
    # A part of a character at the end cannot happen: the regex is over characters.
    assert re.fullmatch(regex, text, re.ASCII), (regex, text)


LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.tuples(st.integers(-50, 50), st.integers(0, 30)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": sum(pair)}
    ),
    st.tuples(st.integers(0, 2), st.integers(0, 3)).map(
        lambda pair: {"type": "string", "minLength": pair[0], "maxLength": sum(pair)}
    ),
    st.lists(st.sampled_from(["a", "é", 1, None, True]), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
    st.just({"type": "string", "pattern": "^[a-c]{1,3}$"}),
    st.just({"type": "string", "format": "date"}),
)


def _object(parts: list[Any], needed: int) -> dict[str, Any]:
    names = [f"p{number}" for number in range(len(parts))]
    return {
        "type": "object",
        "properties": dict(zip(names, parts, strict=True)),
        "required": names[:needed],
        "additionalProperties": False,
    }


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: (
        st.tuples(st.lists(inner, max_size=3), st.integers(0, 3)).map(lambda pair: _object(*pair))
        | st.tuples(inner, st.integers(0, 2)).map(
            lambda pair: {"type": "array", "items": pair[0], "maxItems": pair[1] + 1}
        )
        | st.tuples(inner, inner).map(lambda pair: {"anyOf": list(pair)})
    ),
    max_leaves=5,
)


@given(SCHEMAS, st.booleans(), st.randoms())
def test_texts_satisfy_their_json_schema(
    schema: dict[str, Any], is_compact: bool, draw: random.Random
) -> None:
    # Optional whitespace has no end of its own in a text that is drawn at random.
    spaces = {"disable_any_whitespace": True} if is_compact else {"whitespace_pattern": "[ \\n]?"}
    text = text_of(started(json=draw.choice([schema, json.dumps(schema)]), **spaces), draw)
    assert text is not None
    value = json.loads(text)
    jsonschema.validate(value, schema)
    if is_compact:
        assert not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*"', "", text))


def test_objects_are_closed_on_request() -> None:
    schema = {
        "type": "object",
        "properties": {"inner": {"$ref": "#/$defs/x"}, "properties": {"type": "null"}},
        "$defs": {"x": {"type": "object", "properties": {"a": {"enum": [{"properties": 1}]}}}},
    }
    other = '{"other":1'
    for closes in (False, True):
        state = started(
            json=schema, disable_additional_properties=closes, disable_any_whitespace=True
        )
        GRAMMARS.advance([(state, PYDOC.encode("{", add_special_tokens=False)[0])])
        for token in PYDOC.encode(other, add_special_tokens=False)[1:]:
            is_open = token in allowed(state)
            if not is_open:
                break
            GRAMMARS.advance([(state, token)])
        assert is_open != closes
    assert "additionalProperties" not in schema


OBJECT = {
    "type": "object",
    "properties": {"a": {"enum": [1]}},
    "required": ["a"],
    "additionalProperties": False,
}
ITEMS = {"type": "array", "items": {"enum": [1]}, "maxItems": 2}
WITHOUT_EFFECT: list[tuple[dict[str, Any], str, Any]] = [
    *((ITEMS, name, value) for name, value in {
        "uniqueItems": False,
        "minItems": 0,
        "contains": {"title": "any"},
        "minContains": 2,
        "maxContains": 0,
        "unevaluatedItems": True,
        "additionalItems": True,
        "propertyNames": {"pattern": "^x"},
        "minProperties": 3,
    }.items()),
    *((OBJECT, name, value) for name, value in {
        "propertyNames": True,
        "minProperties": 1,
        "patternProperties": {},
        "dependentRequired": {"b": []},
        "dependentSchemas": {"b": True},
        "dependencies": {"b": [], "c": {}},
        "unevaluatedProperties": {},
        "uniqueItems": True,
        "format": "email",
    }.items()),
    *(({"enum": ["x"]}, name, value) for name, value in {
        "minLength": 0,
        "format": "no-such-format",
        "pattern": "",
        "contentMediaType": "text/plain",
        "not": False,
        "if": {"type": "null"},
        "then": {"type": "null"},
        "else": {"type": "null"},
        "allOf": [True],
        "$comment": "x",
        "title": "x",
        "default": 1,
        "deprecated": True,
        "examples": [1],
        "$anchor": "x",
        "$dynamicAnchor": "x",
        "$defs": {"x": {"not": {}}},
        "unknown": 1,
    }.items()),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "name", "value"), WITHOUT_EFFECT)
def test_keywords_without_an_effect_are_accepted(
    schema: dict[str, Any], name: str, value: Any
) -> None:
    inner = {**schema, name: value}
    if name == "contains":
        inner["minContains"] = 0
    jsonschema.Draft202012Validator.check_schema(inner)
    draw = random.Random(1)
    for whole in (inner, {"anyOf": [{"$ref": "#/$defs/y"}], "$defs": {"y": inner}}):
        text = text_of(started(json=whole, disable_any_whitespace=True), draw)
        assert text is not None
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    "schema",
    [
        {**OBJECT, "propertyNames": {"type": "string", "title": "x"}},
        {**OBJECT, "unevaluatedProperties": False},
        {**{k: v for k, v in OBJECT.items() if k[:3] != "add"}, "unevaluatedProperties": False},
        {"type": "array", "prefixItems": [{"enum": [1]}], "unevaluatedItems": False},
        {**ITEMS, "unevaluatedItems": {"enum": [2]}},
        {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 1, "uniqueItems": True},
    ],
)
def test_keywords_that_others_express(schema: dict[str, Any]) -> None:
    for seed in range(8):
        state = started(json=schema, disable_any_whitespace=True)
        text = text_of(state, random.Random(seed))
        assert text is not None
        jsonschema.validate(json.loads(text), schema)


KEYWORDS = [
    "type", "required", "properties", "patternProperties", "additionalProperties", "propertyNames",
    "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
    "unevaluatedProperties", "unevaluatedItems", "items", "prefixItems", "uniqueItems", "contains",
    "minContains", "maxContains", "minItems", "maxItems", "format", "not", "if", "then", "else",
]  # fmt: skip
ODD = st.sampled_from([
    None, True, False, 0, 1, 2.5, "x", "(", "object", "array", [], [[]], ["a"], ["a", {}], {},
    {"a": [[]]}, {"a": ["b"]}, {"enum": [1]}, {"^a$": {"enum": [1]}}, {"a": {"enum": [1]}},
])  # fmt: skip


@given(st.dictionaries(st.sampled_from(KEYWORDS), ODD, max_size=5), st.randoms())
def test_a_schema_that_compiles_is_satisfied(schema: dict[str, Any], draw: random.Random) -> None:
    try:
        state = started(json=schema, disable_any_whitespace=True)
    except SamplingParamsError:
        return
    text = text_of(state, draw, 60)
    with suppress(jsonschema.SchemaError):
        jsonschema.Draft202012Validator.check_schema(schema)
        if text is not None:
            jsonschema.validate(json.loads(text), schema)


def test_an_unconditional_contains_bounds_the_number_of_items() -> None:
    schema = {"type": "array", "items": {"enum": [1]}, "contains": True}
    draw = random.Random(1)
    for bounds in ({}, {"minContains": 2}, {"maxContains": 1}, {"maxContains": 3, "maxItems": 2}):
        for _ in range(8):
            text = text_of(started(json={**schema, **bounds}, disable_any_whitespace=True), draw)
            assert text is not None
            jsonschema.validate(json.loads(text), {**schema, **bounds})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"type": ["array", "null"], "contains": {"type": "null"}},
        {"propertyNames": {"pattern": "^a"}},
        {"dependentRequired": {"a": ["b"]}},
        {"dependentSchemas": {"a": {"required": ["b"]}}},
        {"unevaluatedProperties": False, "anyOf": [{"properties": {"a": True}}]},
        {"unevaluatedItems": False, "contains": {"type": "null"}},
        {"properties": {"a": {}}, "minProperties": 1},
        {"not": {"type": "null"}},
        {"if": {"type": "null"}, "then": False},
        {"$dynamicRef": "#x", "$dynamicAnchor": "x"},
    ],
)
def test_keywords_with_an_effect_are_enforced_or_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(SamplingParamsError, match="cannot compile the JSON schema"):
        started(json=schema)


@pytest.mark.parametrize("schema", [
    {"properties": {"ab": True}, "patternProperties": {"^ab$": {"enum": [1]}}},
    {"properties": {"ab": {"enum": [1, 2]}, 'c"é': {"enum": [3]}},
     "patternProperties": {'^(ab|c"é)$': {"enum": [1, 3]}}, "required": ["ab"]},
    {"patternProperties": {"^ab$": {"enum": [1]}}, "required": ["ab"]},
    {"properties": {"ab": {"enum": [1]}, "x": {"enum": [1]}},
     "patternProperties": {"^ab$": {"enum": [1]}, "^y": False}},
    {"patternProperties": {r"^(?:a\.b|ab)$": {"enum": [1]}, "^ab$": {"type": "integer"}},
     "allOf": [{"properties": {"ab": {"enum": [1]}, "a.b": {"enum": [1]}}}]},
])  # fmt: skip
@pytest.mark.parametrize("is_compact", [True, False])
def test_patterns_that_match_only_declared_names(schema: dict[str, Any], is_compact: bool) -> None:
    schema = {"type": "object", "additionalProperties": False, **schema}
    spaces = {"disable_any_whitespace": True} if is_compact else {"whitespace_pattern": " ?"}
    texts = [text_of(started(json=schema, **spaces), random.Random(n)) for n in range(20)]
    for text in texts:
        assert text is not None
        jsonschema.validate(json.loads(text), schema)
    assert any("ab" in text for text in texts if text)


def test_enforced_formats_are_the_documented_ones() -> None:
    page = ROOT / "docs/how-to/structured-output.md"
    listed = page.read_text(encoding="utf-8").split("values of `format` are enforced: ")[1]
    names = re.findall("`([a-z0-9-]+)`", listed.split(".")[0])
    assert len(names) == 10
    others = ["regex", "json-pointer", "uri-reference", "iri", "idn-email", "idn-hostname"]
    for name in [*names, *others]:
        text = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "format": name}))
        assert LLMatcher(LLTokenizer("byte"), text, log_level=0).is_error() == (name in others)
        assert ("format" in enforceable({"format": name})) == (name in names)


@pytest.mark.parametrize(
    "wrap", [lambda inner: {"anyOf": [inner]}, lambda inner: {"properties": {"a": inner}}]
)
def test_a_schema_that_is_nested_too_deeply(
    wrap: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    schema: dict[str, Any] = {}
    for _ in range(MAX_DEPTH // 2):  # a wrapped schema has two more levels
        schema = wrap(schema)
    assert enforceable(schema) == schema
    StructuredOutputsParams(json=schema)
    with pytest.raises(ValueError, match=f"the schema exceeds the limit of {MAX_DEPTH} levels"):
        enforceable(wrap(schema))
    with pytest.raises(SamplingParamsError, match=f"json exceeds the limit of {MAX_DEPTH} levels"):
        StructuredOutputsParams(json=wrap(schema))


@pytest.mark.parametrize(
    "notation", ['root ::= "ab" | "(" root ")"', 'start: "ab" | "(" start ")"']
)
def test_grammars_in_both_notations(notation: str) -> None:
    draw = random.Random(3)
    found = {text_of(started(grammar=notation), draw, 30) for _ in range(10)} - {None}
    assert found
    for text in found:
        assert re.fullmatch(r"\(*ab\)*", text)
        assert text.count("(") == text.count(")")


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": r"(?=a)b"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreference"),
        ({"json": {"type": "foo"}}, "Invalid type: foo"),
        ({"json": {"$ref": "#/$defs/gone"}}, "does not exist"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "string", "pattern": "^a$", "minLength": 3}}, "Unsatisfiable"),
        ({"json": False}, "nothing satisfies the schema false"),
        ({"grammar": "no grammar"}, "Expected ::="),
        ({"grammar": 'root ::= "a" other'}, "other"),
        ({"grammar": "start: unknown"}, "unknown"),
    ],
)
def test_what_does_not_compile_says_why(form: dict[str, Any], message: str) -> None:
    for method in (compiled, GRAMMARS.start):
        with pytest.raises(
            SamplingParamsError, match="^structured_outputs: .*" + message
        ) as caught:
            method(constrained(**form))
        assert caught.value.parameter == "structured_outputs"
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar; got none"),
        ({"json_object": False}, "got none"),
        ({"json": {}, "regex": "a"}, "got json and regex"),
        ({"json": False, "choice": ["a"]}, "got json and choice"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": "[1]"}, "must be a JSON schema"),
        ({"json": 5}, "must be a JSON schema"),
        ({"json": {"a": {1}}}, "not valid JSON"),
        ({"choice": []}, "one or more strings"),
        ({"choice": "ab"}, "one or more strings"),
        ({"choice": ["a", 1]}, "one or more strings"),
        ({"regex": ""}, "regex='' must be a string"),
        ({"grammar": 3}, "grammar=3 must be a string"),
        ({"json_object": "yes"}, "json_object='yes'"),
        ({"json": {}, "whitespace_pattern": 1}, "whitespace_pattern=1"),
        ({"json": {}, "disable_any_whitespace": "x"}, "disable_any_whitespace='x'"),
    ],
)
def test_forms_that_contradict_themselves(form: dict[str, Any], message: str) -> None:
    with pytest.raises(SamplingParamsError, match=re.escape(message)) as caught:
        StructuredOutputsParams(**form)
    assert caught.value.parameter == "structured_outputs"


def test_the_parameter_is_checked() -> None:
    given: Any = {"json": {}}
    with pytest.raises(SamplingParamsError, match="must be StructuredOutputsParams"):
        SamplingParams(structured_outputs=given)


def test_a_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance

    grammars, count = GrammarCompiler(PYDOC, VOCABULARY, [EOS]), []
    real = llguidance.LLMatcher

    class Counted:
        grammar_from_regex = real.grammar_from_regex

        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            count.append(1)
            return real(*arguments, **options)

    monkeypatch.setattr(llguidance, "LLMatcher", Counted)
    states = [started(grammars, regex="a+") for _ in range(5)]
    assert len(count) == 1
    grammars.advance([(states[0], allowed(states[0])[0])])  # the others do not move
    assert allowed(states[1]) == allowed(started(grammars, regex="a+"))
    assert EOS not in allowed(states[1])


def test_a_model_without_an_end_of_text_token() -> None:
    grammars = GrammarCompiler(PYDOC, VOCABULARY, [])
    state = started(grammars, choice=["a", "a."])
    for text in ("a", "."):
        assert not state.is_complete
        token = PYDOC.encode(text, add_special_tokens=False)[0]
        assert token in allowed(state)
        grammars.advance([(state, token)])
    assert state.is_complete
    with pytest.raises(SamplingParamsError, match="only the empty one"):
        started(grammars, choice=[""])


# Limits, and grammars that end their process


def reference_chain(length: int, schema: Any = None, between: int = 0) -> dict[str, Any]:
    """A schema of *length* references in a row, each in *between* arrays."""
    definitions: dict[str, Any] = {f"d{length}": schema or {"type": "null"}}
    for i in range(length):
        part: Any = {"$ref": f"#/$defs/d{i + 1}"}
        for _ in range(between):
            part = {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}
        definitions[f"d{i}"] = part
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def rule_chain(length: int, arrow: str = ":", start: str = "start") -> str:
    rules = [f'r{i}{arrow} "a" r{i + 1}' for i in range(length)]
    return "\n".join([f"{start}{arrow} r0", *rules, f'r{length}{arrow} "b"'])


def nested(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "null"}


CRASHING = reference_chain(59, between=24)  # within the limits, but it overflows the stack
CHOICE_OF_30_000 = [f"item number {i}" for i in range(30_000)]
LARK_JSON = "start: a\na: %json "


@pytest.mark.parametrize(("form", "message"), [
    ({"json": reference_chain(4000)}, "json exceeds the limit of 2000 references"),
    ({"json": json.dumps(reference_chain(4000))}, "limit of 2000 references"),
    ({"json": reference_chain(61)}, "json exceeds the limit of 60 references in a chain"),
    ({"json": nested(101)}, "json exceeds the limit of 100 levels of nesting"),
    ({"json": "[" * 100_000}, "json exceeds the limit of 100 levels of nesting"),
    ({"json": {"title": "x" * 2**20}}, "json exceeds the limit of 1048576 bytes"),
    ({"grammar": rule_chain(4000)}, "grammar exceeds the limit of 1000 rules"),
    ({"grammar": rule_chain(4000, " ::=", "root")}, "limit of 1000 rules"),
    ({"grammar": "start: " + "x" * 2**17}, "grammar exceeds the limit of 131072 bytes"),
    ({"grammar": f"start: {'(' * 101}"}, "grammar exceeds the limit of 100 levels of nesting"),
    ({"grammar": LARK_JSON + json.dumps(reference_chain(61))}, "60 references in a chain"),
    ({"grammar": f'{LARK_JSON}{{"a":{"[" * 9000}'}, "limit of 100 levels of nesting"),
    ({"grammar": json.dumps({"grammars": [{"lark_grammar": rule_chain(600)}] * 2})},
     "limit of 1000 rules"),
    ({"grammar": json.dumps({"grammars": [{"json_schema": reference_chain(61)}]})},
     "60 references in a chain"),
    ({"grammar": "{"}, "grammar starts with { but is not valid JSON"),
    ({"regex": "a" * 2**17}, "regex exceeds the limit of 65536 bytes"),
    ({"regex": "(" * 101 + ")" * 101}, "regex exceeds the limit of 100 levels of nesting"),
    ({"json": {}, "whitespace_pattern": " " * 2**17}, "whitespace_pattern exceeds the limit"),
    ({"choice": ["a"] * 50_001}, "choice exceeds the limit of 50000 texts"),
    ({"choice": ["ä" * 2**20]}, "choice exceeds the limit of 1048576 bytes"),
])  # fmt: skip
def test_constraints_are_limited(form: dict[str, Any], message: str) -> None:
    with pytest.raises(SamplingParamsError, match=re.escape(message)):
        StructuredOutputsParams(**form)


@pytest.mark.parametrize(
    "character", ["\n", "[", '\\\\"', "/", "(", "%json {", "a[", '%json {"a":']
)
@pytest.mark.parametrize("kind", ["grammar", "regex"])
def test_limits_are_checked_in_linear_time(kind: str, character: str) -> None:
    text = character * (2**16 // len(character))
    began = time.process_time()
    with contextlib.suppress(SamplingParamsError):
        StructuredOutputsParams(**{kind: text})
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize("key", ["$ref", "allOf", "properties"])
def test_the_longest_chain_of_references_compiles_for_every_form(key: str) -> None:
    def schema(length: int) -> dict[str, Any]:
        chain = reference_chain(length, {"type": "object", "properties": {"a": {}}})
        if key != "$ref":
            for i in range(length):
                part = chain["$defs"][f"d{i}"]
                chain["$defs"][f"d{i}"] = {key: [part] if key == "allOf" else {"a": part}}
        return chain

    layout = Hermes.layout("")
    for form in (
        lambda schema: StructuredOutputsParams(json=schema),
        lambda schema: StructuredOutputsParams(json={"type": "object", **schema}),
        lambda schema: answer_grammar(
            layout=layout, functions=[("f", {"type": "object", **schema})]
        ),
    ):
        # One more reference leads to the first definition.
        GRAMMARS.start(SamplingParams(structured_outputs=form(schema(59))))
        with pytest.raises(SamplingParamsError, match="limit of 60 references in a chain"):
            form(schema(60))


TINY_LISTS: dict[str, Any] = {"enum": [[] for _ in range(130_000)]}
LARGE_SCHEMAS = {
    "references": lambda: reference_chain(10_000, between=2),
    "references in a text": lambda: json.dumps(reference_chain(10_000)),
    "tiny lists": lambda: TINY_LISTS,
    "tiny lists and references": lambda: {**TINY_LISTS, **reference_chain(59, between=8)},
    "many numbers": lambda: {"enum": [1] * 7_000_000},
    "many names": lambda: {"properties": dict.fromkeys(map(str, range(600_000)), True)},
    "long text": lambda: {"title": "a" * 15_000_000},
    "long text of a schema": lambda: "[" + "1," * 7_000_000 + "1]",
    "lists in lists": lambda: {"enum": [[[[]] * 10] * 10] * 1000},
}


@pytest.mark.parametrize("name", LARGE_SCHEMAS)
def test_the_limits_of_a_large_schema_are_checked_quickly(name: str) -> None:
    schema = LARGE_SCHEMAS[name]()
    gc.collect()
    started = time.process_time()
    with contextlib.suppress(SamplingParamsError):
        StructuredOutputsParams(json=schema)
    assert time.process_time() - started < 0.15


@pytest.mark.parametrize(
    "form",
    [
        {"json": reference_chain(59, {"type": "integer"})},
        # A cycle is not a chain, and a word in a list of values is not a reference.
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}}},
        {"json": {"enum": ["$ref", 1]}},
        {"json": nested(45)},
        {"grammar": rule_chain(300)},
        {"grammar": 'start: "' + "(" * 200 + '" /[(]{200}/ // ' + "(" * 200},
        {"grammar": 'root ::= [(] "a" # ' + "(" * 200},
        {"regex": r"\(" * 200 + "[(]"},
        {"grammar": LARK_JSON + json.dumps(reference_chain(50))},
    ],
)
def test_usual_constraints_are_within_the_limits(form: dict[str, Any]) -> None:
    assert allowed(started(**form))


def test_large_choices_that_begin_alike() -> None:
    draw = random.Random(0)
    assert text_of(started(choice=CHOICE_OF_30_000), draw) in CHOICE_OF_30_000


def test_a_grammar_that_ends_its_process_is_refused() -> None:
    for _ in range(2):  # the second time in a new process
        with pytest.raises(SamplingParamsError, match=r"too complex: .* with SIG[A-Z]+\."):
            GRAMMARS.start(constrained(json=CRASHING))
    assert allowed(started(regex="after"))


def test_a_grammar_that_takes_too_long_is_refused() -> None:
    grammars = GrammarCompiler(PYDOC, VOCABULARY, [EOS])
    compiled(constrained(regex="a"), grammars)
    grammars._slow.seconds = 0.05
    with pytest.raises(SamplingParamsError, match=r"choice: it takes longer than 0\.05 s"):
        grammars.start(constrained(choice=CHOICE_OF_30_000))
    process = grammars._quick._process
    assert process.is_running  # large ones never come to it
    niceness = os.getpriority(os.PRIO_PROCESS, process.pid)
    assert niceness > os.getpriority(os.PRIO_PROCESS, 0)  # it leaves the cores to the engine
    grammars._quick.seconds, grammars._slow.seconds = 0.0, 10.0
    assert allowed(started(grammars, regex="b"))  # it moves from one to the other
    grammars.close()


def test_memory_of_the_process_is_limited() -> None:
    code = (
        f"import runpy; program = runpy.run_path({grammar_worker.__file__!r})\n"
        "bytearray(200 << 20); program['_limit_memory'](); bytearray(200 << 20)\n"
        "try: bytearray(300 << 20)\nexcept MemoryError: print('limited')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "limited\n"


def test_closing_ends_what_is_compiled() -> None:
    grammars = GrammarCompiler(PYDOC, VOCABULARY, [EOS])
    compiled(constrained(choice=[*CHOICE_OF_30_000[:5000], "x" * 2**16]), grammars)
    process = grammars._slow._process
    params = StructuredOutputsParams(choice=CHOICE_OF_30_000)
    futures = [grammars.compile(params) for _ in range(3)]
    cancelled = grammars.compile(params)
    assert cancelled.cancel()
    grammars.close()
    for future in futures:
        with pytest.raises(EngineDeadError):
            future.result(10)
    assert not process.is_running


def test_small_grammars_do_not_wait_for_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, go_on = GrammarCompiler(PYDOC, VOCABULARY, [EOS]), threading.Event()
    monkeypatch.setattr(grammars._slow, "check", lambda *_: go_on.wait(60))
    large = [[*CHOICE_OF_30_000, str(i)] for i in range(3)]
    futures = [grammars.compile(StructuredOutputsParams(choice=choice)) for choice in large]
    assert allowed(started(grammars, regex="a"))
    monkeypatch.setattr(grammar_compiler, "_MAX_WAITING_SECONDS", 0.0)
    go_on.set()
    assert futures[0].result(60)
    with pytest.raises(GrammarQueueFullError, match="others take long"):
        futures[2].result(60)
    grammars.close()


def test_a_small_text_that_takes_much_memory_is_refused() -> None:
    with pytest.raises(SamplingParamsError, match=r"takes \d+ MiB of memory .* at most 64 MiB"):
        GRAMMARS.start(constrained(regex="(a?)" * 5000 + "a" * 5000))


def test_the_memory_of_a_compiled_grammar_is_counted() -> None:
    small, large = started(regex="a{10}").grammar, started(regex="(a{200}){200}").grammar
    assert small.size < 2**20
    assert 10 * 2**20 < large.size < 64 * 2**20


def test_the_memory_of_all_grammars_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = GrammarCompiler(PYDOC, VOCABULARY, [EOS])
    monkeypatch.setattr(grammars._quick, "check", lambda *_: 400)
    monkeypatch.setattr(grammar_compiler, "_HELD_BYTES", 1200)
    for letter in "abc":
        started(grammars, regex=letter)
    assert len(grammars._compiled) == 2
    answers = [started(grammars, regex=letter) for letter in "bc"]
    assert started(grammars, regex="small")
    monkeypatch.setattr(grammar_compiler, "_SMALL_BYTES", 100)
    with pytest.raises(GrammarQueueFullError, match="The grammars of unfinished answers take"):
        started(grammars, regex="d")
    answers.pop()
    assert started(grammars, regex="d")
    grammars.close()


# Tokenizers

TRAINED = (CHECKPOINT / "heldout.txt").read_text(encoding="utf-8")[:20_000]
SPECIAL = ["<unk>", "<s>", "</s>"]


def _sentencepiece() -> Backend:
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    hexes = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL + hexes, show_progress=False
    )
    backend.train_from_iterator([TRAINED], trainer)
    described = json.loads(backend.to_str())
    described["added_tokens"] = described["added_tokens"][: len(SPECIAL)]
    return Backend.from_str(json.dumps(described))


def _metaspace() -> Backend:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator([TRAINED], trainer)
    return backend


def _bytes() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TRAINED], trainer)
    return backend


@pytest.mark.parametrize("build", [_sentencepiece, _metaspace, _bytes])
def test_bytes_of_tokens(build: Any, tmp_path: Any) -> None:
    backend = build()
    backend.add_tokens([AddedToken("<tool_call>", normalized=False)])
    backend.enable_padding(length=32)  # which a tokenizer.json may ask for
    backend.enable_truncation(8)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    tokenizer = Tokenizer(Checkpoint(tmp_path))
    size = backend.get_vocab_size() + 40  # scores that no token has
    eos = backend.token_to_id("</s>")
    found = native_vocabulary(Vocabulary(*vocabulary_arguments(tokenizer, size, [eos])))
    assert found.vocab_size == size
    assert found.eos_tokens == [eos]
    for token in range(backend.get_vocab_size()):
        if token in tokenizer.special_ids:
            assert found.is_special_token(token)
        elif (known := tokenizer.bytes_of(token)) != b"\xff":  # no text has this byte
            assert found.decode_bytes([token]) == known
    # Every text can be written, also one with an added token or the name of a special one.
    grammars = GrammarCompiler(tokenizer, size, [eos])
    for text in ("a <tool_call> b", "<tool_call>", "return </s>", "<s>", " x", "déjà"):
        state, written = started(grammars, choice=[text]), b""
        while not state.is_complete and state.error is None:
            token = random.choice(allowed(state))
            written += tokenizer.bytes_of(token) or b""
            grammars.advance([(state, token)])
        if build is not _metaspace:  # which has no token for <
            assert written.decode() == text
