"""Parses a model's output while it arrives: reasoning, tool calls and text."""

import json
import logging
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeVar

from opweave_engine import CompletionOutput, StructuredOutputsParams
from opweave_engine.structured.schema_grammar import enforceable, grammar_text

# The formats in which a model writes tool calls and reasoning.


ToolCallParser = Literal[
    "auto", "none", "hermes", "llama3_json", "mistral", "deepseek", "deepseek_v3", "deepseek_v31"
]
ReasoningParser = Literal["auto", "none", "qwen3", "deepseek_r1"]


# Events of an output: deltas of content, reasoning and tool calls.


@dataclass(frozen=True)
class _TextDelta:
    text: str


class ContentDelta(_TextDelta):
    """Text for the user."""


class ReasoningDelta(_TextDelta):
    """Text that the model thinks before it answers."""


class ArgumentsDelta(_TextDelta):
    """More of the arguments of the call that began last."""


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a function begins."""

    name: str
    id: str


Event = ContentDelta | ReasoningDelta | CallStart | ArgumentsDelta


# Incremental text source for parsers that are written as coroutines.


T = TypeVar("T")
Steps = Generator[None, None, T]  # yields where it must wait for more text


class MalformedError(Exception):
    """The text does not follow the format."""


class TextSource:
    """The text so far, and the read position. Parsers must depend on the text alone.

    Attributes:
        text: the text that has arrived.
        position: the number of characters that are read.
        is_complete: whether the text is complete.
    """

    def __init__(self) -> None:
        self.text, self.position, self.is_complete = "", 0, False

    def peek(self) -> Steps[str]:
        """Return the next character, or "" at the end."""
        while self.position >= len(self.text) and not self.is_complete:
            yield
        return self.text[self.position : self.position + 1]

    def skip_spaces(self) -> Steps[str]:
        """Skip whitespace, and return the character after it."""
        while (character := (yield from self.peek())) and character.isspace():
            self.position += 1
        return character

    def take(self, literal: str) -> Steps[bool]:
        """Read *literal*, and return True, if it comes next."""
        while not self.text.startswith(literal, self.position):
            if self.is_complete or not literal.startswith(self.text[self.position :]):
                return False
            yield
        self.position += len(literal)
        return True

    def expect(self, literal: str) -> Steps[None]:
        """Read *literal*.

        Raises:
            MalformedError: something else comes next.
        """
        if not (yield from self.take(literal)):
            raise MalformedError

    def word(self, punctuation: str) -> Steps[str]:
        """Read letters, digits and characters in *punctuation*; return them."""
        start = self.position
        while (character := (yield from self.peek())) and (
            character.isalnum() or character in punctuation
        ):
            self.position += 1
        return self.text[start : self.position]

    def until(self, markers: Sequence[str], emit: Callable[[str], None]) -> Steps[str | None]:
        """Read and emit text up to the first of *markers*; return that, or None at the end.

        The marker is read, too, and not emitted. Text that may be the beginning of one is held
        back until that is decided.
        """
        while True:
            rest = self.text[self.position :]
            starts = {marker: rest.find(marker) for marker in markers if marker in rest}
            if starts:
                marker = min(starts, key=starts.__getitem__)
                emit(rest[: starts[marker]])
                self.position += starts[marker] + len(marker)
                return marker
            held = 0 if self.is_complete else max((_overlap(rest, m) for m in markers), default=0)
            emit(rest[: len(rest) - held])
            self.position += len(rest) - held
            if self.is_complete:
                return None
            yield

    def json_value(self, emit: Callable[[str], None]) -> Steps[None]:
        """Read a JSON value, and emit its text as it arrives.

        Raises:
            MalformedError: no JSON value comes next.
        """
        first = yield from self.skip_spaces()
        if first and first in "{[":
            yield from self._nested(emit)
        else:
            emit((yield from self._scalar(first)))

    def json_string(self) -> Steps[str]:
        """Read a JSON string, and return its value.

        Raises:
            MalformedError: no string comes next, or it is unterminated.
        """
        text = yield from self._scalar((yield from self.skip_spaces()))
        try:
            value = json.loads(text)
        except ValueError as error:
            raise MalformedError from error
        if not isinstance(value, str):
            raise MalformedError
        return value

    def _nested(self, emit: Callable[[str], None]) -> Steps[None]:
        """Read an object or a list; what is inside is not checked."""
        depth, in_string, escaped = 0, False, False
        while True:
            start = self.position
            while self.position < len(self.text):
                character = self.text[self.position]
                self.position += 1
                if in_string:
                    in_string = escaped or character != '"'
                    escaped = character == "\\" and not escaped
                elif character == '"':
                    in_string = True
                elif character in "{[":
                    depth += 1
                elif character in "}]":
                    depth -= 1
                    if not depth:
                        emit(self.text[start : self.position])
                        return
            emit(self.text[start : self.position])
            if self.is_complete:
                return
            yield

    def _scalar(self, first: str) -> Steps[str]:
        start, escaped = self.position, False
        if first == '"':
            self.position += 1
            while (character := (yield from self.peek())) and (escaped or character != '"'):
                escaped = character == "\\" and not escaped
                self.position += 1
            yield from self.expect('"')
        else:
            yield from self.word("+-.")
        if start == self.position:
            raise MalformedError
        return self.text[start : self.position]


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of *text* that *marker* begins with."""
    lengths = range(min(len(text), len(marker) - 1), 0, -1)
    return next((n for n in lengths if marker.startswith(text[-n:])), 0)


