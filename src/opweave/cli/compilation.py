"""The option ``--compilation-config.<key>=value``, or ``--compilation-config`` and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from cyclopts import Parameter

from opweave.cli.conversion import by_key
from opweave.config.current import apply_command_line_config

CompilationOption = Annotated[
    dict[str, Any] | None,
    Parameter(
        name=("--compilation-config", "--compilation_config"),
        negative=(),
        converter=by_key,
        allow_leading_hyphen=True,  # for -op
        help="How to compile, and which ops run their platform's method: "
        "--compilation-config.mode=3, --compilation-config.backend=inductor, "
        '--compilation-config.custom_ops \'["none","+rms_norm"]\' or none,+rms_norm, '
        "--compilation-config.options '{\"fusion\": false}'; or all in one JSON object.",
    ),
]


def apply_compilation(values: Mapping[str, object] | None) -> None:
    """Apply what the option said, and check what weaker sources say (SettingError if wrong)."""
    apply_command_line_config(values or {})
