"""Mixture of experts."""

from opweave.integrations.vllm_api.model_executor.layers.fused_moe.activation import MoEActivation
from opweave.integrations.vllm_api.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEQuantConfig,
)
from opweave.integrations.vllm_api.model_executor.layers.fused_moe.routed_experts import (
    FusedMoERouter,
    RoutedExperts,
)
from opweave.layers import FusedMoE, GroupedTopk, UnquantizedFusedMoEMethod
from opweave.layers import FusedMoEMethod as FusedMoEMethodBase

__all__ = [
    "FusedMoE",
    "FusedMoEConfig",
    "FusedMoEMethodBase",
    "FusedMoEQuantConfig",
    "FusedMoERouter",
    "GroupedTopk",
    "MoEActivation",
    "RoutedExperts",
    "UnquantizedFusedMoEMethod",
]
