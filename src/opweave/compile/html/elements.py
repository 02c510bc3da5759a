"""HTML elements from Python values. What is not HTML already is escaped; there is no other way in.

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
    """Text that is HTML."""

    __slots__ = ()


def text(value: object) -> Html:
    r"""Escape *value*; characters that cannot be seen are shown as Python writes them.

    >>> text("</script>\x1b")
    '&lt;/script&gt;\\x1b'
    """
    if isinstance(value, Html):
        return value
    return Html(html.escape("".join(map(_visible, str(value)))))


def breakable(value: object) -> Html:
    """Escape *value*; long names may be broken after their underscores and dots.

    >>> breakable("x_1 = torch.ops.aten.mm.default(x, w)")
    'x_1 = torch.<wbr>ops.<wbr>aten.<wbr>mm.<wbr>default(<wbr>x, w)'
    """
    if isinstance(value, Html):
        return value
    return Html(_LONG_NAME.sub(lambda name: _BREAKS.sub(r"\g<0><wbr>", name[0]), text(value)))


def element(name: str, /, *children: object, **attributes: str | int | bool | None) -> Html:
    """Return an element.

    Args:
        name: its tag.
        children: in order; None is left out.
        attributes: ``class_`` is ``class``, ``aria_label`` is ``aria-label``; True writes the name
            alone, False and None nothing.
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
    """Return *parts* one after the other; None is left out."""
    return Html(text(separator).join(text(part) for part in parts if part is not None))


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _visible(character: str) -> str:
    """Escape controls, surrogates, and marks that would reorder the text around them."""
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs"):
        return character
    return character.encode("unicode_escape").decode("ascii")
