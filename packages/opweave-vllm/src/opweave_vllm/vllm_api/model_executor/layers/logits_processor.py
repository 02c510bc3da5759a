"""The layer that computes logits."""

from opweave.layers import LogitsProcessor

__all__ = ["LogitsProcessor"]
