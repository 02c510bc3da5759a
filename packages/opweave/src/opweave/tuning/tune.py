"""Measure the calls of a trace into a tuning file."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from opweave.tuning.cell import Cell, cells_to_measure
from opweave.tuning.machine import Machine
from opweave.tuning.trace import Trace
from opweave.tuning.tuning_file import TuningFile
from opweave.tuning.worker import Task, TuningWorker

Progress = Callable[[int, int, str], object]


@dataclass
class Tuned:
    """The outcome of a run.

    Attributes:
        cells: the cells that were measured in this run.
        left: the number of cells that the budget did not allow.
        problems: why a call could not be measured, by its op and arguments.
    """

    cells: list[Cell] = field(default_factory=list)
    left: int = 0
    problems: dict[str, str] = field(default_factory=dict)


def tune(
    trace: Trace,
    path: Path,
    task: Task | None = None,
    *,
    machine: Machine | None = None,
    budget: float | None = None,
    timeout: float = 120.0,
    progress: Progress = lambda done, total, what: None,
    clock: Callable[[], float] = time.monotonic,
) -> Tuned:
    """Measure every call of *trace* that *path* has no cell for, and add the cells to the file.

    The file is written after each cell, so that an interrupted run continues where it ended.

    Args:
        trace: the calls.
        path: the tuning file; it is created if it does not exist.
        task: how to measure.
        machine: the machine that runs this; by default as :meth:`Machine.here` finds it.
        budget: seconds after which no further cell is begun; None: no limit.
        timeout: seconds that one step of a measurement may take.
        progress: called with the number of cells measured, their total and the next op.
        clock: returns the time in seconds.

    Raises:
        TuningFileError: the existing file is malformed.
        UnknownOpError, TraceError: a call does not fit its op.
        WorkerFailedError: the subprocess does not start.
    """
    machine = machine or Machine.here()
    file = TuningFile.load(path) if path.exists() else TuningFile()
    calls = cells_to_measure(trace, file.machines.get(machine, ()))
    tuned, start = Tuned(), clock()
    with TuningWorker(task or Task(), timeout) as worker:
        for done, call in enumerate(calls):
            progress(done, len(calls), call.op)
            if budget is not None and clock() - start > budget:
                tuned.left = len(calls) - done
                break
            found = worker.measure(trace, call)
            if isinstance(found, str):
                tuned.problems[f"{call.op}({call.label})"] = found
                continue
            tuned.cells.append(found)
            file.add(found, machine)
            file.save(path)
    return tuned
