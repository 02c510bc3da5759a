"""The engine that fits a checkpoint."""

from __future__ import annotations

from pathlib import Path

from opweave.config import EngineConfig
from opweave.engine.client.async_embedder import AsyncEmbedder
from opweave.engine.client.async_engine import AsyncEngine
from opweave.engine.loading.checkpoint import Checkpoint
from opweave.engine.loading.loader import Progress
from opweave.engine.parallel.data_parallel import DataParallelEngine
from opweave.models import BertModel, model_class


def open_engine(
    model: str | Path,
    *,
    config: EngineConfig | None = None,
    model_name: str | None = None,
    progress: Progress | None = None,
) -> AsyncEngine | AsyncEmbedder | DataParallelEngine:
    """Return an :class:`AsyncEngine`, or for an encoder an :class:`AsyncEmbedder`.

    With a ``data_parallel_size`` above 1, it is a :class:`DataParallelEngine` of so many of them.
    Arguments and errors are those of the three.
    """
    found = model_class(Checkpoint(model).config())
    if config is not None and config.parallel.data_parallel_size > 1:
        return DataParallelEngine(model, config=config, model_name=model_name, progress=progress)
    is_encoder = isinstance(found, type) and issubclass(found, BertModel)
    make = AsyncEmbedder if is_encoder else AsyncEngine
    return make(model, config=config, model_name=model_name, progress=progress)
