"""Chooses the class of engine that runs a checkpoint."""

from __future__ import annotations

from pathlib import Path

from opweave.engine.client.async_embedder import AsyncEmbedder
from opweave.engine.client.async_engine import AsyncEngine
from opweave.engine.loading.checkpoint import Checkpoint
from opweave.models import BertModel, model_class


def engine_class(model: str | Path) -> type[AsyncEngine] | type[AsyncEmbedder]:
    """Return :class:`AsyncEmbedder` for an encoder, else :class:`AsyncEngine`.

    Args:
        model: the directory of a checkpoint.

    Raises:
        EngineError, ModelError: the checkpoint is missing, damaged or not supported.
    """
    found = model_class(Checkpoint(model).config())
    is_encoder = isinstance(found, type) and issubclass(found, BertModel)
    return AsyncEmbedder if is_encoder else AsyncEngine
