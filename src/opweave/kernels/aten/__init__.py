"""Provider ``aten``: torch's own fused calls, where there are any."""

from opweave.kernels.aten import attention, norm

__all__ = ["attention", "norm"]
