"""Advance the decode inputs of all sequences by one token.

A sequence that cannot advance gets slot -1, which ``reshape_and_cache`` skips; with
``TRITON_DEBUG=1``, a device assert fails. Checking on the host would synchronize with the GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import rules
from opweave.ir.ops.advance_step import advance_step_flashattn as op
from opweave.kernels.triton.arguments import on_device
from opweave.kernels.triton.launch import Kernels, launch
from opweave.kernels.triton.registration import implements

_kernels = Kernels("advance_step")
_BLOCK = 128
_VECTORS = ("input_tokens", "input_positions", "slot_mapping")


def _fits(
    input_tokens: Tensor,
    sampled_token_ids: Tensor,
    input_positions: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    block_size: int,
) -> bool:
    count, queries = seq_lens.shape[0], sampled_token_ids.shape[0]
    return (
        input_tokens.shape == input_positions.shape == slot_mapping.shape == seq_lens.shape
        and sampled_token_ids.shape[1:] in ((), (1,))
        and queries <= count == block_tables.shape[0]
        and block_size >= 1
    )


@implements(
    op,
    on_device(*_VECTORS, "sampled_token_ids", "seq_lens", "block_tables")
    & rules.dtype("input_tokens", torch.int64)
    & rules.same_dtype(*_VECTORS, "sampled_token_ids")
    & rules.dtype("seq_lens", torch.int32, torch.int64)
    & rules.dtype("block_tables", torch.int32, torch.int64)
    & rules.ndim("seq_lens", 1)
    & rules.ndim("sampled_token_ids", 1, 2)
    & rules.ndim("block_tables", 2)
    & rules.unit_stride("block_tables")
    & rules.custom(_fits, "shapes do not fit, or block_size is not positive"),
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
    """Advance every sequence, and return new tensors."""
    count = seq_lens.shape[0]
    tokens, positions, slots = (sampled_token_ids.new_empty(count) for _ in range(3))
    lengths = seq_lens.new_empty(count)
    launch(
        _kernels.advance_step,
        (-(-count // _BLOCK),),
        tokens,
        positions,
        lengths,
        slots,
        sampled_token_ids,
        seq_lens,
        block_tables,
        count,
        sampled_token_ids.shape[0],
        sampled_token_ids.stride(0),
        seq_lens.stride(0),
        block_tables.stride(0),
        block_tables.shape[1],
        block_size,
        BLOCK=_BLOCK,
    )
    return tokens, positions, lengths, slots
