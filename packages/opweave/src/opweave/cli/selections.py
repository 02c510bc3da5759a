"""Kernel selections of an eager run, as a table and as data."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from opweave import ir
from opweave.cli.tables import PlainTable


def selections(record: ir.Record) -> list[dict[str, Any]]:
    """Return every distinct selection as plain data."""
    return [{**explanation.to_dict(), "calls": calls} for explanation, calls in record.outcomes()]


def selection_table(record: ir.Record) -> Table:
    """Return a table with a row per distinct selection."""
    table = PlainTable("op", "ran", "calls", "because of", "the others")
    for explanation, calls in record.outcomes():
        others = [
            f"{verdict.provider}: {verdict.reason}"
            for verdict in explanation.verdicts
            if verdict.outcome != "chosen"
        ]
        chosen = next(v for v in explanation.verdicts if v.outcome == "chosen")
        table.add_row(
            explanation.op,
            f"[green]{escape(chosen.provider)}[/]",
            str(calls),
            escape(chosen.origin),
            escape("\n".join(others) or "-"),
        )
    return table
