"""The state of each plugin in this process."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """The state of a plugin."""

    FOUND = "found"
    """Installed, not used yet."""
    EXCLUDED = "excluded"
    """Disabled by the environment."""
    LOADED = "loaded"
    """Imported, and called if its group requires it."""
    DECLINED = "declined"
    """A platform whose device is not present."""
    CLAIMED = "claimed"
    """A platform whose device is present."""
    ACTIVE = "active"
    """The current platform."""
    FAILED = "failed"
    """It ended with an error."""


@dataclass(frozen=True)
class PluginRecord:
    """A plugin, as :func:`opweave.plugins.plugin_report` shows it.

    Attributes:
        name: its name in settings.
        group: the group of its entry point.
        value: the imported object, ``"package.module:function"``.
        distribution: its distribution.
        version: version of the distribution.
        state: its state.
        seconds: duration of import and call.
        error: the message of its error, or None.
        detail: why it was disabled, or why its device is present.
        registered: its registrations, such as ``"op acme_scale"``.
    """

    name: str
    group: str
    value: str
    distribution: str
    version: str
    state: State
    seconds: float
    error: str | None
    detail: str
    registered: tuple[str, ...]
