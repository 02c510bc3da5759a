"""The native ops as functions of MindSpore tensors.

MindSpore runs operators asynchronously: what an op refuses is raised as RuntimeError where
MindSpore next synchronizes, for example where a tensor is read. The op has then changed nothing.
"""

from __future__ import annotations

from mindspore import Tensor

__all__ = ["advance_step_flashattn", "rms_norm"]


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
    """
    from opweave_mindspore import _C_ops  # type: ignore[attr-defined]

    _C_ops.advance_step_flashattn(
        num_seqs=num_seqs,
        num_queries=num_queries,
        block_size=block_size,
        input_tokens=input_tokens,
        sampled_token_ids=sampled_token_ids,
        input_positions=input_positions,
        seq_lens=seq_lens,
        slot_mapping=slot_mapping,
        block_tables=block_tables,
    )


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """Return ``x / sqrt(mean(x ** 2, -1) + epsilon) * weight``.

    *x* is ``[..., h]``, float32, bfloat16 or float16, contiguous in its last dimension; *weight* is
    None or ``[h]``, of *x*'s dtype or float32. Normalizes in float32, rounds to *weight*'s dtype,
    multiplies, rounds to *x*'s dtype.
    """
    from opweave_mindspore import _C_ops  # type: ignore[attr-defined]

    normalized: Tensor = _C_ops.rms_norm(x=x, weight=weight, epsilon=epsilon)
    return normalized
