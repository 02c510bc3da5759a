"""Request bodies that could exhaust a server: each kind draws bodies with a seeded generator."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
USER = {"role": "user", "content": "Return a list"}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SHORT = {"max_tokens": 8, "temperature": 0}
WRONG = (
    *("null", "true", "1", "-1", "1.5", "1e999", "NaN", "9" * 30, '"a"', '"\\ud800"'),
    *("[]", "{}", "[[]]", '["a"]', "[{}]", '{"a":1}'),
)
# Values that replace a field; a text that starts with @ stands for itself without quotes.
REPLACEMENTS: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308),
    *(math.nan, math.inf, -math.inf, "@1e999", "@1e-999", "@" + "9" * 5000, "@-", "@01", "@'a'"),
    *("", "a", "\0", "\ud800", "\udfff\ud800", "🙂", "a" * 10_000, "1", "nan", "@" + "[" * 500),
    *([], {}, [[]], [None], [1], ["a"], [{}], {"a": 1}, {"": None}, [1, "a"], [[1], [2]]),
)
VALID: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {"prompt": "Return", **SHORT, "stop": ["a"], "seed": 1, "logprobs": 1}),
    (COMPLETIONS, {"prompt": ["a", "b"], **SHORT, "n": 2, "best_of": 2, "echo": True}),
    (COMPLETIONS, {"prompt": [1, 2], **SHORT, "stream": True, "stream_options": {}, "user": "u"}),
    (COMPLETIONS, {"prompt": "a", **SHORT, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "min_tokens": 1,
                   "presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.1,
                   "logit_bias": {"5": 1}, "bad_words": ["a"], "stop_token_ids": [1], "priority": 0,
                   "prompt_logprobs": 1, "truncate_prompt_tokens": 5, "cache_salt": "a"}),
    (COMPLETIONS, {"prompt": "a", **SHORT, "structured_outputs": {"choice": ["a", "b"]}}),
    (COMPLETIONS, {"prompt": "a", **SHORT, "guided_json": {"type": "object", "properties": {}}}),
    (CHAT, {"messages": [USER], **SHORT, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], **SHORT}),
    (CHAT, {"messages": [USER], **SHORT, "tools": [FUNCTION], "tool_choice": "required"}),
    (
        CHAT,
        {
            "messages": [USER],
            "max_completion_tokens": 8,
            "chat_template_kwargs": {"a": 1},
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": True},
            },
        },
    ),
    (RESPONSES, {"input": "a", "max_output_tokens": 8, "instructions": "a", "stream": True}),
    (RESPONSES, {"input": [USER], "max_output_tokens": 8, "text": {"format": {"type": "text"}}}),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "float", "dimensions": 8}),
    ("/tokenize", {"prompt": "Return a list", "add_special_tokens": True}),
    ("/tokenize", {"messages": [USER], "tools": [FUNCTION], "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
)  # fmt: skip
# Each field that takes a list: the endpoint, and a valid request with ITEMS for the list.
ITEMS = "ITEMS"
LISTS: tuple[tuple[str, dict[str, Any]], ...] = (
    *((COMPLETIONS, {"prompt": value}) for value in (ITEMS, [ITEMS])),
    *(
        (COMPLETIONS, {"prompt": "a", name: ITEMS})
        for name in ("stop", "bad_words", "stop_token_ids", "guided_choice", "allowed_token_ids")
    ),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"choice": ITEMS}}),
    (CHAT, {"messages": ITEMS}),
    (CHAT, {"messages": [{"role": "user", "content": ITEMS}]}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": ITEMS}]}),
    *((CHAT, {"messages": [USER], name: ITEMS}) for name in ("tools", "documents", "stop")),
    (RESPONSES, {"input": ITEMS}),
    (RESPONSES, {"input": [{"role": "user", "content": ITEMS}]}),
    (RESPONSES, {"input": "a", "tools": ITEMS}),
    *(("/v1/embeddings", {"input": value}) for value in (ITEMS, [ITEMS])),
    *(("/tokenize", {name: ITEMS}) for name in ("prompt", "messages")),
    ("/tokenize", {"messages": [USER], "tools": ITEMS}),
    ("/detokenize", {"tokens": ITEMS}),
)


@dataclass(frozen=True)
class Body:
    """A request.

    Attributes:
        path: the endpoint.
        content: the body.
        headers: further headers; Content-Length instead of the true one.
        cancel_after: seconds after which the client closes the connection, or None.
    """

    path: str
    content: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    cancel_after: float | None = None

    def __str__(self) -> str:
        """Return the request for a report, cut."""
        headers = f" {dict(self.headers)}" if self.headers else ""
        return f"{self.path}{headers} {len(self.content)} bytes: {self.content[:200]!r}"


Kind = Callable[[Random, int], Body]  # of a generator and the most bytes


def log_uniform(random: Random, high: float, low: float = 1) -> int:
    return int(math.exp(random.uniform(math.log(low), math.log(high))))


def body(path: str, values: object) -> Body:
    return Body(path, json.dumps(values).encode())


def with_schema(random: Random, schema: object) -> Body:
    """Return a request with a JSON schema in one of the fields that take one."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    flat = {"type": "json_schema", "name": "a", "schema": schema}
    chat = {"messages": [USER], **SHORT}
    requests: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {**chat, "response_format": form}),
        (CHAT, {**chat, "response_format": {"type": "json_object", "schema": schema}}),
        (CHAT, {**chat, "tools": [tool], "tool_choice": "required"}),
        (CHAT, {**chat, "structured_outputs": {"json": schema}}),
        (COMPLETIONS, {"prompt": "a", **SHORT, "guided_json": schema}),
        (RESPONSES, {"input": "a", "max_output_tokens": 8, "text": {"format": flat}}),
    ]
    return body(*random.choice(requests))


