"""The entry point groups and their contracts."""

from __future__ import annotations

from dataclasses import dataclass

PREFIX = "opweave."
PLATFORM_PLUGINS = "opweave.platform_plugins"
"""Plugins that provide a platform."""
GENERAL_PLUGINS = "opweave.general_plugins"
"""Plugins that register ops, kernels, layers, models and options."""
IO_PROCESSOR_PLUGINS = "opweave.io_processor_plugins"
"""Plugins that process requests with their own input and output formats."""
STAT_LOGGER_PLUGINS = "opweave.stat_logger_plugins"
"""Plugins that log engine statistics."""
COMMAND_LINE_GROUPS = ("opweave.commands", "opweave.model_runner", "opweave.option_hints")
"""Groups of :mod:`opweave.cli.companions`; their entry points are not plugins."""


@dataclass(frozen=True, slots=True)
class PluginGroup:
    """The contract of a plugin group.

    Attributes:
        name: the name of the group in a distribution's entry points.
        kind: the name for a plugin of the group in messages.
        entry_point: the required type of the entry point, and its return value if it is called.
        when: when opweave imports and calls it, and in which process.
    """

    name: str
    kind: str
    entry_point: str
    when: str


GROUPS = {
    group.name: group
    for group in (
        PluginGroup(
            PLATFORM_PLUGINS,
            "platform plugin",
            "a function without arguments that returns the qualified name of a platform class, a "
            "Claim, or None where its device is absent",
            "in every process, once, when the current platform is first asked for",
        ),
        PluginGroup(
            GENERAL_PLUGINS,
            "general plugin",
            "a function without arguments that registers things; what it returns is ignored",
            "in every process, once, before the command line is parsed or an op is first used",
        ),
        PluginGroup(
            IO_PROCESSOR_PLUGINS,
            "I/O processor plugin",
            "a function without arguments that returns the qualified name of an I/O processor",
            "in the process that takes requests, when a model or an option names it",
        ),
        PluginGroup(
            STAT_LOGGER_PLUGINS,
            "stat logger plugin",
            "a class that logs the statistics of an engine",
            "in the process that takes requests, when an engine starts",
        ),
    )
}
"""Every group, by the name that entry points have."""
