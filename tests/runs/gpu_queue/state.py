"""The recorded state: what came of each job, in a JSON file with a line for each."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_queue.job import Row

PASSED, FAILED, CRASHED, TIMEOUT, STOPPED = "passed", "failed", "crashed", "timeout", "stopped"


class StateError(Exception):
    """The file of the state cannot be read."""


@dataclass(frozen=True)
class Record:
    """The outcome of the last run of a job.

    Attributes:
        status: ``passed``; ``failed``: it raised an error or found something wrong; ``crashed``:
            its process ended; ``timeout``; ``stopped``: at the end of the budget.
        digest: of the sources that it ran with.
        seconds: how long it took.
        machine, torch, date: where and when it ran.
        problem: the last lines of its output, if it did not pass.
        rows: what it found.
    """

    status: str
    digest: str
    seconds: float
    date: str
    machine: str = ""
    torch: str = ""
    problem: str = ""
    rows: list[Row] = field(default_factory=list)

    @property
    def place(self) -> str:
        """Where and when it ran, in words."""
        torch = self.torch and f"torch {self.torch}"
        return ", ".join(filter(None, (self.machine, torch, self.date)))


def load(path: Path) -> dict[str, Record]:
    """Return the records by the names of jobs; none if there is no file.

    Raises:
        StateError: the file is not valid.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise StateError(f"cannot read {path}: {error}") from error
    try:
        return {name: Record(**record) for name, record in json.loads(text)["jobs"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(
            f"{path} does not hold the state of a queue ({type(error).__name__}: {error}); "
            "restore it with git, or remove it to begin from the start"
        ) from error


def merged(old: Record | None, new: Record) -> Record:
    """Return *new*; where it did not pass, rows that it no longer reached are kept from *old*."""
    if new.status == PASSED or old is None:
        return new
    again = {_key(row) for row in new.rows}
    kept = [row for row in old.rows if _key(row) not in again and "problem" not in row]
    return Record(**{**asdict(new), "rows": [*kept, *new.rows]})


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("name", "case", "contender"))


def dump(records: Mapping[str, Record]) -> str:
    """Return the state as JSON."""
    lines = []
    for name, record in sorted(records.items()):
        given = {key: value for key, value in asdict(record).items() if value not in ("", [])}
        lines.append(f"{json.dumps(name)}: {json.dumps(given)}")
    return '{"jobs": {\n' + ",\n".join(lines) + "\n}}\n"


def write(path: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
