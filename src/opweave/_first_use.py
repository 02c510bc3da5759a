"""What happens when an op is first used: kernels load, settings are read.

``import opweave`` does none of it.
"""

from __future__ import annotations

from opweave.ir import Registry, Source


def prepare(registry: Registry) -> None:
    """Load the providers that come with opweave, and apply settings and platform defaults."""
    from opweave import kernels, native
    from opweave.config.sources import apply_environment_and_file
    from opweave.ir.codegen import use_plain_check
    from opweave.platforms import current_platform

    kernels.load(registry)
    use_plain_check(native.plain_check())
    apply_environment_and_file(registry)
    registry.settings.set_priorities(
        Source.PLATFORM,
        current_platform.get_default_ir_op_priority(None),
        f"platform default, {current_platform.name}",
    )
