"""Checkpoints, and the models that are loaded from them."""

from __future__ import annotations
