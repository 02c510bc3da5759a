"""Normalization layers."""

from opweave.layers import GemmaRMSNorm, RMSNorm, RMSNormGated

__all__ = ["GemmaRMSNorm", "RMSNorm", "RMSNormGated"]
