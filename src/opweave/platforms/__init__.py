"""Device families, and the one that this process runs on.

``current_platform`` is resolved on first access, once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from opweave.platforms.base import Platform
from opweave.platforms.cpu import CpuPlatform
from opweave.platforms.cuda import CudaPlatform

__all__ = ["CpuPlatform", "CudaPlatform", "Platform", "current_platform"]

current_platform: Platform


@cache
def _resolve() -> Platform:
    has_cuda = torch.cuda.is_available() and torch.version.hip is None
    return CudaPlatform() if has_cuda else CpuPlatform()


def __getattr__(name: str) -> Any:
    if name == "current_platform":
        return _resolve()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
