"""Serve a tiny model of every architecture of transformers, and compare with transformers."""
