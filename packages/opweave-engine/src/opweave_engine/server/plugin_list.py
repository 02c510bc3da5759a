"""The plugins, as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from opweave.plugins import plugin_report


def plugins() -> list[dict[str, Any]]:
    """Return every installed plugin: its state, its registrations, and its error."""
    return [asdict(record) for record in plugin_report()]
