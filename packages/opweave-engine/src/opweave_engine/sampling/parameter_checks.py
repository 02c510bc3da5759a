"""Checks of single sampling parameters."""

from __future__ import annotations

import math
import sys

from opweave_engine.errors import SamplingParamsError


def check_int(name: str, value: object, least: int, note: str, *, what: str = "") -> None:
    """Raise SamplingParamsError unless *value* is an integer from *least* up to 64 bits."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if is_int and value >= 2**63:  # type: ignore[operator]
        raise SamplingParamsError(f"{what}{name}={_shown(value)} must be below 2**63.", name)
    if not is_int or value < least:  # type: ignore[operator]
        message = f"{what}{name}={_shown(value)} must be an integer of at least {least}, {note}."
        raise SamplingParamsError(message, name)


def check_number(name: str, value: object, low: float, high: float, *, place: str = "") -> None:
    """Raise SamplingParamsError unless *value* is a finite number from *low* to *high*."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    most = min(high, sys.float_info.max)  # integers above it become no float
    if not is_number or not low <= value <= most:  # type: ignore[operator]
        limit = "finite" if high == math.inf else f"at most {high:g}"
        message = f"{name}{place}={_shown(value)} must be a number of at least {low:g}, {limit}."
        raise SamplingParamsError(message, name)


def _shown(value: object) -> str:
    """Return ``repr(value)``, or the size of a huge integer, which Python refuses to print."""
    is_long = isinstance(value, int) and value.bit_length() > 128
    return f"<an integer of {value.bit_length()} bits>" if is_long else repr(value)  # type: ignore[attr-defined]


def check_flag(name: str, value: object) -> None:
    """Raise SamplingParamsError unless *value* is True or False."""
    if not isinstance(value, bool):
        raise SamplingParamsError(f"{name}={value!r} is neither True nor False.", name)


def texts(name: str, value: object) -> tuple[str, ...]:
    """Return one text or several as a tuple.

    Raises:
        SamplingParamsError: *value* is something else, or a text is empty.
    """
    given = (value,) if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not all(isinstance(text, str) for text in given):
        raise SamplingParamsError(f"{name}={value!r} must be a string or a list of strings.", name)
    if "" in given:
        message = f"{name} holds an empty string, which every text contains."
        raise SamplingParamsError(message, name)
    return tuple(given)


def token_ids(name: str, ids: object) -> tuple[int, ...]:
    """Return a list of token ids as a tuple.

    Raises:
        SamplingParamsError: *ids* is something else.
    """
    if not isinstance(ids, list | tuple):
        raise SamplingParamsError(f"{name}={ids!r} must be a list of token ids.", name)
    for token in ids:
        check_int(name, token, 0, "an id of the vocabulary", what="a token of ")
    return tuple(ids)
