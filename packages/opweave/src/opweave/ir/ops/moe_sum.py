"""Sum over the experts of a token."""

import torch
from torch import Tensor

from opweave.ir.registry import register_op
from opweave.ir.traits import ROWWISE


@register_op(native_traits={ROWWISE})
def moe_sum(x: Tensor) -> Tensor:
    """Sum over the middle dimension, in float32 (float64 stays), rounded once.

    Args:
        x: ``(T, K, hidden)``, floating point: the weighted results of each token's experts.

    Returns:
        ``(T, hidden)`` in the dtype of ``x``.

    Raises:
        ValueError: ``x`` does not have three dimensions.
    """
    if x.ndim != 3:
        raise ValueError(
            f"moe_sum: x must have shape (tokens, experts per token, hidden); found "
            f"{tuple(x.shape)}."
        )
    return x.to(torch.promote_types(x.dtype, torch.float32)).sum(dim=1).to(x.dtype)


@moe_sum.register_input_generator
def _moe_sum_inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    topk: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor]:
    return (torch.randn(num_tokens, topk, hidden_size, device=device).to(dtype),)
