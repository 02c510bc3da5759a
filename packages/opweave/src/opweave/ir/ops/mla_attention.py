"""Multi-head latent attention (MLA): keys and values of all heads from one latent row per token.

The row of a token is ``[kv_c | k_pe]``: the normalized latent vector, and a rotated key part shared
by all heads. The key of a head is ``[kv_c @ W_UK.T | k_pe]``, its value ``kv_c @ W_UV.T``.
Both ops compute the same attention. *Prefill* expands keys and values, which is cheaper if many
queries share them. *Decode* uses the absorbed form: it multiplies the queries by ``W_UK`` and the
result by ``W_UV``, and attends to the cached rows directly.

Both call other ops and have the same rounding as these.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1 and appendix C.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from opweave.ir.ops.arguments import boundaries, misfit, sequence_lengths
from opweave.ir.ops.attention import varlen_attention
from opweave.ir.ops.linear import linear
from opweave.ir.ops.paged_attention import paged_attention
from opweave.ir.registry import register_op
from opweave.ir.rules import BATCH_INVARIANT, plain


# Batch invariant because a required trait applies to linear and varlen_attention too.
@register_op(composite=True, native_traits={BATCH_INVARIANT}, autocast=False)
def mla_attention_prefill(
    query: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_b_weight: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float | None = None,
    causal: bool = True,
) -> Tensor:
    """Latent attention over packed sequences, with expanded keys and values.

    ``varlen_attention`` with the keys and values from ``linear(kv_c, kv_b_weight)``.

    Args:
        query: ``(q_tokens, heads, nope + rope)``; the last ``rope`` dimensions are rotated.
        kv_c: ``(k_tokens, latent)``, the dtype of the queries, normalized.
        k_pe: ``(k_tokens, rope)``, the dtype of the queries, rotated.
        kv_b_weight: ``(heads * (nope + value_size), latent)``, the dtype of the queries; a head's
            rows are ``W_UK``, then ``W_UV``.
        cu_seqlens_q, cu_seqlens_k, causal: as in ``varlen_attention``.
        scale: factor on the scores; by default ``(nope + rope) ** -0.5``.

    Returns:
        ``(q_tokens, heads, value_size)`` in the dtype of the queries, contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    name = "mla_attention_prefill"
    if kv_c.ndim != 2:
        raise misfit(name, "kv_c", kv_c, "(k_tokens, latent)")
    if k_pe.ndim != 2 or k_pe.shape[0] != kv_c.shape[0]:
        raise misfit(name, "k_pe", k_pe, f"({kv_c.shape[0]}, rope)")
    sizes = _sizes(name, query, kv_b_weight, kv_c.shape[1], k_pe.shape[1])
    expanded = torch.unflatten(linear(kv_c, kv_b_weight), -1, (sizes.heads, -1))
    k_nope, value = expanded.split_with_sizes([sizes.nope, sizes.value], -1)
    key = torch.cat((k_nope, k_pe[:, None].expand(-1, sizes.heads, -1)), -1)
    out: Tensor = varlen_attention(query, key, value, cu_seqlens_q, cu_seqlens_k, scale, causal)
    return out


