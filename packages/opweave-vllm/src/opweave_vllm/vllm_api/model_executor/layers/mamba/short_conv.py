"""Short convolution."""

from opweave.layers import ShortConv

__all__ = ["ShortConv"]
