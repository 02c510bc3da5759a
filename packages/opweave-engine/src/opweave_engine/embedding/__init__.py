"""Encoder models: one vector per text."""
