"""The command line, ``opweave``."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits with 0, 1 (problem found), 2 (bad input) or 130 (interrupted)."""
    # Benchmarks print with opweave.cli.output on machines where cyclopts is not installed.
    from opweave.cli.app import main as run

    run(arguments)
