"""What became of each plugin in this process."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """What became of a plugin."""

    FOUND = "found"
    """Installed; nothing has asked for it yet."""
    EXCLUDED = "excluded"
    """Left out by the environment."""
    LOADED = "loaded"
    """Imported, and called if its group asks for that."""
    DECLINED = "declined"
    """A platform whose device is not here."""
    CLAIMED = "claimed"
    """A platform whose device is here."""
    ACTIVE = "active"
    """The platform that is used."""
    FAILED = "failed"
    """It ended with an error."""


@dataclass(frozen=True)
class PluginRecord:
    """A plugin, as :func:`opweave.plugins.plugin_report` shows it.

    Attributes:
        name: what settings call it.
        group: the group of its entry point.
        value: what is imported, ``"package.module:function"``.
        distribution: the distribution that brings it.
        version: of the distribution.
        state: what became of it.
        seconds: how long importing and calling it took.
        error: the message of the error that it ended with, or None.
        detail: why it was left out, or why its device is here.
        registered: what it registered, such as ``"op acme_scale"``.
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
