"""The attention backend: a cache in the device's own layout."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from acme_device.engine.usage import usage
from opweave import ir
from opweave_engine.attention import (
    AttentionBackend,
    CacheSpec,
    FullAttentionSpec,
    SequenceBatch,
)
from opweave_engine.kv_cache import NULL_BLOCK


class AcmeAttention(AttentionBackend):
    """Keeps a token's key and value side by side, so that one transfer brings both.

    The cache is one tensor, ``(blocks, heads, block_size, key_size + value_size)``; the kernels of
    ``reshape_and_cache`` and ``paged_attention`` get views of its two parts. They are called by
    their ops, so that the choice between kernels stays the user's.
    """

    name: ClassVar[str] = "acme"
    block_multiple: ClassVar[int] = 16  # tokens in a line of the device's local memory

    @classmethod
    def unsupported(cls, spec: CacheSpec) -> str | None:
        return None if isinstance(spec, FullAttentionSpec) else "it keeps keys and values only"

    def allocate(
        self, spec: CacheSpec, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        assert isinstance(spec, FullAttentionSpec)  # unsupported() has said so
        rows = torch.empty(
            *(num_blocks, spec.num_kv_heads, block_size, spec.key_size + spec.value_size),
            dtype=spec.dtype,
            device=device,
        )
        rows[NULL_BLOCK].zero_()
        self.keys, self.values = rows.split_with_sizes([spec.key_size, spec.value_size], -1)

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
        usage.attention_calls += 1
        self.keys, self.values = ir.ops.reshape_and_cache.maybe_inplace(
            key, value, self.keys, self.values, metadata.slot_mapping
        )
        attended: Tensor = ir.ops.paged_attention(
            query,
            self.keys,
            self.values,
            metadata.block_tables,
            metadata.seq_lens,
            metadata.query_starts,
            scale,
            True,
            window,
            soft_cap,
        )
        return attended
