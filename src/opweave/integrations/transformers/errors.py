"""Errors of the transformers backend."""

from __future__ import annotations


class NotSuitableError(Exception):
    """A model cannot run in some way; the message says why. It never leaves this package."""
