"""What a benchmark prints."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from opweave.cli.output import out  # as wide as a table is where stdout is no terminal

__all__ = ["out", "print_json", "progress", "significant"]


def print_json(machine: dict[str, Any], rows: list[dict[str, Any]], **more: Any) -> None:
    """Print the one object that ``--json`` promises."""
    json.dump({"machine": machine, "rows": rows, **more}, sys.stdout, indent=2)
    print()


def progress(*, quiet: bool = False) -> Progress:
    """Return a progress bar on stderr that leaves nothing behind."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True, quiet=quiet),
        transient=True,
    )


def significant(value: float, digits: int = 4) -> float:
    """Return *value* with so many significant digits."""
    return float(f"{value:.{digits}g}")
