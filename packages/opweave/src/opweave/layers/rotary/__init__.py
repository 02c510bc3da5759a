"""Rotary position embedding: the layers, and the scalings for longer contexts."""

from opweave.layers.rotary.apply_rotary_emb import ApplyRotaryEmb
from opweave.layers.rotary.dual_chunk import DualChunkRotaryEmbedding
from opweave.layers.rotary.get_rope import get_rope
from opweave.layers.rotary.mrope import MRotaryEmbedding
from opweave.layers.rotary.parameters import ROPE_TYPES
from opweave.layers.rotary.rotary_embedding import RotaryEmbedding
from opweave.layers.rotary.scaling import (
    AlphaNTKScaling,
    DynamicNTKScaling,
    FixedNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Scaling,
    YarnScaling,
)

__all__ = [
    "ROPE_TYPES",
    "AlphaNTKScaling",
    "ApplyRotaryEmb",
    "DualChunkRotaryEmbedding",
    "DynamicNTKScaling",
    "FixedNTKScaling",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "MRotaryEmbedding",
    "RotaryEmbedding",
    "Scaling",
    "YarnScaling",
    "get_rope",
]
