"""Causal self-attention over the sequences of the current forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.ir.opaque import opaque_op
from opweave_engine.models.forward_context import CachedRows, current_forward_context


class Attention(nn.Module):
    """Causal attention within each sequence.

    Inside a :func:`~opweave_engine.models.forward_context.forward_context`, new keys and values are
    added to the cache. Without one, the tokens are one new sequence.

    Args:
        layer: the index of the layer, which identifies its cache.
        num_heads: the number of query heads on this rank.
        num_kv_heads: the number of key and value heads on this rank.
        head_dim: the size of a head.
        window: the maximum number of positions to attend to; None: all.
        scale, soft_cap: as in ``ir.ops.varlen_attention``.
        value_dim: the size of a value head; by default *head_dim*.

    Attributes:
        cached: the cache entry of a token for this layer.
    """

    def __init__(
        self,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        *,
        value_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.num_heads = layer, num_heads
        self.window, self.scale, self.soft_cap = window, scale, soft_cap
        self.cached = CachedRows(layer, num_kv_heads, head_dim, value_dim or head_dim, window)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return ``(T, heads * value_dim)``.

        Args:
            query: ``(T, heads, head_dim)``.
            key: ``(T, kv_heads, head_dim)``.
            value: ``(T, kv_heads, value_dim)``.
        """
        # A graph must hold for every context, so that it looks the context up when it runs.
        attend = _opaque if torch.compiler.is_dynamo_compiling() else _attend
        options = self.window, self.scale, self.soft_cap
        return attend(query, key, value, self.layer, *options).flatten(1)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: int,
    window: int | None,
    scale: float | None,
    soft_cap: float | None,
) -> Tensor:
    context = current_forward_context()
    if context is None:
        dense: Tensor = ir.ops.causal_attention(
            query[None], key[None], value[None], scale, window, soft_cap
        )
        return dense[0]
    return context.attention.attend(layer, query, key, value, scale, window, soft_cap)


def _fake(query: Tensor, key: Tensor, value: Tensor, *options: object) -> Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


_opaque = opaque_op("opweave", "attention_in_context", _attend, _fake)
