"""The groups of entry points, and the contract of each."""

from __future__ import annotations

from dataclasses import dataclass

PREFIX = "opweave."
PLATFORM_PLUGINS = "opweave.platform_plugins"
"""The group of those that bring a platform."""
GENERAL_PLUGINS = "opweave.general_plugins"
"""The group of those that register ops, kernels, layers, models and options."""
IO_PROCESSOR_PLUGINS = "opweave.io_processor_plugins"
"""The group of those that answer requests of a form of their own."""
STAT_LOGGER_PLUGINS = "opweave.stat_logger_plugins"
"""The group of those that log the statistics of an engine."""


@dataclass(frozen=True, slots=True)
class PluginGroup:
    """What the plugins of a group are.

    Attributes:
        name: the name of the group in a distribution's entry points.
        kind: what messages call a plugin of the group.
        entry_point: what the entry point must be, and what it returns if it is called.
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
