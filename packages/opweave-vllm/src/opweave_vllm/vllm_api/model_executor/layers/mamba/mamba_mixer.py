"""Mamba mixer."""

from opweave.layers import MambaMixer

__all__ = ["MambaMixer"]
