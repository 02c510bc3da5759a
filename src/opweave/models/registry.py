"""The models that are made of layers, by the architecture that a ``config.json`` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from opweave.models.bert import BertModel
from opweave.models.deepseek import DeepseekV3ForCausalLM
from opweave.models.fields import Fields
from opweave.models.gemma3 import Gemma3ForCausalLM
from opweave.models.mamba2 import Mamba2ForCausalLM
from opweave.models.mixtral import MixtralForCausalLM
from opweave.models.qwen2_vision import Qwen2VisionTransformer
from opweave.models.qwen3_moe import Qwen3MoeForCausalLM
from opweave.models.weights import CheckpointModel

MODELS: dict[str, type[CheckpointModel]] = {
    "BertModel": BertModel,
    "DeepseekV3ForCausalLM": DeepseekV3ForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "Mamba2ForCausalLM": Mamba2ForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "Qwen2VisionTransformerPretrainedModel": Qwen2VisionTransformer,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
}


def build_model(config: Mapping[str, Any], *, dtype: torch.dtype) -> CheckpointModel:
    """Build the model that the object in a ``config.json`` describes; weights are not set.

    It is one rank's part of the current :func:`~opweave.layers.parallel.tensor_parallel` group.

    Raises:
        UnsupportedModelError: an architecture or feature that is not supported.
        InvalidConfigError: a value is missing, of the wrong type, or does not fit the others.
    """
    fields = Fields(config)
    named = ", ".join(fields.texts("architectures"))
    architecture = fields.require("architectures", named, *MODELS)
    return MODELS[architecture].from_hf(config, dtype=dtype)
