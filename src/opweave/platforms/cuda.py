"""NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from opweave.config import EngineConfig
from opweave.platforms.base import Platform


class CudaPlatform(Platform):
    """CUDA devices."""

    name = "cuda"
    device_type = "cuda"

    def get_default_ir_op_priority(
        self, config: EngineConfig | None = None
    ) -> Mapping[str, list[str]]:
        return {
            "rms_norm": ["aten"],
            "fused_add_rms_norm": ["aten"],
            "bidirectional_attention": ["aten"],
            "causal_attention": ["aten"],
            "varlen_attention": ["aten"],
        }
