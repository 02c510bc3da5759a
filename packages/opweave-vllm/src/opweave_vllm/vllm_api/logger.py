"""``init_logger``: loggers with methods that log a message only once."""

import logging
from types import MethodType
from typing import cast

__all__ = ["Logger", "init_logger", "logger"]

_logged: set[tuple[object, ...]] = set()


class Logger(logging.Logger):
    """A logger with methods that log each message once per process, regardless of *scope*."""

    def debug_once(self, message: str, *args: object, scope: str = "process") -> None:
        """Log a debug message once."""
        _log_once(self, logging.DEBUG, message, args)

    def info_once(self, message: str, *args: object, scope: str = "process") -> None:
        """Log a message once."""
        _log_once(self, logging.INFO, message, args)

    def warning_once(self, message: str, *args: object, scope: str = "process") -> None:
        """Log a warning once."""
        _log_once(self, logging.WARNING, message, args)


def init_logger(name: str) -> Logger:
    """Return the logger of :func:`logging.getLogger`, with the additional methods."""
    logger = logging.getLogger(name)
    for method in (Logger.debug_once, Logger.info_once, Logger.warning_once):
        setattr(logger, method.__name__, MethodType(method, logger))
    return cast(Logger, logger)


def _log_once(logger: logging.Logger, level: int, message: str, args: tuple[object, ...]) -> None:
    key = (logger.name, level, message, *map(str, args))
    if key not in _logged:
        _logged.add(key)
        logger.log(level, message, *args, stacklevel=3)  # the caller of the method


logger = init_logger("opweave")
