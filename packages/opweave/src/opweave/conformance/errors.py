"""Errors of the conformance kit, one class per condition."""

from opweave.ir.errors import OpweaveError


class ConformanceError(OpweaveError):
    """Base class of the errors of the conformance kit."""


class UnknownCheckError(ConformanceError, LookupError):
    """A check does not exist."""


class NothingToVerifyError(ConformanceError, LookupError):
    """No registered implementation matches the given ops, providers and platform."""


class ModuleImportError(ConformanceError, ImportError):
    """A module with implementations cannot be imported."""


class UnknownPlatformError(ConformanceError, LookupError):
    """The platform does not exist, or its device is missing."""


class NonconformingError(ConformanceError, AssertionError):
    """An implementation, layer or platform failed a check."""


class UnknownInputError(ConformanceError, LookupError):
    """An input generator does not have the option, or does not accept its value."""


class VerifierFailedError(ConformanceError, RuntimeError):
    """The process that verifies does not start."""
