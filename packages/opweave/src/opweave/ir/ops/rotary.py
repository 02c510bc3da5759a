"""Rotary position embedding (RoPE), also for dual chunk attention."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from opweave.ir.ops.norm import rms_norm
from opweave.ir.registry import register_op
from opweave.ir.rules import BATCH_INVARIANT

# Rotary position embedding (RoPE).
#
# The *neox* layout pairs dimension ``i`` with ``i + r/2``; the *interleaved* layout (GPT-J)
# pairs ``2i`` with ``2i + 1``. The native implementations are batch invariant, because every
# step is an elementwise operation.
#
# Source: Su et al., "RoFormer", arXiv:2104.09864.


@register_op(native_traits={BATCH_INVARIANT}, autocast=False)
def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    is_neox_style: bool = True,
    enable_fp32_compute: bool = False,
) -> Tensor:
    """Rotate pairs of dimensions of every head by given angles.

    ``o1 = x1 * cos - x2 * sin``, ``o2 = x2 * cos + x1 * sin``, joined in the layout of ``x``.

    Args:
        x: ``(..., tokens, heads, head_size)``.
        cos, sin: ``(tokens, r / 2)`` with ``r <= head_size``: the first ``r`` dimensions of a head
            are rotated, the rest is unchanged.
        is_neox_style: the layout of the pairs.
        enable_fp32_compute: compute in float32 instead of the dtype of ``x``.

    Returns:
        Shape and dtype of ``x``.

    Raises:
        ValueError: ``2 * cos.shape[-1]`` exceeds the head size.
    """
    return _rotate(x, cos.unsqueeze(-2), sin.unsqueeze(-2), is_neox_style, enable_fp32_compute)


@register_op(allow_inplace=True, native_traits={BATCH_INVARIANT}, autocast=False)
def rotary_embedding(
    x_query: Tensor,
    x_key: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions.

    Args:
        x_query: ``(*positions.shape, query_heads * head_size)`` or ``(*positions.shape,
            query_heads, head_size)``.
        x_key: the same with the number of key heads.
        positions: integer, any shape: rows of ``cos_sin_cache``. Negative ones count from the end,
            so padding of -1 uses the last row.
        cos_sin_cache: ``(max_position, r)`` with ``r <= head_size``: each row holds ``r / 2``
            cosines, then ``r / 2`` sines. Cast to the dtype of the queries.
        head_size: the size of a head; its first ``r`` dimensions are rotated, the rest is
            unchanged.
        is_neox_style: the layout of the pairs.

    Returns:
        The rotated queries and keys, in the shapes and dtypes of the inputs.

    Raises:
        ValueError: ``r`` exceeds the head size.
        IndexError: a position is not in the table (RuntimeError from native kernels).
    """
    angles = cos_sin_cache[positions.flatten()].to(x_query.dtype).unsqueeze(-2)
    query, key = (
        _rotate_heads(x, angles, positions, head_size, is_neox_style) for x in (x_query, x_key)
    )
    return query, key


@register_op(allow_inplace=True, native_traits={BATCH_INVARIANT}, autocast=False)
def rotary_embedding_single(
    x: Tensor, positions: Tensor, cos_sin_cache: Tensor, head_size: int, is_neox_style: bool = True
) -> Tensor:
    """Rotate a single tensor, such as queries without keys, by the angles of its positions.

    Args:
        x: ``(*positions.shape, heads * head_size)`` or ``(*positions.shape, heads, head_size)``.
        positions, cos_sin_cache, head_size, is_neox_style: as in ``rotary_embedding``.

    Returns:
        Shape and dtype of ``x``.

    Raises:
        ValueError: ``r`` exceeds the head size.
        IndexError: a position is not in the table (RuntimeError from native kernels).
    """
    angles = cos_sin_cache[positions.flatten()].to(x.dtype).unsqueeze(-2)
    return _rotate_heads(x, angles, positions, head_size, is_neox_style)


