"""Checkpoints whose configuration ties the output matrix that their files store separately."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from opweave_engine.loading.sources import TensorSource
from opweave_engine.models import CausalLM, CheckpointModel
from opweave_engine.models.causal_lm import HEAD

_log = logging.getLogger(__name__)

_KEY = "tie_word_embeddings"


def head_name(model: CheckpointModel) -> str | None:
    """Return the name of the output matrix if *model* ties it; else None."""
    return HEAD if isinstance(model, CausalLM) and model.is_tied else None


def untied(
    config: Mapping[str, Any],
    planned: CheckpointModel,
    files: Iterable[TensorSource],
    dtype: torch.dtype,
) -> Mapping[str, Any]:
    """Return *config*, with untied embeddings if the files hold two matrices that differ.

    As in transformers, the stored matrices win over the configuration.

    Args:
        config: the object in ``config.json``.
        planned: the model that it describes, without memory for its weights.
        files: the checkpoint's, in which every tensor has the shape that *planned* needs.
        dtype: in which the model is loaded; differences that it rounds away do not count.
    """
    if not (isinstance(planned, CausalLM) and planned.is_tied):
        return config
    names = (HEAD, planned.embedding_name)
    found = {name: _read(name, files, dtype) for name in names}
    head, embedding = (found[name] for name in names)
    if head is None or embedding is None or torch.equal(head, embedding):
        return config
    _log.warning(
        "config.json ties the embeddings (%s), but the files hold a different %s; both are loaded. "
        "Set %s to false in config.json to silence this warning",
        _KEY, HEAD, _KEY,
    )  # fmt: skip
    return {**config, _KEY: False}


def _read(name: str, files: Iterable[TensorSource], dtype: torch.dtype) -> Tensor | None:
    for file in files:
        if name in file.shapes():
            return file.tensor(name).to(dtype)
    return None
