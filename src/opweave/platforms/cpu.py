"""The CPU."""

from __future__ import annotations

from collections.abc import Mapping

from opweave.config import EngineConfig
from opweave.platforms.base import Platform


class CpuPlatform(Platform):
    """Host memory and processor."""

    name = "cpu"
    device_type = "cpu"

    def get_default_ir_op_priority(
        self, config: EngineConfig | None = None
    ) -> Mapping[str, list[str]]:
        return {
            "rms_norm": ["opweave_c"],
            "fused_add_rms_norm": ["opweave_c"],
            "causal_attention": ["aten"],
            "varlen_attention": ["aten"],
        }
