"""What can go wrong while a graph is compiled."""

from __future__ import annotations

from opweave.ir import IrError


class CompileError(IrError):
    """Base of the errors that opweave.compile raises."""


class UseAfterDonationError(CompileError):
    """A tensor, or a view of its memory, is read after it was given to ``maybe_inplace``."""


class OptionError(CompileError):
    """An option of the backend is unknown or malformed."""


class PluginPassError(CompileError):
    """A compiler pass of a plugin failed, or is none."""


class UnloweredOpError(CompileError):
    """An op of the IR would have reached code generation."""
