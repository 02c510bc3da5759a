"""Errors of recording, measuring and tuning."""

from opweave.base.errors import OpweaveError


class TuningError(OpweaveError):
    """Base class of the errors of this package."""


class TraceError(TuningError, ValueError):
    """A trace file cannot be read, or an argument cannot be recorded."""


class TuningFileError(TuningError, ValueError):
    """A tuning file cannot be read, or is of another machine."""


class WorkerFailedError(TuningError, RuntimeError):
    """The process that measures does not start."""