def with_constraint(random: Random, name: str, value: object) -> Body:
    """Return a request with a regex, a choice or a grammar."""
    form = {"structured_outputs": {name: value}} if random.random() < 0.5 else {
        f"guided_{name}": value
    }  # fmt: skip
    if random.random() < 0.5:
        return body(COMPLETIONS, {"prompt": "a", **SHORT, **form})
    return body(CHAT, {"messages": [USER], **SHORT, **form})


def reference_chain(random: Random, limit: int) -> Body:
    count = log_uniform(random, min(20_000, limit / 50))
    key = random.choice(["$ref", "allOf", "anyOf", "properties"])

    def link(index: int) -> dict[str, Any]:
        if index == count:
            return {"type": "integer"}
        next_one = {"$ref": f"#/$defs/r{index + 1}"}
        if key == "$ref":
            return next_one
        return {key: {"a": next_one} if key == "properties" else [next_one]}

    schema = {
        "$ref": "#/$defs/r0",
        "$defs": {f"r{index}": link(index) for index in range(count + 1)},
    }
    return with_schema(random, schema)


def schema_bounds(random: Random, limit: int) -> Body:
    """Return a small schema with huge bounds, or one with very many properties."""
    large = log_uniform(random, 10**12)
    count = log_uniform(random, min(100_000, limit / 40))
    schemas: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "string", "minLength": large, "maxLength": large},
        lambda: {"type": "array", "items": {"type": "integer"}, "minItems": large},
        lambda: {"type": "integer", "minimum": -large, "maximum": 10**300},
        lambda: {"type": "number", "multipleOf": 10.0 ** -random.randrange(300)},
        lambda: {"type": "object", "properties": {f"p{index}": {} for index in range(count)}},
        lambda: {"anyOf": [{"const": index} for index in range(count)]},
        lambda: {"enum": [f"{index:06}" for index in range(count)]},
        lambda: {
            "allOf": [
                {"type": "string", "pattern": f"a{{{index}}}"} for index in range(count % 300)
            ]
        },
    ]
    return with_schema(random, random.choice(schemas)())


def rule_chain(random: Random, limit: int) -> Body:
    count = log_uniform(random, min(20_000, limit / 20))
    line, last, start = random.choice([
        ("r{0}: r{1}", 'r{0}: "a"', "start: r0"),
        ('r{0}: "a" r{1} | r{1}', 'r{0}: "a"', "start: r0"),
        ('r{0}: r{0} r{1} | "b"', 'r{0}: "a"', "start: r0"),
        ("T{0}: T{1} T{1}", 'T{0}: "a"', "start: T0"),
        ("r{0} ::= r{1}", 'r{0} ::= "a"', "root ::= r0"),
    ])  # fmt: skip
    rules = [line.format(index, index + 1) for index in range(count)]
    return with_constraint(random, "grammar", "\n".join([start, *rules, last.format(count)]))


