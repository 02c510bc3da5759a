"""Base class of tool call formats: separates calls from text."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from opweave_engine.server.output.events import ArgumentsDelta, CallStart, ContentDelta, Event
from opweave_engine.server.output.source import MalformedError, Steps, TextSource

_ARGUMENTS = ("arguments", "parameters")


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
        self._spaces, self._calls = "", 0
        self._resume: int | None = None  # where text goes on that did not become a call

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
            markers = (self.opener, *(self.closers if self._calls else ()))
            marker = yield from source.until(markers, self._content)
            if marker is None:
                break
            if marker == self.opener:
                yield from self._attempt(source.position - len(marker), source.position)
        if self._spaces and not self._calls:
            self._emit(ContentDelta(self._spaces))

    def _begin(self) -> Steps[None]:
        """Parse calls at the beginning of the text that have no marker."""
        yield from ()

    @abstractmethod
    def _parse_calls(self) -> Steps[None]:
        """Parse what follows the opener.

        Raises:
            MalformedError: the text does not follow the format.
        """

    def _attempt(self, start: int, behind: int) -> Steps[None]:
        """Parse calls; without any, the text from *start* to *behind* is content."""
        source, calls = self._source, self._calls
        self._resume = behind
        try:
            yield from self._parse_calls()
        except MalformedError:
            if self._resume is not None:
                source.position = self._resume
            if self._calls == calls:
                self._content(source.text[start:behind])

    def _content(self, text: str) -> None:
        """Emit text, without the whitespace at its end, which a call may follow."""
        text = self._spaces + text
        kept = text.rstrip()
        self._spaces = text[len(kept) :]
        if kept:
            self._emit(ContentDelta(kept))

    def _start(self, name: str) -> None:
        self._spaces, self._resume = "", None
        self._calls += 1
        self._emit(CallStart(name))

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
        source, name, early, is_started, has_arguments = self._source, "", "", False, False
        yield from source.skip_spaces()
        yield from source.expect("{")
        while (yield from source.skip_spaces()) != "}":
            key = yield from source.json_string()
            yield from source.skip_spaces()
            yield from source.expect(":")
            is_arguments = key in _ARGUMENTS and not has_arguments
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
                yield from source.json_value(_ignore)
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


def _ignore(text: str) -> None:
    """Ignore text that is not part of a call."""
