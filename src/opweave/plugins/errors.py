"""Every error about plugins, one class per condition.

Each message names the entry point, its group and its distribution, the cause, and the way out.
"""

from __future__ import annotations

from opweave.ir.errors import OpweaveError


class PluginError(OpweaveError, RuntimeError):
    """Base class of everything that :mod:`opweave.plugins` raises on purpose."""


class PluginPolicyError(PluginError, ValueError):
    """``OPWEAVE_PLUGINS``, ``OPWEAVE_PLATFORM`` or another setting names no plugin, or nonsense."""


class UnknownGroupError(PluginError, LookupError):
    """No group of plugins is called that."""


class UnknownPluginError(PluginError, LookupError):
    """The group has no plugin of that name."""


class DuplicatePluginError(PluginError, ValueError):
    """Two distributions bring a plugin of the same group and name."""


class ReservedPluginNameError(PluginError, ValueError):
    """A platform plugin has the name of a platform that comes with opweave."""


class PluginImportError(PluginError):
    """The entry point of a plugin cannot be imported."""


class PluginFailedError(PluginError):
    """The function of a plugin raised."""


class PluginTimeoutError(PluginError, TimeoutError):
    """A plugin takes too long, in import or in its function."""


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
    """A plugin requires one that is not installed, is left out, or failed; or they form a cycle."""


class PluginTypeError(PluginError, TypeError):
    """An entry point is not what its group asks for, or returned something else."""


class ClaimApiError(PluginError):
    """A platform plugin's claim is for another version of the platform interface."""


class PlatformConflictError(PluginError):
    """Several platforms claim the device with the same score."""


class PlatformAbsentError(PluginError):
    """The platform that ``OPWEAVE_PLATFORM`` selects says that its device is not here."""


class PlatformReentryError(PluginError):
    """A platform plugin's function asks for the current platform, which it is to help to find."""


class ReferenceNameError(PluginError, ImportError):
    """A qualified name, such as ``package.module.Class``, stands for nothing."""


class PluginScaffoldError(PluginError, ValueError):
    """A new plugin package cannot be written: its name is no good, or it exists already."""


class PluginWarning(UserWarning):
    """A plugin failed, or is set up in a way that does nothing, and opweave goes on without it."""
