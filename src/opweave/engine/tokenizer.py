"""Text to token ids and back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from opweave.config import EngineConfig
from opweave.engine.checkpoint import Checkpoint
from opweave.engine.dependencies import require
from opweave.engine.errors import PromptError, TokenizerError
from opweave.engine.generation_config import FILE, generation_folder
from opweave.engine.special_tokens import SpecialTokens
from opweave.engine.token_bytes import token_bytes
from opweave.engine.token_length import described, longest_token
from opweave.engine.tokenizer_settings import follow_settings

_log = logging.getLogger(__name__)

_REPLACEMENT = "\ufffd"
_SHORT = 1024  # tokens that are decoded sooner than a thread could take turns
_CONTEXT = 8  # tokens of the prompt that decide how its continuation is decoded
# The files of tokenizers, of any kind.
_KINDS = ("tokenizer*", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
# No character has more bytes, and a token that is text at all has one: what is longer undecided
# than twice that holds bytes that never become text.
_BYTES = 4


class Tokenizer:
    """The tokenizer of a checkpoint, from its ``tokenizer.json``.

    Padding and truncation in the file are disabled, as they are in transformers: they were meant
    for training. Special and added tokens of the other files are added.

    Attributes:
        eos_token_ids: the ids that end a text: those of ``generation_config.json``,
            ``config.json`` and ``tokenizer_config.json`` together.
        bos_token_id: the id that begins a text, or None.
        special_ids: the ids that stand for no text of their own.

    Args:
        checkpoint: where the files are.
        generation: where ``generation_config.json`` is; None: there, too.

    Raises:
        TokenizerError: the file is missing or damaged.
    """

    def __init__(self, checkpoint: Checkpoint, generation: Checkpoint | None = None) -> None:
        self._backend = _load(checkpoint)
        tokens = SpecialTokens.of(checkpoint)
        tokens.add_to(self._backend)
        self._pieces: dict[int, str] = {}
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        named = {name: self._backend.token_to_id(text) for name, text in tokens.named.items()}
        eos, bos = named.get("eos_token"), named.get("bos_token")
        configured = _configured_ids(checkpoint, generation, "eos")
        self.eos_token_ids = frozenset(configured if eos is None else [*configured, eos])
        self.bos_token_id = next(iter(_configured_ids(checkpoint, generation, "bos")), bos)
        follow_settings(self._backend, checkpoint, bos=bos, eos=eos)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of *text*, with the special tokens that the tokenizer adds unless not.

        Raises:
            PromptError: it holds half of a surrogate pair, which is no character.
        """
        try:
            # A batch, since the library lets other threads run only while it works on one.
            batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:
            half = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
            if half is None:
                raise
            raise PromptError(
                f"The prompt holds half of a surrogate pair, {text[half]!a} at {half}, which is no "
                "character."
            ) from error
        return list(batch[0].ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of *ids*; bytes that are no text become U+FFFD."""
        if len(ids) < _SHORT:
            text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
            return text
        # A batch, for the same reason as above.
        (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def piece(self, token_id: int) -> str:
        """Return the text of one token inside of a text; of a part of a character, U+FFFD."""
        if (known := self._pieces.get(token_id)) is None:
            # Decoders drop the space before the first token of a text.
            before = self.encode("a", add_special_tokens=False)
            decoded = [
                self.decode(ids, skip_special_tokens=False) for ids in (before, [*before, token_id])
            ]
            known = self._pieces[token_id] = decoded[1][len(decoded[0]) :]
        return known

    def bytes_of(self, token_id: int) -> bytes | None:
        """Return the bytes of one token; None: it is no text, and its bytes are not known."""
        text = self.piece(token_id)
        if _REPLACEMENT not in text:
            return text.encode("utf-8")
        token = self.token(token_id)
        return None if token is None else token_bytes(token, self._decoder)

    @cached_property
    def _decoder(self) -> dict[str, Any]:
        return described(self._backend.decoder)

    @cached_property
    def longest_token(self) -> int | None:
        """How many characters of a text a token stands for at most; None: that is not known."""
        return longest_token(self._backend)

    def to_json(self) -> str:
        """Return the tokenizer in the format of ``tokenizer.json``."""
        text: str = self._backend.to_str()
        return text

    def token(self, token_id: int) -> str | None:
        """Return how the vocabulary writes a token, or None if it has no such id."""
        token: str | None = self._backend.id_to_token(token_id)
        return token


class AbsentTokenizer(Tokenizer):
    """Stands for the tokenizer of a checkpoint that has none.

    Prompts must be token ids. The text of a token is its number, ``<17>``: an answer grows, and a
    stream of it has events, as with a tokenizer.
    """

    def __init__(self, checkpoint: Checkpoint, generation: Checkpoint | None = None) -> None:
        self._path = checkpoint.path
        self.eos_token_ids = frozenset(_configured_ids(checkpoint, generation, "eos"))
        self.bos_token_id = next(iter(_configured_ids(checkpoint, generation, "bos")), None)
        self.special_ids, self.longest_token = frozenset(), None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise TokenizerError(
            f"{self._path} has no tokenizer.json: give token ids instead of the text {text!r}."
        )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(self.piece, ids))

    def piece(self, token_id: int) -> str:
        return f"<{token_id}>"

    def token(self, token_id: int) -> str | None:
        return None


def tokenizer_of(checkpoint: Checkpoint, config: EngineConfig) -> Tokenizer:
    """Return the tokenizer of *checkpoint*, or what stands for it where there is none.

    Raises:
        TokenizerError: it is damaged, or of another kind, which dummy weights do not need.
    """
    generation = generation_folder(checkpoint, config.generation_config)
    if (checkpoint.path / "tokenizer.json").exists():
        return Tokenizer(checkpoint, generation)
    if config.load_format != "dummy":
        if any(file for kind in _KINDS for file in checkpoint.path.glob(kind)):
            return Tokenizer(checkpoint, generation)  # which says what to do
        _log.warning("%s has no tokenizer: prompts must be token ids", checkpoint.path)
    return AbsentTokenizer(checkpoint, generation)


class IncrementalDecoder:
    """Text from tokens that arrive one by one.

    What is returned never ends inside a character, and all together is the text that the tokens add
    to the prompt's.

    Args:
        tokenizer: of the tokens.
        prompt: the tokens before.
        skip_special_tokens: leave special tokens out.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        # Decoders treat the first token of a text differently (they drop its space), so each
        # piece is decoded behind the one before it.
        self._context = list(prompt[-_CONTEXT:])
        self._before = self._decode(self._context)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Return the text that *token_id* completes; empty while a character is incomplete."""
        if self._skips and token_id in self._tokenizer.special_ids:
            return ""
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if not text.endswith(_REPLACEMENT):
            return self._advance(len(self._pending), text)
        return self._give_up(text) if len(self._pending) > 2 * _BYTES else ""

    def finish(self) -> str:
        """Return the rest: what incomplete characters decode to."""
        text = self._new(self._decode(self._context + self._pending))
        self._pending = []
        return text

    def _advance(self, count: int, text: str) -> str:
        """Return what is new in *text*, which the context and *count* tokens decode to."""
        new = self._new(text)
        done, self._pending = self._pending[:count], self._pending[count:]
        # Tokens without a text of their own can decide how the next one is decoded.
        self._context = done if new else (self._context + done)[-_CONTEXT:]
        self._before = self._decode(self._context)
        return new

    def _new(self, text: str) -> str:
        # A character that the prompt began is part of what comes after it.
        is_behind = text.startswith(self._before)
        return text[len(self._before if is_behind else self._before.rstrip(_REPLACEMENT)) :]

    def _give_up(self, text: str) -> str:
        """Return the text of old tokens whose bytes are no text, so that they do not pile up."""
        count = len(self._pending) - _BYTES
        older = self._decode(self._context + self._pending[:count])
        # Text that follows shows that the bytes before it are complete.
        if len(text) > len(older) and text.startswith(older):
            return self._advance(count, older)
        return ""

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skips)


def _configured_ids(checkpoint: Checkpoint, generation: Checkpoint | None, kind: str) -> list[int]:
    """Return the ids that end or begin a text, as the model's configuration files say."""
    found: list[int] = []
    for folder, file in ((generation or checkpoint, FILE), (checkpoint, "config.json")):
        given = (folder.json(file) or {}).get(f"{kind}_token_id")
        ids: list[Any] = given if isinstance(given, list) else [given]
        if ids and all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            found += ids
        elif ids not in ([], [None]):
            _log.warning(
                "%s: %s_token_id=%r is ignored: it is neither a token id nor a list of them",
                folder.path / file, kind, given,
            )  # fmt: skip
    return found


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
