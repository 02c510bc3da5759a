"""Attention to cached tokens: the interface of attention backends, and the default backends."""

from opweave_engine.attention.backend import AttentionBackend
from opweave_engine.attention.batch import SequenceBatch
from opweave_engine.attention.latent import LatentPagedAttention
from opweave_engine.attention.paged import PagedAttention
from opweave_engine.attention.specs import (
    CacheSpec,
    FullAttentionSpec,
    LatentAttentionSpec,
    SlidingWindowSpec,
    StateSpaceSpec,
    StateSpec,
    cache_specs,
)

__all__ = [
    "AttentionBackend",
    "CacheSpec",
    "FullAttentionSpec",
    "LatentAttentionSpec",
    "LatentPagedAttention",
    "PagedAttention",
    "SequenceBatch",
    "SlidingWindowSpec",
    "StateSpaceSpec",
    "StateSpec",
    "cache_specs",
]
