"""Base classes of attention backends."""

from opweave_vllm.vllm_api.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionType,
)

__all__ = ["AttentionBackend", "AttentionImpl", "AttentionMetadata", "AttentionType"]
