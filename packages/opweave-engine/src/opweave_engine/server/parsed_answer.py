"""Parses one output while it grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opweave_engine import CompletionOutput
from opweave_engine.server.answer_plan import AnswerPlan
from opweave_engine.server.output import (
    ArgumentsDelta,
    CallStart,
    ContentDelta,
    Event,
    ReasoningDelta,
)


@dataclass
class ParsedCall:
    """A function call so far."""

    id: str
    name: str
    arguments: str = ""


class ParsedAnswer:
    """Parses the deltas of one output, and accumulates its parts.

    Args:
        plan: the formats of the output.

    Attributes:
        content: the text for the user.
        reasoning: the reasoning before the content.
        calls: function calls, in order.
    """

    def __init__(self, plan: AnswerPlan) -> None:
        self.content, self.reasoning, self.calls = "", "", list[ParsedCall]()
        self._plan, self._parser = plan, plan.parser()

    def add(self, delta: CompletionOutput) -> Sequence[Event]:
        """Parse a delta, and return its events."""
        events = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            events += self._parser.finish()
        for event in events:
            self._note(event)
        return events

    def _note(self, event: Event) -> None:
        match event:
            case ContentDelta(text):
                self.content += text
            case ReasoningDelta(text):
                self.reasoning += text
            case CallStart(name):
                assert self._plan.calls is not None, "calls have a format"
                self.calls.append(ParsedCall(self._plan.calls.new_id(), name))
            case ArgumentsDelta(text):
                self.calls[-1].arguments += text
