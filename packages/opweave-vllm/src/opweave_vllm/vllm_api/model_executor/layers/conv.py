"""Convolutions."""

from opweave.layers import Conv2dLayer, Conv3dLayer

__all__ = ["Conv2dLayer", "Conv3dLayer"]
