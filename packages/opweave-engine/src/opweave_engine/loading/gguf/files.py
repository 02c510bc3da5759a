"""The JSON files of a checkpoint directory that a GGUF file stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from opweave_engine.loading.gguf.config import config_of
from opweave_engine.loading.gguf.file import GgufFile
from opweave_engine.loading.gguf.tokenizer import end_tokens, tokenizer_config, tokenizer_json

# Names of sampling parameters in the file, and those in generation_config.json.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def _generation(file: GgufFile) -> dict[str, Any]:
    values = {ours: file.metadata.get(f"general.sampling.{key}") for key, ours in _SAMPLING.items()}
    # The shortest decimal number that is the same float32: 0.6, not 0.6000000238.
    short = {k: float(str(np.float32(v))) if isinstance(v, float) else v for k, v in values.items()}
    sampling = {key: value for key, value in short.items() if value is not None}
    return {"eos_token_id": end_tokens(file), **sampling}


_FILES: dict[str, Callable[[GgufFile], dict[str, Any]]] = {
    "config.json": config_of,
    "generation_config.json": _generation,
    "tokenizer.json": tokenizer_json,
    "tokenizer_config.json": tokenizer_config,
}
_NO_VOCABULARY = ("none", "no_vocab")  # llama.cpp's names for files without a tokenizer


def has_json(file: GgufFile, name: str) -> bool:
    """Return whether *file* stands for the JSON file *name*; without a vocabulary, for few."""
    kind = file.get("tokenizer.ggml.model", str, "none")
    return name == "config.json" or (name in _FILES and kind not in _NO_VOCABULARY)


def json_of(file: GgufFile, name: str) -> dict[str, Any] | None:
    """Return the object of the JSON file *name*, or None if *file* stands for no such file."""
    return _FILES[name](file) if has_json(file, name) else None
