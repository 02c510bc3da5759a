"""Render reports as one self-contained HTML page, with light and dark themes."""

from __future__ import annotations

import base64
import hashlib
import html
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from opweave.compile.report import Report, alike

_TEMPLATES = Path(__file__).parent / "templates"


def render(reports: Sequence[Report], title: str, facts: Mapping[str, str] | None = None) -> str:
    """Return an HTML page that shows *reports*.

    The page loads no other files, and its content security policy admits only its own script.

    Args:
        reports: one per graph, in order of compilation.
        title: the title of the page.
        facts: names and values to show below the title: versions, the device, the command.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        finalize=_printable,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"breakable": breakable, "seconds": seconds, "size": size}
    environment.globals |= {
        f.__name__: f
        for f in (alike, color, common_folder, count, diff, reuse_groups, split_source)
    }
    style, script = (
        (_TEMPLATES / name).read_text(encoding="utf-8") for name in ("style.css", "filter.js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = environment.get_template("page.html")
    return page.render(
        reports=reports, title=title, facts=facts or {}, style=style, script=script, digest=digest
    )


# Filters and functions of the template.


_LONG_NAME = re.compile(r"[\w.]{16,}\(?")
_BREAKS = re.compile(r"[_.(](?=.)|\($")


def _printable(value: Any) -> Any:
    """Return *value* with invisible characters as Python escape sequences."""
    if value is None or hasattr(value, "__html__"):
        return "" if value is None else value
    return "".join(map(_visible, str(value)))


def _visible(character: str) -> str:
    """Escape control characters, surrogates and bidirectional marks."""
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs"):
        return character
    return character.encode("unicode_escape").decode("ascii")


def breakable(value: object) -> str:
    """Return *value* as HTML, with line breaks in long names after underscores and dots.

    >>> breakable("x_1 = torch.ops.aten.mm.default(x, w)")
    'x_1 = torch.<wbr>ops.<wbr>aten.<wbr>mm.<wbr>default(<wbr>x, w)'
    """
    escaped = html.escape(_printable(value))
    return _LONG_NAME.sub(lambda name: _BREAKS.sub(r"\g<0><wbr>", name[0]), escaped)


def color(provider: str, providers: Iterable[str]) -> int:
    """Return the color of a provider: 0, gray, for native, otherwise by index."""
    others = [name for name in providers if name != "native"]
    return others.index(provider) % 6 + 1 if provider in others else 0


def common_folder(sources: Iterable[str]) -> str:
    """Return the deepest folder with all files of *sources* (``file:line: code``), or ""."""
    files = {file for file, _ in map(split_source, sources) if os.path.isabs(file)}
    folders = {os.path.dirname(file.rpartition(":")[0]) for file in files}
    folder = os.path.commonpath(folders) if folders else ""
    return "" if folder == os.path.sep else folder


def split_source(source: str) -> tuple[str, str]:
    """Split a source line into ``file:line`` and the code.

    >>> split_source("/models/llama.py:12: y = f(x)")
    ('/models/llama.py:12', 'y = f(x)')
    """
    file, separator, line_and_code = source.partition(".py:")
    line, _, code = line_and_code.partition(": ")
    return (f"{file}{separator}{line}", code) if line.isdigit() else (source, "")


def reuse_groups(report: Report) -> list[tuple[tuple[str, str, str, str], int]]:
    """Return the memory decisions as (verb, op, activation, reason), with their numbers."""
    decisions = Counter(
        (reuse.verb, node.op, reuse.activation, reuse.reason)
        for node in report.nodes
        for reuse in node.reuse
    )
    return sorted(decisions.items())


def seconds(value: float) -> str:
    """Format a duration.

    >>> seconds(4.06), seconds(0.0123), seconds(0.00042), seconds(1e-5)
    ('4.1 s', '12 ms', '0.4 ms', '< 0.1 ms')
    """
    if value >= 1:
        return f"{value:.1f} s"
    if value >= 0.01:
        return f"{value * 1e3:.0f} ms"
    return f"{value * 1e3:.1f} ms" if value >= 0.0001 else "< 0.1 ms"


def size(number: int) -> str:
    """Format a number of bytes.

    >>> size(512), size(24_576), size(3_300_000_000)
    ('512 B', '24.6 kB', '3.3 GB')
    """
    value = float(number)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


def count(number: int, noun: str, plural: str = "") -> str:
    """Format a number with a noun.

    >>> count(1, "call"), count(3, "near miss", "near misses")
    ('1 call', '3 near misses')
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


