"""Checkpoints, and the models that are loaded from them."""
