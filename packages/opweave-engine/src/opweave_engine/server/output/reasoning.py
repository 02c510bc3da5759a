"""Reasoning: text between ``<think>`` and ``</think>`` at the beginning of an answer."""

from __future__ import annotations

from collections.abc import Callable

from opweave_engine.server.output.events import Event, ReasoningDelta
from opweave_engine.server.output.source import Steps, TextSource

BEGIN, END = "<think>", "</think>"


def split_reasoning(
    source: TextSource,
    emit: Callable[[Event], None],
    rest: Callable[[str], None],
    *,
    is_inside: bool,
) -> Steps[None]:
    """Emit the reasoning in *source*, and pass the text after it to *rest*.

    Whitespace around the reasoning is part of the format.

    Args:
        source: the text that the model writes.
        emit: takes the reasoning.
        rest: takes the text after it, or all of the text if there is no reasoning.
        is_inside: whether the prompt has begun the reasoning.
    """
    yield from source.skip_spaces()
    is_inside = (yield from source.take(BEGIN)) or is_inside
    if is_inside:
        spaces = [""]

        def think(text: str) -> None:
            text = spaces[0] + text
            kept = text.rstrip()
            spaces[0] = text[len(kept) :]
            if kept:
                emit(ReasoningDelta(kept))

        yield from source.skip_spaces()
        yield from source.until([END], think)
        yield from source.skip_spaces()
    else:
        source.position = 0
    yield from source.until((), rest)


def is_thinking(prompt: str) -> bool:
    """Whether *prompt* ends inside of the reasoning of the answer."""
    return prompt.rfind(BEGIN) > prompt.rfind(END) and prompt.rstrip().endswith(BEGIN)
