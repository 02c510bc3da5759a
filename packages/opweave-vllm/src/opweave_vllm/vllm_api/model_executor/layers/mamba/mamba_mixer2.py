"""Mamba-2 mixer."""

from opweave.layers import MambaMixer2

__all__ = ["MambaMixer2"]
