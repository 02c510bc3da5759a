"""Errors of plugins, one class per condition.

Messages name the entry point, its group, its distribution, the cause and a workaround.
"""

from __future__ import annotations

from opweave.ir.errors import OpweaveError


class PluginError(OpweaveError, RuntimeError):
    """Base class of the errors of :mod:`opweave.plugins`."""


class PluginPolicyError(PluginError, ValueError):
    """``OPWEAVE_PLUGINS``, ``OPWEAVE_PLATFORM`` or another setting is not valid."""


class UnknownGroupError(PluginError, LookupError):
    """The plugin group does not exist."""


class UnknownPluginError(PluginError, LookupError):
    """The group does not have a plugin of that name."""


class DuplicatePluginError(PluginError, ValueError):
    """Two distributions declare a plugin of the same group and name."""


class ReservedPluginNameError(PluginError, ValueError):
    """A platform plugin has the name of one of opweave's platforms."""


class PluginImportError(PluginError):
    """The entry point of a plugin cannot be imported."""


class PluginFailedError(PluginError):
    """The function of a plugin raised."""


class PluginTimeoutError(PluginError, TimeoutError):
    """A plugin's import or function exceeded its time limit."""


class PluginHookError(PluginError):
    """A hook of a plugin's platform raised."""


class PluginsFailedError(PluginError):
    """Several plugins failed; the message has the error of each, and so has ``errors``."""

    def __init__(self, errors: tuple[PluginError, ...]) -> None:
        super().__init__("\n".join([f"{len(errors)} plugins failed:", *map(str, errors)]))
        self.errors = errors

    def __reduce__(self) -> tuple[type[PluginsFailedError], tuple[tuple[PluginError, ...]]]:
        return type(self), (self.errors,)


class PluginRequirementError(PluginError):
    """A plugin's requirement is not installed, disabled, failed, or part of a cycle."""


class PluginTypeError(PluginError, TypeError):
    """An entry point or its return value has the wrong type for its group."""


class ClaimApiError(PluginError):
    """A platform plugin's claim is for another version of the platform interface."""


class PlatformConflictError(PluginError):
    """Several platforms claim the device with the same score."""


class PlatformAbsentError(PluginError):
    """The device of the platform selected by ``OPWEAVE_PLATFORM`` is not present."""


class PlatformReentryError(PluginError):
    """A platform plugin's function accessed the current platform during its resolution."""


class ReferenceNameError(PluginError, ImportError):
    """A qualified name, such as ``package.module.Class``, cannot be resolved."""


class PluginScaffoldError(PluginError, ValueError):
    """A new plugin package cannot be created: its name is not valid, or it exists."""


class PluginWarning(UserWarning):
    """A plugin failed or its declaration has no effect; opweave continues without it."""
