"""Advance the decode inputs of all sequences by one token, in-place."""

from __future__ import annotations

from torch import SymInt, Tensor

from opweave import _custom_ops
from opweave.adapters.opaque import mutating
from opweave.ir import rules
from opweave.ir.ops.advance_step import advance_step_flashattn as op
from opweave.ir.traits import ALIAS_SAFE, BATCH_INVARIANT
from opweave.kernels.opweave_c.call_paths import implements

_UPDATED = ("input_tokens", "input_positions", "seq_lens", "slot_mapping")
_TENSORS = (*_UPDATED, "sampled_token_ids", "block_tables")


def _separate(
    input_tokens: Tensor,
    sampled_token_ids: Tensor,
    input_positions: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
) -> bool:
    updated = (input_tokens, input_positions, seq_lens, slot_mapping)
    others = (sampled_token_ids, block_tables)
    return len({*map(id, updated), *map(id, others)}) == len(_TENSORS)


@implements(
    op,
    rules.cpu(*_TENSORS)
    & rules.ndim("seq_lens", 1)
    & rules.ndim("sampled_token_ids", 1, 2)
    & rules.contiguous(*_UPDATED)
    & rules.unit_stride("block_tables")
    & rules.custom(_separate, "one tensor is passed twice"),
    inplace=True,
    traits={ALIAS_SAFE, BATCH_INVARIANT},
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
    """Advance every sequence in-place, and return the four updated tensors."""
    updated = (input_tokens, input_positions, seq_lens, slot_mapping)
    rest = (sampled_token_ids, block_tables, block_size)
    sizes = (seq_lens.shape[0], sampled_token_ids.shape[0])
    advance = _with_any_sizes if any(isinstance(s, SymInt) for s in sizes) else _with_sizes
    try:
        advance(*updated, *rest)
    except RuntimeError:
        pass  # tensors overlap, or the arguments are invalid and the next call raises
    else:
        return updated
    tokens, positions, lengths, slots = (tensor.clone() for tensor in updated)
    try:
        advance(tokens, positions, lengths, slots, *rest)
    except RuntimeError as error:  # native raises ValueError
        raise ValueError(str(error)) from error
    return tokens, positions, lengths, slots


def _with_sizes(
    input_tokens: Tensor,
    input_positions: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    sampled_token_ids: Tensor,
    block_tables: Tensor,
    block_size: int,
) -> None:
    _custom_ops.advance_step_flashattn(
        seq_lens.shape[0],
        sampled_token_ids.shape[0],
        block_size,
        input_tokens,
        sampled_token_ids,
        input_positions,
        seq_lens,
        slot_mapping,
        block_tables,
    )


# For dynamic shapes: the native op takes sizes as plain integers, which would be specialized.
_with_any_sizes = mutating(
    "opweave_c_sizes",
    "advance_step(Tensor(a!) input_tokens, Tensor(b!) input_positions, Tensor(c!) seq_lens, "
    "Tensor(d!) slot_mapping, Tensor sampled_token_ids, Tensor block_tables, int block_size) "
    "-> ()",
)(_with_sizes)
