"""The option ``--ir-op-priority.<op>=a,b``, shared by the commands."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from opweave.cli.conversion import by_key
from opweave.config.environment import TUNING_FILE
from opweave.config.sources import apply_command_line
from opweave.ir import current_registry

PriorityOption = Annotated[
    dict[str, Any] | None,
    Parameter(
        name="--ir-op-priority",
        negative=(),
        converter=by_key,
        help="Providers to prefer for an op: --ir-op-priority.rms_norm=opweave_c,native. "
        "A provider written as name! is required. Also accepts one JSON object for all ops.",
    ),
]


TuningFileOption = Annotated[
    Path | None,
    Parameter(
        name="--tuning-file",
        help="Tuning file of opweave tune, whose measurements choose kernels.",
    ),
]


def apply_tuning(path: Path | None) -> None:
    """Use a tuning file, in child processes too.

    Raises:
        SettingError: it is missing or malformed.
    """
    if path is None:
        return
    from opweave.tuning.apply import apply_tuning_file

    current_registry().ensure_ready()
    apply_tuning_file(current_registry(), path, "--tuning-file")
    os.environ[TUNING_FILE] = str(path.resolve())


def apply_priorities(priorities: Mapping[str, str | Iterable[str]] | None) -> None:
    """Apply the option, and check all priorities; raises SettingError for invalid ones."""
    apply_command_line(current_registry(), priorities or {})
