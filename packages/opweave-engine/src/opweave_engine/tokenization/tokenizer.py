"""Text to token ids and back."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

from opweave.config import EngineConfig
from opweave_engine.dependencies import require
from opweave_engine.errors import EngineError, PromptError, TokenizerError
from opweave_engine.loading.checkpoint import Checkpoint
from opweave_engine.loading.generation_config import FILE, generation_folder
from opweave_engine.tokenization.settings import follow_settings, has_token_types
from opweave_engine.tokenization.special_tokens import SpecialTokens
from opweave_engine.tokenization.token_bytes import (
    REPLACEMENT,
    has_byte_tokens,
    incomplete_end,
    is_byte_level,
    token_bytes,
)
from opweave_engine.tokenization.token_length import described, longest_token

_log = logging.getLogger(__name__)

Side = Literal["left", "right"]

_CHARACTER = 4  # bytes of the longest character
_TOKENIZER = "tokenizer.json"
_SHORT = 1024  # tokens that are decoded sooner than a thread could take turns
# The files of tokenizers, of any kind.
_KINDS = ("tokenizer*", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")


class Tokenizer:
    """The tokenizer of a checkpoint, from its ``tokenizer.json``.

    Padding and truncation in the file are disabled, as they are in transformers: they were meant
    for training. Special and added tokens of the other files are added.

    Attributes:
        eos_token_ids: the ids that end a text: those of ``generation_config.json``,
            ``config.json`` and ``tokenizer_config.json`` together.
        bos_token_id: the id that begins a text, or None.
        special_ids: the ids of special tokens.

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
        self._has_token_types = has_token_types(checkpoint)

    def lowercase(self) -> None:
        """Lowercase every text before it is split into tokens."""
        normalizers, own = require("tokenizers.normalizers"), self._backend.normalizer
        steps = [normalizers.Lowercase(), *([] if own is None else [own])]
        self._backend.normalizer = normalizers.Sequence(steps)

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        keep: int | None = None,
        truncation_side: Side = "left",
    ) -> list[int]:
        """Return the ids of *text*, by default with the tokenizer's special tokens.

        Args:
            text: any.
            add_special_tokens: whether to add special tokens.
            keep: truncate to this many ids, including special ones; None: no truncation.
            truncation_side: the side that is truncated.

        Raises:
            PromptError: the text has an unpaired surrogate, which is not a valid character.
        """
        encoding = self._encoding(text, add_special_tokens=add_special_tokens)
        if keep is not None and len(encoding) > keep:
            encoding = self._encoding(text, add_special_tokens=False)
            added = self._backend.num_special_tokens_to_add(False) if add_special_tokens else 0
            encoding.truncate(max(0, keep - added), direction=truncation_side)
            encoding = self._backend.post_process(encoding, None, add_special_tokens)
            return list(encoding.ids)[:keep]
        return list(encoding.ids)

    def encode_pair(
        self, first: str, second: str, *, keep: int | None = None, truncation_side: Side = "right"
    ) -> tuple[list[int], list[int]]:
        """Return the ids of a pair of texts with special tokens, and the type id of each token.

        Args:
            first, second: any texts.
            keep: truncate to this many ids, including special ones, the longer text first, as
                transformers' ``longest_first`` does; None: no truncation.
            truncation_side: the side on which both texts are truncated.

        Raises:
            PromptError: as for :meth:`encode`.
        """
        texts = [self._encoding(text, add_special_tokens=False) for text in (first, second)]
        added = self._backend.num_special_tokens_to_add(True)
        if keep is not None:
            room, sizes = max(0, keep - added), [len(text.ids) for text in texts]
            shorter = min(*sizes, room // 2)
            is_first = sizes[0] <= sizes[1]
            for text, is_shorter in zip(texts, (is_first, not is_first), strict=True):
                limit = shorter if is_shorter else room - shorter
                text.truncate(limit, direction=truncation_side)
        pair = self._backend.post_process(*texts, True)
        # Only a template for pairs sets type ids.
        types = list(pair.type_ids if added else pair.sequence_ids)
        if not self._has_token_types:
            types = [0] * len(types)
        return list(pair.ids)[:keep], types[:keep]

    def _encoding(self, text: str, *, add_special_tokens: bool) -> Any:
        try:
            # A batch, since the library lets other threads run only while it works on one.
            batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:
            half = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
            if half is None:
                raise
            raise PromptError(
                f"The prompt has half of a surrogate pair, {text[half]!a} at {half}, which is not "
                "a character."
            ) from error
        return batch[0]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of *ids*; bytes that are not valid UTF-8 become U+FFFD."""
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
        """Return the bytes of one token; None if they are not known."""
        text = self.piece(token_id)
        if REPLACEMENT not in text:
            return text.encode("utf-8")
        token = self.token(token_id)
        return None if token is None else token_bytes(token, self._decoder)

    def bytes_in_text(self, token_id: int) -> bytes:
        """Return the bytes of one token; of an unknown one, those of its text."""
        known = self.bytes_of(token_id)
        return self.piece(token_id).encode() if known is None else known

    def incomplete_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes at the end of *ids* that tokens after them may make a character.

        Args:
            ids: tokens, without special ones if they are left out of the text.
        """
        if self.has_byte_tokens:
            parts = [token_bytes(self.token(token) or "", self._decoder) for token in ids]
            first = next((at for at in range(len(ids), 0, -1) if parts[at - 1] is None), 0)
            # One byte that is not valid UTF-8 spoils all bytes around it.
            return incomplete_end(b"".join(part or b"" for part in parts[first:]), is_strict=True)
        if self._is_byte_level:
            return incomplete_end(b"".join(map(self.bytes_in_text, ids[-_CHARACTER:])))
        return b""

    @cached_property
    def has_byte_tokens(self) -> bool:
        """Whether a byte that has no token of its own is written as ``<0xE6>``."""
        return has_byte_tokens(self._decoder)

    @cached_property
    def _is_byte_level(self) -> bool:
        return is_byte_level(self._decoder)

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
    """Substitute for the tokenizer of a checkpoint without one.

    Prompts must be token ids. The text of a token is its id, ``<17>``, so that streams have text as
    with a tokenizer.
    """

    def __init__(self, checkpoint: Checkpoint, generation: Checkpoint | None = None) -> None:
        self._path = checkpoint.path
        self.eos_token_ids = frozenset(_configured_ids(checkpoint, generation, "eos"))
        self.bos_token_id = next(iter(_configured_ids(checkpoint, generation, "bos")), None)
        self.special_ids, self.longest_token = frozenset(), None
        self.has_byte_tokens = False

    def _encoding(self, text: str, *, add_special_tokens: bool) -> Any:
        raise TokenizerError(
            f"{self._path} has no tokenizer.json: give token ids instead of the text {text!r}."
        )

    def lowercase(self) -> None:
        """No-op: there are no texts."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(self.piece, ids))

    def piece(self, token_id: int) -> str:
        return f"<{token_id}>"

    def incomplete_bytes(self, ids: Sequence[int]) -> bytes:
        return b""

    def token(self, token_id: int) -> str | None:
        return None


def tokenizer_of(checkpoint: Checkpoint, config: EngineConfig) -> Tokenizer:
    """Return the tokenizer of *checkpoint*, or a substitute if it has none.

    Raises:
        TokenizerError: it is damaged, or of another kind, which dummy weights do not need.
    """
    generation = generation_folder(checkpoint, config.generation_config)
    if checkpoint.has(_TOKENIZER):
        return Tokenizer(checkpoint, generation)
    if config.load_format != "dummy":
        if any(file for kind in _KINDS for file in checkpoint.path.glob(kind)):
            return Tokenizer(checkpoint, generation)  # which says what to do
        _log.warning("%s has no tokenizer: prompts must be token ids", checkpoint.path)
    return AbsentTokenizer(checkpoint, generation)


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
    tokenizers = require("tokenizers")
    file = checkpoint.path / _TOKENIZER
    try:
        if checkpoint.gguf is not None:
            file = checkpoint.path
            return tokenizers.Tokenizer.from_str(json.dumps(checkpoint.json(_TOKENIZER)))
        if file.is_file():
            return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        if isinstance(error, EngineError):
            raise
        raise TokenizerError(f"{file} is damaged or of an unknown kind: {error}.") from error
    raise TokenizerError(
        f"{checkpoint.path} has no tokenizer.json. Checkpoints with another kind of tokenizer "
        "need it converted: load it with transformers and save it again."
    )
