"""``opweave native build``: build a package's C++ module."""

from __future__ import annotations

import sys
from pathlib import Path

from cyclopts import App
from rich.markup import escape

from opweave.cli.options import Flag
from opweave.cli.output import fail, out, print_json
from opweave.native import NativeBuildError, jit

native = App(name="native", help="Build packages with native operators.")


@native.command
def build(directory: Path, /, *, verbose: Flag = False, json: Flag = False) -> None:
    """Build a package's native module in place, so that the package can be imported.

    Parameters
    ----------
    directory
        The folder with the package's pyproject.toml.
    verbose
        Show the compiler's commands and messages.
    json
        Print JSON.
    """
    try:
        built = jit.build(directory, verbose=verbose)
    except NativeBuildError as error:
        try:
            fail(error.summary)
        finally:
            sys.stderr.write(error.log)
    if json:
        print_json({"path": str(built.path), "cached": built.cached})
    else:
        how = "from the cache" if built.cached else "built"
        out.print(f"{escape(str(built.path))} ({how})")
