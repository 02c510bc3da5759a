"""The option ``--plugin.<plugin>.<key>=value``, shared by the commands that load plugins."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from opweave import platforms
from opweave.config.plugin_options import apply_plugin_options
from opweave.plugins import load_general_plugins

GivenOptions = dict[str, dict[str, str]] | None
"""Texts by plugin and key."""

PluginOption = Annotated[
    GivenOptions,
    Parameter(
        name="--plugin",
        negative=(),
        allow_leading_hyphen=True,  # for negative numbers
        help="An option that a plugin or the platform brings: --plugin.acme.queue-depth=8. "
        "opweave doctor lists them.",
    ),
]


def apply_plugins(values: GivenOptions) -> None:
    """Load what declares options, and set those that were given.

    Raises:
        SettingError: an option is unknown, or a value is of another type than the option.
        PluginError: a plugin failed.
    """
    load_general_plugins()
    platforms.resolution()
    set_options(values)


def set_options(values: GivenOptions) -> None:
    """Set the options that were given, of what has been loaded.

    Raises:
        SettingError: an option is unknown, or a value is of another type than the option.
    """
    apply_plugin_options(
        {
            f"{plugin}.{key}": text
            for plugin, keys in (values or {}).items()
            for key, text in keys.items()
        }
    )
