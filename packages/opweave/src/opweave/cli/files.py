"""Output files of commands; ``-`` is standard output."""

from __future__ import annotations

import json
import lzma
import os
from pathlib import Path
from typing import Any

from opweave.cli.errors import CliError
from opweave.cli.output import err, print_text

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
