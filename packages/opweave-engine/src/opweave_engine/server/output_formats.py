"""The formats in which a model writes tool calls and reasoning."""

from __future__ import annotations

from typing import Literal

ToolCallParser = Literal[
    "auto", "none", "hermes", "llama3_json", "mistral", "deepseek", "deepseek_v3", "deepseek_v31"
]
ReasoningParser = Literal["auto", "none", "qwen3", "deepseek_r1"]
