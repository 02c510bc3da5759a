"""Writes into the paged KV cache.

A cache is ``(blocks, kv_heads, block_size, head_size)``: a block holds ``block_size`` positions of
one sequence, with the keys of each head contiguous. Slot ``s`` is position ``s % block_size`` of
block ``s // block_size``.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", arXiv:2309.06180.
"""

import torch
from torch import Tensor

from opweave.ir.memory import empty_in_layout
from opweave.ir.ops.checks import check_shape, misfit
from opweave.ir.ops.rotary import _heads, rotary_embedding
from opweave.ir.registry import register_op
from opweave.ir.rule import plain
from opweave.ir.traits import BATCH_INVARIANT


@register_op(
    activations=["key_cache", "value_cache"],
    allow_inplace=True,
    keeps_strides=["key_cache", "value_cache"],
    native_traits={BATCH_INVARIANT},
    autocast=False,
)
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """Write the keys and values of new tokens into their slots of a paged cache.

    ``cache[slot // block_size, :, slot % block_size] = key[token]`` for every token whose slot is
    not -1. The contents of a slot that several tokens share are undefined.

    Args:
        key: ``(tokens, kv_heads, head_size)``.
        value: ``(tokens, kv_heads, value_size)``.
        key_cache: ``(blocks, kv_heads, block_size, head_size)`` in the dtype of the keys.
        value_cache: ``(blocks, kv_heads, block_size, value_size)`` in the dtype of the values.
        slot_mapping: ``(tokens,)``, int64; -1 to skip a token.

    Returns:
        The new ``key_cache`` and ``value_cache``, with the strides of the inputs. With
        ``maybe_inplace``, only the slots are written.

    Raises:
        ValueError: shapes or dtypes do not fit.
        IndexError: a slot is out of range and not -1 (RuntimeError from native kernels).
    """
    _check_layout(key, value, key_cache, value_cache, slot_mapping)
    return _scatter(key, key_cache, slot_mapping), _scatter(value, value_cache, slot_mapping)


@register_op(
    activations=["query", "key_cache", "value_cache"],
    allow_inplace=True,
    keeps_strides=["key_cache", "value_cache"],
    composite=True,
    native_traits={BATCH_INVARIANT},
    autocast=False,
)
def rope_reshape_and_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    head_size: int,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate queries and keys, and write the rotated keys and the values into a paged cache.

    A composite of ``rotary_embedding`` and ``reshape_and_cache``. The rotated keys are written to
    the cache only.

    Args:
        query, key, positions, cos_sin_cache, head_size, is_neox_style: as in
            ``rotary_embedding``, with one position per token.
        value, key_cache, value_cache, slot_mapping: as in ``reshape_and_cache``.

    Returns:
        The rotated queries, in the shape and dtype of ``query``, and the new ``key_cache`` and
        ``value_cache``. ``maybe_inplace`` donates these three.

    Raises:
        ValueError: shapes or dtypes do not fit, or ``r`` exceeds the head size.
        IndexError: a slot is out of range and not -1, or a position is not in the table
            (RuntimeError from native kernels).
    """
    rotated_query, rotated_key = rotary_embedding(
        query, key, positions, cos_sin_cache, head_size, is_neox_style
    )
    keys, values = reshape_and_cache(
        _heads(rotated_key, positions, head_size), value, key_cache, value_cache, slot_mapping
    )
    return rotated_query, keys, values


def _scatter(x: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    blocks, heads, block_size, size = cache.shape
    count = blocks * block_size
    rows = cache.transpose(1, 2).reshape(count, heads, size)
    # A spare row takes the skipped tokens; invalid slots stay out of range, so that torch raises.
    rows = torch.cat((rows, rows.new_zeros(1, heads, size)))
    index = torch.where((slots >= -1) & (slots < count), slots % (count + 1), count + 1)
    rows = rows.index_copy(0, index, x)[:count]
    new = rows.reshape(blocks, block_size, heads, size).transpose(1, 2)
    return new.contiguous() if cache.is_contiguous() else empty_in_layout(cache).copy_(new)


def _check_layout(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    op = "reshape_and_cache"
    if slot_mapping.ndim != 1 or slot_mapping.dtype != torch.int64:
        raise misfit(op, "slot_mapping", slot_mapping, "int64, (tokens,)")
    if key_cache.ndim != 4:
        raise misfit(op, "key_cache", key_cache, "(blocks, kv_heads, block_size, head_size)")
    blocks, heads, block_size, _ = key_cache.shape
    for name, x, cache in (("key", key, key_cache), ("value", value, value_cache)):
        fits = cache.ndim == 4 and cache.shape[:3] == (blocks, heads, block_size)
        if not fits or cache.dtype != x.dtype:
            wanted = f"{plain(x.dtype)}, ({blocks}, {heads}, {block_size}, {name}'s head size)"
            raise misfit(op, f"{name}_cache", cache, wanted)
        check_shape(op, name, x, slot_mapping.shape[0], heads, cache.shape[3])


@reshape_and_cache.register_input_generator
def _inputs(
    num_tokens: int = 8,
    num_kv_heads: int = 2,
    head_size: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    blocks = num_tokens // block_size + 3
    key, value = torch.randn(2, num_tokens, num_kv_heads, head_size, device=device).to(dtype)
    shape = (2, blocks, num_kv_heads, block_size, head_size)
    key_cache, value_cache = torch.randn(shape, device=device).to(dtype)
    slots = torch.randperm(blocks * block_size, device=device)[:num_tokens]
    slots[: num_tokens // 4] = -1
    return key, value, key_cache, value_cache, slots


@rope_reshape_and_cache.register_input_generator
def _rope_inputs(
    num_tokens: int = 8,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    block_size: int = 16,
    rotary_size: int = 0,
    max_position: int = 64,
    negative_positions: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, bool]:
    query, key, positions, table, _, is_neox = rotary_embedding.generate_inputs(
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rotary_size=rotary_size,
        max_position=max_position,
        negative_positions=negative_positions,
        dtype=dtype,
        device=device,
    )
    _, value, *caches_and_slots = _inputs(
        num_tokens, num_kv_heads, head_size, block_size, dtype, device
    )
    return query, key, value, positions, table, *caches_and_slots, head_size, is_neox


for _dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    reshape_and_cache.override_tolerance(_dtype, atol=0, rtol=0)  # copies

for _dtype in (torch.bfloat16, torch.float16):
    _atol, _rtol = rotary_embedding.get_tolerance(_dtype)  # the caches are copies
    rope_reshape_and_cache.override_tolerance(_dtype, atol=_atol, rtol=_rtol)
