"""The option ``--plugin.<plugin>.<key>=value``, shared by the commands that load plugins."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from opweave import platforms
from opweave.config.plugin_options import apply_plugin_options
from opweave.plugins import load_general_plugins

GivenOptions = dict[str, dict[str, str]] | None
"""Option texts by plugin and key."""

PluginOption = Annotated[
    GivenOptions,
    Parameter(
        name="--plugin",
        negative=(),
        allow_leading_hyphen=True,  # for negative numbers
        help="An option of a plugin or the platform: --plugin.acme.queue-depth=8. "
        "opweave doctor lists them.",
    ),
]


def apply_plugins(values: GivenOptions) -> None:
    """Load the plugins that declare options, and set the given ones.

    Raises:
        SettingError: an option is unknown, or a value is of another type than the option.
        PluginError: a plugin failed.
    """
    load_general_plugins()
    platforms.resolution()
    set_options(values)


def set_options(values: GivenOptions) -> None:
    """Set the given options of loaded plugins.

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
