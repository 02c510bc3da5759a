"""The engine that fits a checkpoint."""

from __future__ import annotations

from pathlib import Path

from opweave.config import EngineConfig
from opweave.engine.async_embedder import AsyncEmbedder
from opweave.engine.async_engine import AsyncEngine
from opweave.engine.checkpoint import Checkpoint
from opweave.engine.loader import Progress
from opweave.models import BertModel, model_class


def open_engine(
    model: str | Path,
    *,
    config: EngineConfig | None = None,
    model_name: str | None = None,
    progress: Progress | None = None,
) -> AsyncEngine | AsyncEmbedder:
    """Return an :class:`AsyncEngine`, or for an encoder an :class:`AsyncEmbedder`.

    Arguments and errors are those of the two.
    """
    found = model_class(Checkpoint(model).config())
    is_encoder = isinstance(found, type) and issubclass(found, BertModel)
    make = AsyncEmbedder if is_encoder else AsyncEngine
    return make(model, config=config, model_name=model_name, progress=progress)
