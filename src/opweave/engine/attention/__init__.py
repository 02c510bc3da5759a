"""Attention to cached tokens: the interface of attention backends, and the default backends."""

from opweave.engine.attention.backend import AttentionBackend
from opweave.engine.attention.batch import SequenceBatch
from opweave.engine.attention.latent import LatentPagedAttention
from opweave.engine.attention.paged import PagedAttention
from opweave.engine.attention.specs import (
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
