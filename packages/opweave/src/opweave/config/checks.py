"""Checks of configuration values."""

from __future__ import annotations

from collections.abc import Sequence

from opweave.ir.errors import SettingError, did_you_mean


def check_count(owner: str, name: str, value: object, note: str = "") -> None:
    """Raise :class:`SettingError` unless *value* is a positive integer; *note* ends the message."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingError(f"{owner}: {name}={value!r} must be a positive integer{note}.")


def api_key_fault(key: str) -> str | None:
    """Return why *key* cannot be sent in an HTTP header, or None."""
    if key.isascii() and key.isprintable() and " " not in key:
        return None
    return (
        "An API key contains characters that cannot be sent in an HTTP header; use printable ASCII "
        "characters without spaces."
    )


def check_flag(owner: str, name: str, value: object) -> None:
    """Raise :class:`SettingError` unless *value* is True or False."""
    if not isinstance(value, bool):
        raise SettingError(f"{owner}: {name}={value!r} must be True or False.")


def check_seconds(owner: str, name: str, value: object) -> None:
    """Raise :class:`SettingError` unless *value* is a positive, finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):  # type: ignore[operator]
        raise SettingError(f"{owner}: {name}={value!r} must be a positive number of seconds.")


def check_share(owner: str, name: str, value: object) -> None:
    """Raise :class:`SettingError` unless *value* is above 0 and at most 1."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= 1:  # type: ignore[operator]
        raise SettingError(f"{owner}: {name}={value!r} must be a number above 0, and at most 1.")


def check_choice(owner: str, name: str, value: object, choices: Sequence[str]) -> None:
    """Raise :class:`SettingError` unless *value* is one of *choices*."""
    if value not in choices:
        hint = did_you_mean(str(value), choices).partition("Known:")[0]  # choices are listed below
        raise SettingError(
            f"{owner}: {name}={value!r} must be one of {', '.join(choices)}. {hint}".rstrip()
        )