class _Trimmer:
    """Emits text without whitespace at its end, which is held back until other text follows.

    Attributes:
        spaces: the whitespace that is held back.
    """

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit, self.spaces = emit, ""

    def __call__(self, text: str) -> None:
        text = self.spaces + text
        trimmed = text.rstrip()
        self.spaces = text[len(trimmed) :]
        if trimmed:
            self._emit(trimmed)


# Base class of tool call formats: separates calls from text.


_ARGUMENTS_KEYS = ("arguments", "parameters")


@dataclass(frozen=True)
class CallLayout:
    """The texts around the arguments of calls, for a model that must call a function.

    Attributes:
        head: returns the text before the arguments of a call, with the name of the function.
        tail: the text after the arguments.
        opening: the text before the first call.
        separator: the text between two calls.
        closing: the text after the last call.
    """

    head: Callable[[str], str]
    tail: str = ""
    opening: str = ""
    separator: str = ""
    closing: str = ""


class CallFormat(ABC):
    """A format in which a model writes tool calls.

    Text that looks like a call but is not one is content. Whitespace around calls belongs to the
    format. A call is emitted as soon as its name is known, and its arguments as they arrive.

    Args:
        source: the text that the model writes.
        emit: receives the events.
        names: the names of the functions that may be called.

    Attributes:
        opener: the marker that calls begin with.
        closers: markers that are removed from the text after a call.
        markers: all texts of the format that may be special tokens.
    """

    opener: ClassVar[str]
    closers: ClassVar[Sequence[str]] = ()
    markers: ClassVar[Sequence[str]] = ()

    def __init__(
        self, source: TextSource, emit: Callable[[Event], None], names: Collection[str] = ()
    ) -> None:
        self._source, self._emit, self._names = source, emit, names
        self._content = _Trimmer(lambda text: emit(ContentDelta(text)))
        self._num_calls = 0
        self._resume: int | None = None  # position after a call, or after a failed attempt

    @classmethod
    @abstractmethod
    def layout(cls, template: str) -> CallLayout:
        """Return the texts around the arguments, as the source of a chat template has them."""

    @classmethod
    def new_id(cls) -> str:
        """Return an identifier for a call."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def parse(self) -> Steps[None]:
        """Parse the text to its end."""
        source = self._source
        yield from self._begin()
        while True:
            markers = (self.opener, *(self.closers if self._num_calls else ()))
            marker = yield from source.until(markers, self._content)
            if marker is None:
                break
            if marker == self.opener:
                yield from self._attempt(source.position - len(marker), source.position)
        if self._content.spaces and not self._num_calls:
            self._emit(ContentDelta(self._content.spaces))

    def _begin(self) -> Steps[None]:
        """Parse calls at the beginning of the text that have no marker."""
        yield from ()

    @abstractmethod
    def _parse_calls(self) -> Steps[None]:
        """Parse what follows the opener.

        Raises:
            MalformedError: the text does not follow the format.
        """

    def _attempt(self, start: int, end: int) -> Steps[None]:
        """Parse calls; without any, the text from *start* to *end* is content."""
        source, num_calls = self._source, self._num_calls
        self._resume = end
        try:
            yield from self._parse_calls()
        except MalformedError:
            if self._resume is not None:
                source.position = self._resume
            if self._num_calls == num_calls:
                self._content(source.text[start:end])

    def _start(self, name: str) -> None:
        self._content.spaces, self._resume = "", None
        self._num_calls += 1
        self._emit(CallStart(name, self.new_id()))

    def _arguments(self, text: str) -> None:
        if text:
            self._emit(ArgumentsDelta(text))

    def _end(self) -> None:
        """Note that a call is complete."""
        self._resume = self._source.position

    def _call_object(self, *, is_strict: bool = False) -> Steps[None]:
        """Parse an object with a name, arguments, and perhaps more.

        Args:
            is_strict: it is a call only if it names a known function and has arguments.

        Raises:
            MalformedError: it is not a call, or does not go on like one.
        """
        source, name, is_started, has_arguments = self._source, "", False, False
        early = ""  # arguments before the name
        yield from source.skip_spaces()
        yield from source.expect("{")
        while (yield from source.skip_spaces()) != "}":
            key = yield from source.json_string()
            yield from source.skip_spaces()
            yield from source.expect(":")
            is_arguments = key in _ARGUMENTS_KEYS and not has_arguments
            if key == "name" and not name:
                name = yield from source.json_string()
                if not name or (is_strict and name not in self._names):
                    raise MalformedError
            has_arguments = has_arguments or is_arguments
            if name and not is_started and (has_arguments or not is_strict):
                is_started = True
                self._start(name)
                self._arguments(early)
            if is_arguments and is_started:
                yield from self._value(self._arguments)
            elif is_arguments:
                parts: list[str] = []
                yield from self._value(parts.append)
                early = "".join(parts)
            elif key != "name":
                yield from source.json_value(lambda _: None)
            if (yield from source.skip_spaces()) != "}":
                yield from source.expect(",")
        source.position += 1
        if not is_started:
            raise MalformedError
        if not has_arguments:
            self._arguments("{}")
        self._end()

    def _value(self, emit: Callable[[str], None]) -> Steps[None]:
        """Parse arguments: an object, or a string that holds one."""
        source = self._source
        first = yield from source.skip_spaces()
        if first and first in "{[":
            yield from source.json_value(emit)
            return
        start = source.position
        try:
            if first == '"':
                emit((yield from source.json_string()))
                return
            parts: list[str] = []
            yield from source.json_value(parts.append)
        except MalformedError:
            emit(source.text[start : source.position])
            raise
        text = "".join(parts)
        emit("{}" if text == "null" else text)


# The formats in which models write tool calls.


class Hermes(CallFormat):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen write."""

    opener = "<tool_call>"
    closers = ("</tool_call>",)
    markers = (opener, *closers)

    @classmethod
    def layout(cls, template: str) -> CallLayout:
        return CallLayout(
            head=lambda name: f'{cls.opener}\n{{"name": {json.dumps(name)}, "arguments": ',
            tail=f"}}\n{cls.closers[0]}",
            separator="\n",
        )

    def _parse_calls(self) -> Steps[None]:
        yield from self._call_object()


