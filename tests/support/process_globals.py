"""Restore the process-wide state that the command line sets, for tests that run it in process."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from opweave import ir
from opweave.config import compilation, plugin_options, terminal
from opweave.packages import PROJECT

_SHOWN = (*PROJECT, "uvicorn")  # the loggers that ``opweave serve`` configures
_Undo = Callable[[], None]


@contextmanager
def restored() -> Iterator[None]:
    """Undo the changes that are made inside the block to what all tests of a process share.

    These are loggers, settings of the command line, environment variables, ``sys.path``, the
    current directory, the format of warnings and signal handlers.
    """
    undo = [part() for part in (_log, _environment, _settings, _interpreter)]
    try:
        yield
    finally:
        for each in undo:
            each()


def _log() -> _Undo:
    existing = [each for each in logging.root.manager.loggerDict.values() if _is_logger(each)]
    loggers = dict.fromkeys([logging.root, *map(logging.getLogger, _SHOWN), *existing])
    before = [(each, _state(each)) for each in loggers]
    formatter, chosen = terminal._handler.formatter, terminal._chosen

    def undo() -> None:
        terminal._handler.formatter, terminal._chosen = formatter, chosen
        for logger, state in before:
            if _state(logger) != state:
                level, logger.propagate, logger.disabled, handlers = state
                logger.setLevel(level)
                logger.handlers[:] = handlers

    return undo


def _is_logger(entry: Any) -> bool:
    return isinstance(entry, logging.Logger)  # a placeholder stands for a parent without one


def _state(logger: logging.Logger) -> tuple[int, bool, bool, list[logging.Handler]]:
    return logger.level, logger.propagate, logger.disabled, copy(logger.handlers)


def _settings() -> _Undo:
    settings, source = ir.current_registry().settings, ir.Source.COMMAND_LINE
    priorities = settings._priorities.get(source, {})
    config, options = dict(compilation._command_line), plugin_options.given_plugin_options()

    def undo() -> None:
        if settings._priorities.get(source, {}) != priorities:
            settings._priorities[source] = priorities
            settings._on_change()
        if compilation._command_line != config:
            compilation.apply_command_line_config(config)
        plugin_options.set_plugin_options(options)

    return undo


def _environment() -> _Undo:
    before = dict(os.environ)

    def undo() -> None:
        if os.environ != before:
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)

    return undo


def _interpreter() -> _Undo:
    path, folder, format_warning = copy(sys.path), os.getcwd(), warnings.formatwarning
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def undo() -> None:
        sys.path[:] = path
        os.chdir(folder)
        warnings.formatwarning = format_warning
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)

    return undo
