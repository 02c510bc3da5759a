"""Parameters of structured output, and their limits."""

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from opweave_engine.errors import SamplingParamsError

# Limits of the constraints that clients may send, checked before a native parser reads them.


MAX_BYTES = 2**20  # limit for a schema, a list of choices, or a composed grammar
MAX_GRAMMAR_BYTES = 2**17
MAX_REGEX_BYTES = 2**16
MAX_CHOICES = 50_000
MAX_DEPTH = 100
MAX_REFERENCES = 2000
# llguidance merges the schemas of a chain, of at most 64 references, if another keyword is next to
# its first one, such as the type of a function's arguments.
MAX_REFERENCE_CHAIN = 60
MAX_RULES = 1000

_CONTAINERS = (dict, list, tuple)  # the types that become JSON arrays and objects

# A rule starts a line in Lark (``?a{b}[c].1: ...``) and in GBNF (``a ::= ...``).
_RULE = re.compile(
    r"^[ \t]*[?!]?[\w-]+[ \t]*(?:\{[^}\n]*\})?(?:\[[^]\n]*\])?(?:\.-?\d+)?[ \t]*:", re.M
)
# Brackets in strings, character classes, regular expressions and comments are text. The ends are
# optional, so that matching takes linear time.
_GRAMMAR_TEXT = re.compile(
    r'"(?:\\.|[^"\\\n])*"?|\[\^?\]?(?:\\.|[^]\\\n])*\]?|/(?:\\.|[^/\\\n])+/?|(?:#|//)[^\n]*'
)
_REGEX_TEXT = re.compile(r"\\.|\[\^?\]?(?:\\.|[^]\\])*\]?", re.S)


def check_limits(values: Mapping[str, Any]) -> None:
    """Check the fields of structured output parameters.

    Args:
        values: the values by field; ``json`` is a parsed schema.

    Raises:
        ValueError: a value exceeds a limit, which the message names.
    """
    for name in ("regex", "whitespace_pattern"):
        if (regex := values.get(name)) is not None:
            _check_size(name, regex, MAX_REGEX_BYTES)
            _check_brackets(name, _REGEX_TEXT.sub("", regex))
    if (choice := values.get("choice")) is not None:
        _check_count("choice", "texts", len(choice), MAX_CHOICES)
        _check_size("choice", "".join(choice), MAX_BYTES)
    if (schema := values.get("json")) is not None:
        _check_schema("json", schema)
        _check_size("json", json.dumps(schema), MAX_BYTES)
    if (grammar := values.get("grammar")) is not None:
        _check_grammar(grammar)


def too_deep(name: str) -> str:
    """Return the message for a value that has more than MAX_DEPTH levels of nesting."""
    return f"{name} exceeds the limit of {MAX_DEPTH} levels of nesting"


def _check_schema(name: str, schema: Any) -> None:
    """Check a schema in one pass, which ends at the first limit that it exceeds."""
    nodes = [schema] if isinstance(schema, _CONTAINERS) else []
    parents = [-1]  # index of the parent of each node; nodes are in breadth-first order
    references: list[int] = []
    items = depth = 0
    end_of_level = 1
    for index, node in enumerate(nodes):
        if index == end_of_level:
            depth, end_of_level = depth + 1, len(nodes)
            _check_count(name, "levels of nesting", depth, MAX_DEPTH)
        items += len(node)
        _check_count(name, "bytes", 2 * items, MAX_BYTES)  # each has at least a digit and a comma
        if isinstance(node, dict) and "$ref" in node:
            references.append(index)
            _check_count(name, "references", len(references), MAX_REFERENCES)
        for child in node.values() if isinstance(node, dict) else node:
            if isinstance(child, _CONTAINERS):
                nodes.append(child)
                parents.append(index)
    if len(references) > MAX_REFERENCE_CHAIN:  # fewer cannot form a longer chain
        referring: set[int] = set()  # ids of the nodes with a reference in them
        for reference in references:
            index = reference
            while index >= 0 and id(nodes[index]) not in referring:
                referring.add(id(nodes[index]))
                index = parents[index]
        chain = _longest_chain(schema, referring)
        _check_count(name, "references in a chain", chain, MAX_REFERENCE_CHAIN)


def _longest_chain(schema: Any, referring: Set[int]) -> int:
    """Return the length of the longest chain of references.

    Args:
        schema: the schema.
        referring: the ids of the nodes with a reference in them.
    """
    # By node. A reference to a node that is still in progress closes a cycle, and ends a chain.
    longest: dict[int, int] = {}
    stack = [schema]
    while stack:
        node = stack[-1]
        target = _target(schema, node)
        values = node.values() if isinstance(node, dict) else node
        children = [child for child in values if id(child) in referring]
        if id(node) not in longest:
            longest[id(node)] = 0
            below = children if target is None else [*children, target]
            stack += [child for child in below if id(child) not in longest]
        else:
            stack.pop()
            chain = max([longest[id(child)] for child in children], default=0)
            if target is not None:
                chain = max(chain, 1 + longest[id(target)])
            longest[id(node)] = chain
    return longest[id(schema)]


def _target(schema: Any, node: Any) -> Any:
    """Return the part of *schema* that *node* refers to, or None."""
    reference = node.get("$ref") if isinstance(node, dict) else None
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    target = schema
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict):
            target = target.get(key)
        elif isinstance(target, list | tuple) and key.isdecimal() and int(key) < len(target):
            target = target[int(key)]
        else:
            return None
    return target if isinstance(target, dict) else None


