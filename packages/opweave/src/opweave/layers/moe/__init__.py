"""Mixture of experts: routing, experts, and their placement on ranks."""

from opweave.layers.moe.grouped_topk import GroupedTopk
from opweave.layers.moe.layer import FusedMoE
from opweave.layers.moe.method import ExpertShapes, FusedMoEMethod, FusedMoEQuantConfig
from opweave.layers.moe.modular import (
    Experts,
    FusedMoEModularMethod,
    LocalPrepareAndFinalize,
    ModularKernel,
    OpExperts,
    PrepareAndFinalize,
)
from opweave.layers.moe.placement import ExpertPlacement
from opweave.layers.moe.quantized import QuantizedFusedMoEMethod
from opweave.layers.moe.router import Router
from opweave.layers.moe.transformers_moe import TransformersFusedMoE
from opweave.layers.moe.unquantized import UnquantizedFusedMoEMethod

__all__ = [
    "ExpertPlacement",
    "ExpertShapes",
    "Experts",
    "FusedMoE",
    "FusedMoEMethod",
    "FusedMoEModularMethod",
    "GroupedTopk",
    "LocalPrepareAndFinalize",
    "ModularKernel",
    "OpExperts",
    "PrepareAndFinalize",
    "FusedMoEQuantConfig",
    "QuantizedFusedMoEMethod",
    "Router",
    "TransformersFusedMoE",
    "UnquantizedFusedMoEMethod",
]
