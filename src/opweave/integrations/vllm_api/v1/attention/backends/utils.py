"""Constants of attention backends."""

__all__ = ["PAD_SLOT_ID"]

PAD_SLOT_ID = -1
"""The slot of a padding token, which is not written to the cache."""
