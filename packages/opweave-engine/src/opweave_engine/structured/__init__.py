"""Structured output: answers that follow a JSON schema, a regular expression or a grammar."""

from opweave_engine.structured.params import StructuredOutputsParams

__all__ = ["StructuredOutputsParams"]
