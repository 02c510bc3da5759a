"""The tables on the terminal."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kernel_cells.results import disturbances
from kernel_cells.summary import Cell, Row, below_the_bar


def print_cells(cells: Sequence[Cell], console: Console) -> None:
    """Print a table for each kernel."""
    for title, group in itertools.groupby(sorted(cells, key=_title), key=_title):
        console.print(_table(title, group))
    console.print(
        "Microseconds: with a fresh output, a reused one, in eager torch, by Inductor; then how "
        "many times ours these two take (fresh output), and the shares of the stream's bandwidth "
        "and of what the memory allows (reused output, data in no cache).",
        style="dim",
    )


def _title(cell: Cell) -> str:
    return f"{cell.kernel}, {_threads(cell)}"


def _table(title: str, cells: Iterable[Cell]) -> Table:
    table = Table(title=escape(title), title_justify="left", title_style="bold")
    table.box, table.padding = None, (0, 1, 0, 0)
    table.add_column("case", no_wrap=True)
    for column in ("fresh", "reused", "eager", "Induct.", "e/o", "i/o", "stream", "limit"):
        table.add_column(column, justify="right", no_wrap=True)
    for cell in cells:
        times = [cell.value("fresh"), cell.value("reused"), cell["eager"]]
        ratios = [cell.over("eager"), cell.over("inductor")]
        table.add_row(
            cell.case,
            *map(_time, [*times, cell.rows[0].get("inductor")]),
            *map(_ratio, ratios),
            *map(_share, [cell.share, cell.limit_share]),
            style="red" if cell.shortfalls else None,
        )
    return table


def _time(value: float | None) -> str:
    if value is None:
        return ""
    if value < 1000:
        return f"{value:.1f}"
    return f"{value:,.0f}" if value < 1e5 else f"{value / 1000:,.0f}ms"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def print_below_the_bar(cells: Sequence[Cell], console: Console) -> None:
    found = below_the_bar(cells)
    console.rule(f"below the bar: {len(found)} of {len(cells)} cells")
    for cell in found:
        where = f"{cell.kernel}: {cell.case}, {_threads(cell)}"
        console.print(f"  {where}: [red]{', '.join(cell.shortfalls)}[/]", soft_wrap=True)


def print_omitted(cells: Sequence[Cell], skipped: Sequence[Row], console: Console) -> None:
    """Say what was not measured, and why."""
    reasons: dict[str, list[str]] = {}
    for row in skipped:
        reasons.setdefault(f"not by our kernel: {row['reason']}", []).append(
            f"{row['name'].removeprefix('kernel.')} {row['case']}"
        )
    for cell in cells:
        if "no_inductor" in cell.rows[0]:
            reason = f"not by Inductor: {cell['no_inductor']}"
            reasons.setdefault(reason, []).append(f"{cell.kernel} {cell.case}")
    for reason, what in reasons.items():
        console.print(f"{escape(reason)}: {len(what)} cells, as {escape(what[0])}", soft_wrap=True)


def _threads(cell: Cell) -> str:
    return f"{cell['threads']} thread{'s' if cell['threads'] > 1 else ''}"


def print_machine(machine: dict[str, Any], console: Console) -> None:
    allocator = ", ".join(f"{name}: {value}" for name, value in machine["allocator"].items())
    console.print(f"{machine['processor']}, {machine['isa']}; allocator: {escape(allocator)}")
    console.print(
        "measured again because others computed on the same cores, and disturbed but counted: "
        f"{disturbances(machine['disturbed'])}",
        soft_wrap=True,
    )
    for threads, sizes in machine["stream_gb_per_second"].items():
        for size, speeds in sizes.items():
            figures = ", ".join(f"{what} {speed:g}" for what, speed in speeds.items())
            console.print(f"stream, {threads} thread(s), {size}: {figures or 'not measured'} GB/s")
