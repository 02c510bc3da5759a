"""Attention with ``torch.nn.functional.scaled_dot_product_attention``.

Not differentiable: packed attention reads the sequence lengths on the host, which cannot be traced,
so calls that need gradients use native.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise, starmap

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir import ops, rules
from opweave.ir.ops.attention import check_attention, check_varlen
from opweave.kernels.aten.aligned import aligned

# torch requires one dtype; native promotes.
_ONE_DTYPE = rules.same_dtype("query", "key", "value")
_NO_SOFT_CAP = _ONE_DTYPE & rules.is_none("soft_cap")


@ops.bidirectional_attention.register_impl("aten", supports_args=_ONE_DTYPE)
def bidirectional_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None = None
) -> Tensor:
    check_attention(query, key, value, False, None, "bidirectional_attention")
    return attend(query, key, value, scale, False, None).contiguous()


@ops.causal_attention.register_impl("aten", supports_args=_NO_SOFT_CAP)
def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    check_attention(query, key, value, True, window, "causal_attention")
    return attend(query, key, value, scale, True, window).contiguous()


@ops.varlen_attention.register_impl(
    "aten", supports_args=_NO_SOFT_CAP & rules.has_values("cu_seqlens_q", "cu_seqlens_k")
)
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    check_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, causal, window)
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    for q, k in _segments(cu_seqlens_q, cu_seqlens_k):
        out[q] = attend(query[None, q], key[None, k], value[None, k], scale, causal, window)[0]
    if causal and not out.isfinite().all():
        # torch multiplies the values of masked keys by zero, so NaN and infinity spread from them;
        # native ignores masked keys.
        for q, k in _segments(cu_seqlens_q, cu_seqlens_k):
            if not out[q].isfinite().all():
                packed = query[None, q], key[None, k], value[None, k]
                out[q] = ops.causal_attention.native(*packed, scale, window)[0]
    return out


def _segments(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the slices of the queries and of the keys of each sequence."""
    bounds = (starmap(slice, pairwise(cu.tolist())) for cu in (cu_seqlens_q, cu_seqlens_k))
    return zip(*bounds, strict=True)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    causal: bool,
    window: int | None,
) -> Tensor:
    """Return attention for ``(batch, length, heads, size)``; zeros for queries without a key."""
    q_len, k_len = query.shape[1], key.shape[1]
    blind = max(q_len - k_len, 0) if causal else (q_len if k_len == 0 else 0)
    if blind == q_len:
        return query.new_zeros(*query.shape[:3], value.shape[-1])
    mask = _mask(query, k_len, scale, window) if causal else None
    scale, value_size = query.shape[-1] ** -0.5 if scale is None else scale, value.shape[-1]
    if query.is_cuda:
        # torch 2.11 crashes on an H100 if keys and values have different head sizes.
        widest = max(query.shape[-1], value_size)
        query, key, value = (aligned(_widened(t, widest)) for t in (query, key, value))
    out = functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal and mask is None and q_len > 1,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    ).transpose(1, 2)[..., :value_size]
    return torch.cat((torch.zeros_like(out[:, :blind]), out[:, blind:]), 1) if blind else out


def _widened(t: Tensor, size: int) -> Tensor:
    missing = size - t.shape[-1]
    return functional.pad(t, (0, missing)) if missing else t


def _mask(query: Tensor, k_len: int, scale: float | None, window: int | None) -> Tensor | None:
    """Return an additive mask, or None if torch's own top-left mask, or no mask, is enough.

    A bool mask is not safe: cuDNN's kernel replaces it with a finite number that the score of a
    masked key may exceed.
    """
    q_len, narrow = query.shape[1], window is not None and window < k_len
    # torch scales after its own mask: a scale of 0 or less would change minus infinity.
    own_is_enough = q_len == k_len and (scale is None or scale > 0)
    if not narrow and (q_len == 1 or own_is_enough):
        return None
    q_pos = torch.arange(k_len - q_len, k_len, device=query.device)[:, None]
    distance = q_pos - torch.arange(k_len, device=query.device)
    hidden = distance < 0
    if window is not None:
        hidden = hidden | (distance >= window)
    return query.new_zeros(q_len, k_len).masked_fill(hidden, -math.inf)
