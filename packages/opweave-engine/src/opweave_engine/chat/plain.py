"""Values that clients send: as plain objects, and in error messages."""

from __future__ import annotations

import reprlib
from typing import Any

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 100


def as_mapping(value: Any) -> Any:
    """Return an object of a pydantic model as a dictionary, and anything else as it is.

    The OpenAI client returns messages and tool calls as such objects, which programs append to
    their conversations.
    """
    dump = getattr(value, "model_dump", None)
    return dump() if callable(dump) else value


def shown(value: object) -> str:
    """Return *value* as an error message quotes it, shortened."""
    return _short.repr(value)
