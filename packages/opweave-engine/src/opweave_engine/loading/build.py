"""Build models of configurations that may be damaged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from opweave import platforms
from opweave.platforms.errors import UnsupportedByPlatformError
from opweave_engine.errors import CheckpointError
from opweave_engine.models import CheckpointModel, build_model

MOST_LAYERS = 4096  # of a model that is built before tensors say how many there are
# Of experts and extra layers, which are listed one by one, and of a head, which has a table.
_LARGEST = 2**16
_LIMITED = ("experts", "predict_layers", "head_dim")  # how their keys end
# Up to so many parameters per number in the files, tensors that do not fit are listed.
_SLACK = 8
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
    layers = _language_model(config).get("num_hidden_layers")
    return layers if isinstance(layers, int) else 0


def _language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")  # of models that also see images
    return text if isinstance(text, Mapping) else config


def check_sizes(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a model has more experts or larger heads than there can be."""
    for name, size in _language_model(config).items():
        is_limited = name.endswith(_LIMITED) and isinstance(size, int)
        if is_limited and size > _LARGEST:
            raise CheckpointError(f"config.json says {name}={size}, but there can be {_LARGEST}.")


def check_parameters(planned: nn.Module, held: int) -> None:
    """Raise CheckpointError if a model has far more parameters than a checkpoint.

    Args:
        planned: the model, without memory for its weights.
        held: the number of elements of the checkpoint's tensors.
    """
    count = sum(parameter.numel() for parameter in planned.parameters())
    if count > held * _SLACK + _LARGEST * _SLACK:
        raise CheckpointError(
            f"config.json describes a model of {count:,} parameters, but the files hold {held:,}. "
            "It does not belong to them, or is damaged."
        )


def check_memory(planned: nn.Module, dtype: torch.dtype) -> None:
    """Raise CheckpointError if a model's weights and tables exceed the memory of the device.

    Args:
        planned: the model, without memory for its weights, in any dtype.
        dtype: in which it is to be built.
    """
    needed = sum(tensor.numel() for tensor in [*planned.parameters(), *planned.buffers()])
    needed *= dtype.itemsize
    try:
        total = platforms.current_platform.memory_info()[1]
    except UnsupportedByPlatformError:  # the allocation of the weights fails then
        return
    if needed > total:
        raise CheckpointError(
            f"config.json asks for more memory than there is: the model takes {needed:,} bytes, "
            f"and the device has {total:,}."
        )


def build(config: Mapping[str, Any], dtype: torch.dtype) -> CheckpointModel:
    """Build the model of opweave that a configuration describes; weights are not set.

    Raises:
        CheckpointError: its sizes are too large for tensors, or for the memory.
        ModelError: it is invalid or not supported.
    """
    check_sizes(config)
    try:
        return build_model(config, dtype=dtype)
    except (RuntimeError, TypeError) as error:
        text = str(error).partition("\n")[0]
        what = next((_TOO_LARGE[sign] for sign in _TOO_LARGE if sign in text), None)
        if what is None:
            raise
        reason = text.rpartition("DefaultCPUAllocator: ")[2].rstrip(".")
        raise CheckpointError(f"config.json {what}: {reason}.") from error
