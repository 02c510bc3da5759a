"""The command line, ``opweave``."""

from opweave.cli.app import main

__all__ = ["main"]
