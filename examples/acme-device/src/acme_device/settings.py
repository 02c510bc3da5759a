"""User settings: an environment variable and command-line options."""

from __future__ import annotations

from opweave.config.environment import declare_variable, declared_value
from opweave.config.plugin_options import PluginOptions

MEMORY = "ACME_MEMORY_GIB"
declare_variable(MEMORY, float, 4.0, "The memory of each acme device, in GiB.")


def memory_bytes() -> int:
    """Return the memory that a device is to have, in bytes."""
    return int(declared_value(MEMORY) * 2**30)


def declare_options(options: PluginOptions) -> None:
    """Declare ``--plugin.acme.tiled-weights``."""
    options.add("tiled_weights", bool, True, "Keep weights in the layout that the device reads.")


def tiled_weights() -> bool:
    """Return what the user said about tiles."""
    return bool(PluginOptions("acme")["tiled_weights"])
