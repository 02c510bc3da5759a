"""Build models of configurations that may be damaged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from opweave.engine.errors import CheckpointError
from opweave.models import CheckpointModel, build_model

MOST_LAYERS = 4096  # of a model that is built before tensors say how many there are
# Parts of torch's error messages, which have no classes of their own -> their meaning.
_TOO_LARGE = {
    "verflow": "names sizes that no tensor has",
    "DefaultCPUAllocator": "asks for more memory than there is",
}


def check_layers(config: Mapping[str, Any], most: int, what: str) -> None:
    """Raise CheckpointError if a model has more layers than *most*.

    Args:
        config: the object in ``config.json``.
        most: the limit.
        what: its name in the message, with a verb.
    """
    if (layers := num_layers(config)) > most:  # they would be built one by one
        raise CheckpointError(f"config.json says num_hidden_layers={layers}, but {what} {most}.")


def num_layers(config: Mapping[str, Any]) -> int:
    """Return how many layers a configuration asks for; 0 if it does not say."""
    text = config.get("text_config")  # of models that also see images
    named = text if isinstance(text, Mapping) else config
    layers = named.get("num_hidden_layers")
    return layers if isinstance(layers, int) else 0


def build(config: Mapping[str, Any], dtype: torch.dtype) -> CheckpointModel:
    """Build the model of opweave that a configuration describes; weights are not set.

    Raises:
        CheckpointError: its sizes are too large for tensors, or for the memory.
        ModelError: it is invalid or not supported.
    """
    try:
        return build_model(config, dtype=dtype)
    except (RuntimeError, TypeError) as error:
        text = str(error).partition("\n")[0]
        what = next((_TOO_LARGE[sign] for sign in _TOO_LARGE if sign in text), None)
        if what is None:
            raise
        reason = text.rpartition("DefaultCPUAllocator: ")[2].rstrip(".")
        raise CheckpointError(f"config.json {what}: {reason}.") from error
