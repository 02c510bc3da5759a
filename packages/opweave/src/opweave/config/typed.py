"""Typed values of plugin settings, parsed from text: bool, int, float or str."""

from __future__ import annotations

from typing import Any

from opweave.ir.errors import SettingError

KINDS = (bool, int, float, str)
TRUE = frozenset({"1", "true", "yes", "on"})
FALSE = frozenset({"0", "false", "no", "off", ""})


def check_kind(where: str, kind: type, default: object) -> None:
    """Raise :class:`SettingError` unless *kind* is supported and *default* is of that type."""
    names = ", ".join(each.__name__ for each in KINDS)
    if kind not in KINDS:
        raise SettingError(f"{where}: kind={kind!r} must be one of {names}.")
    if not _is(kind, default):
        raise SettingError(f"{where}: default={default!r} must be of type {kind.__name__}.")


def read(where: str, kind: type, value: object) -> Any:
    """Return *value* as *kind*: parsed if it is text, or unchanged if it has the type.

    >>> read("--plugin.acme.depth", int, "8"), read("ACME_FAST", bool, "yes")
    (8, True)

    Raises:
        SettingError: it is malformed; the message starts with *where*.
    """
    if _is(kind, value):
        return value
    found = _from_text(kind, value.strip()) if isinstance(value, str) else None
    if found is None:
        raise SettingError(f"{where}={value!r} must be {_WANTED[kind]}.")
    return found


def _is(kind: type, value: object) -> bool:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return True
    return type(value) is kind


def _from_text(kind: type, text: str) -> Any:
    if kind is bool:
        lower = text.lower()
        return lower in TRUE if lower in TRUE | FALSE else None
    try:
        return kind(text)
    except ValueError:
        return None


_WANTED = {
    bool: "true (1) or false (0)",
    int: "an integer",
    float: "a number",
    str: "a string",
}
