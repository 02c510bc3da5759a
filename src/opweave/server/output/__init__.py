"""What a model writes: its reasoning, its tool calls and its text, told apart as they arrive."""

from opweave.server.output.events import (
    ArgumentsDelta,
    CallStart,
    ContentDelta,
    Event,
    ReasoningDelta,
)
from opweave.server.output.parser import AnswerParser

__all__ = [
    "AnswerParser",
    "ArgumentsDelta",
    "CallStart",
    "ContentDelta",
    "Event",
    "ReasoningDelta",
]
