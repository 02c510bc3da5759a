"""The results of this run and of those before it, in files that are written after every job."""

from __future__ import annotations

import sys
import time
from datetime import date
from pathlib import Path

from gpu_queue import report
from gpu_queue.plan import Planned
from gpu_queue.process import Outcome
from gpu_queue.state import Record, dump, load, merged, write

NAME = "gpu_queue"


class Results:
    """The outcome of each job.

    Args:
        state: the file of the state; the page of results goes next to it.
        out: a folder for copies; None: no copies.
        began: when the budget began, by ``time.monotonic``.
        quiet: whether to leave out a line for each job.

    Attributes:
        records: the last result of every job.
        ran: the outcomes of this run.

    Raises:
        StateError: the file of the state is not valid.
    """

    def __init__(self, state: Path, out: Path | None, began: float, *, quiet: bool) -> None:
        self.records: dict[str, Record] = load(state)
        self.ran: dict[str, Outcome] = {}
        self._state, self._out, self._began, self._quiet = state, out, began, quiet

    def add(self, planned: Planned, outcome: Outcome) -> None:
        """Record what came of a job, and write everything."""
        name = planned.job.name
        self.ran[name] = outcome
        new = Record(
            outcome.status,
            planned.digest,
            round(outcome.seconds, 1),
            date.today().isoformat(),
            outcome.facts.get("machine", ""),
            outcome.facts.get("torch", ""),
            outcome.problem,
            outcome.rows,
        )
        self.records[name] = merged(self.records.get(name), new)
        self.write()
        if not self._quiet:
            self._tell(name, outcome)

    def write(self) -> None:
        """Write the state, the page, and into copies the output of failures, too."""
        files = {".json": dump(self.records), ".md": report.page(self.records)}
        for suffix, text in files.items():
            write(self._state.with_suffix(suffix), text)
        if self._out is not None:
            for suffix, text in {**files, ".log": report.log(self.records)}.items():
                write(self._out / f"{NAME}{suffix}", text)

    def _tell(self, name: str, outcome: Outcome) -> None:
        problem = outcome.problem.partition("\n")[0]
        line = f"{outcome.status:<8} {name}  {outcome.seconds:.1f} s  {problem}"
        now = time.monotonic() - self._began
        print(f"{now:4.0f} s  {line}".rstrip(), file=sys.stderr, flush=True)