def _check_grammar(grammar: str) -> None:
    if not grammar.startswith("{"):
        _check_size("grammar", grammar, MAX_GRAMMAR_BYTES)
        _check_count("grammar", "rules", _rules(grammar), MAX_RULES)
        return
    # llguidance's notation: several grammars, which refer to each other.
    _check_size("grammar", grammar, MAX_BYTES)
    try:
        parts = json.loads(grammar)
    except RecursionError:
        raise ValueError(too_deep("grammar")) from None
    except ValueError as error:
        raise ValueError(f"grammar starts with {{ but is not valid JSON: {error}") from error
    grammars = parts.get("grammars")
    rules = 0
    for part in grammars if isinstance(grammars, list) else ():
        if isinstance(part, dict):
            _check_schema("grammar", part.get("json_schema", {}))
            lark = part.get("lark_grammar")
            rules += max(1, _rules(lark) if isinstance(lark, str) else 0)
    _check_count("grammar", "rules", rules, MAX_RULES)


def _rules(grammar: str) -> int:
    """Check the nesting and the schemas in a grammar, and return the number of its rules."""
    decoder, start, rest = json.JSONDecoder(), 0, list[str]()
    for match in re.finditer(r"%json\s*(?=\{)", grammar):
        if match.start() < start:  # inside the schema before
            continue
        rest.append(grammar[start : match.start()])
        try:
            schema, start = decoder.raw_decode(grammar, match.end())
        except RecursionError:
            raise ValueError(too_deep("grammar")) from None
        except ValueError:  # llguidance says where
            start = match.end()
        else:
            _check_schema("grammar", schema)
    text = _GRAMMAR_TEXT.sub("", "".join([*rest, grammar[start:]]))
    _check_brackets("grammar", text)
    return sum(1 for _ in _RULE.finditer(text))


def _check_brackets(name: str, text: str) -> None:
    depth = 0
    for bracket in re.findall(r"[()]", text):
        depth += 1 if bracket == "(" else -1
        _check_count(name, "levels of nesting", depth, MAX_DEPTH)


def _check_size(name: str, text: str, limit: int) -> None:
    _check_count(name, "bytes", len(text.encode(errors="surrogatepass")), limit)


def _check_count(name: str, unit: str, count: int, limit: int) -> None:
    if count > limit:
        raise ValueError(f"{name} exceeds the limit of {limit} {unit}")


# Parameters of structured output.


NAME = "structured_outputs"  # the sampling parameter that holds the constraint
_KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True)
class StructuredOutputsParams:
    r"""A constraint on an answer; set exactly one of the first five fields.

    Attributes:
        json: a JSON schema, as a dict or as JSON text.
        json_object: any JSON object.
        regex: a regular expression that the whole answer matches; without look-around and
            backreferences. As with ``re.ASCII``, ``\d``, ``\w`` and ``\s`` are ASCII.
        choice: the answer is one of these texts.
        grammar: a context-free grammar in Lark or GBNF notation, or in llguidance's JSON.
        disable_any_whitespace: forbid optional whitespace in JSON.
        whitespace_pattern: a regular expression for the optional whitespace in JSON.
        disable_additional_properties: allow only properties that are in the schema, as with
            ``"additionalProperties": false``.

    Raises:
        SamplingParamsError: no field or several are set, or a value has the wrong type or exceeds
            a limit.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        kinds = self._kinds
        if len(kinds) != 1:
            names = " and ".join(kinds) or "none of them"
            raise _error(f"needs exactly one of {', '.join(_KINDS)}; got {names}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise _error(f"{name}={value!r} must be a string that is not empty")
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            if getattr(self, name) not in (None, True, False):
                raise _error(f"{name}={getattr(self, name)!r} must be True or False")
        if (choice := self.choice) is not None:
            is_list = isinstance(choice, list | tuple) and choice
            if not is_list or not all(isinstance(text, str) for text in choice):
                raise _error(f"{choice=} must be a list of one or more strings")
            object.__setattr__(self, "choice", tuple(choice))
        schema = None if self.json is None else self._checked_schema()
        try:
            check_limits({**vars(self), "json": schema})
        except TypeError as error:  # the schema has values that JSON lacks
            raise _error(f"json is not valid JSON: {error}") from error
        except ValueError as error:
            raise _error(str(error)) from error

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return self._kinds[0]

    @property
    def _kinds(self) -> list[str]:
        # json=False is a schema, which nothing satisfies, but json_object=False is the default.
        unset = {"json_object": (None, False)}
        return [name for name in _KINDS if getattr(self, name) not in unset.get(name, (None,))]

    @property
    def schema(self) -> Mapping[str, Any] | bool:
        """The JSON schema as an object."""
        assert self.json is not None
        if not isinstance(self.json, str):
            return self.json
        schema: Mapping[str, Any] | bool = json.loads(self.json)
        return schema

    def _checked_schema(self) -> Mapping[str, Any] | bool:
        if isinstance(self.json, str) and len(self.json) > MAX_BYTES:
            raise _error(f"json exceeds the limit of {MAX_BYTES} bytes")
        try:
            schema = self.schema
        except RecursionError as error:
            raise _error(too_deep("json")) from error
        except ValueError as error:
            raise _error(f"json is not valid JSON: {error}") from error
        if not isinstance(schema, Mapping | bool):
            raise _error(f"json={self.json!r} must be a JSON schema, which is an object")
        return schema


def _error(problem: str) -> SamplingParamsError:
    return SamplingParamsError(f"{NAME}: {problem}.", NAME)
