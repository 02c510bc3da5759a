"""Multi-head latent attention."""

from opweave.layers import MLAModules, MultiHeadLatentAttentionWrapper

__all__ = ["MLAModules", "MultiHeadLatentAttentionWrapper"]
