"""Building blocks of the sections: tables, lists, labels and formatted numbers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from opweave.compile.html.elements import Html, breakable, element, join


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
