"""Tuning files: measurements by machine."""

from __future__ import annotations

import fcntl
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from opweave.ir import Registry, current_registry
from opweave.ir.errors import SettingError, SettingWarning
from opweave.tuning.choice import ranges_of
from opweave.tuning.measure import Cell, Key, Task, TuningWorker, cells_to_measure
from opweave.tuning.timing import Machine, busy, disturbance
from opweave.tuning.trace import Trace, TuningFileError

# Tuning files: measurements by machine, as JSON.


FORMAT, VERSION = "opweave tuning", 1
_CellsByKey = dict[Key, Cell]


@dataclass
class TuningFile:
    """Measurements of several machines.

    Attributes:
        machines: the cells of each machine by key.
    """

    machines: dict[Machine, _CellsByKey] = field(default_factory=dict)

    def here(self, path: Path) -> _CellsByKey:
        """Return the cells of this machine.

        Raises:
            TuningFileError: the file has measurements of other machines only.
        """
        machine = Machine.here()
        if machine not in self.machines:
            others = "; ".join(map(machine.differences, self.machines)) or "it is empty"
            raise TuningFileError(
                f"{path} has no measurements of this machine: {others}. Run opweave tune here."
            )
        return self.machines[machine]

    def add(self, cell: Cell, machine: Machine) -> None:
        """Add a cell, or replace the one with the same key."""
        self.machines.setdefault(machine, {})[cell.key] = cell

    def save(self, path: Path) -> None:
        """Write the file; readers see the old or the new one, never a part."""
        machines = [
            {"machine": asdict(machine), "cells": [cell.to_dict() for cell in cells.values()]}
            for machine, cells in self.machines.items()
        ]
        text = json.dumps({"format": FORMAT, "version": VERSION, "machines": machines}, indent=1)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            unfinished.write_text(f"{text}\n", encoding="utf-8")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def add_to(cls, path: Path, cell: Cell, machine: Machine) -> None:
        """Add a cell to a file, which other processes may write too."""
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # of the folder, since the file is replaced
            file = cls.load(path) if path.exists() else cls()
            file.add(cell, machine)
            file.save(path)
        finally:
            os.close(folder)

    @classmethod
    def load(cls, path: Path) -> TuningFile:
        """Read a file.

        Raises:
            TuningFileError: it is missing or malformed, or has an unknown version.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except RecursionError as error:
            raise TuningFileError(f"{path}: the JSON is nested too deeply.") from error
        except (OSError, ValueError) as error:
            raise TuningFileError(f"{path}: cannot read the tuning file: {error}.") from error
        header = (data.get("format"), data.get("version")) if isinstance(data, dict) else None
        if header != (FORMAT, VERSION):
            raise TuningFileError(
                f"{path} is not a tuning file of version {VERSION}. Write one with opweave tune."
            )
        file = cls()
        for entry in _list(path, data.get("machines")):
            machine = Machine.parse(entry.get("machine"))
            if machine is None:
                raise TuningFileError(f"{path}: an entry has no valid 'machine'.")
            for cell in _list(path, entry.get("cells")):
                try:
                    file.add(Cell.of(cell), machine)
                except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                    raise TuningFileError(
                        f"{path}: a cell is malformed: {type(error).__name__}: {error}."
                    ) from error
        return file


def merge(files: Iterable[TuningFile]) -> TuningFile:
    """Return the cells of all files; if several have the same cell, the last one wins."""
    merged = TuningFile()
    for file in files:
        for machine, cells in file.machines.items():
            for cell in cells.values():
                merged.add(cell, machine)
    return merged


def _list(path: Path, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise TuningFileError(f"{path}: expected a list of objects, found {value!r:.60}.")
    return value


# Measure the calls of a trace into a tuning file.


Progress = Callable[[int, int, str], object]


@dataclass
class Tuned:
    """The outcome of a run.

    Attributes:
        cells: the cells that were measured in this run.
        left: the number of cells that the budget did not allow.
        stale: the implementations, as ``op:provider``, that have changed since they were measured.
        problems: why a call could not be measured, by its op and arguments.
    """

    cells: list[Cell] = field(default_factory=list)
    left: int = 0
    stale: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


def tune(
    trace: Trace,
    path: Path,
    task: Task | None = None,
    *,
    machine: Machine | None = None,
    budget: float | None = None,
    timeout: float = 120.0,
    progress: Progress = lambda done, total, op: None,
    clock: Callable[[], float] = time.monotonic,
) -> Tuned:
    """Measure every call of *trace* that *path* has no current cell for, and add the cells to it.

    The file is written after each cell, so that an interrupted run continues where it ended. A cell
    that was measured on a busy machine is measured again by the next run.

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
    measured = file.machines.get(machine, {})
    calls = cells_to_measure(trace, measured)
    tuned, start = Tuned(stale=stale_names(measured, current_registry())), clock()
    busy_reason = busy() or ""
    with TuningWorker(task or Task(), timeout) as worker:
        for done, call in enumerate(calls):
            progress(done, len(calls), call.op)
            if budget is not None and clock() - start > budget:
                tuned.left = len(calls) - done
                break
            cell = worker.measure(trace, call)
            if isinstance(cell, str):
                tuned.problems[f"{call.op}({call.label})"] = cell
                continue
            busy_before, busy_reason = busy_reason, disturbance() or ""
            cell = replace(cell, busy=busy_before or busy_reason)
            tuned.cells.append(cell)
            TuningFile.add_to(path, cell, machine)
    return tuned


def stale_names(cells: _CellsByKey, registry: Registry) -> list[str]:
    """Return the implementations that have changed since they were measured, as ``op:provider``."""
    ops = registry.ops
    names = {f"{c.op}:{p}" for c in cells.values() if c.op in ops for p in c.stale(ops[c.op])}
    return sorted(names)


# Apply a tuning file to the settings of a registry.


def apply_tuning_file(registry: Registry, path: Path, setting: str) -> None:
    """Let the measurements of this machine choose; warn of stale ones, or if the file has none.

    Args:
        registry: the registry of the ops.
        path: the tuning file.
        setting: the setting that names the file, for messages.

    Raises:
        SettingError: the file is missing or malformed.
    """
    try:
        cells = TuningFile.load(path)
    except TuningFileError as error:
        raise SettingError(f"{setting}: {error}") from error
    try:
        here = cells.here(path)
    except TuningFileError as error:
        warnings.warn(f"{setting} is ignored: {error}", SettingWarning, stacklevel=2)
        here = {}
    stale = stale_names(here, registry)
    if stale:
        warnings.warn(
            f"{setting}: the measurements of {', '.join(stale)} in {path} are ignored: the kernel, "
            "its package or a library has changed since. Run opweave tune again.",
            SettingWarning,
            stacklevel=2,
        )
    current = (
        replace(c, results=tuple(m for m in c.results if f"{c.op}:{m.provider}" not in stale))
        for c in here.values()
    )
    registry.settings.set_tuned(ranges_of(current, str(path)))
