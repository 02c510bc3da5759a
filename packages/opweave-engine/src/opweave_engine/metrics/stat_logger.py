"""Stat loggers: plugins that receive an engine's statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod

from opweave.config import EngineConfig
from opweave.plugins import STAT_LOGGER_PLUGINS, load_plugins_by_group
from opweave.plugins.errors import PluginTypeError
from opweave_engine.metrics.stats import EngineStats


class StatLogger(ABC):
    """Base class of stat loggers. A plugin's entry point is a class derived from this one.

    Args:
        config: the engine's configuration.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @abstractmethod
    def record(self, stats: EngineStats) -> None:
        """Receive the statistics since the engine started; called after each step.

        Runs in the engine's loop, so it must not block.
        """

    def shutdown(self) -> None:  # noqa: B027 - most have nothing left
        """Flush the log, because the engine has shut down."""


def stat_loggers(config: EngineConfig) -> list[StatLogger]:
    """Return an instance of each installed stat logger, sorted by the name of its plugin.

    Raises:
        PluginTypeError: (a TypeError) an entry point is not a subclass of :class:`StatLogger`.
        PluginError: a plugin failed.
    """
    found = load_plugins_by_group(STAT_LOGGER_PLUGINS)
    return [_checked(name, found[name])(config) for name in sorted(found)]


def _checked(name: str, found: object) -> type[StatLogger]:
    if isinstance(found, type) and issubclass(found, StatLogger):
        return found
    raise PluginTypeError(
        f"stat logger plugin {name!r} is {found!r}; its entry point should be a class derived from "
        f"{StatLogger.__module__}.StatLogger. To go on without it: OPWEAVE_PLUGINS=-{name}"
    )
