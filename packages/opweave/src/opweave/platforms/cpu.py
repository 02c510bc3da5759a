"""The CPU platform."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch

from opweave.config import EngineConfig
from opweave.ir.priority import EVERY_OP
from opweave.platforms import defaults, probes
from opweave.platforms.base import Platform
from opweave.platforms.capabilities import Capabilities

# Ops for which a fused torch operator is the first choice.
_TORCH_OPS = (
    "bidirectional_attention",
    "causal_attention",
    "causal_conv1d",
    "causal_conv1d_update",
    "fused_experts",
    "fused_experts_quant",
    "selective_scan",
    "selective_state_update",
    "ssd_chunk_scan",
    "varlen_attention",
)


class CpuPlatform(Platform):
    """The CPU."""

    name = "cpu"
    device_type = "cpu"
    dispatch_tags = ("cpu",)
    supported_dtypes = (torch.bfloat16, torch.float16, torch.float32)

    @cached_property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        found = probes.cpu_features()
        return Capabilities(
            bf16=bool(found & {"avx512_bf16", "amx_bf16", "bf16"}),
            int8=bool(found & {"avx512_vnni", "avx_vnni", "amx_int8", "i8mm"}),
            unified_memory=True,
        )

    def get_default_ir_op_priority(
        self, config: EngineConfig | None = None
    ) -> Mapping[str, list[str]]:
        # The second is for batch-invariant runs: linear layers of the first choose kernels by
        # batch size.
        own = ["opweave_c", "opweave_c_invariant"]
        return {EVERY_OP: own, **{op: ["aten"] for op in _TORCH_OPS}}

    def get_device_communicator_cls(self) -> str:
        return defaults.HOST_COMMUNICATOR

    def get_device_name(self, index: int = 0) -> str:
        return probes.cpu_name()

    def set_device(self, index: int) -> None:
        """No-op: there is a single device."""

    def synchronize(self) -> None:
        """No-op: the CPU is synchronous."""

    def doctor(self) -> Mapping[str, object]:
        return {"threads": torch.get_num_threads(), "features": sorted(probes.cpu_features())}
