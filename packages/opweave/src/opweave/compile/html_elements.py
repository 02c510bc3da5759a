"""HTML elements, sections and diffs of reports."""

from __future__ import annotations

import html
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import NamedTuple

# Build HTML elements from Python values. Every value that is not :class:`Html` is escaped.
#
# >>> element("p", "a < b", element("b", "!"), class_="note")
# '<p class="note">a &lt; b<b>!</b></p>'


_LONG_NAME = re.compile(r"[\w.]{16,}\(?")
_BREAKS = re.compile(r"[_.(](?=.)|\($")
_EMPTY = frozenset({"meta", "link", "input", "br"})


class Html(str):
    """A string of HTML, which is not escaped again."""

    __slots__ = ()


def text(value: object) -> Html:
    r"""Escape *value*, with invisible characters as Python escape sequences.

    >>> text("</script>\x1b")
    '&lt;/script&gt;\\x1b'
    """
    if isinstance(value, Html):
        return value
    return Html(html.escape("".join(map(_visible, str(value)))))


def breakable(value: object) -> Html:
    """Escape *value*, and allow line breaks in long names after underscores and dots.

    >>> breakable("x_1 = torch.ops.aten.mm.default(x, w)")
    'x_1 = torch.<wbr>ops.<wbr>aten.<wbr>mm.<wbr>default(<wbr>x, w)'
    """
    if isinstance(value, Html):
        return value
    return Html(_LONG_NAME.sub(lambda name: _BREAKS.sub(r"\g<0><wbr>", name[0]), text(value)))


def element(name: str, /, *children: object, **attributes: str | int | bool | None) -> Html:
    """Return an element.

    Args:
        name: the tag.
        children: the content; None is skipped.
        attributes: ``class_`` becomes ``class``, ``aria_label`` becomes ``aria-label``. True writes
            only the name; False and None are skipped.
    """
    written = "".join(
        f" {_name(key)}" + ("" if value is True else f'="{text(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _EMPTY:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def join(parts: Iterable[object], separator: str = "") -> Html:
    """Join *parts*; None is skipped."""
    return Html(text(separator).join(text(part) for part in parts if part is not None))


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _visible(character: str) -> str:
    """Escape control characters, surrogates and bidirectional marks."""
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs"):
        return character
    return character.encode("unicode_escape").decode("ascii")


# Building blocks of the sections: tables, lists, labels and formatted numbers.


class Place(NamedTuple):
    """The position of a graph on the page."""

    number: int  # from 1
    several: bool  # whether the page shows other graphs

    def id(self, name: str) -> str:
        """Return the anchor of a part of this graph."""
        return f"graph-{self.number}-{name}"

    def heading(self, level: int, *content: object, id: str | None = None) -> Html:
        """Return a heading; sections have *level* 2."""
        return element(f"h{level + self.several}", *content, id=id)

    def section(self, name: str, heading: str, content: Html) -> Html:
        """Return a section with an anchor."""
        label = self.id(f"{name}-heading")
        return element(
            "section",
            self.heading(2, heading, id=label),
            content,
            id=self.id(name),
            aria_labelledby=label,
        )


def table(caption: str, columns: Sequence[str], rows: Iterable[Html], class_: str = "") -> Html:
    """Return a table in a scrollable box; *rows* are ``tr`` elements."""
    head = element("tr", *(element("th", column, scope="col") for column in columns))
    inner = element(
        "table",
        element("caption", caption, class_="unseen"),
        element("thead", head),
        element("tbody", *rows),
        class_=class_ or None,
    )
    return element("div", inner, class_="box", tabindex=0, role="region", aria_label=caption)


def row(first: object, *others: object, **attributes: str) -> Html:
    """Return a table row; the first cell is its header."""
    cells = [element("td", cell) for cell in others]
    return element("tr", element("th", first, scope="row"), *cells, **attributes)


def items(parts: Iterable[object], class_: str | None = None) -> Html | None:
    """Return a list, or None if it is empty."""
    found = [element("li", part) for part in parts]
    return element("ul", *found, class_=class_) if found else None


def code(value: object) -> Html:
    """Return *value* in monospace."""
    return element("code", breakable(value))


def small(*content: object) -> Html:
    """Return *content* in small type."""
    return element("span", join(content), class_="small")


def provider(chosen: str, colors: Sequence[str]) -> Html:
    """Return a color swatch and the name of a provider; *colors* lists all providers."""
    return element("span", swatch(chosen, colors), chosen, class_="provider")


def swatch(chosen: str, colors: Sequence[str]) -> Html:
    """Return the color swatch of a provider: gray for native, otherwise by index."""
    others = [each for each in colors if each != "native"]
    index = others.index(chosen) % 6 + 1 if chosen in others else 0
    return element("span", class_=f"swatch color-{index}", aria_hidden="true")


def common_folder(sources: Iterable[str]) -> str:
    """Return the deepest folder with all files of *sources* (``file:line: code``), or ""."""
    files = {file for file, _ in map(split_source, sources) if os.path.isabs(file)}
    folders = {os.path.dirname(file.rpartition(":")[0]) for file in files}
    found = os.path.commonpath(folders) if folders else ""
    return "" if found == os.path.sep else found


def split_source(source: str) -> tuple[str, str]:
    """Split a source line into ``file:line`` and the code.

    >>> split_source("/models/llama.py:12: y = f(x)")
    ('/models/llama.py:12', 'y = f(x)')
    """
    file, separator, line_and_code = source.partition(".py:")
    line, _, code = line_and_code.partition(": ")
    return (f"{file}{separator}{line}", code) if line.isdigit() else (source, "")


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
