"""The plugin loaders. Distributions must use opweave's entry-point groups."""

from collections.abc import Callable
from typing import Any

from opweave import plugins
from opweave.plugins import load_general_plugins

__all__ = [
    "DEFAULT_PLUGINS_GROUP", "IO_PROCESSOR_PLUGINS_GROUP", "PLATFORM_PLUGINS_GROUP",
    "STAT_LOGGER_PLUGINS_GROUP", "load_general_plugins", "load_plugins_by_group",
]  # fmt: skip

DEFAULT_PLUGINS_GROUP = plugins.GENERAL_PLUGINS
PLATFORM_PLUGINS_GROUP = plugins.PLATFORM_PLUGINS
IO_PROCESSOR_PLUGINS_GROUP = plugins.IO_PROCESSOR_PLUGINS
STAT_LOGGER_PLUGINS_GROUP = plugins.STAT_LOGGER_PLUGINS


def load_plugins_by_group(group: str) -> dict[str, Callable[..., Any]]:
    """Return the entry points of a group by name; ``vllm.general_plugins`` is opweave's group.

    Raises:
        PluginError: a plugin of the group is broken, or the group does not exist.
    """
    kind = group.removeprefix("vllm.")
    return plugins.load_plugins_by_group(group if kind == group else f"opweave.{kind}")
