"""The method of unquantized experts."""

from opweave.layers import UnquantizedFusedMoEMethod

__all__ = ["UnquantizedFusedMoEMethod"]