@register_op(allow_inplace=True, composite=True, native_traits={BATCH_INVARIANT}, autocast=False)
def qk_norm_rope(
    x_query: Tensor,
    x_key: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    epsilon: float,
    head_size: int,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor]:
    """Normalize every head of queries and keys, then rotate them: ``rotary_embedding(rms_norm)``.

    A composite: the normalized heads are rounded to their dtype before the rotation.

    Args:
        x_query, x_key, positions, cos_sin_cache, head_size, is_neox_style: as in
            ``rotary_embedding``.
        query_weight, key_weight: ``(head_size,)``, any floating dtype, or None for no scaling.
        epsilon: added to the mean square of a head.

    Returns:
        The normalized and rotated queries and keys, in the shapes and dtypes of the inputs.

    Raises:
        ValueError: ``r`` exceeds the head size.
        IndexError: a position is not in the table (RuntimeError from native kernels).

    Source: Henry et al., "Query-Key Normalization for Transformers", arXiv:2010.04245, with the
        norm of ``rms_norm``, as in Qwen3.
    """
    query = rms_norm(_heads(x_query, positions, head_size), query_weight, epsilon)
    key = rms_norm(_heads(x_key, positions, head_size), key_weight, epsilon)
    heads = query.reshape(x_query.shape), key.reshape(x_key.shape)
    rotated: tuple[Tensor, Tensor] = rotary_embedding(
        *heads, positions, cos_sin_cache, head_size, is_neox_style
    )
    return rotated


def _heads(x: Tensor, positions: Tensor, head_size: int) -> Tensor:
    """Return *x* as ``(tokens, heads, head_size)``."""
    heads = math.prod(x.shape[positions.ndim :]) // head_size
    return x.reshape(positions.numel(), heads, head_size)


def _rotate_heads(
    x: Tensor, angles: Tensor, positions: Tensor, head_size: int, neox: bool
) -> Tensor:
    """Rotate *x* by the cosines and sines of each token, ``(tokens, 1, r)``."""
    cos, sin = angles.chunk(2, dim=-1)
    return _rotate(_heads(x, positions, head_size), cos, sin, neox, False).reshape(x.shape)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, neox: bool, in_float32: bool) -> Tensor:
    half = cos.shape[-1]
    if 2 * half > x.shape[-1]:
        raise ValueError(
            f"rotary embedding: cannot rotate {2 * half} dimensions of a head of {x.shape[-1]}."
        )
    dtype = torch.promote_types(x.dtype, torch.float32) if in_float32 else x.dtype
    rotated, rest = x[..., : 2 * half].to(dtype), x[..., 2 * half :]
    cos, sin = cos.to(dtype), sin.to(dtype)
    if neox:
        x1, x2 = rotated[..., :half], rotated[..., half:]
    else:
        x1, x2 = rotated[..., 0::2], rotated[..., 1::2]
    o1, o2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    joined = torch.cat((o1, o2), -1) if neox else torch.stack((o1, o2), -1).flatten(-2)
    return torch.cat((joined.to(x.dtype), rest), -1)


