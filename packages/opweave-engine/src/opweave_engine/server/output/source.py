"""Incremental text source for parsers that are written as coroutines."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

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
        while True:
            found = self.text[self.position : self.position + len(literal)]
            if not literal.startswith(found):
                return False
            if len(found) == len(literal):
                self.position += len(literal)
                return True
            if self.is_complete:
                return False
            yield

    def expect(self, literal: str) -> Steps[None]:
        """Read *literal*.

        Raises:
            MalformedError: something else comes next.
        """
        if not (yield from self.take(literal)):
            raise MalformedError

    def until(self, markers: Sequence[str], emit: Callable[[str], None]) -> Steps[str | None]:
        """Read and emit text up to the first of *markers*; return that, or None at the end.

        The marker is read, too, and not emitted. Text that may be the beginning of one is held
        back until that is decided.
        """
        while True:
            rest = self.text[self.position :]
            places = [(rest.find(marker), marker) for marker in markers]
            found = min((each for each in places if each[0] >= 0), default=None)
            if found is not None:
                emit(rest[: found[0]])
                self.position += found[0] + len(found[1])
                return found[1]
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
            while (character := (yield from self.peek())) and (
                character.isalnum() or character in "+-."
            ):
                self.position += 1
        if start == self.position:
            raise MalformedError
        return self.text[start : self.position]


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of *text* that *marker* begins with."""
    lengths = range(min(len(text), len(marker) - 1), 0, -1)
    return next((n for n in lengths if marker.startswith(text[-n:])), 0)
