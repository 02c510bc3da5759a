"""Stat loggers: plugins that are told what an engine has done."""

from __future__ import annotations

from abc import ABC, abstractmethod

from opweave.config import EngineConfig
from opweave.engine.metrics.stats import EngineStats
from opweave.plugins import STAT_LOGGER_PLUGINS, load_plugins_by_group
from opweave.plugins.errors import PluginTypeError


class StatLogger(ABC):
    """Is told an engine's statistics; a plugin's entry point is a class derived from this one.

    Args:
        config: of the engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @abstractmethod
    def record(self, stats: EngineStats) -> None:
        """Take the state of the engine, and all that it has done so far; called between steps.

        It runs in the engine's own loop, so that it must return at once.
        """

    def shutdown(self) -> None:  # noqa: B027 - most have nothing left
        """Write what is left; the engine has ended."""


def stat_loggers(config: EngineConfig) -> list[StatLogger]:
    """Return an object of every stat logger that is installed, by the names of the plugins.

    Raises:
        PluginTypeError: (a TypeError) an entry point is no class derived from :class:`StatLogger`.
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
