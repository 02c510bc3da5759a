"""Plugins: packages that extend opweave by being installed.

A distribution declares entry points; opweave finds, orders, loads and reports them. Importing this
package does not load plugins.
"""

from opweave.plugins.entry import (
    BUILTIN_PLATFORMS,
    GENERAL_PLUGINS,
    GROUPS,
    IO_PROCESSOR_PLUGINS,
    PLATFORM_API,
    PLATFORM_PLUGINS,
    STAT_LOGGER_PLUGINS,
    Claim,
    PluginError,
    PluginGroup,
    PluginWarning,
    resolve_obj_by_qualname,
)
from opweave.plugins.loader import (
    Choice,
    PlatformCandidate,
    choose_platform,
    hook,
    load_general_plugins,
    load_plugins_by_group,
    plugin_problems,
    plugin_report,
    refuse_reentry,
)
from opweave.plugins.plugin import PluginRecord, State

__all__ = [
    "BUILTIN_PLATFORMS", "GENERAL_PLUGINS", "GROUPS", "IO_PROCESSOR_PLUGINS", "PLATFORM_API",
    "PLATFORM_PLUGINS", "STAT_LOGGER_PLUGINS", "PlatformCandidate", "Choice", "Claim",
    "PluginGroup", "PluginError", "PluginRecord", "PluginWarning", "State", "choose_platform",
    "hook", "load_general_plugins", "load_plugins_by_group", "plugin_problems", "plugin_report",
    "refuse_reentry", "resolve_obj_by_qualname",
]  # fmt: skip
