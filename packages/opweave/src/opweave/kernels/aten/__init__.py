"""Provider ``aten``: torch's own fused operators, and loops over sequences and experts."""

from opweave.kernels.aten import attention, causal_conv, experts, norm, paged_attention, state_space

__all__ = ["attention", "causal_conv", "experts", "norm", "paged_attention", "state_space"]
