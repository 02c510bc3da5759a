"""The option ``--compilation-config.<key>=value``, or ``--compilation-config`` and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from cyclopts import Parameter

from opweave.cli.conversion import by_key
from opweave.config import current_compilation_config
from opweave.config.current import apply_command_line_config
from opweave.config.custom_ops import CustomOps

CompilationOption = Annotated[
    dict[str, Any] | None,
    Parameter(
        name=("--compilation-config", "--compilation_config"),
        negative=(),
        converter=by_key,
        allow_leading_hyphen=True,  # for -op
        help="Settings of compilation and of enabled layers (custom_ops): "
        "--compilation-config.mode=3, --compilation-config.backend=inductor, "
        '--compilation-config.custom_ops \'["none","+rms_norm"]\' or none,+rms_norm, '
        "--compilation-config.options '{\"fusion\": false}'. Also accepts one JSON object.",
    ),
]


def apply_compilation(values: Mapping[str, object] | None) -> None:
    """Apply the option, and check weaker sources; raises SettingError for invalid settings."""
    apply_command_line_config(values or {})


def apply_compilation_like_eager(values: Mapping[str, object] | None) -> None:
    """Apply the option, with defaults for which compiled results equal eager results bit for bit.

    The kernels of eager mode run, and fused code rounds like eager mode.
    """
    apply_compilation(values)
    config, unsaid = current_compilation_config(), dict[str, object]()
    if config.uses_passes and not config.backend_options:
        unsaid["options"] = {"eager_rounding": True}
    if config.uses_passes and isinstance(config.custom_ops, CustomOps):
        unsaid |= {} if config.custom_ops.given else {"custom_ops": "all"}
    if unsaid:
        apply_compilation({**(values or {}), **unsaid})
