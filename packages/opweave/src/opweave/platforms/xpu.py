"""Intel GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch

from opweave.platforms import probes
from opweave.platforms.base import Platform
from opweave.platforms.capabilities import Capabilities


class XpuPlatform(Platform):
    """Intel GPUs, ``xpu`` devices in torch. Not tested on hardware; all ops use native."""

    name = "xpu"
    device_type = "xpu"
    dispatch_tags = ("xpu",)
    supported_dtypes = (torch.bfloat16, torch.float16, torch.float32)
    dist_backend = "xccl"

    @cached_property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        found = probes.properties("xpu", 0)
        matrix = bool(getattr(found, "has_subgroup_matrix_multiply_accumulate", False))
        return Capabilities(
            bf16=matrix,
            int8=matrix,
            streams=True,
            pinned_memory=True,
            unified_memory=bool(getattr(found, "is_integrated_gpu", False)),  # torch 2.13
        )

    def get_device_name(self, index: int = 0) -> str:
        return str(probes.properties("xpu", index).name)

    def doctor(self) -> Mapping[str, object]:
        return {"xpu": torch.version.xpu, "devices": probes.xpu_devices()}
