"""Plugins: packages that extend opweave by being installed.

A distribution declares entry points; opweave finds, orders, loads and reports them. Importing this
package does not load plugins.
"""

from opweave.plugins.claim import BUILTIN_PLATFORMS, PLATFORM_API, Claim
from opweave.plugins.errors import PluginError, PluginWarning
from opweave.plugins.groups import (
    GENERAL_PLUGINS,
    GROUPS,
    IO_PROCESSOR_PLUGINS,
    PLATFORM_PLUGINS,
    STAT_LOGGER_PLUGINS,
    PluginGroup,
)
from opweave.plugins.installed import (
    choose_platform,
    hook,
    load_general_plugins,
    load_plugins_by_group,
    plugin_problems,
    plugin_report,
    refuse_reentry,
)
from opweave.plugins.platform import Choice, PlatformCandidate
from opweave.plugins.qualname import resolve_obj_by_qualname
from opweave.plugins.record import PluginRecord, State

__all__ = [
    "BUILTIN_PLATFORMS",
    "GENERAL_PLUGINS",
    "GROUPS",
    "IO_PROCESSOR_PLUGINS",
    "PLATFORM_API",
    "PLATFORM_PLUGINS",
    "STAT_LOGGER_PLUGINS",
    "PlatformCandidate",
    "Choice",
    "Claim",
    "PluginGroup",
    "PluginError",
    "PluginRecord",
    "PluginWarning",
    "State",
    "choose_platform",
    "hook",
    "load_general_plugins",
    "load_plugins_by_group",
    "plugin_problems",
    "plugin_report",
    "refuse_reentry",
    "resolve_obj_by_qualname",
]
