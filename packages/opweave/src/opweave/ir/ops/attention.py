"""Softmax attention.

Source: Vaswani et al., arXiv:1706.03762; grouped queries: Ainslie et al., arXiv:2305.13245; logit
soft-capping: Gemma 2, arXiv:2408.00118. Scores and probabilities are computed in float32, the
result is cast back.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir.ops.arguments import boundaries, sequence_lengths
from opweave.ir.registry import register_op


@register_op(autocast=False)
def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Causal attention over a dense batch.

    The last query is aligned with the last key, so ``q`` queries may follow ``k - q`` cached keys.
    A query without keys gives zeros. Non-finite keys and values do not affect other batch elements.
    In native, masked ones contribute nothing; a kernel may multiply them by zero, which gives NaN.

    Args:
        query: ``(batch, q, query_heads, head_size)``.
        key: ``(batch, k, kv_heads, head_size)``; ``kv_heads`` divides ``query_heads``, and each key
            head serves a group of consecutive query heads.
        value: ``(batch, k, kv_heads, value_size)``.
        scale: factor on the scores; by default ``head_size ** -0.5``.
        window: size of the sliding window, including the query's own position.
        soft_cap: replace a score ``s`` by ``soft_cap * tanh(s / soft_cap)``.

    Returns:
        ``(batch, q, query_heads, value_size)`` in the dtype of the query, contiguous.

    Raises:
        ValueError: shapes do not fit, or ``window`` is not positive.
    """
    check_attention(query, key, value, True, window, "causal_attention")
    q_len, k_len = query.shape[1], key.shape[1]
    q_pos = torch.arange(k_len - q_len, k_len, device=query.device)
    visible = _visible(q_pos, torch.arange(k_len, device=query.device), True, window)
    return _attend(query, key, value, visible, scale, soft_cap)


@register_op(autocast=False)
def bidirectional_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None = None
) -> Tensor:
    """Attention of every query to every key of its batch element, as in an encoder.

    Gives zeros if there are no keys.

    Args:
        query: ``(batch, q, query_heads, head_size)``.
        key: ``(batch, k, kv_heads, head_size)``; ``kv_heads`` divides ``query_heads``, and each key
            head serves a group of consecutive query heads.
        value: ``(batch, k, kv_heads, value_size)``.
        scale: factor on the scores; by default ``head_size ** -0.5``.

    Returns:
        ``(batch, q, query_heads, value_size)`` in the dtype of the query, contiguous.

    Raises:
        ValueError: shapes do not fit.
    """
    check_attention(query, key, value, False, None, "bidirectional_attention")
    visible = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=query.device)
    return _attend(query, key, value, visible, scale, None)


@register_op(autocast=False)
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
    """Attention over packed sequences of different lengths.

    Sequence ``i`` has queries ``cu_seqlens_q[i]:cu_seqlens_q[i + 1]`` and keys
    ``cu_seqlens_k[i]:cu_seqlens_k[i + 1]``; tokens attend to their own sequence only. Masked keys
    contribute nothing, even if they are NaN. Tokens after the last sequence, and queries without
    keys, give zeros.

    Args:
        query: ``(q_tokens, query_heads, head_size)``.
        key: ``(k_tokens, kv_heads, head_size)``; ``kv_heads`` divides ``query_heads``.
        value: ``(k_tokens, kv_heads, value_size)``.
        cu_seqlens_q, cu_seqlens_k: ``(sequences + 1,)``, int32 or int64, non-decreasing, from 0.
        scale: factor on the scores; by default ``head_size ** -0.5``.
        causal: mask later keys; the last query of a sequence is aligned with its last key.
        window: size of the sliding window, including the query's own position; needs ``causal``.
        soft_cap: replace a score ``s`` by ``soft_cap * tanh(s / soft_cap)``.

    Returns:
        ``(q_tokens, query_heads, value_size)`` in the dtype of the query, contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit, or ``window`` is not positive or given without
            ``causal``.
    """
    check_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, causal, window)
    q_seq, q_pos = locate(query.shape[0], cu_seqlens_q)
    k_seq, k_pos = locate(key.shape[0], cu_seqlens_k)
    # Positions count from the first key, and the last query is aligned with the last key.
    cached = cached_keys(cu_seqlens_k.diff(), cu_seqlens_q)[q_seq]
    visible = _visible(q_pos + cached, k_pos, causal, window)
    visible = visible & (q_seq[:, None] == k_seq) & (k_seq < cu_seqlens_q.shape[0] - 1)
    return _attend(query[None], key[None], value[None], visible, scale, soft_cap)[0]