# Not a composite: its slices depend on model sizes, so it cannot be recognized.
@register_op(autocast=False)
def mla_attention_decode(
    query: Tensor,
    kv_cache: Tensor,
    kv_b_weight: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Causal latent attention over a paged cache of rows, in the absorbed form.

    ``paged_attention`` with one key head, between products with ``W_UK`` and ``W_UV``. Its keys are
    the cached rows, its values their latent parts.

    Args:
        query: ``(tokens, heads, nope + rope)``; the last ``rope`` dimensions are rotated.
        kv_cache: ``(blocks, block_size, latent + rope)``, rows ``[kv_c | k_pe]`` in the dtype of
            the queries.
        kv_b_weight: ``(heads * (nope + value_size), latent)``, as in ``mla_attention_prefill``.
        block_tables, seq_lens, cu_seqlens_q: as in ``paged_attention``.
        scale: factor on the scores; by default ``(nope + rope) ** -0.5``.

    Returns:
        ``(tokens, heads, value_size)`` in the dtype of the queries, contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit.
        IndexError: a used block is not in the cache (RuntimeError from native kernels, which also
            check lengths).
    """
    latent, sizes = kv_b_weight.shape[-1], check_decode(query, kv_cache, kv_b_weight)
    queries, w_uv = absorb(query, kv_b_weight, sizes)
    rows = kv_cache[:, None]  # one key head
    scale = query.shape[2] ** -0.5 if scale is None else scale
    # Values are whole rows, as kernels require; the rotated part is cut off afterwards.
    attended = paged_attention(queries, rows, rows, block_tables, seq_lens, cu_seqlens_q, scale)
    return torch.einsum("tnl,nvl->tnv", attended[..., :latent], w_uv).contiguous()


class Sizes(NamedTuple):
    """Number of heads, and the sizes of the key part without rotation and of the value."""

    heads: int
    nope: int
    value: int


def check_decode(query: Tensor, kv_cache: Tensor, kv_b_weight: Tensor) -> Sizes:
    """Return the sizes; raise ValueError if they do not fit together."""
    name, latent = "mla_attention_decode", kv_b_weight.shape[-1]
    if kv_cache.ndim != 3 or kv_cache.shape[2] < latent:
        raise misfit(name, "kv_cache", kv_cache, f"(blocks, block_size, {latent} + rope)")
    return _sizes(name, query, kv_b_weight, latent, kv_cache.shape[2] - latent)


def absorb(
    query: Tensor, kv_b_weight: Tensor, sizes: Sizes, einsum: Any = torch.einsum
) -> tuple[Tensor, Tensor]:
    """Return queries for cached rows, ``(tokens, heads, latent + rope)``, and ``W_UV``."""
    weights = torch.unflatten(kv_b_weight, 0, (sizes.heads, -1))
    w_uk, w_uv = weights.split_with_sizes([sizes.nope, sizes.value], 1)
    absorbed = einsum("tnp,npl->tnl", query[..., : sizes.nope], w_uk)
    return torch.cat((absorbed, query[..., sizes.nope :]), -1), w_uv


def _sizes(name: str, query: Tensor, kv_b_weight: Tensor, latent: int, rope: int) -> Sizes:
    if query.ndim != 3 or query.shape[1] == 0 or query.shape[2] < rope:
        raise misfit(name, "query", query, f"(tokens, heads, nope + {rope})")
    heads, nope = query.shape[1], query.shape[2] - rope
    rows = kv_b_weight.shape[0]
    fits = kv_b_weight.ndim == 2 and kv_b_weight.shape[1] == latent
    if not fits or rows % heads or rows // heads < nope:
        expected = f"({heads} * ({nope} + value_size), {latent})"
        raise misfit(name, "kv_b_weight", kv_b_weight, expected)
    if kv_b_weight.dtype != query.dtype:
        raise misfit(name, "kv_b_weight", kv_b_weight, f"{plain(query.dtype)}, as query is")
    return Sizes(heads, nope, rows // heads - nope)


def _queries_and_weight(
    num_tokens: int, num_heads: int, head_size: int, rope: int, latent: int, device: str
) -> tuple[Tensor, Tensor]:
    query = torch.randn(num_tokens, num_heads, head_size + rope, device=device)
    # Scaled so that results are of order one.
    weight = torch.randn(num_heads * 2 * head_size, latent, device=device) / latent**0.5
    return query, weight


@mla_attention_prefill.register_input_generator
def _prefill_inputs(
    num_tokens: int = 8,
    num_heads: int = 4,
    head_size: int = 16,
    rope_size: int = 8,
    latent_size: int = 24,
    num_seqs: int = 2,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, None, bool]:
    """Make sequences with 2, 3, 4, ... cached tokens before their queries."""
    query, weight = _queries_and_weight(
        num_tokens, num_heads, head_size, rope_size, latent_size, device
    )
    queries = sequence_lengths(num_tokens, num_seqs)
    keys = [count + 2 + i for i, count in enumerate(queries)]
    kv_c = torch.randn(sum(keys), latent_size, device=device)
    k_pe = torch.randn(sum(keys), rope_size, device=device)
    cu_q, cu_k = boundaries(queries, device), boundaries(keys, device)
    return query.to(dtype), kv_c.to(dtype), k_pe.to(dtype), weight.to(dtype), cu_q, cu_k, None, True


@mla_attention_decode.register_input_generator
def _decode_inputs(
    num_tokens: int = 8,
    num_heads: int = 4,
    head_size: int = 16,
    latent_size: int = 24,
    rope_size: int = 0,
    block_size: int = 16,
    long_context: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, None]:
    """Make one new token per sequence, after 3, 4, 5, ... cached ones.

    A *rope_size* of 0 stands for an eighth of *latent_size*, as DeepSeek's models have. The first
    sequence of a *long_context* has more than 4,096 tokens.
    """
    rope_size = rope_size or latent_size // 8
    query, weight = _queries_and_weight(
        num_tokens, num_heads, head_size, rope_size, latent_size, device
    )
    lengths = torch.arange(4, num_tokens + 4, dtype=torch.int32, device=device)
    if long_context:
        lengths[:1] += 4096
    width = -(-(num_tokens + 3 + 4096 * long_context) // block_size)
    blocks = num_tokens * width
    cache = torch.randn(blocks + 1, block_size, latent_size + rope_size, device=device)
    tables = torch.randperm(blocks + 1, device=device)[:blocks].view(num_tokens, width)
    cu_seqlens_q = torch.arange(num_tokens + 1, dtype=torch.int32, device=device)
    tensors = query.to(dtype), cache.to(dtype), weight.to(dtype)
    return *tensors, tables.to(torch.int32), lengths, cu_seqlens_q, None


for _op in (mla_attention_prefill, mla_attention_decode):
    # As for attention, but 16-bit dtypes also round the expanded or absorbed tensors, which adds
    # some ulps to scores and values.
    _op.override_tolerance(torch.float32, atol=2e-5, rtol=1e-4)
    _op.override_tolerance(torch.bfloat16, atol=4e-2, rtol=1.6e-2)
    _op.override_tolerance(torch.float16, atol=5e-3, rtol=2e-3)
