"""Attention over the paged cache.

A sequence length or block number out of range raises RuntimeError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import rules
from opweave.ir.ops.paged_attention import attention_quant as attention_quant_op
from opweave.ir.ops.paged_attention import paged_attention as op
from opweave.kernels.opweave_c.arguments import one_float32
from opweave.kernels.opweave_c.call_paths import implements, native_op
from opweave.kernels.paged import ATTENDS, attention_fits, has_whole_heads

_BLOCK_STEP = 16

_empty = torch.empty

_attend = native_op("paged_attention")
_attend_and_quantize = native_op("attention_quant")


def _blocks_fit(key_cache: Tensor, value_cache: Tensor) -> bool:
    return (
        key_cache.shape[2] % _BLOCK_STEP == 0
        and has_whole_heads(key_cache)
        and has_whole_heads(value_cache)
    )


_WHY = (
    "shapes do not fit, block_size is not a multiple of 16, positions of a head are not contiguous "
    "in a block, or window or soft_cap is not positive"
)
_COMMON = (
    rules.cpu("query", "key_cache", "value_cache", "block_tables", "seq_lens", "cu_seqlens_q")
    & ATTENDS
    & rules.custom(attention_fits, _WHY)
    & rules.custom(_blocks_fit, _WHY)
)


@implements(op, _COMMON)
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Return the attention of each query over its sequence: ``(tokens, heads, size)``."""
    out = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])
    _attend(
        out,
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        cu_seqlens_q,
        query.shape[2] ** -0.5 if scale is None else scale,
        causal,
        window,
        soft_cap,
    )
    return out


@implements(attention_quant_op, _COMMON & one_float32("out_scale"))
def attention_quant(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    out_scale: Tensor,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Return the attention of each query, quantized by *out_scale*: ``(tokens, heads * size)``."""
    width = query.shape[1] * value_cache.shape[3]
    out = _empty(query.shape[0], width, dtype=torch.float8_e4m3fn)
    _attend_and_quantize(
        out,
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        cu_seqlens_q,
        out_scale,
        query.shape[2] ** -0.5 if scale is None else scale,
        causal,
        window,
        soft_cap,
    )
    return out
