"""Errors raised during compilation."""

from __future__ import annotations

from opweave.ir import IrError


class CompileError(IrError):
    """Base class of the errors that opweave.compile raises."""


class UseAfterDonationError(CompileError):
    """A tensor, or a view of it, is read after it was donated to ``maybe_inplace``."""


class OptionError(CompileError):
    """A backend option is unknown or has an invalid value."""


class PluginPassError(CompileError):
    """A plugin's compiler pass failed, does not exist or is not a valid pass."""


class UnloweredOpError(CompileError):
    """An IR op would have reached code generation."""
