"""Provider ``aten``: torch's own fused calls, where there are any."""

from opweave.kernels.aten import attention, causal_conv, experts, norm, state_space

__all__ = ["attention", "causal_conv", "experts", "norm", "state_space"]
