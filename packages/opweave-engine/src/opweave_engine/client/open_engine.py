"""Opens the engine that fits a checkpoint and a configuration."""

from __future__ import annotations

from pathlib import Path

from opweave.config import EngineConfig
from opweave_engine.client.async_embedder import AsyncEmbedder
from opweave_engine.client.async_engine import AsyncEngine
from opweave_engine.client.engine_class import engine_class
from opweave_engine.loading.checkpoint import Progress
from opweave_engine.parallel.data_parallel import DataParallelEngine


def open_engine(
    model: str | Path,
    *,
    config: EngineConfig | None = None,
    model_name: str | None = None,
    progress: Progress | None = None,
) -> AsyncEngine | AsyncEmbedder | DataParallelEngine:
    """Return an :class:`AsyncEngine`, or an :class:`AsyncEmbedder` for an encoder.

    If ``data_parallel_size`` is above 1, return a :class:`DataParallelEngine` with that many
    replicas. Arguments and errors are those of the three classes.
    """
    make = engine_class(model)  # first: it reports a bad checkpoint before any replica starts
    if config is not None and config.parallel.data_parallel_size > 1:
        return DataParallelEngine(model, config=config, model_name=model_name, progress=progress)
    return make(model, config=config, model_name=model_name, progress=progress)
