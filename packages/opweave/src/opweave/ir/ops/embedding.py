"""Embedding lookup."""

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir.registry import register_op
from opweave.ir.traits import BATCH_INVARIANT


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
