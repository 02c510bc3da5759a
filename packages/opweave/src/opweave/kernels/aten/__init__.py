"""Provider ``aten``: torch's own fused operators, and loops over sequences and experts."""

from opweave.kernels.aten import attention, experts, norm, state_space

__all__ = ["attention", "state_space", "experts", "norm"]
