"""Output of the program: the queue, and the results."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from gpu_queue import report
from gpu_queue.plan import DONE, Planned
from gpu_queue.results import Results
from harness import out


def names(planned: Sequence[Planned], results: Results, *, as_json: bool) -> None:
    """Print the names of all jobs, in order."""
    found = [each.job.name for each in planned]
    print(json.dumps(found, indent=2) if as_json else "\n".join(found))


def queue(planned: Sequence[Planned], results: Results, *, as_json: bool) -> None:
    """Print what would run, in order, and why."""
    if as_json:
        print(json.dumps(report.as_json(planned, results.records), indent=2))
        return
    table = Table("priority", "job", "limit, s", "expected, s", "state", "why", box=None)
    for index, each in enumerate(planned, 1):
        priority = "" if each.state == DONE else str(index)
        numbers = f"{each.job.limit:.0f}", f"{each.expected:.0f}"
        table.add_row(priority, each.job.name, *numbers, each.state, escape(each.why))
    out.print(table)


def outcome(planned: Sequence[Planned], results: Results, *, as_json: bool) -> None:
    """Print every result there is, and what remains to be run."""
    if as_json:
        print(json.dumps(report.as_json(planned, results.records), indent=2))
        return
    records = results.records
    for heading, rows in (
        (("stage", "provider", "jobs"), report.counts(records)),
        (report.HEADING, [report.cells(row) for row in report.measured(records)]),
        (
            ("did not pass", "status", "problem"),
            [(name, s, text.partition("\n")[0]) for name, s, text in report.problems(records)],
        ),
    ):
        if rows:
            table = Table(*heading, box=None)
            for row in rows:
                table.add_row(*map(escape, row))
            out.print(table)
    left = sum(each.state != DONE and each.job.name not in results.ran for each in planned)
    out.print(f"{len(results.ran)} jobs ran; {left} are left for the next run.")
