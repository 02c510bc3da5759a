"""Softmax attention over the paged KV cache.

Source: Kwon et al., arXiv:2309.06180. See :mod:`opweave.ir.ops.attention` for the softmax,
:mod:`opweave.ir.ops.kv_cache` for the layout of the cache.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from opweave.ir.ops import attention
from opweave.ir.ops.arguments import boundaries, misfit, sequence_lengths
from opweave.ir.ops.quant import static_quant_fp8
from opweave.ir.registry import register_op
from opweave.ir.rules import plain

_misfit = functools.partial(misfit, "paged_attention")


@register_op(autocast=False)
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
    """Attention of packed queries over cached keys: decode, prefill, or both in one call.

    Sequence ``i`` has queries ``cu_seqlens_q[i]:cu_seqlens_q[i + 1]`` and ``seq_lens[i]`` keys, the
    last of which belong to its queries; position ``p`` is at ``p % block_size`` of block
    ``block_tables[i, p // block_size]``. Other contents of the cache and the tables are not used,
    and masked keys contribute nothing, even if they are NaN. Queries after the last sequence, and
    queries without keys, give zeros.

    Args:
        query: ``(tokens, query_heads, head_size)``.
        key_cache: ``(blocks, kv_heads, block_size, head_size)`` in the dtype of the queries;
            ``kv_heads`` divides ``query_heads``, and each key head serves a group of consecutive
            query heads.
        value_cache: ``(blocks, kv_heads, block_size, value_size)``.
        block_tables: ``(sequences, max_blocks)``, int32.
        seq_lens: ``(sequences,)``, int32: the number of keys of each sequence, including new ones.
        cu_seqlens_q: ``(sequences + 1,)``, int32, non-decreasing, from 0.
        scale: factor on the scores; by default ``head_size ** -0.5``.
        causal: mask later keys; the last query of a sequence is aligned with its last key.
        window: size of the sliding window, including the query's own position; needs ``causal``.
        soft_cap: replace a score ``s`` by ``soft_cap * tanh(s / soft_cap)``.

    Returns:
        ``(tokens, query_heads, value_size)`` in the dtype of the query, contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit, or ``window`` is not positive or given without
            ``causal``.
        IndexError: a used block is not in the cache (RuntimeError from native kernels, which also
            check lengths).
    """
    _check_caches(query, key_cache, value_cache)
    check_tables(block_tables, seq_lens, cu_seqlens_q)
    attention.check_heads(
        query.shape[1], key_cache.shape[1], value_cache.shape[1], "paged_attention"
    )
    attention.check_window(causal, window, "paged_attention")
    num_seqs, block_size = seq_lens.shape[0], key_cache.shape[2]
    k_pos = torch.arange(block_tables.shape[1] * block_size, device=query.device)
    used = k_pos < seq_lens[:, None]  # (sequences, positions)
    # Negative indices would count from the end; make them invalid, so that torch raises.
    blocks = torch.where(block_tables < 0, key_cache.shape[0], block_tables)
    tables = torch.where(used[:, ::block_size], blocks, 0)
    keys, values = (_gather(cache, tables, used) for cache in (key_cache, value_cache))
    q_seq, q_pos = attention.locate(query.shape[0], cu_seqlens_q)
    cached = attention.cached_keys(seq_lens, cu_seqlens_q)[q_seq]
    visible = attention._visible(q_pos + cached, k_pos, causal, window)  # (queries, positions)
    in_sequence = q_seq[:, None] == torch.arange(num_seqs, device=query.device)
    visible = (visible[:, None] & in_sequence[..., None] & used).flatten(1)
    return attention._attend(query[None], keys[None], values[None], visible, scale, soft_cap)[0]


@register_op(composite=True, autocast=False)
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
    """``static_quant_fp8(paged_attention(query, ...).flatten(1), out_scale)``.

    The input of a quantized output projection. A composite: the result of the attention is rounded
    to the dtype of the queries before it is quantized.

    Args:
        query, key_cache, value_cache, block_tables, seq_lens, cu_seqlens_q: as in
            ``paged_attention``.
        out_scale: as ``scale`` in ``static_quant_fp8``, for ``(tokens, query_heads * value_size)``.
        scale, causal, window, soft_cap: as in ``paged_attention``.

    Returns:
        float8_e4m3fn, ``(tokens, query_heads * value_size)``, contiguous.

    Raises:
        ValueError, IndexError: as in ``paged_attention``; or the shape of ``out_scale`` does not
            fit.
    """
    tables, options = (block_tables, seq_lens, cu_seqlens_q), (scale, causal, window, soft_cap)
    attended = paged_attention(query, key_cache, value_cache, *tables, *options)
    quantized: Tensor = static_quant_fp8(attended.flatten(1), out_scale)
    return quantized


def _gather(cache: Tensor, tables: Tensor, used: Tensor) -> Tensor:
    """Return the cached rows of all sequences, ``(sequences * positions, heads, size)``."""
    rows = cache[tables].transpose(2, 3).flatten(1, 2)  # (sequences, positions, heads, size)
    return torch.where(used[..., None, None], rows, 0).flatten(0, 1)


def _check_caches(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    if query.ndim != 3:
        raise _misfit("query", query, "(tokens, query_heads, head_size)")
    if key_cache.ndim != 4 or key_cache.shape[3] != query.shape[2]:
        expected = f"(blocks, kv_heads, block_size, {query.shape[2]})"
        raise _misfit("key_cache", key_cache, expected)
    if value_cache.ndim != 4 or value_cache.shape[:3] != key_cache.shape[:3]:
        expected = f"({', '.join(map(str, key_cache.shape[:3]))}, value_size)"
        raise _misfit("value_cache", value_cache, expected)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dtype != query.dtype:
            raise _misfit(name, cache, f"{plain(query.dtype)}, as query is")


def check_tables(block_tables: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor) -> None:
    """Raise ValueError unless these are int32 and describe the same number of sequences."""
    if block_tables.ndim != 2 or block_tables.dtype != torch.int32:
        raise _misfit("block_tables", block_tables, "int32, (sequences, max_blocks)")
    sequences = block_tables.shape[0]
    for name, vector, count in (
        ("seq_lens", seq_lens, sequences),
        ("cu_seqlens_q", cu_seqlens_q, sequences + 1),
    ):
        if vector.dtype != torch.int32 or vector.shape != (count,):
            raise _misfit(name, vector, f"int32, ({count},)")


@paged_attention.register_input_generator
def _inputs(
    num_tokens: int = 8,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    value_size: int = 0,
    block_size: int = 16,
    num_seqs: int = 2,
    padding: int = 0,
    rest_is_nan: bool = False,
    long_context: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, None, bool, None, None]:
    """Make one decoding sequence, and others in chunked prefill, all with cached keys.

    A *value_size* of 0 stands for the *head_size*. There are *padding* tokens after the last
    sequence. With *rest_is_nan*, unused slots of the cache are NaN, and unused entries of tables
    are not blocks; with *long_context*, the first sequence has more than 4,096 keys.
    """
    queries = sequence_lengths(num_tokens, num_seqs)
    lengths = torch.tensor(queries) + torch.randint(block_size, 3 * block_size + 1, (num_seqs,))
    if long_context:
        lengths[0] += 4096
    width = 3 + -(-(max(queries) + 4096 * long_context) // block_size)
    blocks = num_seqs * width
    tables = torch.randperm(blocks + 1)[:blocks].view(num_seqs, width)
    shape = (blocks + 1, num_kv_heads, block_size)
    key_cache = torch.randn(*shape, head_size, device=device).to(dtype)
    value_cache = torch.randn(*shape, value_size or head_size, device=device).to(dtype)
    if rest_is_nan:
        used = torch.zeros(blocks + 1, block_size, dtype=torch.bool)
        used[tables] = (torch.arange(width * block_size) < lengths[:, None]).view(
            num_seqs, width, block_size
        )
        rest = ~used.to(device)[:, None, :, None]
        key_cache, value_cache = (t.masked_fill(rest, math.nan) for t in (key_cache, value_cache))
        is_used = torch.arange(width) * block_size < lengths[:, None]
        tables = torch.where(is_used, tables, torch.iinfo(torch.int32).max)
    query = torch.randn(num_tokens + padding, num_heads, head_size, device=device).to(dtype)
    tables, lengths = tables.to(device, torch.int32), lengths.to(device, torch.int32)
    cu_seqlens_q = boundaries(queries, device)
    return query, key_cache, value_cache, tables, lengths, cu_seqlens_q, None, True, None, None


@attention_quant.register_input_generator
@functools.wraps(_inputs)
def _quant_inputs(
    *args: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, bool, int, float]:
    """Give every option, so that recognition of the composite covers them."""
    tensors = _inputs(*args, **options)[:6]
    return *tensors, torch.full((1,), 0.02, device=tensors[0].device), 0.3, True, 11, 25.0


# Sums in a different order, and a different exponential; results are of order one. In 16-bit
# dtypes, the rounding of the result comes on top.
paged_attention.override_tolerance(torch.float32, atol=2e-5, rtol=1e-4)
paged_attention.override_tolerance(torch.bfloat16, atol=1e-2, rtol=1.6e-2)
paged_attention.override_tolerance(torch.float16, atol=2e-3, rtol=2e-3)
# Tolerance in units of codes: where keys cancel, the difference above is divided by the scale, and
# next to a boundary it gives the neighboring code, up to 1/8 of the value away.
attention_quant.override_tolerance(torch.float8_e4m3fn, atol=0.25, rtol=0.125)
