"""Output of the benchmarks."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from opweave.cli.output import out  # as wide as the table if stdout is not a terminal

__all__ = ["as_json", "out", "print_json", "progress", "significant"]


def print_json(machine: dict[str, Any], rows: list[dict[str, Any]], **more: Any) -> None:
    """Print the result of ``--json``: one object."""
    json.dump({"machine": machine, "rows": rows, **more}, sys.stdout, indent=2)
    print()


def as_json(machine: dict[str, Any], **lists: Sequence[object]) -> str:
    """Return the same object with one line per row, for readable diffs."""
    parts = [f'"machine": {json.dumps(machine, indent=2)}']
    for name, rows in lists.items():
        parts.append(f'"{name}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def progress(*, quiet: bool = False) -> Progress:
    """Return a transient progress bar on stderr."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True, quiet=quiet),
        transient=True,
    )


def significant(value: float, digits: int = 4) -> float:
    """Return *value* rounded to *digits* significant digits."""
    return float(f"{value:.{digits}g}")
