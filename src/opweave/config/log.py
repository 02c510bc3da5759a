"""Shows the log on standard error, where a setting asks for it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TextIO

_FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to what is standard error at the time of writing."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class _JsonLines(logging.Formatter):
    """Writes each record as one line of JSON; ``fields`` of a record are keys of their own."""

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
_chosen = False  # by the program, which is stronger than a setting


def show_log(level: str | None) -> None:
    """Write what the loggers below ``opweave`` say, from *level* up, to standard error.

    They no longer speak to the handlers of the root logger then: each line appears once. With None,
    nothing changes; the program decides what is shown, as with any library.
    """
    if level is not None and not _chosen:
        _show("opweave", level)


def choose_log(
    level: str, *, as_json: bool = False, others: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write the log to standard error, for a program of opweave's own; settings no longer count.

    Args:
        level: of the loggers below ``opweave``.
        as_json: write lines of JSON.
        others: other loggers to show, and their levels.
    """
    global _chosen
    _chosen = True
    if as_json:
        _handler.setFormatter(_JsonLines())
    for name, its_level in {"opweave": level, **others}.items():
        _show(name, its_level)


def _show(name: str, level: str) -> None:
    logger = logging.getLogger(name)
    logger.setLevel(level)
    logger.addHandler(_handler)  # once, however often
    logger.propagate = False
