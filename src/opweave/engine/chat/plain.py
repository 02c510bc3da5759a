"""Objects of client libraries, as plain values."""

from __future__ import annotations

from typing import Any


def as_mapping(value: Any) -> Any:
    """Return an object of a pydantic model as a dictionary, and anything else as it is.

    The OpenAI client returns messages and tool calls as such objects, which programs append to
    their conversations.
    """
    dump = getattr(value, "model_dump", None)
    return dump() if callable(dump) else value
