"""Rotary position embedding."""

from __future__ import annotations

from torch import Tensor
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from opweave import ir


class OpweaveRotaryEmbedding(RotaryEmbedding):  # type: ignore[misc]
    """Rotary embedding by opweave's ops."""

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        cache = self._match_cos_sin_cache_dtype(query)
        rest = (positions, cache, self.head_size, self.is_neox_style)
        if key is None:
            return ir.ops.rotary_embedding_single.maybe_inplace(query, *rest), None
        return ir.ops.rotary_embedding.maybe_inplace(query, key, *rest)

    # vLLM calls forward_cpu where custom_ops enables the layer, and forward_native elsewhere.
    forward_cpu = forward_native


def register(bfloat16_only: bool) -> None:
    """Replace vLLM's RotaryEmbedding; subclasses with scaled frequencies keep their own."""
    RotaryEmbedding.register_oot(OpweaveRotaryEmbedding, name="RotaryEmbedding")