def locate(num_tokens: int, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sequence of each token and its index in it; tokens after the last have n."""
    token = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    # Not torch.searchsorted: for a view, Inductor before torch 2.13 searches its base instead.
    sequence = (cu_seqlens[1:] <= token[:, None]).sum(-1)
    return sequence, token - cu_seqlens[sequence]


def cached_keys(seq_lens: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    """Return the number of keys before the queries of each sequence, and a 0 for no sequence."""
    return functional.pad(seq_lens - cu_seqlens_q.diff(), (0, 1))


def _visible(q_pos: Tensor, k_pos: Tensor, causal: bool, window: int | None) -> Tensor:
    """Return the attention mask, ``(queries, keys)``, bool; True for visible keys."""
    distance = q_pos[:, None] - k_pos
    visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return visible if window is None else visible & (distance < window)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    scale: float | None,
    soft_cap: float | None,
) -> Tensor:
    dtype = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[2] // key.shape[2]
    q = query.to(dtype).transpose(1, 2)
    k, v = (t.to(dtype).transpose(1, 2).repeat_interleave(group, dim=1) for t in (key, value))
    scores = q @ k.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    # A finite fill keeps rows without keys finite; their probabilities are zeroed below.
    scores = scores.masked_fill(~visible, torch.finfo(dtype).min)
    probabilities = torch.softmax(scores, dim=-1).masked_fill(~visible, 0.0)
    return _weighed(probabilities, v, visible).transpose(1, 2).to(query.dtype).contiguous()


def _weighed(probabilities: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Return ``probabilities @ value``; masked values contribute nothing, even NaN."""
    # 0 * NaN is NaN, so non-finite values are left out of the product and added by masks.
    rises, falls = ~(value < math.inf), ~(value > -math.inf)  # NaN is in both
    weighed = probabilities @ value.masked_fill(rises | falls, 0.0)
    odd = torch.cat((rises, falls), -1).to(value.dtype)
    rises, falls = (visible.to(value.dtype) @ odd > 0).chunk(2, -1)
    weighed = weighed.masked_fill(rises, math.inf).masked_fill(falls, -math.inf)
    return weighed.masked_fill(rises & falls, math.nan)


def check_attention(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int | None, name: str
) -> None:
    """Raise ValueError if the arguments of a dense attention op called *name* do not fit."""
    _check_shapes(query, key, value, ("batch",), name)
    check_heads(query.shape[2], key.shape[2], value.shape[2], name)
    check_window(causal, window, name)


def check_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    window: int | None,
) -> None:
    """Raise ValueError if the arguments of ``varlen_attention`` do not fit together."""
    name = "varlen_attention"
    _check_shapes(query, key, value, (), name)
    check_heads(query.shape[1], key.shape[1], value.shape[1], name)
    check_window(causal, window, name)
    both = cu_seqlens_q, cu_seqlens_k
    whole = all(t.dtype in (torch.int32, torch.int64) for t in both)
    if not whole or cu_seqlens_q.ndim != 1 or cu_seqlens_q.shape != cu_seqlens_k.shape:
        actual = " and ".join(f"{t.dtype}, {tuple(t.shape)}" for t in both).replace("torch.", "")
        raise ValueError(
            f"{name}: cu_seqlens_q and cu_seqlens_k must both be int32 or int64, (sequences + 1,); "
            f"found {actual}."
        )
    if cu_seqlens_q.shape[0] == 0:
        raise ValueError(f"{name}: cu_seqlens_q is empty; it must start with 0.")


def _check_shapes(
    query: Tensor, key: Tensor, value: Tensor, batch: tuple[str, ...], name: str
) -> None:
    """Raise ValueError unless all sizes except the numbers of heads fit; kernels rely on it."""
    count = len(batch)
    fits = (
        query.ndim == key.ndim == value.ndim == count + 3
        and query.shape[:count] == key.shape[:count] == value.shape[:count]
        and key.shape[count] == value.shape[count]
        and query.shape[-1] == key.shape[-1]
    )
    if not fits:
        of_query, of_key, of_value = (
            f"({', '.join((*batch, *sizes))})"
            for sizes in (
                ("q", "query_heads", "head_size"),
                ("k", "kv_heads", "head_size"),
                ("k", "kv_heads", "value_size"),
            )
        )
        raise ValueError(
            f"{name}: query, key and value must be {of_query}, {of_key} and {of_value}; found "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
        )


def check_heads(queries: int, keys: int, values: int, name: str) -> None:
    """Raise ValueError unless there are as many key as value heads, dividing the query heads."""
    if keys != values or keys == 0 or queries % keys:
        raise ValueError(
            f"{name}: {queries} query heads, {keys} key heads and {values} value heads do not "
            "fit; keys and values need the same number, and it must divide that of the queries."
        )


def check_window(causal: bool, window: int | None, name: str) -> None:
    """Raise ValueError if the window is not positive or given without a causal mask."""
    if window is not None and window < 1:
        raise ValueError(f"{name}: window={window} is not positive.")
    if window is not None and not causal:
        raise ValueError(f"{name}: window needs causal=True.")


@causal_attention.register_input_generator
def _causal_attention_inputs(
    num_tokens: int = 8,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
    query = torch.randn(2, num_tokens, num_heads, head_size, device=device).to(dtype)
    key, value = (
        torch.randn(2, num_tokens + 3, num_kv_heads, head_size, device=device).to(dtype)
        for _ in range(2)
    )
    return query, key, value, None, None, None


@bidirectional_attention.register_input_generator
@functools.wraps(_causal_attention_inputs)
def _bidirectional_attention_inputs(
    *args: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor, None]:
    query, key, value, scale, *_ = _causal_attention_inputs(*args, **options)
    return query, key, value, scale


@varlen_attention.register_input_generator
def _varlen_attention_inputs(
    num_tokens: int = 8,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    num_seqs: int = 2,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, None, bool, None, None]:
    """Make sequences with 2, 3, 4, ... cached keys before their queries."""
    query = torch.randn(num_tokens, num_heads, head_size, device=device).to(dtype)
    queries = sequence_lengths(num_tokens, num_seqs)
    keys = [count + 2 + i for i, count in enumerate(queries)]
    key, value = (
        torch.randn(sum(keys), num_kv_heads, head_size, device=device).to(dtype) for _ in range(2)
    )
    cu_q, cu_k = boundaries(queries, device), boundaries(keys, device)
    return query, key, value, cu_q, cu_k, None, True, None, None


for _op in (bidirectional_attention, causal_attention, varlen_attention):
    # Fused kernels round the probabilities to the dtype before the second product, and sum in a
    # different order; results are of order one.
    _op.override_tolerance(torch.float32, atol=2e-5, rtol=1e-4)
    _op.override_tolerance(torch.bfloat16, atol=2e-2, rtol=1.6e-2)
    _op.override_tolerance(torch.float16, atol=2e-3, rtol=2e-3)