class LlamaJson(CallFormat):
    """``{"name": ..., "parameters": {...}}``, alone or separated by semicolons, as of Llama 3.

    An answer that begins with an object is a call only if it names a function of the request.
    """

    opener = "<|python_tag|>"
    markers = (opener,)

    @classmethod
    def layout(cls, template: str) -> CallLayout:
        return CallLayout(
            head=lambda name: f'{{"name": {json.dumps(name)}, "parameters": ',
            tail="}",
            separator="; ",
        )

    def _begin(self) -> Steps[None]:
        if (yield from self._source.skip_spaces()) == "{":
            yield from self._attempt(0, 0)
        else:
            self._source.position = 0

    def _parse_calls(self) -> Steps[None]:
        source = self._source
        yield from self._call_object(is_strict=True)
        while (yield from source.skip_spaces()) == ";":
            source.position += 1
            yield from self._call_object(is_strict=True)


class Mistral(CallFormat):
    """``[TOOL_CALLS]`` and a list of calls, or ``[TOOL_CALLS]name[ARGS]{...}``."""

    opener = "[TOOL_CALLS]"
    markers = (opener, "[CALL_ID]", "[ARGS]")

    @classmethod
    def layout(cls, template: str) -> CallLayout:
        if "[ARGS]" in template:
            return CallLayout(head=lambda name: f"{cls.opener}{name}[ARGS]")
        return CallLayout(
            opening=f"{cls.opener}[",
            head=lambda name: f'{{"name": {json.dumps(name)}, "arguments": ',
            tail="}",
            separator=", ",
            closing="]",
        )

    @classmethod
    def new_id(cls) -> str:
        return uuid.uuid4().hex[:9]  # the only form that Mistral's templates accept

    def _parse_calls(self) -> Steps[None]:
        source = self._source
        first = yield from source.skip_spaces()
        if first == "[":
            source.position += 1
            yield from self._call_object()
            while (yield from source.skip_spaces()) == ",":
                source.position += 1
                yield from self._call_object()
            yield from source.expect("]")
        elif first == "{":
            yield from self._call_object()
        else:
            yield from self._named_call()

    def _named_call(self) -> Steps[None]:
        source = self._source
        name = yield from source.word("_-.")
        if (yield from source.take("[CALL_ID]")):
            yield from source.word("_-.")
        yield from source.take("[ARGS]")
        if not name or (yield from source.skip_spaces()) != "{":
            raise MalformedError
        self._start(name)
        yield from self._value(self._arguments)
        self._end()


