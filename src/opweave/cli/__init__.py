"""The command line: ``opweave generate | ops | doctor | native``."""

from opweave.cli.app import main

__all__ = ["main"]
