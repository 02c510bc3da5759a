"""One growing answer, parsed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opweave.engine import CompletionOutput
from opweave.server.answer_plan import AnswerPlan
from opweave.server.output import (
    ArgumentsDelta,
    CallStart,
    ContentDelta,
    Event,
    ReasoningDelta,
)
from opweave.server.pieces import Growth, Piece


@dataclass
class ParsedCall:
    """A call of a function so far."""

    id: str
    name: str
    arguments: str = ""


class ParsedAnswer:
    """Parses an answer piece by piece, and keeps what is known of it.

    Args:
        plan: how to read it.

    Attributes:
        content: the text for the user.
        reasoning: the text that the model thinks before.
        calls: of functions, in their order.
    """

    def __init__(self, plan: AnswerPlan) -> None:
        self.content, self.reasoning, self.calls = "", "", list[ParsedCall]()
        self._plan, self._parser, self._growth = plan, plan.parser(), Growth()

    def add(self, answer: CompletionOutput) -> tuple[Piece, Sequence[Event]]:
        """Return what is new in *answer*, as a piece and as events."""
        piece = self._growth.piece(answer)
        events = self._parser.push(piece.text)
        if piece.finish_reason is not None:
            events += self._parser.finish()
        for event in events:
            self._note(event)
        return piece, events

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
