"""Transformers models in opweave's engine."""
