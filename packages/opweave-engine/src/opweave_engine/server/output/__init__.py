"""Parses a model's output while it arrives: reasoning, tool calls and text."""

from opweave_engine.server.output.events import (
    ArgumentsDelta,
    CallStart,
    ContentDelta,
    Event,
    ReasoningDelta,
)
from opweave_engine.server.output.parser import AnswerParser

__all__ = [
    "AnswerParser",
    "ArgumentsDelta",
    "CallStart",
    "ContentDelta",
    "Event",
    "ReasoningDelta",
]
