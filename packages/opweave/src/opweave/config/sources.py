"""Applies the settings of the environment, the config file and the command line to the IR."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

from opweave.config import environment, file
from opweave.config.log import show_log
from opweave.ir import Registry, Source
from opweave.ir.errors import SettingWarning, UnknownOpWarning
from opweave.ir.traits import BATCH_INVARIANT


def apply_environment_and_file(registry: Registry) -> None:
    """Read the environment and the config file into the registry's settings.

    Raises:
        SettingError: a setting is malformed.
    """
    show_log(environment.logging_level())
    for unknown in environment.unknown_variables():
        warnings.warn(unknown, SettingWarning, stacklevel=2)
    settings, found = registry.settings, file.find()
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
    found = file.find()
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
