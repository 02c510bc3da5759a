"""Multi-head latent attention over the sequences of the current forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opweave.ir.opaque import opaque_op
from opweave.layers.mla import one_sequence
from opweave_engine.models.forward_context import CachedRows, current_forward_context


class LatentAttention(nn.Module):
    """Causal attention within each sequence.

    Inside a :func:`~opweave_engine.models.forward_context.forward_context`, new rows
    ``[kv_c | k_pe]`` are added to the cache, as keys of one head without values. Without a context,
    the tokens are one new sequence.

    Args:
        layer: the index of the layer, which identifies its cache.
        num_heads: the number of query heads on this rank.
        row_size: the size of a row.

    Attributes:
        cached: the cache entry of a token for this layer.
    """

    def __init__(self, layer: int, num_heads: int, row_size: int) -> None:
        super().__init__()
        self.layer, self.num_heads = layer, num_heads
        self.cached = CachedRows(layer, 1, row_size, 0)

    def forward(
        self, query: Tensor, kv_c: Tensor, k_pe: Tensor, kv_b_weight: Tensor, scale: float
    ) -> Tensor:
        """Return ``(T, heads, value_size)``; arguments as in ``ir.ops.mla_attention_prefill``."""
        # A graph must hold for every context, so that it looks the context up when it runs.
        attend = _opaque if torch.compiler.is_dynamo_compiling() else _attend
        out: Tensor = attend(query, kv_c, k_pe, kv_b_weight, scale, self.layer)
        return out


def _attend(
    query: Tensor, kv_c: Tensor, k_pe: Tensor, kv_b_weight: Tensor, scale: float, layer: int
) -> Tensor:
    context = current_forward_context()
    if context is None:
        return one_sequence(query, kv_c, k_pe, kv_b_weight, scale)
    return context.attention.attend_latent(layer, query, kv_c, k_pe, kv_b_weight, scale)


def _fake(
    query: Tensor, kv_c: Tensor, k_pe: Tensor, kv_b_weight: Tensor, *options: object
) -> Tensor:
    heads = query.shape[1]
    nope = query.shape[2] - k_pe.shape[1]
    return query.new_empty(query.shape[0], heads, kv_b_weight.shape[0] // heads - nope)


_opaque = opaque_op("opweave", "latent_attention_in_context", _attend, _fake)
