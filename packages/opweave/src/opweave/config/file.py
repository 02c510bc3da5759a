"""The config file: ``opweave.toml``, or ``[tool.opweave]`` in ``pyproject.toml``.

::

    batch_invariant = false
    check_donation = false  # as OPWEAVE_CHECK_DONATION
    tuning_file = "tuning.json"  # relative to this file

    [ir_op_priority]
    rms_norm = ["triton", "opweave_c"]

    [compilation_config]
    custom_ops = ["none", "+rms_norm"]

opweave reads the nearest file, from the working directory upwards. In the same directory,
``opweave.toml`` takes precedence over ``pyproject.toml``.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opweave.ir.errors import SettingError, did_you_mean

_TABLES = ("compilation_config", "ir_op_priority")
_TEXTS = ("tuning_file",)
_KEYS = ("batch_invariant", "check_donation", *_TEXTS, *_TABLES)


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
            found = "is a directory" if path.is_dir() else "does not exist"
            raise SettingError(f"OPWEAVE_CONFIG={explicit!r} {found}; it must name a file.")
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
        wanted = dict if key in _TABLES else str if key in _TEXTS else bool
        if not isinstance(value, wanted):
            kind = {dict: "table", str: "string", bool: "bool"}[wanted]
            raise SettingError(f"{path}: {key} = {value!r} should be a {kind}.")
    for op, providers in table.get("ir_op_priority", {}).items():
        if not isinstance(providers, (str, list)):
            raise SettingError(
                f"{path}: ir_op_priority.{op} = {providers!r} should be a list of providers, such "
                "as ['opweave_c', 'native']."
            )
    lists = {op.replace("-", "_"): v for op, v in table.get("ir_op_priority", {}).items()}
    return FileSettings(path, **{**table, "ir_op_priority": lists})
