"""Build HTML elements from Python values. Every value that is not :class:`Html` is escaped.

>>> element("p", "a < b", element("b", "!"), class_="note")
'<p class="note">a &lt; b<b>!</b></p>'
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable

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
