"""Settings of sentence-transformers that decide which tokens a text becomes."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from opweave.engine.errors import CheckpointError
from opweave.engine.loading.checkpoint import Checkpoint

_log = logging.getLogger(__name__)

_TEXT, _MODEL = "sentence_bert_config.json", "config_sentence_transformers.json"
_LENGTH = "max_seq_length"


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
            CheckpointError: a file is damaged, or has a wrong value.
        """
        settings = checkpoint.json(_TEXT) or {}
        longest = settings.get(_LENGTH)
        if longest is not None and (type(longest) is not int or longest < 1):
            raise CheckpointError(
                f"{checkpoint.path / _TEXT} has {_LENGTH}={longest!r}; it must be a positive "
                "integer or null."
            )
        if (prompt := (checkpoint.json(_MODEL) or {}).get("default_prompt_name")) is not None:
            _log.warning(
                "%s: default_prompt_name=%r is not followed; put the prompt before the texts",
                checkpoint.path / _MODEL, prompt,
            )  # fmt: skip
        return cls(longest, settings.get("do_lower_case") is True)
