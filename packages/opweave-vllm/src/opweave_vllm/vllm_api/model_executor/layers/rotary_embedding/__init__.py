"""Rotary embeddings."""

from opweave.layers import (
    ApplyRotaryEmb,
    DualChunkRotaryEmbedding,
    MRotaryEmbedding,
    RotaryEmbedding,
    get_rope,
)

__all__ = [
    "ApplyRotaryEmb", "DualChunkRotaryEmbedding", "MRotaryEmbedding", "RotaryEmbedding", "get_rope",
]  # fmt: skip
