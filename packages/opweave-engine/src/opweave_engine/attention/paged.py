"""Attention over a paged cache of keys and values, by IR ops."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from opweave import ir
from opweave_engine.attention.backend import AttentionBackend
from opweave_engine.attention.batch import SequenceBatch
from opweave_engine.attention.specs import CacheSpec, FullAttentionSpec
from opweave_engine.cache import NULL_BLOCK
from opweave_engine.loading import huge_pages


class PagedAttention(AttentionBackend):
    """``reshape_and_cache``, then ``paged_attention``, on any device that has kernels for them."""

    name: ClassVar[str] = "paged"

    @classmethod
    def unsupported(cls, spec: CacheSpec) -> str | None:
        return None if isinstance(spec, FullAttentionSpec) else "it keeps keys and values only"

    def allocate(
        self, spec: CacheSpec, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        assert isinstance(spec, FullAttentionSpec)  # unsupported() has said so
        shape = num_blocks, spec.num_kv_heads, block_size
        self.key_cache, self.value_cache = (
            huge_pages.empty((*shape, size), spec.dtype, device)
            for size in (spec.key_size, spec.value_size)
        )
        for cache in (self.key_cache, self.value_cache):
            cache[NULL_BLOCK].zero_()

    def forward(
        self,
        metadata: SequenceBatch,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None,
        soft_cap: float | None,
    ) -> Tensor:
        self.key_cache, self.value_cache = ir.ops.reshape_and_cache.maybe_inplace(
            key, value, self.key_cache, self.value_cache, metadata.slot_mapping
        )
        attended: Tensor = ir.ops.paged_attention(
            query,
            self.key_cache,
            self.value_cache,
            metadata.block_tables,
            metadata.seq_lens,
            metadata.query_starts,
            scale,
            True,
            window,
            soft_cap,
        )
        return attended
