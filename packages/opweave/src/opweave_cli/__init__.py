"""Console script ``opweave``.

A package of its own: importing anything below ``opweave`` imports torch, which takes more than a
second. ``opweave --version`` does without, and Ctrl-C during the import ends quietly.
"""

from __future__ import annotations

import sys
from importlib.metadata import version


def main() -> None:
    """Print the version, or import and run :func:`opweave.cli.main`."""
    if sys.argv[1:] == ["--version"]:
        print(version("opweave"))
        return
    try:
        from opweave.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()
