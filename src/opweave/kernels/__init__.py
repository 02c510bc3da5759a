"""Providers: one folder for each, registering implementations of ops when it is imported."""

from __future__ import annotations

import importlib

PROVIDERS = ("aten", "row_by_row", "opweave_c")

__all__ = ["PROVIDERS", "load"]


def load() -> None:
    """Import every provider that comes with opweave."""
    for provider in PROVIDERS:
        importlib.import_module(f"{__name__}.{provider}")
