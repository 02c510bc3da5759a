"""Embedding lookup in a shard of the vocabulary."""

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir.registry import register_op
from opweave.ir.traits import BATCH_INVARIANT


@register_op(native_traits={BATCH_INVARIANT})
def masked_embedding(
    input_ids: Tensor,
    weight: Tensor,
    start: int,
    end: int,
    added_start: int = 0,
    added_end: int = 0,
    added_row: int = 0,
) -> Tensor:
    """Look up the rows of two ranges of ids; zeros for every other id.

    The rows of *weight* for ids in ``[start, end)`` start at 0, those for ids in ``[added_start,
    added_end)`` at *added_row*. The sum over the ranks of a vocabulary-parallel embedding, where
    each id belongs to one rank, equals the lookup in the whole table bit for bit.

    Args:
        input_ids: any shape, int32 or int64, any values.
        weight: ``(rows, hidden)``, at least one row.
        start, end: the first range.
        added_start, added_end: the second range, disjoint from the first; empty by default.
        added_row: first row of the second range.

    Returns:
        ``(*input_ids.shape, hidden)`` in the dtype of *weight*.

    Raises:
        IndexError: a range does not fit *weight* (on the CPU; other devices assert).

    Source: Megatron-LM, arXiv:1909.08053.
    """
    first = (input_ids >= start) & (input_ids < end)
    second = (input_ids >= added_start) & (input_ids < added_end)
    found = first | second
    rows = torch.where(second, input_ids - (added_start - added_row), input_ids - start)
    values = functional.embedding(torch.where(found, rows, 0), weight)
    return torch.where(found.unsqueeze(-1), values, torch.zeros_like(values))


@masked_embedding.register_input_generator
def _inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, int, int, int, int, int]:
    weight = torch.randn(24, hidden_size, device=device).to(dtype)
    return torch.randint(40, (num_tokens,), device=device), weight, 8, 22, 32, 36, 16
