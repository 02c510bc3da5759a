"""Load plugins and kernels and read settings when an op is first used.

``import opweave`` does none of this.
"""

from __future__ import annotations

import os
import warnings

from opweave.ir import Registry, Source
from opweave.ir.errors import SettingWarning


def load_plugins() -> None:
    """Load the general plugins that are installed."""
    from opweave.plugins import load_general_plugins

    load_general_plugins()


def prepare(registry: Registry) -> None:
    """Load the platform's kernels, and apply settings and the platform's defaults."""
    from opweave import native, platforms
    from opweave.config.sources import apply_environment_and_file, tuning_file
    from opweave.ir.codegen import use_plain_check
    from opweave.plugins import hook

    platform, owner = platforms.current_platform, platforms.resolution().owner
    with hook(owner, "import_kernels"):
        platform.import_kernels()
    use_plain_check(native.plain_check())
    if os.environ.get("OPWEAVE_ISA") and (reason := native.status().reason_missing) is not None:
        warnings.warn(f"the C++ kernels are not used: {reason}.", SettingWarning, stacklevel=2)
    apply_environment_and_file(registry)
    with hook(owner, "get_default_ir_op_priority"):
        registry.settings.set_priorities(
            Source.PLATFORM,
            platform.get_default_ir_op_priority(None),
            f"platform default, {platform.name}",
        )
    if (tuned := tuning_file()) is not None:
        from opweave.tuning.tuning_file import apply_tuning_file

        apply_tuning_file(registry, *tuned)