# A side-by-side diff of two graphs, with unchanged lines folded.


_CONTEXT_LINES = 3  # unchanged lines around a change
_FREED = re.compile(r";  (?:\w+ = )+None(?:;  (?:\w+ = )+None)*")
_SIGNATURE = re.compile(r"^(def \w+\()(.+)(\).*:)$")
_WORDS = re.compile(r"\w+|\s+|.")
_LONG_LINE_CHARACTERS = 100
_MAX_WORD_PAIRS = 250_000  # of two lines, since comparing is quadratic
_MIN_RATIO = 0.5  # of common words above which changed words are highlighted

Words = Sequence[tuple[bool, str]]  # parts of a line, and whether they are highlighted


class Line(NamedTuple):
    """A line of one column; its kind is "same", "del", "ins" or "gap"."""

    kind: str
    number: int
    words: Words


class Block(NamedTuple):
    """Lines next to each other: a change, unchanged lines around one, or folded lines."""

    left: list[Line]
    right: list[Line]
    is_folded: bool = False


class Diff(NamedTuple):
    """The two columns in blocks, and the numbers of removed and added lines."""

    blocks: list[Block]
    removed: int
    added: int


def diff(before: str, after: str) -> Diff:
    """Compare the source code of two graphs.

    Statements that free values (``; x = None``) are ignored, and long signatures are split into one
    line per parameter.
    """
    old, new = lines_of(before), lines_of(after)
    blocks: list[Block] = []
    removed = added = 0
    for tag, i, j, k, m in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            blocks += _unchanged(old[i:j], i + 1, k + 1, first=i == 0, last=j == len(old))
        else:
            blocks.append(_changed(old[i:j], new[k:m], i + 1, k + 1))
            removed, added = removed + j - i, added + m - k
    return Diff(blocks, removed, added)


def lines_of(graph: str) -> list[str]:
    """Return the lines of a graph in the form in which they are compared and shown."""
    lines: list[str] = []
    for line in graph.strip().split("\n"):
        shown = _FREED.sub("", line).rstrip()
        signature = _SIGNATURE.match(shown) if len(shown) > _LONG_LINE_CHARACTERS else None
        if signature is None:
            lines.append(shown)
        else:
            head, parameters, tail = signature.groups()
            lines += [head, *(f"    {p}," for p in _split(parameters)), tail]
    return lines


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
) -> Iterator[Block]:
    """Show the lines next to a change, and fold the others."""
    head = 0 if first else _CONTEXT_LINES
    tail = len(lines) - (0 if last else _CONTEXT_LINES)
    if tail - head < _CONTEXT_LINES:
        head = tail = len(lines)
    for start, end in ((0, head), (head, tail), (tail, len(lines))):
        if start < end:
            part = [(False, line) for line in lines[start:end]]
            left, right = (
                [Line("same", at + start + i, [words]) for i, words in enumerate(part)]
                for at in (old, new)
            )
            yield Block(left, right, is_folded=start == head and end == tail)


def _changed(old: Sequence[str], new: Sequence[str], at: int, to: int) -> Block:
    left, right = [], []
    for i, (before, after) in enumerate(zip_longest(old, new)):
        removed, added = _edited(before, after)
        left.append(Line("gap" if before is None else "del", at + i, removed))
        right.append(Line("gap" if after is None else "ins", to + i, added))
    return Block(left, right)


def _edited(before: str | None, after: str | None) -> tuple[Words, Words]:
    """Highlight the words in which two similar lines differ."""
    plain = [(False, before or "")], [(False, after or "")]
    if before is None or after is None:
        return plain
    old, new = _WORDS.findall(before), _WORDS.findall(after)
    if len(old) * len(new) > _MAX_WORD_PAIRS:
        return plain
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    if matcher.ratio() < _MIN_RATIO:
        return plain
    opcodes = matcher.get_opcodes()
    left = [(tag != "equal", "".join(old[i:j])) for tag, i, j, _, _ in opcodes]
    right = [(tag != "equal", "".join(new[k:m])) for tag, _, _, k, m in opcodes]
    return left, right
