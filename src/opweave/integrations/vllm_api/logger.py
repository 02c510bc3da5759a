"""``init_logger``: a logger that can say a thing once."""

from __future__ import annotations

import logging
from types import MethodType
from typing import cast

_said: set[tuple[object, ...]] = set()


class Logger(logging.Logger):
    """The logger of a name, with methods that say the same only once.

    Their *scope* is for code that gives one: each process speaks for itself.
    """

    def debug_once(self, message: str, *args: object, scope: str = "process") -> None:
        """Log a message for debugging, unless it was."""
        _say_once(self, logging.DEBUG, message, args)

    def info_once(self, message: str, *args: object, scope: str = "process") -> None:
        """Log a message, unless it was."""
        _say_once(self, logging.INFO, message, args)

    def warning_once(self, message: str, *args: object, scope: str = "process") -> None:
        """Log a warning, unless it was."""
        _say_once(self, logging.WARNING, message, args)


def init_logger(name: str) -> Logger:
    """Return the logger of that name, which is the one of :func:`logging.getLogger`."""
    logger = logging.getLogger(name)
    for method in (Logger.debug_once, Logger.info_once, Logger.warning_once):
        setattr(logger, method.__name__, MethodType(method, logger))
    return cast(Logger, logger)


def _say_once(logger: logging.Logger, level: int, message: str, args: tuple[object, ...]) -> None:
    said = (logger.name, level, message, *map(str, args))
    if said not in _said:
        _said.add(said)
        logger.log(level, message, *args, stacklevel=3)  # where the method is called
