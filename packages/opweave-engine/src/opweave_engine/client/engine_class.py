"""Chooses the class of engine that runs a checkpoint."""

from __future__ import annotations

from pathlib import Path

from opweave_engine.client.async_embedder import AsyncEmbedder
from opweave_engine.client.async_engine import AsyncEngine
from opweave_engine.loading.checkpoint import Checkpoint
from opweave_engine.loading.encoders import is_encoder


def engine_class(model: str | Path) -> type[AsyncEngine] | type[AsyncEmbedder]:
    """Return :class:`AsyncEmbedder` for an encoder, else :class:`AsyncEngine`.

    Args:
        model: the directory of a checkpoint.

    Raises:
        EngineError, ModelError: the checkpoint is missing, damaged or not supported.
    """
    return AsyncEmbedder if is_encoder(Checkpoint(model)) else AsyncEngine
