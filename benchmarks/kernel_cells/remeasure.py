"""Measure the disturbed rows of a saved table again, and keep the new results."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_cells.cell import Cell
from kernel_cells.measure import Results, Row, is_much_disturbed
from kernel_cells.results import Machine, Table
from kernel_cells.summary import cells_of_rows

_SAME = ("processor", "cores", "python", "torch", "isa", "kernels")


def differences(saved: Machine, here: Machine) -> str:
    """Say in what *saved* is of another machine, or of other kernels; empty where it is not."""
    return ", ".join(
        f"{name} {saved.get(name)!r}, here {here.get(name)!r}"
        for name in _SAME
        if saved.get(name) != here.get(name)
    )


def disturbed_cells(families: Sequence[Sequence[Cell]], saved: Results) -> list[list[Cell]]:
    """Return the cells of *families* of which *saved* has a row that was much disturbed."""
    cases = {(row["name"], _cell(row)) for row in saved.rows if is_much_disturbed(row)}
    chosen = [
        [cell for cell in family if (f"kernel.{cell.name}", str(cell)) in cases]
        for family in families
    ]
    return [family for family in chosen if family]


def merge(saved: Table, found: Table) -> Table:
    """Return *saved* with the rows that were measured again, and how that was."""
    machine, before = saved
    measured = {"cells": len(cells_of_rows(found[1].rows)), "disturbed": found[0]["disturbed"]}
    machine = machine | {
        "commands": machine["commands"] + found[0]["commands"],
        "again": [*machine["again"], measured],
    }
    rows = {(row["name"], row["case"]): row for row in found[1].rows}
    merged = [rows.get((row["name"], row["case"]), row) for row in before.rows]
    return machine, Results(merged, before.skipped)


def _cell(row: Row) -> str:
    """Return what the cell of *row* calls itself: its case, but for the state of the output."""
    return str(row["case"]).rpartition(", ")[0]
