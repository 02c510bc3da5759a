"""Device families, and the current platform of the process.

``current_platform`` is resolved once, on first access. Importing this package calls no plugin and
touches no device.
"""

from __future__ import annotations

from typing import Any

from opweave.platforms.base import Platform
from opweave.platforms.capabilities import Capabilities
from opweave.platforms.configure import configured
from opweave.platforms.cpu import CpuPlatform
from opweave.platforms.cuda import CudaPlatform, RocmPlatform
from opweave.platforms.passes import register_pass
from opweave.platforms.resolution import (
    Resolution,
    impose,
    resolution,
    resolve_current_platform_cls_qualname,
)
from opweave.platforms.spec import AttentionSpec, DeviceCapability
from opweave.platforms.tpu import TpuPlatform
from opweave.platforms.xpu import XpuPlatform
from opweave.plugins import PLATFORM_API

__all__ = [
    "PLATFORM_API",
    "AttentionSpec",
    "Capabilities",
    "CpuPlatform",
    "CudaPlatform",
    "DeviceCapability",
    "Platform",
    "Resolution",
    "RocmPlatform",
    "TpuPlatform",
    "XpuPlatform",
    "configured",
    "current_platform",
    "impose",
    "register_pass",
    "resolution",
    "resolve_current_platform_cls_qualname",
]

current_platform: Platform
"""The platform of this process; resolved once, on first access."""


def __getattr__(name: str) -> Any:
    if name == "current_platform":
        return resolution().platform
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
