"""Multi-head latent attention over the sequences of the current forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.layers.mla import one_sequence
from opweave.models.forward_context import ForwardContext, current_forward_context


class LatentAttention(nn.Module):
    """Attends to the tokens before and at each token, in its own sequence.

    Inside a :func:`~opweave.models.forward_context.forward_context`, new rows ``[kv_c | k_pe]``
    join those that are cached: they are keys of one head, whose values have no elements of their
    own. Without one, the tokens are one sequence from its beginning.

    Args:
        layer: the index of the layer, by which the cache knows it.
    """

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

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
    row = torch.cat((kv_c, k_pe), -1)[:, None]
    rows, _ = context.kv_cache.append(layer, row, row[..., :0])
    decodes = query.shape[0] == context.cu_seqlens_q.shape[0] - 1
    if decodes:
        return _decode(query, rows, kv_b_weight, scale, context)
    kv_c, k_pe = rows[:, 0].split_with_sizes([kv_c.shape[1], k_pe.shape[1]], -1)
    starts, ends = context.cu_seqlens_q, context.cu_seqlens_k
    out: Tensor = ir.ops.mla_attention_prefill(query, kv_c, k_pe, kv_b_weight, starts, ends, scale)
    return out


def _decode(
    query: Tensor, rows: Tensor, kv_b_weight: Tensor, scale: float, context: ForwardContext
) -> Tensor:
    """Attend to packed rows as to a paged cache, every page of which is one row."""
    starts, lengths = context.cu_seqlens_k[:-1], context.cu_seqlens_k.diff()
    longest = int(lengths.max()) if lengths.numel() else 0
    pages = starts[:, None] + torch.arange(longest, dtype=torch.int32, device=rows.device)
    out: Tensor = ir.ops.mla_attention_decode(
        query, rows, kv_b_weight, pages, lengths, context.cu_seqlens_q, scale
    )
    return out


_opaque = torch.library.custom_op("opweave::latent_attention_in_context", _attend, mutates_args=())


@_opaque.register_fake
def _(
    query: Tensor, kv_c: Tensor, k_pe: Tensor, kv_b_weight: Tensor, scale: float, layer: int
) -> Tensor:
    heads = query.shape[1]
    nope = query.shape[2] - k_pe.shape[1]
    return query.new_empty(query.shape[0], heads, kv_b_weight.shape[0] // heads - nope)
