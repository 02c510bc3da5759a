"""Mixture of experts."""

from opweave.layers import FusedMoE, GroupedTopk, UnquantizedFusedMoEMethod
from opweave.layers import FusedMoEMethod as FusedMoEMethodBase
from opweave_vllm.vllm_api.model_executor.layers.fused_moe.activation import MoEActivation
from opweave_vllm.vllm_api.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEQuantConfig,
)
from opweave_vllm.vllm_api.model_executor.layers.fused_moe.routed_experts import (
    FusedMoERouter,
    RoutedExperts,
)

__all__ = [
    "FusedMoE", "FusedMoEConfig", "FusedMoEMethodBase", "FusedMoEQuantConfig", "FusedMoERouter",
    "GroupedTopk", "MoEActivation", "RoutedExperts", "UnquantizedFusedMoEMethod",
]  # fmt: skip
