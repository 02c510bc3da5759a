"""The layer."""

from opweave.layers import FusedMoE, UnquantizedFusedMoEMethod

__all__ = ["FusedMoE", "UnquantizedFusedMoEMethod"]