class DeepSeek(CallFormat):
    """Calls between DeepSeek's markers: with the word ``function`` and a code block, or bare."""

    opener = "<｜tool▁calls▁begin｜>"
    begin, separator = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
    closers = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
    markers = (opener, begin, separator, *closers)

    @classmethod
    def layout(cls, template: str) -> CallLayout:
        is_block = "```json" in template
        before, after = f"{cls.begin}function{cls.separator}", "\n```json\n"
        return CallLayout(
            opening=cls.opener,
            head=lambda name: (
                f"{before}{name}{after}" if is_block else f"{cls.begin}{name}{cls.separator}"
            ),
            tail=("\n```" if is_block else "") + cls.closers[0],
            separator="\n" if is_block else "",
            closing=cls.closers[1],
        )

    def _parse_calls(self) -> Steps[None]:
        source = self._source
        yield from source.skip_spaces()
        yield from source.expect(self.begin)
        is_call = True
        while is_call:
            yield from self._call()
            yield from source.skip_spaces()
            is_call = yield from source.take(self.begin)
        yield from source.take(self.closers[1])

    def _call(self) -> Steps[None]:
        source = self._source
        name = yield from self._text_before(self.separator)
        if (yield from source.skip_spaces()) != "{":  # the first text was the type of the tool
            name = yield from self._text_before("\n")
            yield from source.skip_spaces()
            yield from source.take("```json")
        if not name or (yield from source.skip_spaces()) != "{":
            raise MalformedError
        self._start(name)
        yield from self._value(self._arguments)
        yield from source.skip_spaces()
        yield from source.take("```")
        yield from source.skip_spaces()
        yield from source.take(self.closers[0])
        self._end()

    def _text_before(self, marker: str) -> Steps[str]:
        parts: list[str] = []
        if (yield from self._source.until([marker], parts.append)) is None:
            raise MalformedError
        return "".join(parts).strip()


