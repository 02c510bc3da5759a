"""Every error of the conformance kit, one class per condition."""

from opweave.ir.errors import OpweaveError


class ConformanceError(OpweaveError):
    """Base class of what the kit raises about what it was asked."""


class UnknownCheckError(ConformanceError, LookupError):
    """No check has that name."""


class NothingToVerifyError(ConformanceError, LookupError):
    """No implementation fits what was asked for."""


class ModuleImportError(ConformanceError, ImportError):
    """A module that was to register implementations cannot be imported."""


class UnknownPlatformError(ConformanceError, LookupError):
    """No platform has that name, or its device is not here."""


class NonconformingError(ConformanceError, AssertionError):
    """An implementation, or a layer, is not what it claims to be."""


class UnknownInputError(ConformanceError, LookupError):
    """An input generator has no such option, or the option no such value."""


class VerifierFailedError(ConformanceError, RuntimeError):
    """The process that verifies does not start."""
