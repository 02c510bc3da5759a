"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from opweave import ir
from opweave_vllm.replacing import replace


def _forward(
    self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Rotate *query* and *key* at *positions*."""
    cache = self._match_cos_sin_cache_dtype(query)
    rest = (positions, cache, self.head_size, self.is_neox_style)
    if key is None:
        return ir.ops.rotary_embedding_single.maybe_inplace(query, *rest), None
    return ir.ops.rotary_embedding.maybe_inplace(query, key, *rest)


def _replaceable() -> list[type[Any]]:
    """Return RotaryEmbedding and its subclasses that only scale the frequencies."""
    classes: list[Any] = [c for c in vars(rotary_embedding).values() if isinstance(c, type)]
    methods = ("forward", "forward_native", "forward_cpu")
    return [
        cls
        for cls in classes
        if issubclass(cls, RotaryEmbedding)
        and all(getattr(cls, name) is getattr(RotaryEmbedding, name) for name in methods)
    ]


def register() -> None:
    """Replace vLLM's rotary embeddings; those that rotate in their own way stay."""
    for base in _replaceable():
        # vLLM calls forward_cpu where custom_ops enables the layer, and forward_native elsewhere.
        members = {"forward_native": _forward, "forward_cpu": _forward, "__module__": __name__}
        replace(base, type(f"Opweave{base.__name__}", (base,), members))
