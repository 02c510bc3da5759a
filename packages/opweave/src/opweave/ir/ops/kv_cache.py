"""Writes into the paged KV cache, and the update of inputs between two decode steps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from opweave.ir.donation import empty_in_layout
from opweave.ir.ops.arguments import check_shape, is_readable, misfit
from opweave.ir.ops.rotary import _heads, rotary_embedding
from opweave.ir.registry import register_op
from opweave.ir.rules import BATCH_INVARIANT, plain

# Writes into the paged KV cache.
#
# A cache is ``(blocks, kv_heads, block_size, head_size)``: a block holds ``block_size``
# positions of one sequence, with the keys of each head contiguous. Slot ``s`` is position ``s %
# block_size`` of block ``s // block_size``.
#
# Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
# PagedAttention", arXiv:2309.06180.


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
    op = "reshape_and_cache"
    if slot_mapping.ndim != 1 or slot_mapping.dtype != torch.int64:
        raise misfit(op, "slot_mapping", slot_mapping, "int64, (tokens,)")
    if key_cache.ndim != 4:
        raise misfit(op, "key_cache", key_cache, "(blocks, kv_heads, block_size, head_size)")
    blocks, heads, block_size, _ = key_cache.shape
    for name, x, cache in (("key", key, key_cache), ("value", value, value_cache)):
        fits = cache.ndim == 4 and cache.shape[:3] == (blocks, heads, block_size)
        if not fits or cache.dtype != x.dtype:
            expected = f"{plain(x.dtype)}, ({blocks}, {heads}, {block_size}, {name}'s head size)"
            raise misfit(op, f"{name}_cache", cache, expected)
        check_shape(op, name, x, slot_mapping.shape[0], heads, cache.shape[3])
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
        num_tokens=num_tokens, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_size=head_size, rotary_size=rotary_size, max_position=max_position,
        negative_positions=negative_positions, dtype=dtype, device=device,
    )  # fmt: skip
    _, value, *caches_and_slots = _inputs(
        num_tokens, num_kv_heads, head_size, block_size, dtype, device
    )
    return query, key, value, positions, table, *caches_and_slots, head_size, is_neox


for _dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    reshape_and_cache.override_tolerance(_dtype, atol=0, rtol=0)  # copies

for _dtype in (torch.bfloat16, torch.float16):
    _atol, _rtol = rotary_embedding.get_tolerance(_dtype)  # the caches are copies
    rope_reshape_and_cache.override_tolerance(_dtype, atol=_atol, rtol=_rtol)


# Update of the inputs between two decode steps, on the device of the model.


_INDICES = (torch.int32, torch.int64)
_PAD_SLOT = -1  # skipped by reshape_and_cache


@register_op(
    activations=["input_tokens", "input_positions", "seq_lens", "slot_mapping"],
    allow_inplace=True,
    native_traits={BATCH_INVARIANT},
)
def advance_step_flashattn(
    input_tokens: Tensor,
    sampled_token_ids: Tensor,
    input_positions: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the inputs of the next decode step from the sampled tokens.

    A sequence of length ``p`` gets its sampled token as input, position ``p``, length ``p + 1`` and
    slot ``block_table[p // block_size] * block_size + p % block_size``. With ``q`` sampled tokens
    for ``n`` sequences, the last ``n - q`` rows are padding: token 0, position 0, slot -1, length
    unchanged.

    Values are checked for plain CPU tensors in eager mode only. Under tracers and on other devices,
    reading them would cost a graph break or a synchronization; torch's bounds checks remain.

    Args:
        input_tokens, input_positions, slot_mapping: ``(n,)``, int64. Their values are not read;
            ``maybe_inplace`` donates their memory.
        sampled_token_ids: ``(q,)`` or ``(q, 1)`` with ``q <= n``, int64.
        seq_lens: ``(n,)``, int32 or int64: lengths before the step.
        block_tables: ``(n, blocks)``, int32 or int64: the cache blocks of each sequence.
        block_size: positions per block.

    Returns:
        The new ``input_tokens``, ``input_positions``, ``seq_lens`` and ``slot_mapping``, with the
        shapes and dtypes that came in.

    Raises:
        ValueError: shapes or dtypes do not fit, ``block_size`` is not positive, or a sequence
            cannot advance: its length is negative or the largest of its dtype, or its table has no
            block for the position.
    """
    name, int64, count = "advance_step_flashattn", (torch.int64,), seq_lens.numel()
    _check_vector("seq_lens", seq_lens, _INDICES, count)
    _check_vector("input_tokens", input_tokens, int64, count)
    _check_vector("input_positions", input_positions, int64, count)
    _check_vector("slot_mapping", slot_mapping, int64, count)
    is_column = sampled_token_ids.ndim == 2 and sampled_token_ids.shape[1] == 1
    queries = sampled_token_ids.shape[0] if sampled_token_ids.ndim == 1 or is_column else -1
    if sampled_token_ids.dtype != torch.int64 or not 0 <= queries <= count:
        expected = f"int64, (q,) or (q, 1) with q <= {count}"
        raise misfit(name, "sampled_token_ids", sampled_token_ids, expected)
    if block_tables.dtype not in _INDICES or block_tables.shape[:-1] != (count,):
        raise misfit(name, "block_tables", block_tables, f"int32 or int64, ({count}, blocks)")
    if block_size < 1:
        raise ValueError(f"{name}: block_size={block_size} is not positive.")
    if is_readable(seq_lens) and is_readable(block_tables):
        _check_values(seq_lens[:queries], block_tables[:queries], block_size)
    positions = seq_lens[:queries].to(torch.int64)
    columns = torch.div(positions, block_size, rounding_mode="floor")
    blocks = block_tables[:queries].gather(1, columns.unsqueeze(1)).squeeze(1).to(torch.int64)
    slots = blocks * block_size + positions % block_size
    padding = (0, count - queries)
    return (
        pad(sampled_token_ids.reshape(queries), padding),
        pad(positions, padding),
        torch.cat((seq_lens[:queries] + 1, seq_lens[queries:])),
        pad(slots, padding, value=_PAD_SLOT),
    )


