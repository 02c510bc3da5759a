"""Tokenizer settings besides tokens: the supported ones, and warnings about others."""

from __future__ import annotations

import logging
from typing import Any

from opweave_engine.loading.checkpoint import Checkpoint

_log = logging.getLogger(__name__)

_CONFIG = "tokenizer_config.json"


def follow_settings(
    backend: Any, checkpoint: Checkpoint, *, bos: int | None, eos: int | None
) -> None:
    """Make *backend*, a ``tokenizers.Tokenizer``, encode as transformers does at inference.

    Disables padding and truncation, and applies ``split_special_tokens``. Logs unsupported settings
    that would change the tokens.

    Args:
        backend: its special tokens were added.
        checkpoint: where ``tokenizer_config.json`` is.
        bos, eos: the ids that begin and end a text; None: there is no such token.
    """
    for name in ("padding", "truncation"):
        if (given := getattr(backend, name)) is not None:
            _log.info("tokenizer.json: %s=%s is disabled at inference", name, given)
    backend.no_padding()
    backend.no_truncation()
    config = checkpoint.json(_CONFIG) or {}
    backend.encode_special_tokens = config.get("split_special_tokens") is True
    for note in _not_followed(backend, config, bos, eos):
        _log.warning("%s: %s", checkpoint.path / _CONFIG, note)


def has_token_types(checkpoint: Checkpoint) -> bool:
    """Return whether the tokenizer gives the model token type ids; transformers' default."""
    names = (checkpoint.json(_CONFIG) or {}).get("model_input_names")
    return not isinstance(names, list) or "token_type_ids" in names


def _not_followed(
    backend: Any, config: dict[str, Any], bos: int | None, eos: int | None
) -> list[str]:
    notes = []
    ids = backend.encode("").ids
    begins = ids[:1] == [bos]
    for name, adds in (("bos", begins), ("eos", ids[begins:][-1:] == [eos])):
        wanted = config.get(f"add_{name}_token")
        if isinstance(wanted, bool) and wanted != adds:
            does = "adds it" if adds else "does not add it"
            notes.append(
                f"add_{name}_token={wanted} is not followed: the post-processor in tokenizer.json "
                f"decides, and {does}"
            )
    if config.get("clean_up_tokenization_spaces") is True and type(backend.model).__name__ != "BPE":
        notes.append("clean_up_tokenization_spaces=True is not followed: text is not cleaned up")
    return notes
