"""Embedding lookup, and composites of a collective and the following op."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from opweave import torch_compat
from opweave.ir.ops.arguments import inputs_from_rows, random_row
from opweave.ir.ops.norm import fused_add_rms_norm
from opweave.ir.registry import register_op
from opweave.ir.rules import BATCH_INVARIANT

# Embedding lookup.


@register_op(native_traits={BATCH_INVARIANT})
def embedding(input_ids: Tensor, weight: Tensor) -> Tensor:
    """Look up row ``input_ids[i]`` of *weight* for every ``i``.

    Args:
        input_ids: any shape, int32 or int64, values in ``[0, vocabulary)``.
        weight: ``(vocabulary, hidden)``.

    Returns:
        ``(*input_ids.shape, hidden)`` in the dtype of *weight*.

    Raises:
        IndexError: an id is out of range (on the CPU; other devices assert).
    """
    return functional.embedding(input_ids, weight)


@embedding.register_input_generator
def _embedding_inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    num_rows: int = 32,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor]:
    weight = torch.randn(num_rows, hidden_size, device=device).to(dtype)
    return torch.randint(num_rows, (num_tokens,), device=device), weight


# Embedding lookup in a shard of the vocabulary.


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
    is_inside = first | second
    rows = torch.where(second, input_ids - (added_start - added_row), input_ids - start)
    values = functional.embedding(torch.where(is_inside, rows, 0), weight)
    return torch.where(is_inside.unsqueeze(-1), values, torch.zeros_like(values))


@masked_embedding.register_input_generator
@inputs_from_rows
def _masked_embedding_inputs(x: Tensor) -> tuple[Tensor, Tensor, int, int, int, int, int]:
    weight = torch.randn(24, x.shape[1], device=x.device).to(x.dtype)
    return torch.randint(40, x.shape[:1], device=x.device), weight, 8, 22, 32, 36, 16


# Composites of a collective and the following op, for kernels that overlap the two.


@register_op(allow_inplace=True, composite=True)
def all_reduce_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, group: str = "0"
) -> tuple[Tensor, Tensor]:
    """All-reduce, add a residual, then normalize.

    ``fused_add_rms_norm(all_reduce(x), x_residual, weight, epsilon)``. A composite: it rounds where
    the composition rounds. The collective decides the order in which ranks are summed.

    Args:
        x: ``(..., hidden)``, floating point: this rank's summand.
        x_residual: the shape and dtype of ``x``, the same on every rank.
        weight, epsilon: as in ``rms_norm``.
        group: torch's name of the process group; ``"0"`` is the default group of all ranks.

    Returns:
        The normalized sum and the sum, both with the shape and dtype of ``x``.

    Raises:
        RuntimeError: this process does not belong to a group of that name.
    """
    reduced = torch_compat.all_reduce_sum(x, group)
    normalized: tuple[Tensor, Tensor] = fused_add_rms_norm(reduced, x_residual, weight, epsilon)
    return normalized


@all_reduce_rms_norm.register_input_generator
@inputs_from_rows
def _collective_inputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor, float, str]:
    return x, torch.randn_like(x), random_row(x), 1e-6, "0"


# Kernels may round once less than native, and 1 ulp of float16 is large.
all_reduce_rms_norm.override_tolerance(torch.float16, atol=1e-2, rtol=2e-3)
