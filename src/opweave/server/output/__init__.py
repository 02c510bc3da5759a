"""Parses a model's output while it arrives: reasoning, tool calls and text."""

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
