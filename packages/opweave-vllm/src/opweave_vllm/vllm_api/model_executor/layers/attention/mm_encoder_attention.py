"""Attention of multimodal encoders."""

from opweave.layers import MMEncoderAttention

__all__ = ["MMEncoderAttention"]
