"""Device families, and the current platform of the process.

``current_platform`` is resolved once, on first access. Importing this package calls no plugin and
touches no device.
"""

from __future__ import annotations

from typing import Any

from opweave.platforms.base import AttentionSpec, Capabilities, DeviceCapability, Platform
from opweave.platforms.builtin import (
    CpuPlatform,
    CudaPlatform,
    RocmPlatform,
    TpuPlatform,
    XpuPlatform,
)
from opweave.platforms.resolution import (
    Resolution,
    configured,
    impose,
    register_pass,
    resolution,
    resolve_current_platform_cls_qualname,
)
from opweave.plugins import PLATFORM_API

__all__ = [
    "PLATFORM_API", "AttentionSpec", "Capabilities", "CpuPlatform", "CudaPlatform",
    "DeviceCapability", "Platform", "Resolution", "RocmPlatform", "TpuPlatform", "XpuPlatform",
    "configured", "current_platform", "impose", "register_pass", "resolution",
    "resolve_current_platform_cls_qualname",
]  # fmt: skip

current_platform: Platform
"""The platform of this process; resolved once, on first access."""


def __getattr__(name: str) -> Any:
    if name == "current_platform":
        return resolution().platform
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