@apply_rotary_emb.register_input_generator
def _apply_rotary_emb_inputs(
    num_tokens: int = 8,
    num_heads: int = 4,
    head_size: int = 16,
    rotary_size: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, bool, bool]:
    x = torch.randn(num_tokens, num_heads, head_size, device=device).to(dtype)
    angles = torch.rand(num_tokens, (rotary_size or head_size) // 2, device=device) * 6.3
    return x, angles.cos().to(dtype), angles.sin().to(dtype), True, False


@rotary_embedding.register_input_generator
def _rotary_embedding_inputs(
    num_tokens: int = 8,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    rotary_size: int = 0,
    max_position: int = 64,
    negative_positions: bool = False,
    split_heads: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, bool]:
    """Make queries and keys; a *rotary_size* of 0 stands for the *head_size*.

    With *negative_positions*, about half of the positions are negative.
    """
    query = torch.randn(num_tokens, num_heads * head_size, device=device).to(dtype)
    key = torch.randn(num_tokens, num_kv_heads * head_size, device=device).to(dtype)
    if split_heads:
        query, key = (torch.unflatten(x, -1, (-1, head_size)) for x in (query, key))
    angles = torch.rand(max_position, (rotary_size or head_size) // 2, device=device) * 6.3
    cache = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
    positions = torch.randint(max_position, (num_tokens,), device=device)
    if negative_positions:
        positions = torch.where(positions % 2 == 0, positions - max_position, positions)
    return query, key, positions, cache, head_size, True


@rotary_embedding_single.register_input_generator
@functools.wraps(_rotary_embedding_inputs)
def _rotary_embedding_single_inputs(
    *args: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor, int, bool]:
    query, _, *rest = _rotary_embedding_inputs(*args, **options)
    return query, *rest


@qk_norm_rope.register_input_generator
@functools.wraps(_rotary_embedding_inputs)
def _qk_norm_rope_inputs(
    *args: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, int, bool]:
    query, key, positions, cache, head_size, is_neox = _rotary_embedding_inputs(*args, **options)
    weights = (1 + 0.1 * torch.randn(2, head_size, device=query.device)).to(query.dtype)
    return query, key, positions, cache, weights[0], weights[1], 1e-6, head_size, is_neox


for _op in (apply_rotary_emb, rotary_embedding, rotary_embedding_single):
    # A kernel may keep the products in float32; native rounds each to the dtype.
    _op.override_tolerance(torch.bfloat16, atol=2e-2, rtol=1.6e-2)
    _op.override_tolerance(torch.float16, atol=4e-3, rtol=2e-3)

# One more rounding, in the norm.
qk_norm_rope.override_tolerance(torch.float32, atol=1e-5, rtol=1e-5)
qk_norm_rope.override_tolerance(torch.bfloat16, atol=4e-2, rtol=1.6e-2)
qk_norm_rope.override_tolerance(torch.float16, atol=1e-2, rtol=2e-3)


# Rotary position embedding for dual chunk attention.
#
# Source: An et al., "Training-Free Long-Context Scaling of Large Language Models",
# arXiv:2402.17463; the critical variant: Qwen2.5-1M, arXiv:2501.15383.


@register_op(native_traits={BATCH_INVARIANT}, autocast=False)
def dual_chunk_rotary_embedding(
    x_query: Tensor,
    x_key: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    chunk_size: int,
    local_size: int,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor]:
    """Rotate keys once and queries five times, so that no distance exceeds the trained context.

    With ``n = chunk_size - local_size`` and ``p = positions % n``, the position of a token in its
    chunk, keys are rotated by ``p``, and queries, in this order, by

    1. ``p``, for keys of the same chunk;
    2. ``min(p + n, chunk_size)``, for keys of the previous chunk;
    3. ``min(2 * n - 1, chunk_size)``, for keys of earlier chunks;
    4. ``p + n``: 2. in the critical variant;
    5. ``p + chunk_size``: 3. in the critical variant.

    Args:
        x_query: ``(*positions.shape, query_heads * head_size)`` or ``(*positions.shape,
            query_heads, head_size)``.
        x_key: the same with the number of key heads.
        positions: integer, any shape.
        cos_sin_cache: ``(max_position, r)`` as in ``rotary_embedding``, with at least
            ``n + chunk_size`` rows.
        head_size, is_neox_style: as in ``rotary_embedding``.
        chunk_size: number of distinct positions, at most the trained context.
        local_size: overlap of neighboring chunks, in ``[0, chunk_size)``.

    Returns:
        The five queries concatenated, ``(*positions.shape, 5 * query_heads * head_size)``, and the
        keys, ``(*positions.shape, key_heads * head_size)``, in the dtypes of the inputs.

    Raises:
        ValueError: ``local_size`` is out of range, the cache has too few rows, or ``r`` exceeds the
            head size.
    """
    if not 0 <= local_size < chunk_size:
        raise ValueError(
            f"dual_chunk_rotary_embedding: local_size={local_size} is not in [0, "
            f"chunk_size={chunk_size})."
        )
    rows = 2 * chunk_size - local_size
    if cos_sin_cache.shape[0] < rows:
        raise ValueError(
            f"dual_chunk_rotary_embedding: cos_sin_cache has {cos_sin_cache.shape[0]} rows; "
            f"chunk_size={chunk_size} and local_size={local_size} need {rows}."
        )
    size = chunk_size - local_size
    where = positions % size
    slots = (
        where,
        (where + size).clamp(max=chunk_size),
        torch.full_like(where, min(2 * size - 1, chunk_size)),
        where + size,
        where + chunk_size,
    )
    by_slot = torch.stack(slots, dim=-1)
    queries = x_query.flatten(positions.ndim).unsqueeze(-2).expand(*by_slot.shape, -1)
    rotate, rest = rotary_embedding_single.native, (cos_sin_cache, head_size, is_neox_style)
    keys = rotate(x_key.flatten(positions.ndim), where, *rest)
    return rotate(queries, by_slot, *rest).flatten(-2), keys


@dual_chunk_rotary_embedding.register_input_generator
def _inputs(
    num_tokens: int = 8,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int, bool]:
    query, key, _, cache, *_ = rotary_embedding.generate_inputs(
        num_tokens=num_tokens, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_size=head_size, max_position=28, dtype=dtype, device=device,
    )  # fmt: skip
    positions = torch.randint(200, (num_tokens,), device=device)
    return query, key, positions, cache, head_size, 16, 4, True


# A kernel may keep the products in float32; native rounds each to the dtype.
dual_chunk_rotary_embedding.override_tolerance(torch.bfloat16, atol=2e-2, rtol=1.6e-2)
dual_chunk_rotary_embedding.override_tolerance(torch.float16, atol=4e-3, rtol=2e-3)
