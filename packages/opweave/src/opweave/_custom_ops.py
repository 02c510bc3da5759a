"""The native ops as functions, each by its fastest call path.

Eager calls on plain CPU tensors without grad mode go straight to the C++ function (fast call);
calls under ``torch.compile``, in grad mode, under a dispatch mode or on other tensors go through
``torch.ops.opweave_c`` (dispatcher call). Both run the same code and raise the same errors.

An op raises RuntimeError for arguments that it does not take, and for a missing native module.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opweave.native.calls import call_traced
from opweave.native.loader import native_op, require

__all__ = ["advance_step_flashattn", "fused_add_rms_norm", "rms_norm"]


def advance_step_flashattn(
    num_seqs: int,
    num_queries: int,
    block_size: int,
    input_tokens: Tensor,
    sampled_token_ids: Tensor,
    input_positions: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
) -> None:
    """Prepare the next decode step of every sequence, in place.

    For each of the first *num_queries* sequences, of length ``p``: its sampled token becomes its
    input token, ``p`` its position, ``p + 1`` its length, and
    ``block_tables[i, p // block_size] * block_size + p % block_size`` its slot. Rows from
    *num_queries* to *num_seqs* are padding: token 0, position 0, slot -1, length unchanged.

    *input_tokens*, *input_positions* and *slot_mapping* are int64 ``[num_seqs]``; *seq_lens* is
    int32 or int64 ``[num_seqs]``; these four are written, contiguous, and share no memory with
    another tensor. *sampled_token_ids* is int64 ``[num_queries]`` or ``[num_queries, 1]``;
    *block_tables* is int32 or int64 ``[num_seqs, blocks]``, contiguous in its last dimension.

    Raises:
        RuntimeError: An argument is not as described, or a sequence has no block for its position;
            nothing was changed.

    """
    arguments = (
        num_seqs,
        num_queries,
        block_size,
        input_tokens,
        sampled_token_ids,
        input_positions,
        seq_lens,
        slot_mapping,
        block_tables,
    )
    _call("advance_step_flashattn", *arguments)


def rms_norm(out: Tensor, x: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """Write ``x / sqrt(mean(x ** 2, -1) + epsilon) * weight`` into *out*.

    *out* and *x* have one shape ``[..., h]`` and one dtype (float32, bfloat16 or float16) and are
    contiguous in their last dimension; *out* may be *x*. *weight* is None or ``[h]``, of *x*'s
    dtype or float32. Normalizes in float32, rounds to *weight*'s dtype, multiplies, rounds to
    *x*'s dtype.

    Raises:
        RuntimeError: An argument is not as described, or *out* overlaps another.

    """
    _call("rms_norm", out, x, weight, epsilon)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """Add *x* to *residual*, and write `rms_norm` of the sum into *x*; both in place.

    The sum is rounded to *x*'s dtype before it is normalized. *x* and *residual* have one shape
    ``[..., h]`` and one dtype, share no memory and are contiguous in their last dimension; *weight*
    is as in `rms_norm`.

    Raises:
        RuntimeError: An argument is not as described, or one that is written overlaps another.

    """
    _call("fused_add_rms_norm", x, residual, weight, epsilon)


def _call(op: str, *arguments: object) -> None:
    if is_dynamo_compiling():
        require()
        call_traced(getattr(torch.ops.opweave_c, op).default, *arguments)
    else:
        native_op(op)(*arguments)
