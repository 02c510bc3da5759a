"""A side-by-side diff of two graphs, with unchanged lines folded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import NamedTuple

from opweave.compile.html.elements import Html, breakable, element, join

_CONTEXT = 3  # unchanged lines around a change
_FREED = re.compile(r";  (?:\w+ = )+None(?:;  (?:\w+ = )+None)*")
_SIGNATURE = re.compile(r"^(def \w+\()(.+)(\).*:)$")
_WORDS = re.compile(r"\w+|\s+|.")
_LONG = 100
_MOST = 250_000  # limit for the product of two lines' word counts, since comparing is quadratic
_ALIKE = 0.5  # ratio of common words above which changed words are highlighted


class Diff(NamedTuple):
    """The two columns, and the numbers of removed and added lines."""

    table: Html
    removed: int
    added: int


def diff(before: str, after: str) -> Diff:
    """Compare the source code of two graphs.

    Statements that free values (``; x = None``) are ignored, and long signatures are split into one
    line per parameter.
    """
    old, new = lines_of(before), lines_of(after)
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    blocks: list[Html] = []
    removed = added = 0
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag == "equal":
            blocks += _unchanged(old[i:j], i + 1, k + 1, first=i == 0, last=j == len(old))
        else:
            blocks.append(_changed(old[i:j], new[k:m], i + 1, k + 1))
            removed, added = removed + j - i, added + m - k
    return Diff(element("div", *blocks, class_="diff"), removed, added)


def lines_of(graph: str) -> list[str]:
    """Return the lines of a graph in the form in which they are compared and shown."""
    found: list[str] = []
    for line in graph.strip().split("\n"):
        shown = _FREED.sub("", line).rstrip()
        signature = _SIGNATURE.match(shown) if len(shown) > _LONG else None
        if signature is None:
            found.append(shown)
        else:
            head, parameters, tail = signature.groups()
            found += [head, *(f"    {p}," for p in _split(parameters)), tail]
    return found


def _split(parameters: str) -> Iterator[str]:
    """Split at commas outside brackets and quotes."""
    depth, start, quote = 0, 0, ""
    for i, character in enumerate(parameters):
        if quote or character in "\"'":
            quote = "" if character == quote else quote or character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            yield parameters[start:i].strip()
            start = i + 1
    yield parameters[start:].strip()


def _unchanged(
    lines: Sequence[str], old: int, new: int, *, first: bool, last: bool
) -> Iterator[Html]:
    """Show the lines next to a change, and fold the others."""
    head, tail = 0 if first else _CONTEXT, 0 if last else _CONTEXT
    folded = len(lines) - head - tail
    if folded < _CONTEXT:
        yield _same(lines, old, new)
        return
    if head:
        yield _same(lines[:head], old, new)
    middle = _same(lines[head : head + folded], old + head, new + head)
    summary = element("summary", f"{folded} unchanged lines")
    yield element("details", summary, middle, class_="fold")
    if tail:
        yield _same(lines[-tail:], old + head + folded, new + head + folded)


def _same(lines: Sequence[str], old: int, new: int) -> Html:
    left = [_line("same", old + i, line) for i, line in enumerate(lines)]
    right = [_line("same again", new + i, line) for i, line in enumerate(lines)]
    return _columns(left, right)


def _changed(old: Sequence[str], new: Sequence[str], at: int, to: int) -> Html:
    left, right = [], []
    for i, (before, after) in enumerate(zip_longest(old, new)):
        marked = _edited(before, after)
        left.append(_line("gap" if before is None else "del", at + i, marked[0]))
        right.append(_line("gap" if after is None else "ins", to + i, marked[1]))
    return _columns(left, right)


def _columns(left: list[Html], right: list[Html]) -> Html:
    """Return two columns of lines; narrow screens stack them."""
    return element("div", *left, *right, class_="rows", style=f"--rows:{len(left)}")


def _line(kind: str, number: int, content: object) -> Html:
    if kind == "gap":
        return element("div", class_="line gap")
    mark = {"del": "−", "ins": "+"}.get(kind, "")
    tag = kind if mark else "span"
    return element(
        "div",
        element("span", number, class_="number"),
        element("span", mark, class_="mark"),
        element(tag, element("code", breakable(content))),
        class_=f"line {kind}",
        aria_hidden="true" if kind == "same again" else None,
    )


def _edited(before: str | None, after: str | None) -> tuple[object, object]:
    """Highlight the words in which two similar lines differ."""
    if before is None or after is None:
        return before or "", after or ""
    old, new = _WORDS.findall(before), _WORDS.findall(after)
    if len(old) * len(new) > _MOST:
        return before, after
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    if matcher.ratio() < _ALIKE:
        return before, after
    left: list[object] = []
    right: list[object] = []
    for tag, i, j, k, m in matcher.get_opcodes():
        for parts, words in ((left, old[i:j]), (right, new[k:m])):
            word = "".join(words)
            shown = breakable(word)
            parts.append(shown if tag == "equal" or not word else element("mark", shown))
    return join(left), join(right)
