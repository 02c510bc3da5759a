"""Multimodal rotary embedding."""

from opweave.layers import MRotaryEmbedding

__all__ = ["MRotaryEmbedding"]
