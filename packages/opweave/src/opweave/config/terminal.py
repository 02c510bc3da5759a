"""Logging to standard error, and progress bars."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from opweave.packages import PROJECT

# Logging to standard error.


_FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to the current ``sys.stderr``, which may be replaced after the handler is created."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class _JsonLines(logging.Formatter):
    """Formats a record as one line of JSON; the mapping ``record.fields`` replaces the message."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        line.update({"message": record.getMessage()} if fields is None else fields)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


_handler = _StandardError()
_chosen = False  # whether choose_log() was called, which overrides show_log()


def show_log(level: str | None) -> None:
    """Write the project's log from *level* up to standard error; with None, change nothing.

    The loggers no longer propagate to the root logger, so that each line appears once.
    """
    if level is not None and not _chosen:
        for name in PROJECT:
            _show(name, level)


def choose_log(
    level: str, *, as_json: bool = False, others: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write the log to standard error regardless of settings; for opweave's own programs.

    Args:
        level: level of the loggers of the project's packages.
        as_json: write one line of JSON per record.
        others: levels of other loggers to show, by name.
    """
    global _chosen
    _chosen = True
    if as_json:
        _handler.setFormatter(_JsonLines())
    for name, its_level in {**dict.fromkeys(PROJECT, level), **others}.items():
        _show(name, its_level)


def _show(name: str, level: str) -> None:
    logger = logging.getLogger(name)
    logger.setLevel(level)
    logger.addHandler(_handler)  # idempotent
    logger.propagate = False


# Progress bars on terminals.


class ProgressBar:
    """A transient progress bar, shown on terminals only.

    Call it with ``(done, total)`` and, optionally, the name of the current item.

    Args:
        what: description of the work.
        then: description of uncounted work that follows; shown when ``done`` reaches ``total``.
        counts: whether to show numbers.
        console: the console, by default standard error.
    """

    def __init__(
        self, what: str, *, then: str = "", counts: bool = True, console: Console | None = None
    ) -> None:
        self._what, self._then = what, then
        console = console or Console(stderr=True)
        counter = (MofNCompleteColumn(),) if counts else ()
        columns = (TextColumn("{task.description}"), BarColumn(), *counter, TimeElapsedColumn())
        is_shown = console.is_terminal
        self._bar = Progress(*columns, console=console, transient=True, disable=not is_shown)
        self._task = self._bar.add_task(what, total=None)

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def stage(self, what: str) -> ProgressBar:
        """Begin counted work after that of the bar, and return the bar to call for it."""
        self._bar.remove_task(self._task)
        self._task, self._what, self._then = self._bar.add_task(what, total=None), what, ""
        return self

    def __call__(self, done: int, total: int, item: str = "") -> None:
        if done >= total and self._then:
            self._bar.remove_task(self._task)
            self._task, self._what, self._then = self._bar.add_task(self._then, total=None), "", ""
        if not self._what:  # the uncounted work has begun
            return
        described = f"{self._what} {item}".rstrip()
        self._bar.update(self._task, completed=done, total=total, description=described)
