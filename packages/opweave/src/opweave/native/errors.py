"""Errors of building and loading native modules."""

from __future__ import annotations

from opweave.ir.errors import OpweaveError


class NativeBuildError(OpweaveError, RuntimeError):
    """A native module cannot be built.

    Attributes:
        summary: one line with the problem and how to fix it.
        log: the compiler's messages, if it ran.
    """

    def __init__(self, summary: str, log: str = "") -> None:
        super().__init__(f"{summary}\n{log}" if log else summary)
        self.summary = summary
        self.log = log


class NativeImportError(OpweaveError, ImportError):
    """A native module cannot be imported because it is not built, or torch rejects its ops."""
