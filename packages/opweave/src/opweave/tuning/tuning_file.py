"""Tuning files: measurements by machine, as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from opweave.tuning.cell import Cell, Key
from opweave.tuning.errors import TuningFileError
from opweave.tuning.machine import Machine

FORMAT, VERSION = "opweave tuning", 1
Cells = dict[Key, Cell]


@dataclass
class TuningFile:
    """Measurements of several machines.

    Attributes:
        machines: the cells of each machine by key.
    """

    machines: dict[Machine, Cells] = field(default_factory=dict)

    def here(self, path: Path) -> Cells:
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
        found = [
            {"machine": asdict(machine), "cells": [cell.to_dict() for cell in cells.values()]}
            for machine, cells in self.machines.items()
        ]
        text = json.dumps({"format": FORMAT, "version": VERSION, "machines": found}, indent=1)
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
            found = json.loads(path.read_text(encoding="utf-8"))
        except RecursionError as error:
            raise TuningFileError(f"{path}: the JSON is nested too deeply.") from error
        except (OSError, ValueError) as error:
            raise TuningFileError(f"{path}: cannot read the tuning file: {error}.") from error
        if (
            not isinstance(found, dict)
            or found.get("format") != FORMAT
            or found.get("version") != VERSION
        ):
            raise TuningFileError(
                f"{path} is not a tuning file of version {VERSION}. Write one with opweave tune."
            )
        file = cls()
        for entry in _list(path, found.get("machines")):
            machine = Machine.parse(entry.get("machine"))
            if machine is None:
                raise TuningFileError(f"{path}: an entry has no valid 'machine'.")
            for given in _list(path, entry.get("cells")):
                try:
                    file.add(Cell.of(given), machine)
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


def _list(path: Path, found: Any) -> list[dict[str, Any]]:
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise TuningFileError(f"{path}: expected a list of objects, found {found!r:.60}.")
    return found