@advance_step_flashattn.register_fake
def _fake(
    input_tokens: Tensor,
    sampled_token_ids: Tensor,
    input_positions: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    outputs = (input_tokens, input_positions, seq_lens, slot_mapping)
    tokens, positions, lengths, slots = (t.new_empty(t.shape) for t in outputs)
    return tokens, positions, lengths, slots


def _check_vector(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], count: int) -> None:
    if tensor.dtype not in dtypes or tensor.shape != (count,):
        expected = f"{' or '.join(map(plain, dtypes))}, ({count},)"
        raise misfit("advance_step_flashattn", name, tensor, expected)


def _check_values(seq_lens: Tensor, block_tables: Tensor, block_size: int) -> None:
    """Raise ValueError for the first sequence that cannot advance."""
    limit = min(block_tables.shape[1] * block_size, torch.iinfo(seq_lens.dtype).max)
    positions = seq_lens.to(torch.int64)
    if bool(((positions >= 0) & (positions < limit)).all()):
        columns = torch.div(positions, block_size, rounding_mode="floor")
        blocks = block_tables.gather(1, columns.unsqueeze(1)).to(torch.int64)
        if bool(((blocks >= 0) & (blocks <= _last_block(block_size))).all()):
            return
    for sequence, position in enumerate(seq_lens.tolist()):
        problem = _problem(sequence, position, seq_lens.dtype, block_tables[sequence], block_size)
        if problem:
            raise ValueError(f"advance_step_flashattn: sequence {sequence}: {problem}")


def _problem(
    sequence: int, position: int, dtype: torch.dtype, table: Tensor, block_size: int
) -> str | None:
    """Return why a sequence cannot advance, or None if it can."""
    if position < 0:
        return f"its length is {position}, and it is negative"
    if position == torch.iinfo(dtype).max:
        return f"its length is {position}, and seq_lens cannot count further; use int64"
    column = position // block_size
    if column >= len(table):
        return (
            f"position {position} needs block {column} of its table, which has {len(table)} blocks "
            f"of {block_size} positions; allocate the block before the step"
        )
    block = int(table[column])
    if not 0 <= block <= _last_block(block_size):
        return (
            f"block_tables[{sequence}, {column}] is {block}, which is not a valid block for "
            f"position {position}"
        )
    return None


def _last_block(block_size: int) -> int:
    """Return the largest block whose slots fit into 64 bits."""
    return int((torch.iinfo(torch.int64).max - (block_size - 1)) // block_size)


@advance_step_flashattn.register_input_generator
def _advance_step_inputs(
    num_tokens: int = 8,
    num_blocks: int = 4,
    block_size: int = 16,
    dtype: torch.dtype = torch.int32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int]:
    # Conformance also passes floating-point dtypes, which lengths and tables cannot have.
    dtype = dtype if dtype in _INDICES else torch.int32
    tokens = torch.randint(1000, (num_tokens,), device=device)
    lengths = torch.randint(num_blocks * block_size, (num_tokens,), device=device).to(dtype)
    tables = torch.randperm(num_tokens * num_blocks, device=device).to(dtype)
    sampled = torch.randint(1000, (num_tokens - num_tokens // 4, 1), device=device)
    positions, slots = torch.zeros_like(tokens), torch.zeros_like(tokens)
    rest = tables.view(num_tokens, num_blocks), block_size
    return tokens, sampled, positions, lengths, slots, *rest


for _advance_step_dtype in _INDICES:
    advance_step_flashattn.override_tolerance(_advance_step_dtype, atol=0, rtol=0)
