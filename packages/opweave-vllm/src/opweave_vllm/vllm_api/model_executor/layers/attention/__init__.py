"""Attention layers."""

from opweave.layers import MMEncoderAttention

__all__ = ["MMEncoderAttention"]
