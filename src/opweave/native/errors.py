"""What can go wrong between C++ sources and a loaded native module."""

from __future__ import annotations

from opweave.ir.errors import OpweaveError


class NativeBuildError(OpweaveError, RuntimeError):
    """A native module cannot be built.

    Attributes:
        summary: says in one line what is wrong and how to mend it.
        log: what the compiler said, if it was asked.
    """

    def __init__(self, summary: str, log: str = "") -> None:
        super().__init__(f"{summary}\n{log}" if log else summary)
        self.summary = summary
        self.log = log


class NativeImportError(OpweaveError, ImportError):
    """A native module cannot be imported: it is not built, or its registrations are wrong."""
