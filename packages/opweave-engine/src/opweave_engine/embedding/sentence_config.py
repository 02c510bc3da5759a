"""Settings of sentence-transformers that decide which tokens a text becomes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opweave_engine.errors import CheckpointError
from opweave_engine.loading.checkpoint import Checkpoint
from opweave_engine.models.fields import Fields

_log = logging.getLogger(__name__)

# The library reads the first of these that exists.
_TEXTS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_MODEL, _TOKENIZER = "config_sentence_transformers.json", "tokenizer_config.json"
_LENGTH, _TOKENIZER_LENGTH = "max_seq_length", "model_max_length"
# Keys of which only some values are supported; null is supported, too.
_TEXT_KEYS: Mapping[str, tuple[object, ...]] = {
    "do_lower_case": (True, False),
    "transformer_task": ("feature-extraction",),
    "module_output_name": ("token_embeddings",),
    **dict.fromkeys(("config_args", "config_kwargs", "processing_kwargs"), ({},)),
    **dict.fromkeys(("tokenizer_args", "processor_kwargs"), ({},)),
}
_TEXT_FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}
# Options of the library's own forward, and of its models of several vectors per text.
_HARMLESS = ("unpad_inputs", "query_length", "document_length", "query_expansion")


@dataclass(frozen=True)
class SentenceConfig:
    """How sentence-transformers reads a text.

    Attributes:
        max_seq_length: the most tokens of a text; None: as many as the model has positions for.
        lowercases: whether texts are lowercased before they are split into tokens.
    """

    max_seq_length: int | None = None
    lowercases: bool = False

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> SentenceConfig:
        """Read the files of *checkpoint*; a setting that is not followed is logged.

        Raises:
            CheckpointError: a file is damaged, has a wrong value, or asks for something that is not
                supported.
        """
        text = next((name for name in _TEXTS if checkpoint.has(name)), _TEXTS[0])
        settings = checkpoint.json(text) or {}
        check_keys(
            settings, checkpoint.path / text, _TEXT_KEYS, _LENGTH, "modality_config", *_HARMLESS
        )
        _check_text_forward(settings.get("modality_config"), checkpoint.path / text)
        longest = _length(settings, _LENGTH, checkpoint.path / text)
        if longest is None:
            tokenizer = checkpoint.json(_TOKENIZER) or {}
            longest = _length(tokenizer, _TOKENIZER_LENGTH, checkpoint.path / _TOKENIZER)
        model = checkpoint.json(_MODEL) or {}
        check_keys(
            model,
            checkpoint.path / _MODEL,
            {"model_type": ("SentenceTransformer",)},
            *("__version__", "prompts", "default_prompt_name", "similarity_fn_name"),
        )
        if (prompt := model.get("default_prompt_name")) is not None:
            _log.warning(
                "%s: default_prompt_name=%r is not followed; put the prompt before the texts",
                checkpoint.path / _MODEL, prompt,
            )  # fmt: skip
        return cls(longest, settings.get("do_lower_case") is True)


def check_keys(
    settings: Mapping[str, Any], file: Path, supported: Mapping[str, tuple[object, ...]], *read: str
) -> None:
    """Check *settings* for values that change embeddings and are not supported.

    Unknown keys are logged.

    Args:
        settings: the object in *file*.
        file: for errors.
        supported: values of keys, besides null.
        read: other keys that are read, or change nothing.

    Raises:
        CheckpointError: a value is not supported.
    """
    for key, values in supported.items():
        value = settings.get(key)
        if value is not None and value not in values:
            accepted = ", ".join(map(repr, values))
            raise CheckpointError(
                f"{file} has {key}={value!r:.100}, which is not supported. Supported: {accepted}."
            )
    Fields(settings, str(file)).warn_unread(*supported, *read)


def _check_text_forward(modalities: object, file: Path) -> None:
    """Check that the vectors of tokens are the model's last hidden states."""
    if modalities is None:
        return
    text = modalities.get("text") if isinstance(modalities, Mapping) else None
    if text != _TEXT_FORWARD:
        raise CheckpointError(
            f"{file} has modality_config={modalities!r:.200}, which is not supported. Supported "
            f"for 'text': {_TEXT_FORWARD}."
        )


def _length(settings: Mapping[str, Any], key: str, file: Path) -> int | None:
    """Return the maximum number of tokens in *settings*, or None."""
    value = settings.get(key)
    # Tokenizers without a maximum have 1e30, which some versions write as a float.
    if isinstance(value, float) and value.is_integer() and key == _TOKENIZER_LENGTH:
        value = int(value)
    if value is not None and (type(value) is not int or value < 1):
        raise CheckpointError(f"{file} has {key}={value!r}; it must be a positive integer or null.")
    return value