def choices(random: Random, limit: int) -> Body:
    count = log_uniform(random, min(30_000, limit / 16))
    prefix = random.choice(["", "item ", "a" * random.randrange(30), "🙂"])
    return with_constraint(random, "choice", [f"{prefix}{index}" for index in range(count)])


def regexes(random: Random, limit: int) -> Body:
    count = log_uniform(random, min(100_000, limit / 8))
    large = log_uniform(random, 10**6)
    regex = random.choice([
        "a" * count,
        "|".join(f"{index:x}" for index in range(count // 4 + 1)),
        "(a?)" * (count // 8) + "a" * (count // 8),
        f"(a{{{large}}}){{{large}}}",
        f"(.*a.{{{large % 3000}}})",
        f"(([ab]*c){{1,{large}}}d)*",
        "(" * (count // 2) + "a" + ")*" * (count // 2),
        f"[{'a-z' * (count // 3)}]",
        r"\p{L}{" + str(large) + "}",
    ])  # fmt: skip
    if random.random() < 0.3:
        return with_schema(random, {"type": "string", "pattern": regex})
    return with_constraint(random, "regex", regex)


def deep_nesting(random: Random, limit: int) -> Body:
    depth = log_uniform(random, limit / 4)
    opening, closing = random.choice(
        [("[", "]"), ('{"a":', "}"), ("[{", "}]"), ('["a",{"":', "}]")]
    )
    nested = opening * depth + ("1" if opening.endswith(":") else "") + closing * depth
    if random.random() < 0.3:  # brackets of other languages, and JSON in a text
        text = random.choice(["(" * depth + "a" + ")" * depth, nested])
        grammar = "start: " + "(" * depth + '"a"' + ")" * depth
        return random.choice([
            with_constraint(random, "regex", text),
            with_constraint(random, "grammar", grammar),
            body(COMPLETIONS, {"prompt": "a", **SHORT, "guided_json": nested}),
        ])  # fmt: skip
    if random.random() < 0.3:
        schema: dict[str, Any] = {"type": "integer"}
        for _ in range(min(depth, 200)):
            schema = random.choice([{"items": schema}, {"anyOf": [schema]}, {"not": schema}])
        return with_schema(random, schema)
    path, values = random.choice(VALID)
    return filled(path, {**values, random.choice([*values, "metadata", "x"]): ITEMS}, nested)


def filled(path: str, values: object, text: str) -> Body:
    """Return a request with *text* in place of ITEMS."""
    return Body(path, json.dumps(values).replace(f'"{ITEMS}"', text, 1).encode())


def wrong_items(random: Random, limit: int) -> Body:
    path, values = random.choice(LISTS)
    size = log_uniform(random, limit, min(limit, 1000))
    wrong, valid = random.choice(WRONG), random.choice(WRONG)
    start = random.choice(["", f"{valid},"])
    unit = random.choice([wrong, wrong, f"{valid},{wrong}"]) + ","
    return filled(path, values, f"[{start}{unit * (size // len(unit))}{wrong}]")


def long_text(random: Random, limit: int) -> str:
    size = log_uniform(random, limit, min(limit, 1000))
    unit = random.choice([
        *("a", " ", "\n", "Return a list of ", "ab ", "1", "🙂", "\u0301", "<|endoftext|>", "\0"),
        "".join(chr(random.randrange(32, 0x3000)) for _ in range(500)),
        " ".join(str(random.random()) for _ in range(50)),
    ])  # fmt: skip
    return unit * (size // len(unit.encode()))


def sometimes_cancelled(random: Random, path: str, values: object) -> Body:
    content = json.dumps(values, ensure_ascii=random.random() < 0.5).encode()
    delay = random.choice([None, None, random.uniform(0, 0.5)])
    return Body(path, content, cancel_after=delay)


def long_tokenizations(random: Random, limit: int) -> Body:
    return sometimes_cancelled(random, "/tokenize", {"prompt": long_text(random, limit)})


def long_prompts(random: Random, limit: int) -> Body:
    text = long_text(random, limit)
    return sometimes_cancelled(random, *random.choice([
        lambda: (COMPLETIONS, {"prompt": text, **SHORT}),
        lambda: (COMPLETIONS, {"prompt": [text[:5000]] * (len(text) // 5000 + 1), **SHORT}),
        lambda: (COMPLETIONS, {"prompt": [5] * (len(text) // 3), **SHORT}),
        lambda: (COMPLETIONS, {"prompt": "a", **SHORT, "stop": text}),
        lambda: (COMPLETIONS, {"prompt": "a", **SHORT, "bad_words": text.split()}),
        lambda: (CHAT, {"messages": [{"role": "user", "content": text}], **SHORT}),
        lambda: (CHAT, {"messages": [USER] * (len(text) // 50 + 1), **SHORT}),
        lambda: (RESPONSES, {"input": text, "max_output_tokens": 8}),
        lambda: ("/v1/embeddings", {"input": text}),
        lambda: ("/tokenize", {"messages": [{"role": "user", "content": text}]}),
        lambda: ("/detokenize", {"tokens": [5] * (len(text) // 3)}),
    ])())  # fmt: skip


def mutated(random: Random, values: Any) -> Any:
    """Return *values* with one field, at any depth, replaced, deleted or added."""
    if not isinstance(values, dict | list) or not values or random.random() < 0.05:
        return random.choice(REPLACEMENTS)
    copy = values.copy()
    key = random.choice([*values]) if isinstance(values, dict) else random.randrange(len(values))
    action = random.random()
    if action < 0.2:
        del copy[key]
    elif action < 0.3 and isinstance(copy, dict):
        copy[random.choice([key.upper(), f"{key} ", "x", ""])] = random.choice(REPLACEMENTS)
    elif action < 0.3:
        copy.append(random.choice(REPLACEMENTS))
    elif action < 0.6:
        copy[key] = random.choice(REPLACEMENTS)
    else:
        copy[key] = mutated(random, copy[key])
    return copy


def mutations(random: Random, limit: int) -> Body:
    path, values = random.choice(VALID)
    for _ in range(random.choice([1, 1, 2, 3])):
        values = mutated(random, values)
    text = json.dumps(values)
    if isinstance(values, dict) and values and random.random() < 0.1:  # a field given twice
        twice = {random.choice([*values]): random.choice(REPLACEMENTS)}
        position = random.choice([1, len(text) - 1])
        pair = json.dumps(twice)[1:-1]
        text = text[:position] + (f"{pair}, " if position == 1 else f", {pair}") + text[position:]
    return Body(path, re.sub(r'"@([^"]*)"', r"\1", text).encode())


def broken_bodies(random: Random, limit: int) -> Body:
    """Return a body that is not the JSON, or not the length, that its headers announce."""
    path, values = random.choice(VALID)
    content = json.dumps(values).encode()
    position = random.randrange(len(content))
    size = len(content)
    if random.random() < 0.1:
        bomb = b'{"prompt": "' + b"a" * log_uniform(random, 4 * limit, 1000) + b'"}'
        return Body(path, gzip.compress(bomb, 1), {"Content-Encoding": "gzip"})
    return random.choice([
        Body(path, content[:position]),
        Body(path, content[:position] + random.randbytes(3) + content[position:]),
        Body(path, content + random.choice([b"\0", b"}", b"{}", b"\xff", content])),
        Body(path, json.dumps(values).encode(random.choice(["utf-16", "utf-32", "utf-8-sig"]))),
        Body(path, content, {"Content-Length": str(size + log_uniform(random, 10**6))}, 0.2),
        Body(path, content, {"Content-Length": str(position)}),
        Body(path, content, {"Content-Length": random.choice(["-1", "x", "9" * 30, "", "1, 2"])}),
        Body(path, content, {"Content-Type": random.choice(["text/plain", "", "a/b;\xff"])}),
        Body(path, content, {"Transfer-Encoding": "chunked"}, 0.2),
        Body(path, content, {"Content-Encoding": random.choice(["gzip", "deflate", "br", "x"])}),
        Body(path, gzip.compress(content)[:-position - 1], {"Content-Encoding": "gzip"}),
        Body(path, random.randbytes(log_uniform(random, min(limit, 10**6)))),
    ])  # fmt: skip


KINDS: dict[str, Kind] = {
    "reference chains": reference_chain,
    "schema bounds": schema_bounds,
    "rule chains": rule_chain,
    "choices": choices,
    "regexes": regexes,
    "deep nesting": deep_nesting,
    "wrong items": wrong_items,
    "long prompts": long_prompts,
    "long tokenizations": long_tokenizations,
    "mutations": mutations,
    "broken bodies": broken_bodies,
}


def mixed(random: Random, limit: int) -> Body:
    return random.choice([*KINDS.values()])(random, limit)


ALL_KINDS: dict[str, Kind] = {**KINDS, "mixed": mixed}
