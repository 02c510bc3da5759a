"""NVIDIA and AMD GPUs, both ``cuda`` devices in torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from opweave.config import EngineConfig
from opweave.platforms import probes
from opweave.platforms.base import Platform
from opweave.platforms.capabilities import Capabilities
from opweave.platforms.graphs import CudaGraphRecorder, GraphRecorder
from opweave.platforms.spec import DeviceCapability

# Ops for which a fused torch operator is the first choice.
_TORCH_OPS = (
    "bidirectional_attention",
    "causal_attention",
    "fused_add_rms_norm",
    "rms_norm",
    "varlen_attention",
)

# In torch, these gather keys, copy the cache, widen whole weights, or need a dozen kernels for few
# numbers.
_TRITON_OPS = (
    "advance_step_flashattn",
    "linear_q",
    "linear_w4a16",
    "linear_w8a8",
    "paged_attention",
    "reshape_and_cache",
)

_MATRIX_CORES = ("gfx908", "gfx90a", "gfx94", "gfx95")  # AMD Instinct, from MI100 on


def _is_integrated(properties: Any) -> bool:
    """Return whether a GPU shares the memory of the host, as in a Jetson, a GB10 or an APU."""
    return bool(getattr(properties, "is_integrated", False))


class _Gpu(Platform):
    device_type = "cuda"
    supported_dtypes = (torch.bfloat16, torch.float16, torch.float32)
    dist_backend = "nccl"  # RCCL in torch for ROCm

    def get_default_ir_op_priority(
        self, config: EngineConfig | None = None
    ) -> dict[str, list[str]]:
        return {op: ["aten"] for op in _TORCH_OPS} | {op: ["triton"] for op in _TRITON_OPS}

    def graph_recorder(self) -> GraphRecorder | None:
        return CudaGraphRecorder()

    def get_device_name(self, index: int = 0) -> str:
        return str(probes.properties("cuda", index).name)

    def get_device_capability(self, index: int = 0) -> DeviceCapability | None:
        found = probes.properties("cuda", index)
        return DeviceCapability(found.major, found.minor)


class CudaPlatform(_Gpu):
    """NVIDIA GPUs."""

    name = "cuda"
    dispatch_tags = ("cuda",)

    @cached_property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        # Tensor cores support int8 from 7.5 on, bfloat16 from 8.0, float8 from 8.9: CUDA C++
        # Programming Guide, "Compute Capabilities".
        found = probes.properties("cuda", 0)
        capability = DeviceCapability(found.major, found.minor)
        return Capabilities(
            bf16=capability >= (8, 0),
            fp8=capability >= (8, 9),
            int8=capability >= (7, 5),
            streams=True,
            graph_capture=True,
            pinned_memory=True,
            unified_memory=_is_integrated(found),
        )

    def doctor(self) -> Mapping[str, object]:
        return {"cuda": torch.version.cuda, "devices": probes.cuda_devices()}


class RocmPlatform(_Gpu):
    """AMD GPUs. Not tested on hardware; kernels are compiled for gfx942 in tests."""

    name = "rocm"
    dispatch_tags = ("hip", "cuda")

    @cached_property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        # gfx950 and gfx12 support float8_e4m3fn; gfx942 supports float8_e4m3fnuz, a different
        # format. AMD, "Data types and precision support".
        found = probes.properties("cuda", 0)
        architecture = str(getattr(found, "gcnArchName", "")).split(":")[0]
        return Capabilities(
            bf16=architecture.startswith((*_MATRIX_CORES, "gfx11", "gfx12")),
            fp8=architecture.startswith(("gfx95", "gfx12")),
            int8=architecture.startswith((*_MATRIX_CORES, "gfx11", "gfx12")),
            streams=True,
            graph_capture=True,
            pinned_memory=True,
            unified_memory=_is_integrated(found),
        )

    def doctor(self) -> Mapping[str, object]:
        return {"hip": torch.version.hip, "devices": probes.rocm_devices()}
