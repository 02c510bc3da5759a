"""Attention of transformers models, through transformers' registry of attention functions."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from opweave import ir

NAME = "opweave"


def has_interface(model: nn.Module) -> bool:
    """Whether *model* gets its attention from transformers' registry, and currently uses SDPA.

    False for models with sparse attention: they apply the indexer's mask for SDPA only, and expect
    other attention functions to use the indexer's results.
    """
    if "transformers" not in sys.modules or not hasattr(model, "set_attn_implementation"):
        return False
    if any(getattr(module, "indexer", None) is not None for module in model.modules()):
        return False
    config: Any = getattr(model, "config", None)
    return getattr(config, "_attn_implementation", None) == "sdpa"


def install(model: Any) -> None:
    """Make *model* use opweave's attention."""
    _register()
    model.set_attn_implementation(NAME)


def remove(model: Any) -> None:
    """Make *model* use SDPA again."""
    model.set_attn_implementation("sdpa")


def is_installed(model: Any) -> bool:
    """Whether *model* uses opweave's attention."""
    config = getattr(model, "config", None)
    return getattr(config, "_attn_implementation", None) == NAME


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with the signature that transformers calls.

    Calls that the ops do not support (masks, dropout, position biases, a paged cache, tensors that
    autocast casts) run SDPA.

    Args:
        module: the calling layer.
        query: ``(batch, query_heads, q, head_size)``.
        key, value: ``(batch, kv_heads, k, head_size)``.
        attention_mask: None if the causal flag suffices.
        scaling: factor on the scores.
        dropout: probability.
        is_causal: by default, the attribute of *module*.
        kwargs: further options of transformers.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    special = ("cache", "position_bias", "s_aux", "softcap")
    q, k = query.shape[2], key.shape[2]
    # Of a longer cache without a mask, transformers sees the first keys alone; the op sees all.
    covered = attention_mask is None and dropout == 0.0 and (q in (1, k) or not causal)
    dtypes, device = {query.dtype, key.dtype, value.dtype}, query.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))  # SDPA casts to it
    if not covered or len(dtypes) > 1 or any(kwargs.get(name) is not None for name in special):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
    q_first, k_first, v_first = (each.transpose(1, 2) for each in (query, key, value))
    if causal and q > 1:
        return ir.ops.causal_attention(q_first, k_first, v_first, scaling), None
    return ir.ops.bidirectional_attention(q_first, k_first, v_first, scaling), None
