"""The order of tokens by score: one order for sampling and for log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def ranking_keys(logits: Tensor) -> Tensor:
    """Return an integer key for each token: larger for a higher score, and on ties for a lower id.

    All keys of a row differ, so the best tokens do not depend on the sorting algorithm.

    Args:
        logits: ``(rows, vocabulary)``, finite or -inf; compared in float32.

    Returns:
        int64, of the same shape.
    """
    # Adding zero makes -0.0 and 0.0 one. The bits of a float rise with it if it is positive, and
    # fall if it is negative (IEEE 754).
    bits = (logits.float() + 0.0).view(torch.int32)
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    return (rising << 32) | (_LOW - tokens)


def best_tokens(keys: Tensor, count: int) -> Tensor:
    """Return the *count* best tokens of each row, the best first: ``(rows, count)`` int64."""
    if count < keys.shape[-1]:
        best = keys.topk(count, dim=-1).values
    else:
        best = keys.sort(dim=-1, descending=True).values
    return _LOW - (best & _LOW)
