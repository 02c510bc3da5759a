"""The models: configurations, and checkpoints with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
}
_TINY = {
    **_LLAMA,
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
_SMALL = {
    **_TINY,
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
# https://huggingface.co/meta-llama/Llama-3.2-1B
_LLAMA_1B = {
    **_LLAMA,
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
}
MIXED = {"tiny": _TINY, "full": _SMALL}
SINGLE = {"tiny": {**_TINY, "tie_word_embeddings": True}, "full": _LLAMA_1B}
# Blocks of q4_k have 256 columns.
LOW_BIT = {
    "tiny": {**SINGLE["tiny"], "hidden_size": 256, "intermediate_size": 512},
    "full": _LLAMA_1B,
}
NAMES = {"tiny": "a Llama of 2 layers", "full": "Llama-3.2-1B"}


def write_config(path: Path, config: dict[str, Any]) -> Path:
    """Write a directory that dummy weights can be made for."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def write_checkpoint(
    path: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32
) -> Path:
    """Write a checkpoint with random weights, and a tokenizer of numbers."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    write_config(path, config)
    torch.manual_seed(0)
    their_model(path, dtype).save_pretrained(path)
    words = {str(token): token for token in range(config["vocab_size"])}
    Tokenizer(WordLevel(words, unk_token="0")).save(str(path / "tokenizer.json"))
    return path


def their_model(path: Path, dtype: torch.dtype) -> Any:
    """Return transformers' model with random weights."""
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype).eval()


def their_checkpoint(path: Path) -> Any:
    """Return transformers' model with the weights of a checkpoint."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def greedy(max_new_tokens: int) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0)
