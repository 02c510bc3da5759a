"""Parses an output incrementally."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from opweave_engine.server.output.call_format import CallFormat
from opweave_engine.server.output.events import ArgumentsDelta, CallStart, ContentDelta, Event
from opweave_engine.server.output.reasoning import split_reasoning
from opweave_engine.server.output.source import Steps, TextSource


class AnswerParser:
    """Turns the growing text of one output into events.

    The events do not depend on how the text was split into deltas.

    Args:
        calls: the format of tool calls; None: tool calls are not parsed.
        names: of the functions that may be called.
        has_reasoning: whether the answer may begin with reasoning.
        is_thinking: whether the prompt has begun the reasoning.
        is_parallel: whether calls after the first one are kept.
    """

    def __init__(
        self,
        calls: type[CallFormat] | None = None,
        *,
        names: Collection[str] = (),
        has_reasoning: bool = False,
        is_thinking: bool = False,
        is_parallel: bool = True,
    ) -> None:
        self._events: list[Event] = []
        self._answer, self._text = TextSource(), TextSource()
        self._is_parallel, self._calls = is_parallel, 0
        self._reading: Steps[None] | None = None
        if has_reasoning:
            self._reading = split_reasoning(
                self._text, self._events.append, self._add, is_inside=is_thinking
            )
        self._calling: Steps[None] | None = None
        if calls is not None:
            self._calling = calls(self._answer, self._events.append, names).parse()

    def push(self, text: str) -> list[Event]:
        """Return the events that *text* adds."""
        if self._reading is None:
            self._add(text)
        else:
            self._text.text += text
            next(self._reading, None)
        return self._take()

    def finish(self) -> list[Event]:
        """Return the events that were held back, because the text is complete."""
        if self._reading is not None:
            self._text.is_complete = True
            next(self._reading, None)
        if self._calling is not None:
            self._answer.is_complete = True
            next(self._calling, None)
        return self._take()

    def _add(self, text: str) -> None:
        if self._calling is None:
            self._events += [ContentDelta(text)] if text else []
        elif text:
            self._answer.text += text
            next(self._calling, None)

    def _take(self) -> list[Event]:
        events, self._events[:] = list(self._events), []
        return list(self._allowed(events))

    def _allowed(self, events: Iterable[Event]) -> Iterable[Event]:
        for event in events:
            self._calls += isinstance(event, CallStart)
            is_call = isinstance(event, CallStart | ArgumentsDelta)
            if self._is_parallel or self._calls < 2 or not is_call:
                yield event
