"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opweave.engine.checkpoint import Checkpoint
from opweave.engine.dependencies import require
from opweave.engine.errors import TokenizerError

_REPLACEMENT = "\ufffd"
_CONTEXT = 8  # tokens of the prompt that decide how its continuation is decoded


class Tokenizer:
    """The tokenizer of a checkpoint, from its ``tokenizer.json``.

    Attributes:
        eos_token_ids: the ids that end a text: those of ``generation_config.json``, else of
            ``config.json``, else of ``tokenizer_config.json``.
        bos_token_id: the id that begins a text, or None.

    Raises:
        TokenizerError: the file is missing or damaged.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._backend = _load(checkpoint)
        self.eos_token_ids = frozenset(self._special_ids(checkpoint, "eos"))
        self.bos_token_id = next(iter(self._special_ids(checkpoint, "bos")), None)

    def encode(self, text: str) -> list[int]:
        """Return the ids of *text*, with the special tokens that the tokenizer adds."""
        return list(self._backend.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of *ids* without special tokens; bytes that are no text become U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text

    def _special_ids(self, checkpoint: Checkpoint, kind: str) -> list[int]:
        for file in ("generation_config.json", "config.json"):
            ids = (checkpoint.json(file) or {}).get(f"{kind}_token_id")
            ids = ids if isinstance(ids, list) else [ids]
            if ids and all(isinstance(i, int) for i in ids):
                return ids
        token = (checkpoint.json("tokenizer_config.json") or {}).get(f"{kind}_token")
        text = token.get("content") if isinstance(token, dict) else token
        known = self._backend.token_to_id(text) if isinstance(text, str) else None
        return [] if known is None else [known]


class IncrementalDecoder:
    """Text from tokens that arrive one by one.

    What is returned never ends inside a character, and all together is the text that the tokens add
    to the prompt's.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # Decoders treat the first token of a text differently (they drop its space), so each
        # piece is decoded behind the one before it.
        self._context = list(prompt[-_CONTEXT:])
        self._before = tokenizer.decode(self._context).rstrip(_REPLACEMENT)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Return the text that *token_id* completes; empty while a character is incomplete."""
        self._pending.append(token_id)
        text = self._decode()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._context, self._pending = self._pending, []
        self._before = self._tokenizer.decode(self._context)
        return text

    def finish(self) -> str:
        """Return the rest: what incomplete characters decode to."""
        text, self._pending = self._decode(), []
        return text

    def _decode(self) -> str:
        return self._tokenizer.decode(self._context + self._pending)[len(self._before) :]


def _load(checkpoint: Checkpoint) -> Any:
    file = checkpoint.path / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(
            f"{checkpoint.path} has no tokenizer.json. Checkpoints with another kind of tokenizer "
            "need it converted: load it with transformers and save it again."
        )
    tokenizers = require("tokenizers")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        raise TokenizerError(f"{file} is damaged or of an unknown kind: {error}.") from error
