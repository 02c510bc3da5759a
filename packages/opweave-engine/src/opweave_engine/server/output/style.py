"""The output formats of a model, configured or detected from its chat template."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from opweave_engine.server.output.call_format import CallFormat
from opweave_engine.server.output.calls import DeepSeek, Hermes, LlamaJson, Mistral
from opweave_engine.server.output.reasoning import END
from opweave_engine.server.output_formats import ReasoningParser, ToolCallParser

_log = logging.getLogger(__name__)

_FORMATS: dict[str, type[CallFormat] | None] = {
    "none": None,
    "hermes": Hermes,
    "llama3_json": LlamaJson,
    "mistral": Mistral,
    "deepseek": DeepSeek,
    "deepseek_v3": DeepSeek,
    "deepseek_v31": DeepSeek,
}
# In the source of a template, the first of them that it holds.
_MARKS = {
    DeepSeek.opener: DeepSeek,
    Mistral.opener: Mistral,
    Hermes.opener: Hermes,
    LlamaJson.opener: LlamaJson,
    '"parameters": ': LlamaJson,
}
# Calls that are not JSON, though between the marks of Hermes.
_UNKNOWN = ("<function=", "<arg_key>")


@dataclass(frozen=True)
class OutputStyle:
    """The formats that a model writes.

    Attributes:
        template: the source of its chat template.
        calls: the format of tool calls; None: tool calls stay text.
        has_reasoning: whether answers may begin with reasoning.
    """

    template: str
    calls: type[CallFormat] | None
    has_reasoning: bool

    @classmethod
    def of(
        cls, template: str, tool_call_parser: ToolCallParser, reasoning_parser: ReasoningParser
    ) -> OutputStyle:
        """Return the configured style, or the one detected from the template."""
        if tool_call_parser == "auto":
            calls: type[CallFormat] | None = _detected(template)
        else:
            calls = _FORMATS[tool_call_parser]
        if reasoning_parser == "auto":
            has_reasoning = END in template
        else:
            has_reasoning = reasoning_parser != "none"
        return cls(template, calls, has_reasoning)


def _detected(template: str) -> type[CallFormat]:
    found = next((kind for mark, kind in _MARKS.items() if mark in template), None)
    is_known = found is not None and not any(mark in template for mark in _UNKNOWN)
    if not is_known and "tools" in template:
        _log.warning(
            "the format in which the model writes tool calls is not known from its chat template; "
            "assuming hermes (<tool_call> with JSON): calls in another format stay text, unless "
            "tool_choice requires one. Choose with --tool-call-parser"
        )
    return found or Hermes
