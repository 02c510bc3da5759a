"""Apply a tuning file to the settings of a registry."""

from __future__ import annotations

import warnings
from pathlib import Path

from opweave.ir import Registry
from opweave.ir.errors import SettingError, SettingWarning
from opweave.tuning.errors import TuningFileError
from opweave.tuning.token_ranges import ranges_of
from opweave.tuning.tuning_file import TuningFile


def apply_tuning_file(registry: Registry, path: Path, setting: str) -> None:
    """Let the measurements of this machine choose; warn if the file has none.

    Args:
        registry: the registry of the ops.
        path: the tuning file.
        setting: the setting that names the file, for messages.

    Raises:
        SettingError: the file is missing or malformed.
    """
    try:
        cells = TuningFile.load(path)
    except TuningFileError as error:
        raise SettingError(f"{setting}: {error}") from error
    try:
        here = cells.here(path)
    except TuningFileError as error:
        warnings.warn(f"{setting} is ignored: {error}", SettingWarning, stacklevel=2)
        here = {}
    registry.settings.set_tuned(ranges_of(here.values(), str(path)))
