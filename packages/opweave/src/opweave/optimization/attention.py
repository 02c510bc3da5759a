"""Attention of transformers models, through transformers' registry of attention functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from opweave import ir

NAME = "opweave"
_SDPA = "sdpa"


def install(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Make the parts of *model* that use SDPA use opweave's attention.

    The parts of a model, such as its text and vision towers, have configurations of their own,
    which name their attention. Models with sparse attention are left alone: they apply the
    indexer's mask for SDPA only, and expect other attention functions to use the indexer's results.

    Returns:
        The name and the first module of each part, by configuration.
    """
    if any(getattr(module, "indexer", None) is not None for module in model.modules()):
        return []
    parts = _parts(model, _SDPA)
    for config, _, _ in parts:
        config._attn_implementation = {"": _registered()}  # leaves the nested configurations
    return [(name, module) for _, name, module in parts]


def remove(model: nn.Module) -> None:
    """Make the parts of *model* that use opweave's attention use SDPA again."""
    for config, _, _ in _parts(model, NAME):
        config._attn_implementation = {"": _SDPA}


def _parts(model: nn.Module, implementation: str) -> list[tuple[Any, str, nn.Module]]:
    """Return the configurations that name *implementation*, with their first modules.

    Only those of modules that look up their attention in transformers' registry.
    """
    parts: dict[int, tuple[Any, str, nn.Module]] = {}
    # By module name; a module inherits the value of the transformers model that contains it.
    looks_up: dict[str, bool] = {}
    fixed: set[int] = set()
    for name, module in model.named_modules():
        looks_up[name] = looks_up.get(name.rpartition(".")[0], False)
        if callable(can_set := getattr(module, "_can_set_attn_implementation", None)):
            looks_up[name] = can_set()
        config: Any = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == implementation:
            parts.setdefault(id(config), (config, name, module))
            if not looks_up[name]:
                fixed.add(id(config))
    return [part for key, part in parts.items() if key not in fixed]


class _Name(str):
    """The name of opweave's attention, which registers it where it is unpickled."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _registered, ()


def _registered() -> _Name:
    """Register opweave's attention with transformers, and return its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return _Name(NAME)


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
    q_first, k_first, v_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if causal and q > 1:
        return ir.ops.causal_attention(q_first, k_first, v_first, scaling), None
    return ir.ops.bidirectional_attention(q_first, k_first, v_first, scaling), None
