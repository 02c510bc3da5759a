"""``opweave native new | build``: start a package with a native op, and build it."""

from __future__ import annotations

import sys
from pathlib import Path

from cyclopts import App
from rich.markup import escape

from opweave.cli.options import Flag
from opweave.cli.output import fail, out, print_created, print_json
from opweave.native import NativeBuildError, jit
from opweave.native import scaffold as native_scaffold
from opweave.plugins.entry import PluginScaffoldError
from opweave.plugins.scaffold import check_free

native = App(name="native", help="Start and build packages with native operators.")


@native.command
def new(name: str, /, *, json: Flag = False) -> None:
    """Create a package with a working native op, in a new folder.

    Parameters
    ----------
    name
        Name of the package, its folder and the namespace of its torch ops.
    json
        Print JSON.
    """
    try:
        check_free(name)
        files = native_scaffold.new(name, Path.cwd())
    except PluginScaffoldError as error:
        fail(str(error))
    except NativeBuildError as error:
        _fail(error)
    then = f"opweave native build {name} && pip install pytest && pytest {name}"
    print_created(name, files, then, json=json)


@native.command
def build(
    directory: Path,
    /,
    *,
    verbose: Flag = False,
    json: Flag = False,
) -> None:
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
        _fail(error)
    if json:
        print_json({"path": str(built.path), "cached": built.cached})
    else:
        how = "from the cache" if built.cached else "built"
        out.print(f"{escape(str(built.path))} ({how})")


def _fail(error: NativeBuildError) -> None:
    """Exit with 2 after a one-line error and the compiler's output."""
    try:
        fail(error.summary)
    finally:
        sys.stderr.write(error.log)
