"""Errors of the transformers backend."""

from __future__ import annotations


class NotSuitableError(Exception):
    """A way to run a model does not suit it; the message says why. Never raised to users."""
