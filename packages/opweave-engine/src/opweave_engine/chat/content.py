"""The content of a message: a text, or a list of parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opweave_engine.chat.plain import shown
from opweave_engine.errors import PromptError

# The types of parts that are text, and the key that holds it.
_TEXT_KEYS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}


class TextParts(list[dict[str, str]]):
    """Content in parts, for templates that read parts; elsewhere it behaves like its text.

    Some templates read the parts of one role, and concatenate the content of another.
    """

    @classmethod
    def of(cls, texts: list[str]) -> TextParts:
        """Return a part for each text."""
        return cls({"type": "text", "text": text} for text in texts)

    def __str__(self) -> str:
        return "".join(part["text"] for part in self)

    def __add__(self, other: Any) -> Any:
        return str(self) + other if isinstance(other, str) else super().__add__(other)

    def __radd__(self, other: str) -> str:
        return other + str(self)

    def __contains__(self, item: object) -> bool:
        return item in str(self) if isinstance(item, str) else super().__contains__(item)

    def __getattr__(self, name: str) -> Any:
        return getattr(str(self), name)


def texts_of(content: object, path: str) -> str | list[str]:
    """Return the content of a message as a text, or as the texts of its parts.

    Raises:
        PromptError: it is of another type, or a part is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return str(content)
    if not isinstance(content, list | tuple):
        raise PromptError(
            f"{path} is {shown(content)}; it must be a string, a list of text parts, or null.",
            "messages",
        )
    return [_text(part, f"{path}.{index}") for index, part in enumerate(content)] or ""


def in_shape(texts: str | list[str], *, takes_parts: bool, needs_parts: bool) -> str | TextParts:
    """Return the content in the form that a template expects.

    Args:
        texts: a text, or the texts of several parts; without parts, they are joined by newlines.
        takes_parts: whether the template reads parts.
        needs_parts: whether it takes a string for parts.
    """
    if isinstance(texts, str):
        return TextParts.of([texts]) if needs_parts else texts
    return TextParts.of(texts) if takes_parts else "\n".join(texts)


def _text(part: object, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise PromptError(
            f"{path} is {shown(part)}; a part must be an object or a string.", "messages"
        )
    kind = part.get("type", "text")
    if (key := _TEXT_KEYS.get(kind) if isinstance(kind, str) else None) is None:
        raise PromptError(
            f"{path}: a part of type {shown(kind)} is not supported; the model takes parts of type "
            "'text'.",
            "messages",
        )
    if (text := part.get(key)) is None:
        raise PromptError(f"{path}: a part of type {shown(kind)} needs {key!r}.", "messages")
    if not isinstance(text, str):
        raise PromptError(f"{path}.{key} is {shown(text)}; it must be a string.", "messages")
    return text
