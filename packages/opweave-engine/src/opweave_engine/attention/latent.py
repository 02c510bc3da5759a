"""Latent attention over a paged cache of rows, by IR ops."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from opweave import ir
from opweave.ir.traits import BATCH_INVARIANT
from opweave_engine.attention.backend import AttentionBackend
from opweave_engine.attention.batch import SequenceBatch
from opweave_engine.attention.specs import CacheSpec, LatentAttentionSpec
from opweave_engine.cache import NULL_BLOCK
from opweave_engine.loading import huge_pages


class LatentPagedAttention(AttentionBackend):
    """``mla_attention_decode`` for sequences with one new token, else ``mla_attention_prefill``.

    If batch invariance is required, prefill is used for all sequences: the two ops round
    differently, and whether a token is computed alone depends on the rest of the batch.
    """

    name: ClassVar[str] = "latent_paged"

    @classmethod
    def unsupported(cls, spec: CacheSpec) -> str | None:
        return None if isinstance(spec, LatentAttentionSpec) else "it keeps latent rows only"

    def allocate(
        self, spec: CacheSpec, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        assert isinstance(spec, LatentAttentionSpec)  # unsupported() has said so
        shape = num_blocks, 1, block_size
        self._rows = huge_pages.empty((*shape, spec.row_size), spec.dtype, device)
        self._rows[NULL_BLOCK].zero_()
        self._no_values = self._rows.new_empty(*shape, 0)

    def forward(
        self,
        metadata: SequenceBatch,
        query: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        kv_b_weight: Tensor,
        scale: float,
    ) -> Tensor:
        row = torch.cat((kv_c, k_pe), -1)[:, None]
        self._rows, self._no_values = ir.ops.reshape_and_cache.maybe_inplace(
            row, row[..., :0], self._rows, self._no_values, metadata.slot_mapping
        )
        if metadata.num_decodes and _must_not_vary():
            metadata = replace(metadata, num_decodes=0)
        decodes, parts = metadata.num_decodes, []
        if decodes or not metadata.num_prefills:
            parts.append(
                ir.ops.mla_attention_decode(
                    query[:decodes],
                    self._rows[:, 0],
                    kv_b_weight,
                    metadata.block_tables[:decodes],
                    metadata.seq_lens[:decodes],
                    metadata.query_starts[: decodes + 1],
                    scale,
                )
            )
        if metadata.num_prefills:
            rows = self._packed(metadata)
            latents, rotated = rows.split_with_sizes([kv_c.shape[1], k_pe.shape[1]], -1)
            starts = metadata.query_starts[decodes:] - decodes
            ends = metadata.key_starts[decodes:] - metadata.key_starts[decodes]
            parts.append(
                ir.ops.mla_attention_prefill(
                    query[decodes:], latents, rotated, kv_b_weight, starts, ends, scale
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _packed(self, batch: SequenceBatch) -> Tensor:
        """Return the rows of the sequences after the decodes, one after the other."""
        tables, lengths = batch.block_tables[batch.num_decodes :], batch.seq_lens
        rows = self._rows[tables, 0].flatten(1, 2)  # (sequences, positions, row)
        positions = torch.arange(rows.shape[1], device=rows.device)
        return rows[positions < lengths[batch.num_decodes :, None]]


def _must_not_vary() -> bool:
    return BATCH_INVARIANT in ir.policy_for(ir.ops.mla_attention_decode).required
