"""The layer that applies a rotary embedding to given cosines and sines."""

from opweave.layers import ApplyRotaryEmb

__all__ = ["ApplyRotaryEmb"]
