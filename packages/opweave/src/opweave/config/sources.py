"""The config file, and how settings of all sources are applied to the IR."""

from __future__ import annotations

import os
import tomllib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opweave.config import environment
from opweave.config.terminal import show_log
from opweave.ir import Registry, Source
from opweave.ir.errors import SettingError, SettingWarning, UnknownOpWarning, did_you_mean
from opweave.ir.rules import BATCH_INVARIANT

# The config file: ``opweave.toml``, or ``[tool.opweave]`` in ``pyproject.toml``.
#
# ::
#
#     batch_invariant = false
#     check_donation = false  # as OPWEAVE_CHECK_DONATION
#     tuning_file = "tuning.json"  # relative to this file
#
#     [ir_op_priority]
#     rms_norm = ["triton", "opweave_c"]
#
#     [compilation_config]
#     custom_ops = ["none", "+rms_norm"]
#
# opweave reads the nearest file, from the working directory upwards. In the same directory,
# ``opweave.toml`` takes precedence over ``pyproject.toml``.


_KEYS = {v.file_key: v.file_kind for v in environment.VARIABLES if v.in_file}
_TYPES = {"table": dict, "string": str, "bool": bool}


@dataclass(frozen=True)
class FileSettings:
    """The contents of a config file."""

    path: Path | None = None
    batch_invariant: bool = False
    check_donation: bool = False
    tuning_file: str | None = None
    ir_op_priority: dict[str, list[str] | str] = field(default_factory=dict)
    compilation_config: dict[str, object] = field(default_factory=dict)


def find(start: Path | None = None) -> FileSettings:
    """Read the file named by ``OPWEAVE_CONFIG``, or else the nearest one from *start* upwards.

    Raises:
        SettingError: the file is missing, is not valid TOML, or has an unknown key or a value of
            the wrong type.
    """
    explicit = os.environ.get("OPWEAVE_CONFIG")
    if explicit:
        path = Path(explicit)
        if not path.is_file():
            problem = "is a directory" if path.is_dir() else "does not exist"
            raise SettingError(f"OPWEAVE_CONFIG={explicit!r} {problem}; it must name a file.")
        return _settings(_table(path, named=True), path)
    start = start or Path.cwd()
    for folder in (start, *start.parents):
        for name in ("opweave.toml", "pyproject.toml"):
            path = folder / name
            table = _table(path) if path.is_file() else None
            if table is not None:
                return _settings(table, path)
    return FileSettings()


def _table(path: Path, *, named: bool = False) -> Any:
    """Return opweave's table in a file, or None if it does not have one.

    An unreadable ``pyproject.toml`` counts as one without a table unless it is *named* explicitly.
    """
    is_pyproject = path.name == "pyproject.toml"
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        if is_pyproject and not named:
            return None
        raise SettingError(f"{path}: cannot be read as TOML: {error}.") from error
    if not is_pyproject:
        return content
    tools = content.get("tool")
    return tools.get("opweave") if isinstance(tools, dict) else None


def _settings(table: Any, path: Path) -> FileSettings:
    if table is None:  # an explicitly named file without opweave's table
        return FileSettings(path)
    if not isinstance(table, dict):
        raise SettingError(f"{path}: tool.opweave = {table!r} should be a table.")
    for key, value in table.items():
        if key not in _KEYS:
            raise SettingError(f"{path}: unknown key {key!r}. {did_you_mean(key, _KEYS)}")
        if not isinstance(value, _TYPES[_KEYS[key]]):
            raise SettingError(f"{path}: {key} = {value!r} should be a {_KEYS[key]}.")
    for op, providers in table.get("ir_op_priority", {}).items():
        if not isinstance(providers, (str, list)):
            raise SettingError(
                f"{path}: ir_op_priority.{op} = {providers!r} should be a list of providers, such "
                "as ['opweave_c', 'native']."
            )
    lists = {op.replace("-", "_"): v for op, v in table.get("ir_op_priority", {}).items()}
    return FileSettings(path, **{**table, "ir_op_priority": lists})


# Applies the settings of the environment, the config file and the command line to the IR.


def apply_environment_and_file(registry: Registry) -> None:
    """Read the environment and the config file into the registry's settings.

    Raises:
        SettingError: a setting is malformed.
    """
    show_log(environment.logging_level())
    for unknown in environment.unknown_variables():
        warnings.warn(unknown, SettingWarning, stacklevel=2)
    settings, found = registry.settings, find()
    settings.set_priorities(
        Source.ENVIRONMENT,
        environment.priorities(),
        lambda op: f"environment {environment.PRIORITY_PREFIX}{op.upper()}",
    )
    settings.set_priorities(
        Source.CONFIG_FILE, found.ir_op_priority, lambda op: f"{found.path} ir_op_priority.{op}"
    )
    if environment.flag("OPWEAVE_BATCH_INVARIANT"):
        settings.require(Source.ENVIRONMENT, [BATCH_INVARIANT], "OPWEAVE_BATCH_INVARIANT")
    if found.batch_invariant:
        settings.require(Source.CONFIG_FILE, [BATCH_INVARIANT], f"{found.path} batch_invariant")
    settings.check_donation = environment.flag("OPWEAVE_CHECK_DONATION") or found.check_donation


def tuning_file() -> tuple[Path, str] | None:
    """Return the tuning file to use, and the setting that names it.

    Raises:
        SettingError: the config file is malformed.
    """
    if environment.TUNING_FILE in os.environ:
        named = os.environ[environment.TUNING_FILE]
        return (Path(named), environment.TUNING_FILE) if named else None
    found = find()
    if not found.tuning_file or found.path is None:
        return None
    return found.path.parent / found.tuning_file, f"{found.path} tuning_file"


def apply_command_line(registry: Registry, priorities: Mapping[str, str | Iterable[str]]) -> None:
    """Apply ``--ir-op-priority.<op>=...`` and check all names; ``-`` and ``_`` are equivalent.

    Raises:
        SettingError: an op or a provider is unknown, or a list is malformed.
    """
    normalized = {op.replace("-", "_"): providers for op, providers in priorities.items()}
    registry.settings.set_priorities(
        Source.COMMAND_LINE, normalized, lambda op: f"--ir-op-priority.{op}"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnknownOpWarning)  # check_settings raises instead
        registry.check_settings()