# Reasoning: text between ``<think>`` and ``</think>`` at the beginning of an answer.


BEGIN, END = "<think>", "</think>"


def split_reasoning(
    source: TextSource,
    emit: Callable[[Event], None],
    rest: Callable[[str], None],
    *,
    is_inside: bool,
) -> Steps[None]:
    """Emit the reasoning in *source*, and pass the text after it to *rest*.

    Whitespace around the reasoning is part of the format.

    Args:
        source: the text that the model writes.
        emit: takes the reasoning.
        rest: takes the text after it, or all of the text if there is no reasoning.
        is_inside: whether the prompt has begun the reasoning.
    """
    yield from source.skip_spaces()
    is_inside = (yield from source.take(BEGIN)) or is_inside
    if is_inside:
        yield from source.skip_spaces()
        yield from source.until([END], _Trimmer(lambda text: emit(ReasoningDelta(text))))
        yield from source.skip_spaces()
    else:
        source.position = 0
    yield from source.until((), rest)


def is_thinking(prompt: str) -> bool:
    """Whether *prompt* ends inside of the reasoning of the answer."""
    return prompt.rfind(BEGIN) > prompt.rfind(END) and prompt.rstrip().endswith(BEGIN)


# The output formats of a model, configured or detected from its chat template.


_log = logging.getLogger(__name__)

_FORMATS: dict[str, type[CallFormat] | None] = {
    "none": None,
    "hermes": Hermes,
    "llama3_json": LlamaJson,
    "mistral": Mistral,
    **dict.fromkeys(("deepseek", "deepseek_v3", "deepseek_v31"), DeepSeek),
}
# By text in the source of a chat template; the first match counts.
_FORMATS_BY_TEXT = {
    DeepSeek.opener: DeepSeek,
    Mistral.opener: Mistral,
    Hermes.opener: Hermes,
    LlamaJson.opener: LlamaJson,
    '"parameters": ': LlamaJson,
}
_UNKNOWN_MARKERS = ("<function=", "<arg_key>")  # calls in Hermes' markers that are not JSON


@dataclass(frozen=True)
class OutputStyle:
    """The formats that a model writes.

    Attributes:
        template: the source of its chat template.
        calls: the format of tool calls; None: tool calls stay text.
        has_reasoning: whether answers may begin with reasoning.
    """

    template: str
    calls: type[CallFormat] | None
    has_reasoning: bool

    @classmethod
    def of(
        cls, template: str, tool_call_parser: ToolCallParser, reasoning_parser: ReasoningParser
    ) -> Self:
        """Return the configured style, or the one detected from the template."""
        is_auto = tool_call_parser == "auto"
        calls = _detected_format(template) if is_auto else _FORMATS[tool_call_parser]
        is_auto = reasoning_parser == "auto"
        has_reasoning = END in template if is_auto else reasoning_parser != "none"
        return cls(template, calls, has_reasoning)


def _detected_format(template: str) -> type[CallFormat]:
    detected = next((kind for text, kind in _FORMATS_BY_TEXT.items() if text in template), None)
    is_unknown = detected is None or any(marker in template for marker in _UNKNOWN_MARKERS)
    if is_unknown and "tools" in template:
        _log.warning(
            "the format in which the model writes tool calls is not known from its chat template; "
            "assuming hermes (<tool_call> with JSON): calls in another format stay text, unless "
            "tool_choice requires one. Choose with --tool-call-parser"
        )
    return detected or Hermes


# The grammar of an answer with required calls, or with reasoning before a constrained form.


