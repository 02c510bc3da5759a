"""Attention, one query at a time: the result of a query depends only on its own keys."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import ops
from opweave.ir.ops.attention import check_attention, check_varlen
from opweave.ir.ops.mla_attention import check_decode
from opweave.ir.ops.paged_attention import check_tables
from opweave.ir.traits import BATCH_INVARIANT
from opweave.kernels.batch_invariant.opaque import opaque


@ops.bidirectional_attention.register_impl("batch_invariant", traits={BATCH_INVARIANT})
@opaque(ops.bidirectional_attention)
def bidirectional_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None = None
) -> Tensor:
    check_attention(query, key, value, False, None, "bidirectional_attention")
    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    for i in range(query.shape[0]):
        _attend(out[i], query[i], key[i], value[i], scale, False, None, None)
    return out


@ops.causal_attention.register_impl("batch_invariant", traits={BATCH_INVARIANT})
@opaque(ops.causal_attention)
def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    check_attention(query, key, value, True, window, "causal_attention")
    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    for i in range(query.shape[0]):
        _attend(out[i], query[i], key[i], value[i], scale, True, window, soft_cap)
    return out


@ops.varlen_attention.register_impl("batch_invariant", traits={BATCH_INVARIANT})
@opaque(ops.varlen_attention)
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
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(starts_q) - 1):
        q = slice(starts_q[i], starts_q[i + 1])
        k = slice(starts_k[i], starts_k[i + 1])
        _attend(out[q], query[q], key[k], value[k], scale, causal, window, soft_cap)
    return out


@ops.mla_attention_decode.register_impl("batch_invariant", traits={BATCH_INVARIANT})
@opaque(ops.mla_attention_decode)
def mla_attention_decode(
    query: Tensor,
    kv_cache: Tensor,
    kv_b_weight: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float | None = None,
) -> Tensor:
    latent, sizes = kv_b_weight.shape[-1], check_decode(query, kv_cache, kv_b_weight)
    check_tables(block_tables, seq_lens, cu_seqlens_q)
    weights = torch.unflatten(kv_b_weight, 0, (sizes.heads, -1))
    w_uk, w_uv = weights.split_with_sizes([sizes.nope, sizes.value], 1)
    plain, rotated = query[..., : sizes.nope], query[..., sizes.nope :]
    absorbed = torch.cat((_each_token("tnp,npl->tnl", plain, w_uk), rotated), -1)
    attended = query.new_zeros(*query.shape[:2], latent)
    starts, scale = cu_seqlens_q.tolist(), query.shape[2] ** -0.5 if scale is None else scale
    for i, keys in enumerate(seq_lens.tolist()):
        q = slice(starts[i], starts[i + 1])
        blocks = block_tables[i, : -(-keys // kv_cache.shape[1])]
        rows = kv_cache.index_select(0, blocks).flatten(0, 1)[:keys, None]
        _attend(attended[q], absorbed[q], rows, rows[..., :latent], scale, True, None, None)
    return _each_token("tnl,nvl->tnv", attended, w_uv)


def _each_token(equation: str, tokens: Tensor, weight: Tensor) -> Tensor:
    # Copy each row, because libraries choose the summation order by memory alignment.
    rows = [torch.einsum(equation, row.clone()[None], weight) for row in tokens]
    return torch.cat(rows) if rows else torch.einsum(equation, tokens, weight)


def _attend(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
) -> None:
    """Compute attention for one sequence into *out*; all tensors are ``(length, heads, size)``."""
    for i in range(query.shape[0]):
        end = key.shape[0] - query.shape[0] + i + 1 if causal else key.shape[0]
        start = 0 if window is None else max(end - window, 0)
        if end > start:
            # Copies, as in _each_token.
            row = (t.clone()[None] for t in (query[i : i + 1], key[start:end], value[start:end]))
            out[i] = ops.causal_attention.native(*row, scale, None, soft_cap)[0, 0]
