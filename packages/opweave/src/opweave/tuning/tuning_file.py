"""Tuning files: measurements by machine, and the choice of implementations by them."""

from __future__ import annotations

import itertools
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from opweave.ir import Registry
from opweave.ir.errors import SettingError, SettingWarning
from opweave.ir.priority import PriorityEntry, SizeRange
from opweave.tuning.measure import Cell, Key, Task, TuningWorker, bucket, cells_to_measure
from opweave.tuning.timing import Machine, is_faster
from opweave.tuning.trace import Trace, TuningFileError

# Choose implementations by number of tokens, from the cells of a tuning file.
#
# Per op, at most two thresholds divide the numbers of tokens into ranges. A range has a provider
# only if that provider is not slower than the default in any measured cell of the range, and
# faster in at least one; otherwise it has the default. A provider that was wrong or crashed in
# any cell of the op is never chosen.


_MAX_RANGES = 3
_Cells = Sequence[Cell]


@dataclass(frozen=True)
class _Range:
    """Consecutive buckets, and the provider to choose for them; None: the default."""

    buckets: tuple[int, ...]
    provider: str | None
    saved: float  # microseconds of all calls


def ranges_of(cells: Iterable[Cell], origin: str) -> dict[str, list[SizeRange]]:
    """Return the priorities by number of tokens for each op where a choice saves time.

    Args:
        cells: the cells of one machine.
        origin: the name of the file, for explanations.
    """
    priorities = {}
    for op, of_op in itertools.groupby(sorted(cells, key=lambda c: c.op), lambda c: c.op):
        by_bucket: dict[int, list[Cell]] = {}
        for cell in sorted(_trusted(list(of_op)), key=lambda cell: cell.tokens):
            by_bucket.setdefault(bucket(cell.tokens), []).append(cell)
        best = _best(by_bucket)
        if any(token_range.provider for token_range in best):
            priorities[op] = list(_as_priorities(best, by_bucket, origin))
    return priorities


def _trusted(cells: _Cells) -> list[Cell]:
    """Return the cells without providers that were wrong or crashed in one of them."""
    bad = {m.provider for c in cells for m in c.results if m.status in ("failed", "crashed")}
    return [
        replace(cell, results=tuple(m for m in cell.results if m.provider not in bad))
        for cell in cells
    ]


def _best(cells: dict[int, list[Cell]]) -> list[_Range]:
    """Return the division that saves most time; of equal ones, that with the fewest ranges."""
    buckets = tuple(cells)
    choices: list[list[_Range]] = []
    for count in range(1, min(_MAX_RANGES, len(buckets)) + 1):
        for cuts in itertools.combinations(range(1, len(buckets)), count - 1):
            bounds = itertools.pairwise((0, *cuts, len(buckets)))
            choices.append([_chosen(buckets[low:high], cells) for low, high in bounds])
    return max(choices, key=lambda ranges: sum(r.saved for r in ranges))


def _chosen(buckets: tuple[int, ...], cells: dict[int, list[Cell]]) -> _Range:
    inside = [cell for tokens in buckets for cell in cells[tokens]]
    best = _Range(buckets, None, 0.0)
    for provider in dict.fromkeys(m.provider for cell in inside for m in cell.results):
        saved = _saved(provider, inside)
        if saved > best.saved:
            best = _Range(buckets, provider, saved)
    return best


def _saved(provider: str, cells: _Cells) -> float:
    """Return the microseconds that a provider saves; 0 if it may be slower, wrong or no faster."""
    total, wins = 0.0, False
    for cell in cells:
        status = next((m.status for m in cell.results if m.provider == provider), "rejected")
        usual, tuned = cell.time(cell.default), cell.time(provider)
        if status == "rejected":
            continue  # the call runs the default
        if tuned is None or usual is None or tuned.microseconds > usual.microseconds:
            return 0.0
        wins = wins or is_faster(tuned, usual)
        total += cell.calls * (usual.microseconds - tuned.microseconds)
    return total if wins else 0.0


def _as_priorities(
    ranges: Sequence[_Range], cells: dict[int, list[Cell]], origin: str
) -> Iterator[SizeRange]:
    for this, following in itertools.zip_longest(ranges, ranges[1:]):
        limit = None
        if following is not None:
            # Numbers of tokens between two measured buckets have the default, if one side has.
            limit = this.buckets[-1] if this.provider else following.buckets[0] // 2
        inside = [cell for tokens in this.buckets for cell in cells[tokens]]
        yield SizeRange(limit, _entries(this.provider, inside, origin))


def _entries(provider: str | None, cells: _Cells, origin: str) -> tuple[PriorityEntry, ...]:
    if provider is None:
        return ()
    tuned, usual = 0.0, 0.0
    for cell in cells:
        measured, default = cell.time(provider), cell.time(cell.default)
        if measured is not None and default is not None:
            tuned += cell.calls * measured.microseconds
            usual += cell.calls * default.microseconds
    calls = sum(cell.calls for cell in cells if cell.time(provider) is not None)
    text = f"tuned: {tuned / calls:.3g} µs against {usual / calls:.3g} µs, {origin}"
    return (PriorityEntry(provider, False, text),)


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
    progress: Progress = lambda done, total, op: None,
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
            cell = worker.measure(trace, call)
            if isinstance(cell, str):
                tuned.problems[f"{call.op}({call.label})"] = cell
                continue
            tuned.cells.append(cell)
            file.add(cell, machine)
            file.save(path)
    return tuned


# Apply a tuning file to the settings of a registry.


def apply_tuning_file(registry: Registry, path: Path, setting: str) -> None:
    """Let the measurements of this machine choose; warn if the file has none.

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
    registry.settings.set_tuned(ranges_of(here.values(), str(path)))