Function = tuple[str, Mapping[str, Any] | bool]  # a name, and the JSON schema of the arguments
_WHITESPACE_PATTERN = " ?"  # in arguments: without a limit, a model may never stop writing spaces


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
        notation = json.loads(text)["grammars"][0] if text[:1] == "{" else {"lark_grammar": text}
        grammars.append({**notation, "name": "form"})
        bodies.append("@form")
    rules += [f"body: {' | '.join(bodies)}"]
    rules += _start(reasoning, special)
    main = {"name": "main", "lark_grammar": "\n".join(rules)}
    return StructuredOutputsParams(grammar=json.dumps({"grammars": [main, *grammars]}))


def _calls(
    layout: CallLayout, functions: Sequence[Function], is_parallel: bool, special: Mapping[str, int]
) -> list[str]:
    rules = []
    for number, (name, schema) in enumerate(functions):
        options = {"x-guidance": {"whitespace_pattern": _WHITESPACE_PATTERN}}
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


# Parses an output incrementally.


@dataclass
class ParsedCall:
    """A function call so far."""

    id: str
    name: str
    arguments: str = ""


class AnswerParser:
    """Turns the growing text of one output into events, and accumulates its parts.

    The events do not depend on how the text was split into deltas.

    Args:
        call_format: the format of tool calls; None: tool calls are not parsed.
        names: the names of the functions that may be called.
        has_reasoning: whether the answer may begin with reasoning.
        is_thinking: whether the prompt has begun the reasoning.
        is_parallel: whether calls after the first one are kept.

    Attributes:
        content: the text for the user.
        reasoning: the reasoning before the content.
        calls: function calls, in order.
    """

    def __init__(
        self,
        call_format: type[CallFormat] | None = None,
        *,
        names: Collection[str] = (),
        has_reasoning: bool = False,
        is_thinking: bool = False,
        is_parallel: bool = True,
    ) -> None:
        self.content, self.reasoning, self.calls = "", "", list[ParsedCall]()
        self._is_parallel, self._num_calls = is_parallel, 0
        self._has_only_content = call_format is None and not has_reasoning
        self._events: list[Event] = []
        self._output, self._answer = TextSource(), TextSource()  # with and without the reasoning
        self._output_steps: Steps[object] = self._output.until((), self._add_answer)
        if has_reasoning:
            self._output_steps = split_reasoning(
                self._output, self._events.append, self._add_answer, is_inside=is_thinking
            )
        self._answer_steps: Steps[object] = self._answer.until((), self._add_content)
        if call_format is not None:
            self._answer_steps = call_format(self._answer, self._events.append, names).parse()

    def push(self, delta: CompletionOutput) -> list[Event]:
        """Return the events that a delta of the output adds."""
        if self._has_only_content:
            self.content += delta.text
            return [ContentDelta(delta.text)] if delta.text else []
        self._output.text += delta.text
        self._output.is_complete = delta.finish_reason is not None
        next(self._output_steps, None)
        self._answer.is_complete = self._output.is_complete
        next(self._answer_steps, None)
        events, self._events[:] = list(self._events), []
        return [event for event in events if self._accept(event)]

    def _add_answer(self, text: str) -> None:
        self._answer.text += text

    def _add_content(self, text: str) -> None:
        if text:
            self._events.append(ContentDelta(text))

    def _accept(self, event: Event) -> bool:
        """Add an event to the parts; return False if it belongs to a call that is ignored."""
        self._num_calls += isinstance(event, CallStart)
        is_accepted = self._is_parallel or self._num_calls < 2
        match event:
            case ContentDelta(text):
                self.content += text
                return True
            case ReasoningDelta(text):
                self.reasoning += text
                return True
            case CallStart(name, call_id) if is_accepted:
                self.calls.append(ParsedCall(call_id, name))
            case ArgumentsDelta(text) if is_accepted:
                self.calls[-1].arguments += text
        return is_accepted
