"""Loads encoders, and tells them from models that generate text."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from opweave.config import EngineConfig
from opweave_engine import transformers as backend
from opweave_engine.loading.checkpoint import Checkpoint, Progress
from opweave_engine.loading.loader import check_dtype, load_model
from opweave_engine.loading.transformers_checkpoint import load_by_transformers
from opweave_engine.models import CheckpointModel, Encoder, UnsupportedModelError, model_class
from opweave_engine.models.fields import Fields
from opweave_engine.transformers import load_transformers_encoder


def is_encoder(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint makes embeddings or scores pairs, and does not generate text.

    Encoders, base models without a head, and all checkpoints of sentence-transformers make
    embeddings; sequence classifiers score pairs.

    Raises:
        CheckpointError, ModelError: the configuration is missing or damaged.
    """
    config = checkpoint.config()
    if checkpoint.json_list("modules.json") is not None:
        return True
    if (own := _own_class(config)) is not None:  # without a question to transformers
        return issubclass(own, Encoder)
    named = Fields(config).texts("architectures")
    kinds = (backend.is_base_model, backend.is_masked_lm, backend.is_sequence_classifier)
    return bool(named) and any(is_kind(named[0]) for is_kind in kinds)


def load_encoder(
    checkpoint: Checkpoint,
    config: EngineConfig,
    *,
    dtype: str | torch.dtype = "auto",
    progress: Progress | None = None,
) -> Encoder:
    """Build the encoder of a checkpoint, and load its weights.

    Args:
        checkpoint: the directory.
        config: says the format of the weights, the seed, and whose code runs the model.
        dtype, progress: as for :func:`load_model`.

    Raises:
        CheckpointError, ModelError: as for :func:`load_model`; or it is not an encoder.
    """
    given = checkpoint.config()
    dtype = check_dtype(dtype)
    own = _own_class(given)
    if own is not None and issubclass(own, Encoder) and config.model_impl != "transformers":
        loaded = load_model(
            checkpoint.path,
            dtype=dtype,
            load_format=config.load_format,
            seed=config.seed,
            progress=progress,
        )
        assert isinstance(loaded, Encoder), f"{type(loaded)=} is registered as an encoder"
        return loaded
    architectures = Fields(given).texts("architectures")
    if not is_encoder(checkpoint) or config.model_impl == "opweave":
        raise UnsupportedModelError(
            f"{', '.join(architectures) or 'The model'} is not an encoder, so it cannot make "
            "embeddings. opweave_engine.LLM runs language models."
        )
    # All checkpoints with modules.json make embeddings, also those that have a classifier's head.
    has_modules = checkpoint.json_list("modules.json") is not None
    scores = not has_modules and backend.is_sequence_classifier(architectures[0])
    return load_by_transformers(
        partial(load_transformers_encoder, scores=scores),
        checkpoint,
        dtype,
        config.seed if config.load_format == "dummy" else None,
        progress,
    )


def _own_class(config: Mapping[str, Any]) -> type[CheckpointModel] | None:
    """Return opweave's model of the architecture, or None."""
    try:
        return model_class(config)
    except UnsupportedModelError:
        return None
