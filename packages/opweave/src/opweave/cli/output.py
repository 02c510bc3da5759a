"""Console output: results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape

from opweave.base.packages import is_in_project

_WIDE = 240  # for files and pipes, so that lines are not wrapped
_NARROWEST = 20


def _check_width() -> None:
    """Ignore a COLUMNS value that is malformed or too small: rich would loop forever."""
    width = os.environ.get("COLUMNS", "")
    if not (width.isascii() and width.isdecimal() and int(width) >= _NARROWEST):
        os.environ.pop("COLUMNS", None)


_check_width()  # before any console reads it


class Results(Console):
    """Console on standard output, which the reader may close early, as ``head`` does."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # handled by the command line; rich would exit with 1


def _console(*, stderr: bool = False) -> Console:
    kind = Console if stderr else Results
    console = kind(stderr=stderr, highlight=False, soft_wrap=True, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDE
    return console


out, err = _console(), _console(stderr=True)


def open_streams() -> None:
    """Make the standard streams writable, even if they are closed or use another encoding."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (open until exit)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # escape characters that cannot be encoded
            stream.reconfigure(errors="backslashreplace")


def format_warnings() -> None:
    """Show opweave's warnings in one line, without the source location."""
    warnings.formatwarning = _formatted


def _formatted(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    if not is_in_project(category.__module__):
        return _format_warning(message, category, filename, lineno, line)
    return f"opweave: {category.__name__}: {' '.join(str(message).split())}\n"


_format_warning = warnings.formatwarning


def print_text(text: str) -> None:
    """Write *text* to stdout unchanged."""
    sys.stdout.write(f"{text}\n")


def print_json(value: Any) -> None:
    """Write *value* to stdout as one JSON document."""
    print_text(json.dumps(value, indent=2, ensure_ascii=False))


def print_json_line(value: Any) -> None:
    """Write *value* to stdout as JSON in one line."""
    print_text(json.dumps(value, ensure_ascii=False))


def show_error(message: str) -> None:
    """Write *message* as one line to stderr."""
    line = " ".join(message.split())
    err.print(f"[bold red]opweave:[/] {escape(line)}")


def fail(message: str) -> NoReturn:
    """Write *message* as one line to stderr and exit with 2."""
    show_error(message)
    sys.exit(2)


def discard_output() -> None:
    """Prevent Python's error at exit about output that cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
