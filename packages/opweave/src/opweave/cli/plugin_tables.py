"""Plugins as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from opweave.cli.tables import PlainTable

_STYLES = {"failed": "bold red", "active": "green", "loaded": "green"}


def plugin_table(plugins: Iterable[Mapping[str, Any]]) -> Table:
    """Return a row per plugin: state, load time and registrations."""
    table = PlainTable("plugin", "group", "distribution", "state", "ms", "registered", "")
    for plugin in plugins:
        style = _STYLES.get(plugin["state"], "default")
        table.add_row(
            escape(plugin["name"]),
            escape(plugin["group"].removeprefix("opweave.")),
            escape(f"{plugin['distribution']} {plugin['version']}"),
            f"[{style}]{plugin['state']}[/]",
            f"{plugin['seconds'] * 1e3:.1f}",
            str(len(plugin["registered"]) or "-"),
            escape(plugin["error"] or plugin["detail"]),
        )
    return table


def owner_text(owner: Mapping[str, str] | None) -> str:
    """Format an owner like its ``str()``: ``acme (acme-device 0.1.0)``."""
    if owner is None:
        return "opweave"
    return f"{owner['plugin']} ({owner['distribution']} {owner['version']})"
