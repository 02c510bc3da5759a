"""The command line: ``opweave generate | ops | doctor``."""

from opweave.cli.app import main

__all__ = ["main"]
