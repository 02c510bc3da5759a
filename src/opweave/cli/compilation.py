"""The option ``--compilation-config.<key>=value``."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from opweave.config.current import apply_command_line_config

CompilationOption = Annotated[
    dict[str, str] | None,
    Parameter(
        name=("--compilation-config", "--compilation_config"),
        negative=(),
        allow_leading_hyphen=True,  # for -op
        help="How to compile, and which ops run their platform's method: "
        "--compilation-config.mode=3, --compilation-config.backend=inductor, "
        '--compilation-config.custom_ops \'["none","+rms_norm"]\' or none,+rms_norm, '
        "--compilation-config.options '{\"fusion\": false}'.",
    ),
]


def apply_compilation(values: dict[str, str] | None) -> None:
    """Apply what the option said, and check what weaker sources say (SettingError if wrong)."""
    apply_command_line_config(values or {})
