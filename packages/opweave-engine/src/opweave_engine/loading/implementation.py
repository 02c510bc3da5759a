"""Chooses whose code runs a model: opweave's, or transformers'."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from opweave.config.engine import ModelImpl
from opweave_engine import transformers as backend
from opweave_engine.dependencies import require
from opweave_engine.loading.build import MOST_LAYERS, build, num_layers
from opweave_engine.loading.quantization import without_quantization
from opweave_engine.models import UnsupportedModelError, model_class, supported_architectures
from opweave_engine.models.fields import Fields

_log = logging.getLogger(__name__)


def uses_transformers(config: Mapping[str, Any], model_impl: ModelImpl) -> bool:
    """Return whether transformers' code runs the model that the object in a config.json describes.

    Args:
        config: the object.
        model_impl: ``"auto"`` prefers opweave's model if it supports the configuration.

    Raises:
        MissingDependencyError: transformers is asked for and not installed.
        CheckpointError: the configuration's sizes are too large.
        ModelError: neither has the architecture, or the configuration is invalid.
    """
    if model_impl == "opweave":
        return False
    named = Fields(config).texts("architectures")
    architecture = named[0] if len(named) == 1 else ""
    if model_impl == "transformers":
        require("transformers", "transformers")
        if not backend.is_causal_lm(architecture):
            raise UnsupportedModelError(
                f"model_impl='transformers', but transformers has no causal language model "
                f"{', '.join(named) or 'without a name'}. Leave model_impl out."
            )
        return True
    try:
        model_class(config)
        if num_layers(config) <= MOST_LAYERS:
            with torch.device("meta"):
                build(without_quantization(config), torch.float32)
    except UnsupportedModelError as error:
        if not backend.is_available():
            raise UnsupportedModelError(
                f"{str(error).removesuffix('.')}. With transformers, its causal language models "
                "run, too: pip install 'opweave-engine[transformers]'."
            ) from error
        if not backend.is_causal_lm(architecture):
            raise
        if architecture in supported_architectures():
            _log.warning("transformers' code runs the model, because of opweave's: %s", error)
        return True
    return False
