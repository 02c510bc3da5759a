"""Rotary position embedding for dual chunk attention.

Source: An et al., "Training-Free Long-Context Scaling of Large Language Models", arXiv:2402.17463;
the critical variant: Qwen2.5-1M, arXiv:2501.15383.
"""

import torch
from torch import Tensor

from opweave.ir.ops.rotary import rotary_embedding_single
from opweave.ir.registry import register_op
from opweave.ir.traits import BATCH_INVARIANT


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
    _check(cos_sin_cache, chunk_size, local_size)
    size = chunk_size - local_size
    where = positions % size
    by_slot = torch.stack(
        (
            where,
            (where + size).clamp(max=chunk_size),
            torch.full_like(where, min(2 * size - 1, chunk_size)),
            where + size,
            where + chunk_size,
        ),
        dim=-1,
    )
    queries = x_query.flatten(positions.ndim).unsqueeze(-2).expand(*by_slot.shape, -1)
    rotated = rotary_embedding_single.native(
        queries, by_slot, cos_sin_cache, head_size, is_neox_style
    )
    keys = x_key.flatten(positions.ndim)
    return (
        rotated.flatten(-2),
        rotary_embedding_single.native(keys, where, cos_sin_cache, head_size, is_neox_style),
    )


def _check(cos_sin_cache: Tensor, chunk_size: int, local_size: int) -> None:
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


@dual_chunk_rotary_embedding.register_input_generator
def _inputs(
    num_tokens: int = 8,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int, bool]:
    query = torch.randn(num_tokens, num_heads * head_size, device=device).to(dtype)
    key = torch.randn(num_tokens, num_kv_heads * head_size, device=device).to(dtype)
    angles = torch.rand(28, head_size // 2, device=device) * 6.3
    cache = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
    positions = torch.randint(200, (num_tokens,), device=device)
    return query, key, positions, cache, head_size, 16, 4, True


# A kernel may keep the products in float32; native rounds each to the dtype.
dual_chunk_rotary_embedding.override_tolerance(torch.bfloat16, atol=2e-2, rtol=1.6e-2)
dual_chunk_rotary_embedding.override_tolerance(torch.float16, atol=4e-3, rtol=2e-3)
