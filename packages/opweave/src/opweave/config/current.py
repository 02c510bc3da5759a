"""The current compilation config: that of the enclosing scope, or of the process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

from opweave.config import environment, file
from opweave.config.compilation import CompilationConfig

_scoped: ContextVar[CompilationConfig | None] = ContextVar(
    "opweave_compilation_config", default=None
)
_command_line: dict[str, object] = {}


def current_compilation_config() -> CompilationConfig:
    """Return the config of the innermost :func:`compilation_config` block.

    Outside of a block, return the config of the process: from the command line, the environment
    and the config file, strongest first, and the defaults.

    Raises:
        SettingError: one of them is malformed.
    """
    return _scoped.get() or _of_process()


@contextmanager
def compilation_config(config: CompilationConfig) -> Iterator[CompilationConfig]:
    """Make *config* the current one inside the block, in this thread or asyncio task only.

    ``with compilation_config(CompilationConfig(custom_ops=["none", "+rms_norm"])): ...``
    """
    token = _scoped.set(config)
    try:
        yield config
    finally:
        _scoped.reset(token)


def apply_command_line_config(values: Mapping[str, object]) -> None:
    """Set the values of ``--compilation-config.<key>=...`` for the process.

    Raises:
        SettingError: a key is unknown or a value malformed, here or in a weaker source.
    """
    _command_line.clear()
    _command_line.update(values)
    _of_process.cache_clear()
    _of_process()


@cache
def _of_process() -> CompilationConfig:
    config, found = CompilationConfig(), file.find()
    config = config.updated(found.compilation_config, f"{found.path} compilation_config")
    for key, value in environment.compilation_config().items():
        origin = f"environment {environment.COMPILATION_PREFIX}{key.upper()}"
        config = config.updated({key: value}, origin)
    for key, given in _command_line.items():
        config = config.updated({key: given}, f"--compilation-config.{key}")
    return config
