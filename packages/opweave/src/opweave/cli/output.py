"""Console output: results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import lzma
import os
import platform as python_platform
import shlex
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from opweave import __version__, platforms
from opweave.config.terminal import ProgressBar
from opweave.packages import is_in_project

# Errors of user input.


class CliError(Exception):
    """The input of a command is not valid; the message is the line that the user sees."""


# The two consoles, and how a value is printed on them.


_FILE_COLUMNS = 240  # for files and pipes, so that lines are not wrapped
_MIN_COLUMNS = 20


def _check_width() -> None:
    """Ignore a COLUMNS value that is malformed or too small: rich would loop forever."""
    width = os.environ.get("COLUMNS", "")
    if not (width.isascii() and width.isdecimal() and int(width) >= _MIN_COLUMNS):
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
        console.width = _FILE_COLUMNS
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


# Tables that stay readable in a terminal of 80 columns.


_GAP_CHARACTERS = 2  # between columns
_MAX_UNWRAPPED_CHARACTERS = 24  # longer words, such as paths, may be wrapped


class PlainTable(Table):
    """A table without borders whose cells wrap between words.

    Rich shrinks all columns of a wide table equally, down to one letter per line. Here a column is
    at least as wide as its longest word of up to 24 characters.
    """

    def __init__(self, *columns: str, no_wrap: bool = False) -> None:
        super().__init__(
            box=None, header_style="bold", padding=(0, _GAP_CHARACTERS, 0, 0), pad_edge=False
        )
        for column in columns:
            width = self._least_width(column)
            self.add_column(column, overflow="fold", no_wrap=no_wrap, min_width=width)

    def add_row(self, *cells: RenderableType | None, **options: object) -> None:
        for column, cell in zip(self.columns, cells, strict=False):
            if isinstance(cell, str) and column.min_width is not None:
                column.min_width = max(column.min_width, self._least_width(cell))
        super().add_row(*cells, **options)  # type: ignore[arg-type]

    def _least_width(self, cell: str) -> int:
        words = Text.from_markup(cell).plain.split()
        return min(max(map(len, words), default=1), _MAX_UNWRAPPED_CHARACTERS)


class ListTable(PlainTable):
    """A table with one line per row; the last column is truncated to the terminal."""

    def __init__(self, *columns: str) -> None:
        super().__init__(*columns, no_wrap=True)
        for column in self.columns:
            column.overflow = "ellipsis"
        self.columns[-1].min_width = None

    def _least_width(self, cell: str) -> int:
        return len(Text.from_markup(cell).plain)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        *whole, last = self.columns
        taken = sum((column.min_width or 0) + _GAP_CHARACTERS for column in whole)
        last.max_width = max(options.max_width - taken - _GAP_CHARACTERS, 1)
        return super().__rich_console__(console, options)


# Output files of commands; ``-`` is standard output.


STDOUT = "-"


def check_writable(option: str, file: str | None) -> None:
    """Check that *file* can be written, before the command starts its work.

    Raises:
        CliError: *file* is a directory, its directory is missing, or permission is denied.
    """
    if file is None or file == STDOUT:
        return
    path = Path(file)
    if not file or path.is_dir():
        raise CliError(f"{option} {file!r} should name a file; found a directory.")
    if not path.parent.is_dir():
        raise CliError(f"{option} {file!r} cannot be written: no directory {str(path.parent)!r}.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise CliError(f"{option} {file!r} cannot be written: permission denied.")


def write(option: str, file: str, text: str) -> None:
    """Write *text* to *file*, compressed if its name ends in ``.xz``, and print the name to stderr.

    Raises:
        CliError: the file cannot be written.
    """
    if file == STDOUT:
        print_text(text)
        return
    data = text.encode(errors="backslashreplace")
    try:
        Path(file).write_bytes(lzma.compress(data) if file.endswith(".xz") else data)
    except OSError as error:
        raise CliError(f"{option} {file!r} cannot be written: {error.strerror}.") from error
    err.print(f"wrote {file}", markup=False)


def write_json(option: str, file: str, value: Any) -> None:
    """Write *value* to *file* as JSON; see :func:`write`."""
    write(option, file, json.dumps(value, indent=2, ensure_ascii=False))


# Progress bars on stderr.


def progress_bar(what: str, *, then: str = "", counts: bool = True) -> ProgressBar:
    """Return a transient progress bar on stderr."""
    return ProgressBar(what, then=then, counts=counts, console=err)


# Provenance of a saved report: versions, the device and the command.


def facts() -> dict[str, str]:
    """Return the facts by name, for the head of a page."""
    command, platform = [Path(sys.argv[0]).name, *sys.argv[1:]], platforms.current_platform
    return {
        "opweave": __version__,
        "torch": torch.__version__,
        "Python": python_platform.python_version(),
        "device": f"{platform.get_device_name()} ({platform.name})",
        "threads": str(torch.get_num_threads()),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "command": shlex.join(command),
    }
