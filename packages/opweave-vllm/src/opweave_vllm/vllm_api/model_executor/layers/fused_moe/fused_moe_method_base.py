"""Base class of the methods of experts."""

from opweave.layers import FusedMoEMethod as FusedMoEMethodBase

__all__ = ["FusedMoEMethodBase"]
