"""Errors of the platforms."""

from __future__ import annotations

from opweave.ir.errors import OpweaveError


class PlatformError(OpweaveError):
    """Base class of the errors of :mod:`opweave.platforms`."""


class PlatformContractError(PlatformError, TypeError):
    """A subclass of ``Platform`` violates the contract; the message lists every fault.

    Raised when the class is defined, or at the first use for faults that show only then.
    """


class PlatformApiError(PlatformContractError):
    """A platform is written for another version of the contract than opweave's."""


class PlatformMismatchError(PlatformError, RuntimeError):
    """A child process resolved another platform than its parent."""


class UnsupportedByPlatformError(PlatformError, NotImplementedError):
    """The platform does not support the requested operation."""
