"""Every error of the platforms, one class per condition.

Each message says what was asked, what was found, what is possible, and how to fix it.
"""

from __future__ import annotations

from opweave.ir.errors import OpweaveError


class PlatformError(OpweaveError):
    """Base class of everything that :mod:`opweave.platforms` raises on purpose."""


class PlatformContractError(PlatformError, TypeError):
    """A class derived from ``Platform`` does not keep its contract; the message lists every point.

    Raised where the class is defined, or where it is first used for what only then can be seen.
    """


class PlatformApiError(PlatformContractError):
    """A platform is written for another version of the contract than this opweave has."""


class PlatformMismatchError(PlatformError, RuntimeError):
    """A process resolved another platform than the one that started it."""


class UnsupportedByPlatformError(PlatformError, NotImplementedError):
    """The platform cannot do what is asked of it."""
