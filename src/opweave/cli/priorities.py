"""The option ``--ir-op-priority.<op>=a,b``, shared by the commands."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from opweave.config.sources import apply_command_line
from opweave.ir import current_registry

PriorityOption = Annotated[
    dict[str, str] | None,
    Parameter(
        name="--ir-op-priority",
        negative=(),
        help="Providers to prefer for an op: --ir-op-priority.rms_norm=opweave_c,native. "
        "A provider written name! must be usable.",
    ),
]


def apply_priorities(priorities: dict[str, str] | None) -> None:
    """Apply what the option said, and check every setting (SettingError if one is wrong)."""
    apply_command_line(current_registry(), priorities or {})
