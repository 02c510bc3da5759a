"""Small random checkpoints of architectures that opweave has no model of its own for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 131
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_checkpoint(path: Path, model_type: str, fields: dict[str, Any]) -> Any:
    """Write a model to *path*, and return it.

    Args:
        path: an empty directory.
        model_type: as in ``config.json``.
        fields: of the configuration, which differ from ``SIZES``.
    """
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **fields})
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.15)
        else:  # biases, which are zeros, and weights of norms
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    model.eval().save_pretrained(path)
    return model
